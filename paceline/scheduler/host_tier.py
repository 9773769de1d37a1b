"""KV that has left the device and lies in host memory: which pages, for how long, and what moves with the next pass.

    tree, evictable ──evict──▶ pool.free, a copy on the host ──fetch──▶ tree, locked (the copy stays)
                                            │
                                            └──forget, the longest unused first, when host memory is full──▶ nothing

Only eviction spills and only a prompt that reaches the node fetches; a retracted request's pages are the tree's, so
they take the same way. The copy stays when the pages come back: what a tree page holds never changes, so evicted again
it needs no second copy.

Pages move with a plan, before its pass: first all that is spilled, then all that is fetched. The one thing to know
before changing this: in one plan no host page is both written and read, and none is written twice, so an executor
needs no order between the two directions. Hence a node that moves with the plan being made (`moved`) is neither
fetched nor forgotten before the next one.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from paceline.config import SchedulerConfig
from paceline.scheduler.journal import Counters
from paceline.scheduler.node import Node
from paceline.scheduler.page_pool import NO_PAGES, PagePool, Pages
from paceline.scheduler.plan import Swap
from paceline.scheduler.prefix_tree import TOKEN_BYTES, PrefixTree

Key = tuple[int, int]


def _key(node: Node) -> Key:
    """What is forgotten first: the longest unused, and of one path its end."""
    return node.last_used, -node.depth


class HostTier:
    def __init__(self, config: SchedulerConfig, tree: PrefixTree, counters: Counters) -> None:
        self._tree, self._counters = tree, counters
        self.pool = PagePool(config.num_host_pages)
        self.from_token = config.host_from_token  # what lies before it is cheaper to compute than to fetch
        self._most = config.max_swap_pages  # each way, with one pass
        self._least_tokens = config.prefix_wait_tokens
        self._oldest: list[tuple[Key, int, Node]] = []  # a heap of nodes with host pages; keys may be out of date
        # Of the plan being made
        self._spills: list[tuple[Pages, Pages]] = []  # device pages, host pages
        self._fetches: list[tuple[Pages, Pages]] = []
        self._num_spilled = self._num_fetched = 0

    # ------------------------------------------------------------------ asking

    @property
    def num_pages_used(self) -> int:
        return self.pool.num_pages - self.pool.num_free

    @property
    def num_fetchable(self) -> int:
        """Pages that may still come back with the plan being made."""
        return self._most - self._num_fetched

    def tokens_below(self, top: Node, node: Node) -> int:
        """Tokens between `top` and the end of `node`, which is below it, that lie on the host alone."""
        count = 0
        while node is not top:
            count += 0 if node.resident else len(node.hosts)
            assert node.parent is not None, "one node is below the other"
            node = node.parent
        return count * self._tree.page_size

    def begins_at(self, node: Node, key: bytes, start: int, end: int) -> int | None:
        """The first token from `start` up to `end` of `key`, below `node`, from which on enough lies on the host alone
        to be worth another pass."""
        tree = self._tree
        start = -(-start // tree.page_size) * tree.page_size
        while (found := tree.below(node, key, end)) is not None:
            child, common = found
            first, stop = max(node.depth, start), node.depth + common // TOKEN_BYTES
            if not child.resident and len(child.hosts) and stop - first >= self._least_tokens:
                return first
            if common < len(child.key):
                break
            node = child
        return None

    def nodes(self) -> set[int]:
        """Identities of all nodes that would be found when host memory is short."""
        return {id(entry[2]) for entry in self._oldest}

    # ------------------------------------------------------------------ out

    def cut(self, node: Node) -> None:
        """Leaves `node` with only what is worth spilling, if it has both: its beginning becomes a node of its own."""
        begins = node.depth - len(node.key) // TOKEN_BYTES
        if begins < self.from_token < node.depth:
            self._tree.split(node, (self.from_token - begins) * TOKEN_BYTES)

    def spill(self, node: Node) -> tuple[Node, ...]:
        """Copies the pages of a node that is being evicted, as far as there is room. Returns the parts in which it
        leaves the device: where only its beginning is kept, its end goes first."""
        if len(node.hosts) or node.depth <= self.from_token:
            return (node,)
        count = min(len(node.pages), self._most - self._num_spilled)
        self._forget(count)
        count = min(count, self.pool.num_free)
        if not count:
            return (node,)
        parts: tuple[Node, ...] = (node,)
        if count < len(node.pages):
            upper = self._tree.split(node, count * self._tree.page_bytes)
            parts, node = (node, upper), upper
        node.hosts = self.pool.allocate(count)
        node.moved = self._tree.step
        self._spills.append((node.pages, node.hosts))
        self._num_spilled += count
        self._counters.spilled_pages += count
        self.note(node)
        return parts

    def join(self, node: Node) -> None:
        """Makes a node that has left one with its end, which left before it. Pages leave one by one where requests grow
        token by token; a node for each would make every path as long as it has pages."""
        if len(node.children) != 1 or not len(node.hosts) or node.num_ending or node.hidden:
            return
        (below,) = node.children.values()
        # With one age, they would be forgotten together anyway.
        if len(below.hosts) and below.last_used == node.last_used and not below.hidden:
            self._tree.merge(node)

    def note(self, node: Node) -> None:
        """A node has come to have host pages."""
        heappush(self._oldest, (_key(node), node.seq, node))

    def _forget(self, count: int) -> None:
        """Has `count` host pages free, or as many as there can be."""
        moving = []
        while self.pool.num_free < count and self._oldest:
            key, _, node = heappop(self._oldest)
            if not len(node.hosts):
                continue
            if key != _key(node):  # it was used since
                self.note(node)
                continue
            if node.moved == self._tree.step:
                moving.append(node)
                continue
            short = count - self.pool.num_free
            if len(node.hosts) > short and not node.resident:
                self._tree.split(node, (len(node.hosts) - short) * self._tree.page_bytes)
            self._drop(node)
        for node in moving:
            self.note(node)

    def _drop(self, node: Node) -> None:
        self._counters.forgotten_pages += len(node.hosts)
        self.pool.free(node.hosts)
        node.hosts = NO_PAGES
        self._tree.prune(node)

    def forget_all(self) -> None:
        """Forgets everything that does not move with the plan being made."""
        self._forget(self.pool.num_pages)

    # ------------------------------------------------------------------ back

    def follow(self, node: Node, key: bytes, end: int, most_pages: int) -> Node | None:
        """The child on the host alone that continues `key` below `node`, cut to end at token `end` or before, and to
        so many pages. From now on it moves, so that its host pages outlast the search for room on the device."""
        tree = self._tree
        found = tree.below(node, key, end)
        if found is None:
            return None
        child, common = found
        if child.resident or not len(child.hosts) or child.moved == tree.step:
            return None
        common = min(common, most_pages * tree.page_bytes)
        if common < len(child.key):
            child = tree.split(child, common)
        child.moved = tree.step
        return child

    def fetch(self, node: Node, pages: Pages) -> None:
        """`node` is resident from now on, in `pages`: they are filled before the pass being planned runs."""
        self._fetches.append((pages, node.hosts))
        self._num_fetched += len(pages)
        self._counters.fetched_tokens += len(pages) * self._tree.page_size
        self._tree.make_resident(node, pages, self._tree.step - 1)

    # ------------------------------------------------------------------ the plan

    def take_swap(self) -> Swap | None:
        """What moves with the plan that is made now."""
        spills, fetches = self._spills, self._fetches
        if not spills and not fetches:
            return None
        self._spills, self._fetches = [], []
        self._num_spilled = self._num_fetched = 0
        fetch_pages, fetch_hosts = _columns(fetches)
        # A page that was fetched for a request which left again in this very plan may have been given to another
        # fetch: the last one counts.
        last = len(fetch_pages) - 1 - np.unique(fetch_pages[::-1], return_index=True)[1]
        if len(last) < len(fetch_pages):
            fetch_pages, fetch_hosts = fetch_pages[last], fetch_hosts[last]
        return Swap(*_columns(spills), fetch_pages, fetch_hosts)


def _columns(moves: list[tuple[Pages, Pages]]) -> tuple[Pages, Pages]:
    if not moves:
        return NO_PAGES, NO_PAGES
    pages, hosts = zip(*moves, strict=True)
    return np.concatenate(pages), np.concatenate(hosts)
