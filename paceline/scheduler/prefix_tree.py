"""The prefix cache: a radix tree over token pages, with the waiting requests in it.

A node is *resident* (its pages hold KV, or will once the passes already planned have run: passes run in order),
*in flight* (resident, but computed by the pass that is now being planned) or a *ghost* (no KV; a waiting prompt needs
it). A request is inserted once, on arrival, as ghosts below what is resident. Nothing is matched again while it waits:
its cached prefix ends at the deepest resident node at or above `waiting_nodes[request]`. A ghost may have a copy of its
KV in host memory (host_tier.py), or be an ancestor of one that has: then it is kept although no request waits for it.

    root ── tenant ── (salt, adapter) ──[ page page page ]──┬──[ page ]            resident, locked by a running row
                                                            ├──[ page page ]       resident, unlocked: evictable
                                                            └──[ page page page ]  ghost: two requests wait below

A node is locked by every running request whose row reads it, and by pins. Ancestors of a locked node are locked,
children of a ghost are ghosts; so the evictable pages are exactly those of unlocked resident nodes, and they can
always be evicted leaf by leaf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.request import Namespace
from paceline.scheduler.eviction import EvictableLeaves
from paceline.scheduler.kv_events import KvListener, Medium
from paceline.scheduler.node import Node, NodeName
from paceline.scheduler.page_pool import NO_PAGES, Pages
from paceline.scheduler.tracked_request import TrackedRequest

TOKEN_BYTES = 4


class SpillTarget(Protocol):
    """Where evicted KV may be kept; implemented by `HostTier`."""

    def split_unspillable(self, node: Node) -> None: ...

    def spill(self, node: Node, step: int) -> tuple[Node, ...]: ...

    def merge_with_child(self, node: Node) -> None: ...

    def track(self, node: Node) -> None: ...

    def drop(self, node: Node) -> None: ...


class PrefixTree:
    def __init__(self, page_size: int, eviction: str = "lru", partial_eviction: bool = True) -> None:
        self._partial_eviction = partial_eviction
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.num_pages = 0  # resident, locked or not
        self.num_locked_pages = 0
        self.num_exclusive_pages = 0  # of these, counted in `exclusive_pages` of the request that alone has locked them
        self.exclusive_pages: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # by slot: the column of `Slots`
        self.waiting_nodes: dict[TrackedRequest, Node] = {}  # where the path of each waiting request ends
        self.has_frontier = True  # only `LongestPrefixPolicy` reads it
        self.frontier: list[tuple[int, int, Node]] = []  # heap by depth of resident nodes that may have waiters
        self._ticks = 0
        self._num_nodes = 0
        self.leaves = EvictableLeaves(eviction)
        self.needed_evicted_step = -1_000_000  # when a prefix that waiting requests need was last evicted
        self.host: SpillTarget | None = None
        self.listeners: list[KvListener] = []
        self.num_foreground = 0  # waiting requests that are not of background tenants
        self._hidden: list[Node] = []
        self.root = self._new(None, None, b"", 0)
        self.root.resident = True

    # ------------------------------------------------------------------ queries

    @property
    def num_evictable_pages(self) -> int:
        return self.num_pages - self.num_locked_pages

    def match(self, namespace: Namespace, key: bytes) -> int:
        """Number of tokens of `key` that are resident. Changes nothing."""
        tenant, salt, adapter = namespace
        node = self.root.children.get(tenant)
        node = node.children.get((salt, adapter)) if node else None
        while node is not None:
            child = self._child(node, key)
            if child is None or not child.resident:
                return node.depth
            common = self._common(child, key)
            if common < len(child.key):
                return node.depth + common // TOKEN_BYTES
            node = child
        return 0

    def match_held(self, namespace: Namespace, key: bytes, end: int) -> int:
        """Number of tokens of `key`, up to token `end`, that are resident or in host memory. Changes nothing."""
        tenant, salt, adapter = namespace
        node = self.root.children.get(tenant)
        node = node.children.get((salt, adapter)) if node else None
        depth = 0
        while node is not None and (found := self.find_child(node, key, end)) is not None:
            child, common = found
            if not child.resident and not len(child.host_pages):
                break
            depth = node.depth + common // TOKEN_BYTES
            node = child if common == len(child.key) else None
        return depth

    def hit(self, node: Node, step: int) -> Node:
        """The deepest node at or above `node` whose KV the pass `step`, being planned, can read."""
        while not node.resident or node.computed_step == step:
            assert node.parent is not None, "the root is resident"
            node = node.parent
        return node

    def is_hidden(self, request: TrackedRequest) -> bool:
        """Whether a waiting request is hidden in this step, with others that wait for the same prefix."""
        return self.is_below_hidden(self.waiting_nodes[request])

    @staticmethod
    def is_below_hidden(node: Node | None) -> bool:
        while node is not None and not node.hidden:
            node = node.parent
        return node is not None

    def path_pages(self, node: Node) -> Pages:
        """The pages from the root to the end of `node`: the beginning of a row whose cached prefix ends there."""
        parts = []
        while node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else NO_PAGES

    def find_child(self, node: Node, key: bytes, end: int) -> tuple[Node, int] | None:
        """The child that continues `key` below `node`, and how many bytes of it match, up to token `end`."""
        child = self._child(node, key) if node.depth < end else None
        return None if child is None else (child, self._common(child, key, end * TOKEN_BYTES))

    def find_end(self, node: Node, key: bytes, end: int) -> Node | None:
        """The node, at or below `node`, that continues `key` up to token `end` or beyond; None if there is none."""
        if end * TOKEN_BYTES > len(key):
            return None
        while node.depth < end:
            found = self.find_child(node, key, end)
            if found is None or node.depth + found[1] // TOKEN_BYTES < min(found[0].depth, end):
                return None
            node = found[0]
        return node

    def first_visible_child(self, node: Node) -> Node | None:
        """The next child to serve: the best by rank with a visible waiting request at or below it."""
        queue = node.queue
        while queue:
            rank, sibling_order, _, child = queue[0]
            if child.parent is not node or child.hidden or not child.num_waiting or not child.is_alive:
                heappop(queue)
            elif child.rank != rank:
                # A rank that improves is pushed again, so this one got worse: reinsert it at its place.
                heapreplace(queue, (child.rank, sibling_order, child.seq, child))
            else:
                return child
        return None

    def first_waiter(self, node: Node) -> TrackedRequest | None:
        """The oldest visible request whose path ends exactly at `node`."""
        waiters = node.waiters
        while waiters:
            request = waiters[0][1]
            if self.waiting_nodes.get(request) is node and not request.skipped:
                return request
            heappop(waiters)
        return None

    def nodes(self, top: Node | None = None) -> Iterator[Node]:
        """`top`, or the root, and everything below it; parents before their children."""
        stack = [top or self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # ------------------------------------------------------------------ waiting requests

    def enqueue(self, request: TrackedRequest, key: bytes, num_pages: int) -> int:
        """Inserts the first `num_pages` pages of `key`, as ghosts where nothing is resident. Returns how many tokens of
        it are cached, or will be once the older waiting requests have run."""
        node, known = self.insert_path(request.namespace, key, num_pages)
        self.waiting_nodes[request] = node
        self.num_foreground += not request.background
        request.skipped = False
        node.num_waiting_here += 1
        heappush(node.waiters, (request.number, request))
        self._add_waiting(node, 1)
        return known

    def insert_path(self, namespace: Namespace, key: bytes, num_pages: int) -> tuple[Node, int]:
        """The node that ends with the first `num_pages` pages of `key`; nodes are split and ghosts added for it. Also
        returns how many of its tokens the tree had. The caller gives the ghosts a reason to exist, or prunes them."""
        node = self.namespace(namespace)
        known = 0
        end = num_pages * self.page_bytes
        while (start := node.depth * TOKEN_BYTES) < end:
            child = self._child(node, key)
            if child is None:
                name = key[start : start + self.page_bytes]
                child = self._new(node, name, key[start:end], end // TOKEN_BYTES)
                node.children[name] = child
            else:
                common = self._common(child, key, end)
                if common < len(child.key):
                    child = self.split(child, common)
                known = child.depth
            node = child
        return node, known

    def touch(self, node: Node) -> None:
        """Makes `node` the most recently used."""
        self._ticks += 1
        node.last_used = self._ticks

    def dequeue(self, request: TrackedRequest) -> None:
        """Removes a request, and the ghosts that no other request waits for."""
        node = self.waiting_nodes.pop(request)
        self.num_foreground -= not request.background
        if not request.skipped:
            self._add_waiting(node, -1)
        request.skipped = False
        node.num_waiting_here -= 1
        if len(node.waiters) > 16 + 2 * node.num_waiting_here or not node.num_waiting_here:  # mostly stale
            node.waiters = [entry for entry in node.waiters if self.waiting_nodes.get(entry[1]) is node]
            heapify(node.waiters)
        self.prune(node)

    def skip(self, request: TrackedRequest) -> None:
        """Makes one waiting request invisible for the rest of this step."""
        request.skipped = True
        self._add_waiting(self.waiting_nodes[request], -1)

    def unskip(self, request: TrackedRequest) -> None:
        if request.skipped:
            node = self.waiting_nodes[request]
            request.skipped = False
            heappush(node.waiters, (request.number, request))
            self._add_waiting(node, 1)

    def hide(self, node: Node) -> None:
        """Makes all requests that wait at or below `node` invisible for the rest of this step."""
        if node.hidden or not node.num_waiting:
            return
        assert node.parent is not None, "the root cannot be hidden"
        self._add_waiting(node.parent, -node.num_waiting, from_resident=node.resident)
        node.hidden = True
        self._hidden.append(node)

    def unhide(self, node: Node) -> None:
        self._hidden.remove(node)
        node.hidden = False
        if node.is_alive and node.num_waiting and node.parent is not None:
            self._push(node)
            self._add_waiting(node.parent, node.num_waiting, from_resident=node.resident)

    def unhide_all(self) -> None:
        while self._hidden:
            self.unhide(self._hidden[-1])

    # ------------------------------------------------------------------ running requests

    def lock(self, holder: TrackedRequest | None, node: Node, above: Node | None = None) -> None:
        """Locks `node` and its ancestors, up to but not including `above`, which is locked already."""
        self._ticks += 1
        current: Node | None = node
        while current is not None and current is not above:
            if current.locks == 0:
                self.num_locked_pages += len(current.pages)
                current.holder = holder
                if holder is not None:
                    self._count_exclusive(holder, len(current.pages))
            elif current.holder is not None:
                # When later only one holder is left, it is not looked up: the pages count as shared until they
                # are unlocked, which is the conservative side.
                self._count_exclusive(current.holder, -len(current.pages))
                current.holder = None
            if holder is not None and holder.priority > current.priority:
                current.priority = holder.priority
            current.locks += 1
            current.uses += 1
            current.last_used = self._ticks
            current = current.parent

    def unlock(self, holder: TrackedRequest | None, node: Node) -> None:
        self._ticks += 1
        current: Node | None = node
        while current is not None:
            assert current.locks > 0, "a node was unlocked more often than locked"
            current.locks -= 1
            current.last_used = self._ticks
            if current.locks == 0:
                self.num_locked_pages -= len(current.pages)
                if current.holder is not None:
                    self._count_exclusive(current.holder, -len(current.pages))
                    current.holder = None
                self.leaves.update_value(current)
                self.leaves.push(current)
            parent = current.parent
            if current.locks == 0 and not current.pages.size:
                self.prune(current)
            current = parent

    def _count_exclusive(self, holder: TrackedRequest, count: int) -> None:
        holder.exclusive_pages += count
        self.num_exclusive_pages += count
        if holder.slot is not None:
            self.exclusive_pages[holder.slot] = holder.exclusive_pages

    def match_child(self, node: Node, key: bytes, end: int, step: int) -> Node | None:
        """The child that continues `key` below `node` and is readable by pass `step`, split to end at token `end` or
        before."""
        child = self._child(node, key) if node.depth < end else None
        if child is None or not child.resident or child.computed_step == step:
            return None
        common = self._common(child, key, end * TOKEN_BYTES)
        return child if common == len(child.key) else self.split(child, common)

    def insert(self, holder: TrackedRequest, node: Node, key: bytes, end: int, row: Pages, computed_step: int) -> Node:
        """Moves the pages of `row` from `node` to token `end`, computed by pass `computed_step`, into the tree, locked.

        Stops where the tree already has the same tokens: two rows computed the same prefix. The tree's copy survives,
        and the holder keeps its own pages until its row is remapped to the survivor. Returns the deepest node that the
        holder now has locked.
        """
        while node.depth < end:
            start = node.depth * TOKEN_BYTES
            child = self._child(node, key)
            if child is None:
                name = key[start : start + self.page_bytes]
                child = self._new(node, name, key[start : end * TOKEN_BYTES], end)
                node.children[name] = child
            else:
                common = self._common(child, key, end * TOKEN_BYTES)
                if common < len(child.key):
                    child = self.split(child, common)
                if child.resident:
                    return node
                if child.unproven and self.host is not None and len(child.host_pages):
                    self.host.drop(child)  # a token that is sampled from the new copy proves nothing about this one
            pages = row[node.depth // self.page_size : child.depth // self.page_size].copy()
            self.make_resident(child, pages, computed_step)
            child.unproven = holder.number
            self.lock(holder, child, above=node)
            node = child
        return node

    # ------------------------------------------------------------------ NaN

    @staticmethod
    def prove(node: Node, step: int) -> None:
        """Pass `step` sampled a token from everything down to `node`: none of it contains NaN, unless it was evicted
        and computed again by a later pass."""
        current: Node | None = node
        while current is not None and current.unproven and current.computed_step <= step:
            current.unproven = 0
            current = current.parent

    @staticmethod
    def is_below(node: Node | None, top: Node) -> bool:
        """Whether `node` is `top` or one of its descendants."""
        while node is not None and node is not top:
            node = node.parent
        return node is not None

    def drop(self, top: Node) -> Pages:
        """Takes all pages from `top` and everything below it, in host memory too; none of it is locked. Where requests
        wait, ghosts remain."""
        freed: list[Pages] = []
        for node in reversed(list(self.nodes(top))):
            if self.host is not None and len(node.host_pages):
                self.host.drop(node)
            if node.resident:
                freed.append(node.pages)
                self._make_ghost(node)
            else:
                self.prune(node)
        return np.concatenate(freed) if freed else NO_PAGES

    # ------------------------------------------------------------------ eviction

    def evict(self, count: int, step: int, *, spill: bool = True) -> Pages:
        """Takes `count` pages from the tree, coldest leaf first and from its tail, never a locked one. With `spill`,
        their KV is copied to host memory as far as there is space.

        Without partial eviction a node is evicted as a whole, and more than `count` pages may be returned.
        """
        assert count <= self.num_evictable_pages, f"{count} pages to evict, {self.num_evictable_pages} evictable"
        host = self.host if spill else None
        freed: list[Pages] = []
        while count > 0:
            node = self.leaves.pop()
            if node.num_waiting:
                self.needed_evicted_step = step
            if host is not None:
                host.split_unspillable(node)
            if len(node.pages) > count and self._partial_eviction:
                self.split(node, (len(node.pages) - count) * self.page_bytes)
            for part in (node,) if host is None else host.spill(node, step):
                freed.append(part.pages)
                count -= len(part.pages)
                self._make_ghost(part)
                if host is not None:
                    host.merge_with_child(part)
        return np.concatenate(freed) if freed else NO_PAGES

    # ------------------------------------------------------------------ KV events

    def listen(self, listener: KvListener) -> None:
        """Reports everything that is cached now, and from now on every change of it."""
        if listener not in self.listeners:
            self.listeners.append(listener)
        listener.cleared()
        for node in self.nodes():
            if len(node.pages):
                listener.stored(node, Medium.GPU)
            if len(node.host_pages):
                listener.stored(node, Medium.CPU)

    # ------------------------------------------------------------------ structure

    def _new(self, parent: Node | None, name: NodeName, key: bytes, depth: int) -> Node:
        self._num_nodes += 1
        self._ticks += 1
        node = Node(parent, name, key, depth, self._ticks)
        node.last_used = self._ticks
        return node

    def namespace(self, namespace: Namespace) -> Node:
        """The ancestor of all prompts of one tenant, salt and adapter. It has no pages."""
        node = self.root
        tenant, salt, adapter = namespace
        for name in (tenant, (salt, adapter)):
            child = node.children.get(name)
            if child is None:
                child = self._new(node, name, b"", 0)
                child.resident = True
                node.children[name] = child
                node.num_resident_children += 1
            node = child
        return node

    def _child(self, node: Node, key: bytes) -> Node | None:
        start = node.depth * TOKEN_BYTES
        return node.children.get(key[start : start + self.page_bytes])

    def _common(self, child: Node, key: bytes, end: int | None = None) -> int:
        """Number of bytes of the child's key that `key` matches: whole pages, at least one."""
        start = child.depth * TOKEN_BYTES - len(child.key)
        length = min(len(child.key), (len(key) if end is None else end) - start)
        if length == len(child.key) and key.startswith(child.key, start):  # compares in place, copies nothing
            return length
        length -= length % self.page_bytes
        if child.key.startswith(key[start : start + length]):
            return length
        ours = np.frombuffer(child.key, dtype=np.int32, count=length // TOKEN_BYTES)
        theirs = np.frombuffer(key, dtype=np.int32, count=length // TOKEN_BYTES, offset=start)
        first_difference = int((ours != theirs).argmax())
        return first_difference // self.page_size * self.page_bytes

    def split(self, node: Node, at: int) -> Node:
        """Splits `node` after `at` bytes and returns the new upper part.

        `node` itself remains the lower part, so that requests that wait or hold at its end still do.
        """
        assert 0 < at < len(node.key) and at % self.page_bytes == 0, "a node is split between two of its pages"
        parent = node.parent
        assert parent is not None, "the root has no pages to split"
        upper = self._new(parent, node.name, node.key[:at], node.depth - (len(node.key) - at) // TOKEN_BYTES)
        parent.children[node.name] = upper
        upper.sibling_order, node.sibling_order = node.sibling_order, upper.sibling_order
        for name in (
            "resident",
            "computed_step",
            "swap_step",
            "unproven",
            "locks",
            "holder",
            "last_used",
            "uses",
            "value",
            "priority",
            "num_waiting",
            "hidden",
        ):
            setattr(upper, name, getattr(node, name))
        num_upper = at // self.page_bytes
        if node.hashes is not None:
            upper.hashes, node.hashes = node.hashes.split(num_upper)
        if len(node.host_pages):
            upper.host_pages, node.host_pages = node.host_pages[:num_upper], node.host_pages[num_upper:]
        if node.resident:
            upper.pages, node.pages = node.pages[:num_upper], node.pages[num_upper:]
            upper.num_resident_children = 1
            upper.num_waiting_resident = node.num_waiting
        if node.hidden:  # the upper part is now the topmost hidden node
            node.hidden = False
            self._hidden = [upper if hidden is node else hidden for hidden in self._hidden]
        node.parent = upper
        node.key = node.key[at:]
        node.name = node.key[: self.page_bytes]
        upper.children[node.name] = node
        if self.host is not None and len(node.host_pages):
            self.host.track(upper)
        if node.num_waiting:
            self._push(upper)
            self._push(node)
            if node.resident:
                self._push_frontier(upper)
        return upper

    def merge(self, upper: Node) -> None:
        """Merges a ghost with its only child, a ghost: the inverse of `split`. No request waits or holds between."""
        (node,) = upper.children.values()
        parent = upper.parent
        assert parent is not None and not (upper.resident or node.resident or upper.num_waiting_here or upper.hidden), (
            "only ghosts are merged, and only where no request waits or holds"
        )
        node.parent, node.name, node.sibling_order = parent, upper.name, upper.sibling_order
        node.key = upper.key + node.key
        node.host_pages = np.concatenate([upper.host_pages, node.host_pages])
        node.hashes = None
        node.swap_step = max(upper.swap_step, node.swap_step)
        node.unproven = upper.unproven or node.unproven
        parent.children[node.name] = node
        upper.children, upper.host_pages = {}, NO_PAGES
        self._num_nodes -= 1
        if node.num_waiting:
            self._push(node)

    def make_resident(self, node: Node, pages: Pages, computed_step: int) -> None:
        assert node.parent is not None, "the root is resident from the beginning"
        node.resident = True
        node.computed_step = computed_step
        node.pages = pages
        self.num_pages += len(pages)
        node.parent.num_resident_children += 1
        for listener in self.listeners:
            listener.stored(node, Medium.GPU)
        if node.num_waiting:
            if not node.hidden:
                node.parent.num_waiting_resident += node.num_waiting
                self._push(node)
            self._push_frontier(node)

    def _make_ghost(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "the root is never evicted"
        for listener in self.listeners:
            listener.removed(node, Medium.GPU)
        node.resident = False
        node.priority = -math.inf
        self.num_pages -= len(node.pages)
        node.pages = NO_PAGES
        parent.num_resident_children -= 1
        if node.num_waiting:
            if not node.hidden:
                parent.num_waiting_resident -= node.num_waiting
            self._push_frontier(parent)
        self.prune(node)
        self.leaves.push(parent)

    def prune(self, node: Node) -> None:
        """Removes `node` and its ancestors, as far up as they have no children, pages, locks or waiting requests."""
        while (
            node.parent is not None
            and node.is_alive
            and not node.children
            and not node.locks
            and not len(node.pages)
            and not len(node.host_pages)
            and not node.num_waiting
            and not node.num_waiting_here
        ):
            parent = node.parent
            del parent.children[node.name]
            self._num_nodes -= 1
            if node.resident:  # a namespace
                parent.num_resident_children -= 1
            node = parent

    # ------------------------------------------------------------------ counts

    def _add_waiting(self, node: Node, count: int, from_resident: bool = False) -> None:
        """Changes the number of visible waiting requests of `node` and of its ancestors, up to a hidden one."""
        current: Node | None = node
        while current is not None:
            before = current.num_waiting
            current.num_waiting = before + count
            if from_resident:
                current.num_waiting_resident += count
            if current.resident and not from_resident and count > 0:
                self._push_frontier(current)
            if current.hidden:
                return
            if count > 0:
                self._push(current)
            elif not current.num_waiting:
                self.leaves.push(current)  # no request waits for it any more: it may be evicted earlier
            from_resident = current.resident
            current = current.parent

    def _push(self, node: Node) -> None:
        """Puts `node`, which has waiting requests or a better rank, into its parent's queue."""
        parent = node.parent
        if parent is None:
            return
        heappush(parent.queue, (node.rank, node.sibling_order, node.seq, node))
        if len(parent.queue) > 16 + 4 * len(parent.children):  # mostly stale
            parent.queue = [
                (child.rank, child.sibling_order, child.seq, child)
                for child in parent.children.values()
                if child.num_waiting and not child.hidden
            ]
            heapify(parent.queue)

    def _push_frontier(self, node: Node) -> None:
        """Records that requests may wait right below a resident node, for `LongestPrefixPolicy`."""
        if not self.has_frontier:
            return
        heappush(self.frontier, (-node.depth, node.seq, node))
        if len(self.frontier) > 64 + 4 * self._num_nodes:
            live = {id(entry[2]): entry for entry in self.frontier if entry[2].is_alive and entry[2].resident}
            self.frontier = list(live.values())
            heapify(self.frontier)
