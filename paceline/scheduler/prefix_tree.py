"""What is already computed, and who waits for what.

One radix tree over token pages. A node is *resident* (its pages hold KV, or will once the passes already planned
have run: passes run in order), *in flight* (resident, but computed by the very pass now being planned) or a
*ghost* (no KV; a waiting prompt would need it). A request is laid into the tree once, on arrival, as ghosts below
what is resident; nothing is matched again while it waits: how deep it hits is the deepest resident node above
`request.node`, wherever that has moved. A ghost may have a copy of its KV in host memory (host_tier.py), or stand above
one that has: then it stays though nobody waits.

    root ── tenant ── (salt, adapter) ──[ page page page ]──┬──[ page ]            resident, locked by a running row
                                                            ├──[ page page ]       resident, unlocked: evictable
                                                            └──[ page page page ]  ghost: two requests wait below

A node is locked by every running request whose row reads it, and by pins. Ancestors of a locked node are locked,
children of a ghost are ghosts; so the evictable pages are exactly those of unlocked resident nodes, and they can
always be evicted leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.request import Request
from paceline.scheduler.eviction import EvictableLeaves
from paceline.scheduler.node import Node
from paceline.scheduler.page_pool import NO_PAGES, Pages

if TYPE_CHECKING:
    from paceline.scheduler.host_tier import HostTier

TOKEN_BYTES = 4


class PrefixTree:
    def __init__(self, page_size: int, eviction: str = "lru", partial_eviction: bool = True) -> None:
        self._partial_eviction = partial_eviction
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.step = 1  # the pass being planned, or the next one; nodes born in it are in flight
        self.num_pages = 0  # resident, locked or not
        self.num_locked_pages = 0
        self.frontier: list[tuple[int, int, Node]] = []  # a heap by depth of resident nodes that may have waiters
        self._ticks = 0
        self._nodes = 0
        self.leaves = EvictableLeaves(eviction)
        self.host: HostTier | None = None  # where evicted pages may go
        self._hidden: list[Node] = []
        self.root = self._new(None, None, b"", 0)
        self.root.resident = True

    # ------------------------------------------------------------------ asking

    @property
    def num_evictable_pages(self) -> int:
        return self.num_pages - self.num_locked_pages

    def match(self, namespace: tuple[str, str, str], key: bytes) -> int:
        """How many tokens of `key` are resident. Changes nothing."""
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

    def hit(self, node: Node) -> Node:
        """The deepest node at or above `node` whose KV the pass being planned can read."""
        while not node.resident or node.born == self.step:
            assert node.parent is not None, "the root is resident"
            node = node.parent
        return node

    def in_flight_depth(self, node: Node) -> int:
        """How deep the path to `node` will be resident when the pass being planned has run."""
        while not node.resident:
            assert node.parent is not None, "the root is resident"
            node = node.parent
        return node.depth

    def path_pages(self, node: Node) -> Pages:
        """The pages from the root down to the end of `node`: the beginning of a row that hits there."""
        parts = []
        while node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else NO_PAGES

    def below(self, node: Node, key: bytes, end: int) -> tuple[Node, int] | None:
        """The child that continues `key` below `node`, and how many bytes of it do, up to token `end`."""
        child = self._child(node, key) if node.depth < end else None
        return None if child is None else (child, self._common(child, key, end * TOKEN_BYTES))

    def first_visible_child(self, node: Node) -> Node | None:
        """The child to be served next: the best by rank with a visible waiter below it."""
        queue = node.queue
        while queue:
            rank, order, _, child = queue[0]
            if child.parent is not node or child.hidden or not child.num_waiting or not child.is_alive:
                heappop(queue)
            elif child.rank != rank:
                # Ranks that got better were pushed again; so this one got worse, and finds its place now.
                heapreplace(queue, (child.rank, order, child.seq, child))
            else:
                return child
        return None

    def first_waiter(self, node: Node) -> Request | None:
        """The oldest visible request whose path ends exactly here."""
        waiters = node.waiters
        while waiters:
            request = waiters[0][1]
            if request.node is node and not request.set_aside:
                return request
            heappop(waiters)
        return None

    def nodes(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # ------------------------------------------------------------------ waiting requests

    def enqueue(self, request: Request, key: bytes, num_pages: int) -> None:
        """Lays the first `num_pages` pages of `key` into the tree, as ghosts where nothing is resident."""
        node = self.namespace(request)
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
            node = child
        request.node = node
        request.set_aside = False
        node.num_ending += 1
        heappush(node.waiters, (request.number, request))
        self._add_waiting(node, 1)

    def dequeue(self, request: Request) -> None:
        """Takes a request out of the tree, and the ghosts that nobody waits for any more."""
        node = request.node
        assert node is not None, f"request {request.id} does not wait in the tree"
        if not request.set_aside:
            self._add_waiting(node, -1)
        request.set_aside = False
        request.node = None
        node.num_ending -= 1
        if len(node.waiters) > 16 + 2 * node.num_ending or not node.num_ending:  # mostly stale
            node.waiters = [entry for entry in node.waiters if entry[1].node is node]
            heapify(node.waiters)
        self.prune(node)

    def set_aside(self, request: Request) -> None:
        """Makes one waiting request invisible for the rest of this step."""
        assert request.node is not None, f"request {request.id} does not wait in the tree"
        request.set_aside = True
        self._add_waiting(request.node, -1)

    def bring_back(self, request: Request) -> None:
        if request.set_aside and request.node is not None:
            request.set_aside = False
            heappush(request.node.waiters, (request.number, request))
            self._add_waiting(request.node, 1)

    def hide(self, node: Node) -> None:
        """Makes all that wait at or below `node` invisible for the rest of this step."""
        if node.hidden or not node.num_waiting:
            return
        assert node.parent is not None, "the root cannot be hidden"
        self._add_waiting(node.parent, -node.num_waiting, from_resident=node.resident)
        node.hidden = True
        self._hidden.append(node)

    def show_hidden(self) -> None:
        for node in self._hidden:
            node.hidden = False
            if node.is_alive and node.num_waiting and node.parent is not None:
                self._push(node)
                self._add_waiting(node.parent, node.num_waiting, from_resident=node.resident)
        self._hidden.clear()

    # ------------------------------------------------------------------ running requests

    def lock(self, holder: Request | None, node: Node, above: Node | None = None) -> None:
        """Locks `node` and its ancestors, up to but not including `above` (which is locked already)."""
        self._ticks += 1
        current: Node | None = node
        while current is not None and current is not above:
            if current.locks == 0:
                self.num_locked_pages += len(current.pages)
                current.holder = holder
                if holder is not None:
                    holder.sole_pages += len(current.pages)
            elif current.holder is not None:
                # Whoever is left alone later is not found again: the pages then count as shared until they
                # are unlocked, which errs on the careful side.
                current.holder.sole_pages -= len(current.pages)
                current.holder = None
            current.locks += 1
            current.uses += 1
            current.last_used = self._ticks
            current = current.parent

    def unlock(self, holder: Request | None, node: Node) -> None:
        self._ticks += 1
        current: Node | None = node
        while current is not None:
            assert current.locks > 0, "a node was unlocked more often than locked"
            current.locks -= 1
            current.last_used = self._ticks
            if current.locks == 0:
                self.num_locked_pages -= len(current.pages)
                if current.holder is not None:
                    current.holder.sole_pages -= len(current.pages)
                    current.holder = None
                self.leaves.used(current)
                self.leaves.offer(current)
            parent = current.parent
            if current.locks == 0 and not current.pages.size:
                self.prune(current)
            current = parent

    def follow(self, node: Node, key: bytes, end: int) -> Node | None:
        """The resident child that continues `key` below `node`, cut to end at token `end` or before."""
        child = self._child(node, key) if node.depth < end else None
        if child is None or not child.resident or child.born == self.step:
            return None
        common = self._common(child, key, end * TOKEN_BYTES)
        return child if common == len(child.key) else self.split(child, common)

    def claim(self, holder: Request, node: Node, key: bytes, end: int, row: Pages, born: int) -> Node:
        """Gives the pages of `row` from `node` to token `end`, computed by pass `born`, to the tree, locked.

        Stops where the tree already holds the same tokens: two rows computed the same, the tree's copy survives
        and the holder's own pages stay its own until `follow` remaps it to the survivor. Returns the deepest node
        now held.
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
            pages = row[node.depth // self.page_size : child.depth // self.page_size].copy()
            self.make_resident(child, pages, born)
            self.lock(holder, child, above=node)
            node = child
        return node

    # ------------------------------------------------------------------ eviction

    def evict(self, count: int, *, spill: bool = True) -> Pages:
        """Takes `count` pages from the tree, coldest leaf first and from its tail; never a locked one. What they hold
        goes to the host, where there is room and unless it is not to.

        Without partial eviction a node goes as a whole, and more than `count` pages may come.
        """
        assert count <= self.num_evictable_pages, f"{count} pages to evict, {self.num_evictable_pages} evictable"
        host = self.host if spill else None
        freed: list[Pages] = []
        while count > 0:
            node = self.leaves.pop()
            if host is not None:
                host.cut(node)
            if len(node.pages) > count and self._partial_eviction:
                self.split(node, (len(node.pages) - count) * self.page_bytes)
            for part in (node,) if host is None else host.spill(node):
                freed.append(part.pages)
                count -= len(part.pages)
                self._make_ghost(part)
                if host is not None:
                    host.join(part)
        return np.concatenate(freed) if freed else NO_PAGES

    # ------------------------------------------------------------------ structure

    def _new(self, parent: Node | None, name: Any, key: bytes, depth: int) -> Node:
        self._nodes += 1
        self._ticks += 1
        node = Node(parent, name, key, depth, self._ticks)
        node.last_used = self._ticks
        return node

    def namespace(self, request: Request) -> Node:
        """The node all prompts of one tenant, salt and adapter hang below. It holds no pages."""
        node = self.root
        for name in (request.tenant, (request.cache_salt, request.adapter)):
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
        """How many bytes of the child's key `key` continues with: whole pages, at least one."""
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
        """Cuts `node` after `at` bytes and returns the new upper part.

        The node itself stays the lower part, so that whoever waits or holds at its end still does.
        """
        assert 0 < at < len(node.key) and at % self.page_bytes == 0, "a node is split between two of its pages"
        parent = node.parent
        assert parent is not None, "the root has no pages to split"
        upper = self._new(parent, node.name, node.key[:at], node.depth - (len(node.key) - at) // TOKEN_BYTES)
        parent.children[node.name] = upper
        upper.order, node.order = node.order, upper.order
        for name in (
            "resident",
            "born",
            "moved",
            "locks",
            "holder",
            "last_used",
            "uses",
            "value",
            "num_waiting",
            "hidden",
        ):
            setattr(upper, name, getattr(node, name))
        num_upper = at // self.page_bytes
        if len(node.hosts):
            upper.hosts, node.hosts = node.hosts[:num_upper], node.hosts[num_upper:]
        if node.resident:
            upper.pages, node.pages = node.pages[:num_upper], node.pages[num_upper:]
            upper.num_resident_children = 1
            upper.num_waiting_resident = node.num_waiting
        if node.hidden:  # what is hidden hangs below the upper part now
            node.hidden = False
            self._hidden = [upper if hidden is node else hidden for hidden in self._hidden]
        node.parent = upper
        node.key = node.key[at:]
        node.name = node.key[: self.page_bytes]
        upper.children[node.name] = node
        if self.host is not None and len(node.hosts):
            self.host.note(upper)
        if node.num_waiting:
            self._push(upper)
            self._push(node)
            if node.resident:
                self._note_frontier(upper)
        return upper

    def merge(self, upper: Node) -> None:
        """Joins a ghost to its only child, which is one too: the inverse of `split`. Nobody waits or holds between."""
        (node,) = upper.children.values()
        parent = upper.parent
        assert parent is not None and not (upper.resident or node.resident or upper.num_ending or upper.hidden), (
            "only ghosts are merged, and at no place that somebody knows"
        )
        node.parent, node.name, node.order = parent, upper.name, upper.order
        node.key = upper.key + node.key
        node.hosts = np.concatenate([upper.hosts, node.hosts])
        node.moved = max(upper.moved, node.moved)
        parent.children[node.name] = node
        upper.children, upper.hosts = {}, NO_PAGES
        self._nodes -= 1
        if node.num_waiting:
            self._push(node)

    def make_resident(self, node: Node, pages: Pages, born: int) -> None:
        assert node.parent is not None, "the root is resident from the beginning"
        node.resident = True
        node.born = born
        node.pages = pages
        self.num_pages += len(pages)
        node.parent.num_resident_children += 1
        if node.num_waiting:
            if not node.hidden:
                node.parent.num_waiting_resident += node.num_waiting
                self._push(node)
            self._note_frontier(node)

    def _make_ghost(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "the root is never evicted"
        node.resident = False
        self.num_pages -= len(node.pages)
        node.pages = NO_PAGES
        parent.num_resident_children -= 1
        if node.num_waiting:
            if not node.hidden:
                parent.num_waiting_resident -= node.num_waiting
            self._note_frontier(parent)
        self.prune(node)
        self.leaves.offer(parent)

    def prune(self, node: Node) -> None:
        """Removes `node` and what is above it, as far up as nothing hangs below, lies in or waits at it."""
        while (
            node.parent is not None
            and node.is_alive
            and not node.children
            and not node.locks
            and not len(node.pages)
            and not len(node.hosts)
            and not node.num_waiting
            and not node.num_ending
        ):
            parent = node.parent
            del parent.children[node.name]
            self._nodes -= 1
            if node.resident:  # a namespace
                parent.num_resident_children -= 1
            node = parent

    # ------------------------------------------------------------------ counts

    def _add_waiting(self, node: Node, count: int, from_resident: bool = False) -> None:
        """Changes the number of visible waiters of `node` and of all above it, up to a hidden one."""
        current: Node | None = node
        while current is not None:
            before = current.num_waiting
            current.num_waiting = before + count
            if from_resident:
                current.num_waiting_resident += count
            if current.resident and not from_resident and count > 0:
                self._note_frontier(current)
            if current.hidden:
                return
            if count > 0:
                self._push(current)
            elif not current.num_waiting:
                self.leaves.offer(current)  # nobody waits for it any more: it may go earlier
            from_resident = current.resident
            current = current.parent

    def _push(self, node: Node) -> None:
        """Tells the parent that `node` has waiters or a better rank."""
        parent = node.parent
        if parent is None:
            return
        heappush(parent.queue, (node.rank, node.order, node.seq, node))
        if len(parent.queue) > 16 + 4 * len(parent.children):  # mostly stale: rebuild
            parent.queue = [
                (child.rank, child.order, child.seq, child)
                for child in parent.children.values()
                if child.num_waiting and not child.hidden
            ]
            heapify(parent.queue)

    def _note_frontier(self, node: Node) -> None:
        """Remembers that requests may wait right below a resident node, for the deepest-prefix order."""
        heappush(self.frontier, (-node.depth, node.seq, node))
        if len(self.frontier) > 64 + 4 * self._nodes:
            live = {id(entry[2]): entry for entry in self.frontier if entry[2].is_alive and entry[2].resident}
            self.frontier = list(live.values())
            heapify(self.frontier)
