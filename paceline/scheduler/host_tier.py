"""The host tier of the KV cache: which evicted pages are kept in host memory, for how long, and what each plan copies.

    tree, evictable ──evict──▶ pool.free, a copy on the host ──fetch──▶ tree, locked (the copy stays)
                                            │
                                            └──forget, least recently used first, when host memory is full──▶ nothing

Only eviction spills, and only a prompt that reaches the node fetches. The pages of a retracted request belong to the
tree, so they take the same path. The host copy stays when the pages are fetched: the KV of a tree page never changes,
so evicting it again needs no second copy.

Pages may also come from another engine, which computes prompts for this one. Host pages are reserved for them while
they are in transit; then they become copies like any other, of nodes that no request here has computed.

    pool.free ──reserve──▶ reserved ──place──▶ tree, a copy on the host
                              └──release: they never came, or came damaged──▶ pool.free

Pages are copied with a plan, before its pass: first all spills, then all fetches. The one thing to know before changing
this: in one plan no host page is both written and read, and none is written twice, so an executor needs no order
between the two directions. Hence a node that is spilled or fetched by the plan being made (`swap_step`) is neither
fetched nor forgotten before the next plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from paceline.config import SchedulerConfig
from paceline.request import Request
from paceline.scheduler.journal import Counters
from paceline.scheduler.kv_events import Medium
from paceline.scheduler.node import Node
from paceline.scheduler.page_pool import NO_PAGES, PagePool, Pages
from paceline.scheduler.plan import Swap
from paceline.scheduler.prefix_tree import TOKEN_BYTES, PrefixTree

Key = tuple[int, int]
# Computed the nodes of received pages: whoever reads NaN from them is computed again and does not fail.
_NO_REQUEST = -1


@dataclass(slots=True, eq=False)
class Reservation:
    """Host pages for prompt pages `first_page` .. `end_page` of `request`, which another engine computes."""

    request: Request
    first_page: int  # those before it are cached here
    pages: Pages
    is_void: bool = False  # the KV was computed with weights that were replaced since

    @property
    def end_page(self) -> int:
        return self.first_page + len(self.pages)


def _key(node: Node) -> Key:
    """What is forgotten first: the least recently used, and on one path its end."""
    return node.last_used, -node.depth


class HostTier:
    def __init__(self, config: SchedulerConfig, tree: PrefixTree, counters: Counters) -> None:
        self._tree, self._counters = tree, counters
        self.pool = PagePool(config.num_host_pages)
        self.from_token = config.host_from_token  # tokens before it are cheaper to compute than to fetch
        self._max_swap_pages = config.max_swap_pages  # in each direction, per pass
        self._min_fetch_tokens = config.prefix_wait_tokens
        self.reserved: dict[str, Reservation] = {}  # by transfer
        self._lru: list[tuple[Key, int, Node]] = []  # heap of nodes with host pages; keys may be out of date
        # Of the plan being made
        self._spills: list[tuple[Pages, Pages]] = []  # device pages, host pages
        self._fetches: list[tuple[Pages, Pages]] = []
        self._is_copied = np.zeros(config.num_host_pages, np.bool_)  # by host page
        self._num_spilled = self._num_fetched = 0

    # ------------------------------------------------------------------ queries

    @property
    def num_pages_used(self) -> int:
        return self.pool.num_pages - self.pool.num_free

    @property
    def num_fetchable(self) -> int:
        """Pages that the plan being made may still fetch."""
        return self._max_swap_pages - self._num_fetched

    @property
    def num_pages_reserved(self) -> int:
        return sum(len(one.pages) for one in self.reserved.values())

    def tokens_below(self, top: Node, node: Node) -> int:
        """Tokens between `top` and the end of its descendant `node` that are only in host memory."""
        count = 0
        while node is not top:
            count += 0 if node.resident else len(node.host_pages)
            assert node.parent is not None, "one node is below the other"
            node = node.parent
        return count * self._tree.page_size

    def next_fetch(self, node: Node, key: bytes, start: int, end: int) -> int | None:
        """The first token of `key` in start .. end, below `node`, from which enough is only in host memory to be worth
        another pass. None if there is no such token."""
        tree = self._tree
        start = -(-start // tree.page_size) * tree.page_size
        while (found := tree.find_child(node, key, end)) is not None:
            child, common = found
            first, stop = max(node.depth, start), node.depth + common // TOKEN_BYTES
            if not child.resident and len(child.host_pages) and stop - first >= self._min_fetch_tokens:
                return first
            if common < len(child.key):
                break
            node = child
        return None

    def node_ids(self) -> set[int]:
        """id() of every node that can be forgotten; for the invariants."""
        return {id(entry[2]) for entry in self._lru}

    # ------------------------------------------------------------------ spill

    def split_unspillable(self, node: Node) -> None:
        """Splits off the beginning of `node` that is before `from_token`, if it has tokens on both sides of it."""
        begins = node.depth - len(node.key) // TOKEN_BYTES
        if begins < self.from_token < node.depth:
            self._tree.split(node, (self.from_token - begins) * TOKEN_BYTES)

    def spill(self, node: Node, step: int) -> tuple[Node, ...]:
        """Copies the pages of a node that is being evicted, as far as host memory and `max_swap_pages` allow. Returns
        the parts in the order in which they leave the device: if only the beginning is kept, the end comes first."""
        if len(node.host_pages) or node.depth <= self.from_token:
            return (node,)
        count = min(len(node.pages), self._max_swap_pages - self._num_spilled)
        self._forget(count, step)
        count = min(count, self.pool.num_free)
        if not count:
            return (node,)
        parts: tuple[Node, ...] = (node,)
        if count < len(node.pages):
            upper = self._tree.split(node, count * self._tree.page_bytes)
            parts, node = (node, upper), upper
        node.host_pages = self.pool.allocate(count)
        node.swap_step = step
        self._spills.append((node.pages, node.host_pages))
        self._is_copied[node.host_pages] = True
        self._num_spilled += count
        self._counters.spilled_pages += count
        for listener in self._tree.listeners:
            listener.stored(node, Medium.CPU)
        self.track(node)
        return parts

    def merge_with_child(self, node: Node) -> None:
        """Merges a spilled node with its end, which was spilled before it. Where requests grow token by token, pages
        are evicted one by one; with a node for each, every path would have as many nodes as pages."""
        if len(node.children) != 1 or not len(node.host_pages) or node.num_waiting_here or node.hidden:
            return
        (child,) = node.children.values()
        # With the same age they would be forgotten together anyway.
        if len(child.host_pages) and child.last_used == node.last_used and not child.hidden:
            self._tree.merge(node)

    def track(self, node: Node) -> None:
        """Adds a node that now has host pages to the nodes that can be forgotten."""
        heappush(self._lru, (_key(node), node.seq, node))

    def _forget(self, count: int, step: int) -> None:
        """Frees host pages until `count` are free, or as many as possible."""
        swapping = []
        while self.pool.num_free < count and self._lru:
            key, _, node = heappop(self._lru)
            if not len(node.host_pages):
                continue
            if key != _key(node):  # it was used since
                self.track(node)
                continue
            if node.swap_step == step:
                swapping.append(node)
                continue
            short = count - self.pool.num_free
            if len(node.host_pages) > short and not node.resident:
                self._tree.split(node, (len(node.host_pages) - short) * self._tree.page_bytes)
            self._free(node)
        for node in swapping:
            self.track(node)

    def _free(self, node: Node) -> None:
        self._counters.forgotten_pages += len(node.host_pages)
        self._free_pages(node)
        self._tree.prune(node)

    def drop(self, node: Node) -> None:
        """Frees the host pages of a node whose KV is not valid, also those that the plan being made would copy."""
        if self._is_copied[node.host_pages].any():
            self._is_copied[node.host_pages] = False
            self._spills, self._fetches = self._without_dropped(self._spills), self._without_dropped(self._fetches)
        self._free_pages(node)

    def _without_dropped(self, copies: list[tuple[Pages, Pages]]) -> list[tuple[Pages, Pages]]:
        kept = [self._is_copied[hosts] for _, hosts in copies]
        return [(pages[keep], hosts[keep]) for (pages, hosts), keep in zip(copies, kept, strict=True)]

    def _free_pages(self, node: Node) -> None:
        for listener in self._tree.listeners:
            listener.removed(node, Medium.CPU)
        self.pool.free(node.host_pages)
        node.host_pages = NO_PAGES

    def forget_all(self, step: int) -> None:
        """Frees every host page that the plan being made does not copy."""
        self._forget(self.pool.num_pages, step)

    def clear(self) -> None:
        """Frees every host page. Copies for the plan being made are dropped: nothing may use their pages any more."""
        self._spills, self._fetches = [], []
        self._is_copied[:] = False
        self._num_spilled = self._num_fetched = 0
        self._forget(self.pool.num_pages, step=-1)  # of no plan
        for one in self.reserved.values():
            one.is_void = True

    # ------------------------------------------------------------------ pages of another engine

    def reserve(self, name: str, request: Request, first_page: int, end_page: int, step: int) -> Reservation | None:
        """Takes host pages for KV that another engine sends. None if not so many can be free.

        Copies that were launched before may still read or write these pages: an executor is asked when they have
        ended (`Executor.after_launched`)."""
        assert name not in self.reserved, f"host pages are reserved for transfer {name} already"
        count = end_page - first_page
        if count > self.pool.num_pages - self.num_pages_reserved:  # before others are forgotten in vain
            return None
        self._forget(count, step)
        if count > self.pool.num_free:
            return None
        self.reserved[name] = one = Reservation(request, first_page, self.pool.allocate(count))
        return one

    def release(self, name: str) -> None:
        """Frees the pages of a transfer: nothing writes them any more."""
        self.pool.free(self.reserved.pop(name).pages)

    def place(self, name: str) -> int:
        """Makes received pages part of the tree. Returns how many: those that are cached by now are freed."""
        one, tree = self.reserved.pop(name), self._tree
        if one.is_void:
            self.pool.free(one.pages)
            return 0
        namespace, key = one.request.namespace, one.request.keys.tobytes()
        above, _ = tree.insert_path(namespace, key, one.first_page)
        end, _ = tree.insert_path(namespace, key, one.end_page)
        count, node = 0, end
        while node is not above:
            stop = node.depth // tree.page_size - one.first_page
            pages = one.pages[stop - len(node.key) // tree.page_bytes : stop]
            if node.resident or len(node.host_pages):
                self.pool.free(pages)
            else:
                count += len(pages)
                node.host_pages = pages
                node.unproven = _NO_REQUEST
                tree.touch(node)
                self.track(node)
                for listener in tree.listeners:
                    listener.stored(node, Medium.CPU)
            assert node.parent is not None, "one node is below the other"
            node = node.parent
        tree.prune(end)
        self._counters.received_pages += count
        return count

    # ------------------------------------------------------------------ fetch

    def match_child(self, node: Node, key: bytes, end: int, max_pages: int, step: int) -> Node | None:
        """The child that continues `key` below `node` and is only in host memory, split to end at token `end` or before
        and to have at most `max_pages`. Its `swap_step` is set, so that its host pages are not forgotten while device
        pages are allocated for it."""
        tree = self._tree
        found = tree.find_child(node, key, end)
        if found is None:
            return None
        child, common = found
        if child.resident or not len(child.host_pages) or child.swap_step == step:
            return None
        common = min(common, max_pages * tree.page_bytes)
        if common < len(child.key):
            child = tree.split(child, common)
        child.swap_step = step
        return child

    def fetch(self, node: Node, pages: Pages, step: int) -> None:
        """Makes `node` resident in `pages`, which are filled before the pass being planned runs."""
        self._fetches.append((pages, node.host_pages))
        self._is_copied[node.host_pages] = True
        self._num_fetched += len(pages)
        self._counters.fetched_tokens += len(pages) * self._tree.page_size
        self._tree.make_resident(node, pages, step - 1)

    # ------------------------------------------------------------------ the plan

    def take_swap(self) -> Swap | None:
        """The copies that belong to the plan being made."""
        spills, fetches = self._spills, self._fetches
        if not spills and not fetches:
            return None
        self._spills, self._fetches = [], []
        self._num_spilled = self._num_fetched = 0
        (spill_pages, spill_hosts), (fetch_pages, fetch_hosts) = _columns(spills), _columns(fetches)
        self._is_copied[spill_hosts] = self._is_copied[fetch_hosts] = False
        # If a request leaves in the plan that fetched a page for it, the page may be allocated to another fetch of the
        # same plan: the last one counts.
        last = len(fetch_pages) - 1 - np.unique(fetch_pages[::-1], return_index=True)[1]
        if len(last) < len(fetch_pages):
            fetch_pages, fetch_hosts = fetch_pages[last], fetch_hosts[last]
        return Swap(spill_pages, spill_hosts, fetch_pages, fetch_hosts)


def _columns(copies: list[tuple[Pages, Pages]]) -> tuple[Pages, Pages]:
    if not copies:
        return NO_PAGES, NO_PAGES
    pages, host_pages = zip(*copies, strict=True)
    return np.concatenate(pages), np.concatenate(host_pages)
