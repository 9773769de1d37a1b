"""Eviction order: which cached prefix is evicted first when memory is short.

A heap of the evictable leaves. An entry is not removed when its leaf is locked, gets a child or changes its key; it is
recognised as stale when it reaches the top. So evicting costs O(evicted · log leaves) and never a scan.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from paceline.scheduler.node import Node

Key = tuple[float, ...]
_COST_DEPTH = 4096.0  # tokens of context at which recomputing a token costs twice as much

# Whatever the policy, prefixes that waiting requests need are evicted last.
_KEYS: dict[str, Callable[[Node], Key]] = {
    "lru": lambda node: (node.num_waiting > 0, node.last_used),
    "lfu": lambda node: (node.num_waiting > 0, node.uses, node.last_used),
    "cost": lambda node: (node.num_waiting > 0, node.value, node.last_used),
    "priority": lambda node: (node.num_waiting > 0, node.priority, node.last_used),
}


def is_evictable_leaf(node: Node) -> bool:
    return (
        node.resident and node.locks == 0 and node.num_resident_children == 0 and len(node.pages) > 0 and node.is_alive
    )


class EvictableLeaves:
    def __init__(self, policy: str) -> None:
        self._key = _KEYS[policy]
        self._inflation = 0.0
        self._heap: list[tuple[Key, int, Node]] = []
        self._size_after_rebuild = 0

    def push(self, node: Node) -> None:
        """Adds `node` if it is an evictable leaf. Call it whenever it may have become one, or got colder."""
        if is_evictable_leaf(node):
            heappush(self._heap, (self._key(node), node.seq, node))
            if len(self._heap) > 64 + 4 * self._size_after_rebuild:  # mostly stale
                self._rebuild()

    def pop(self) -> Node:
        """Removes and returns the coldest leaf. There must be one."""
        while True:
            key, _, node = heappop(self._heap)
            if not is_evictable_leaf(node):
                continue
            if key != self._key(node):  # a request began to wait for it
                self.push(node)
                continue
            self._inflation = max(self._inflation, node.value)
            return node

    def update_value(self, node: Node) -> None:
        """Greedy-dual: the value of a node is its recomputation cost per page times its uses, plus the value of the
        last evicted node. So a node that is not used again sinks below those that are."""
        node.value = self._inflation + (1.0 + node.depth / _COST_DEPTH) * max(1, node.uses)

    def node_ids(self) -> set[int]:
        """id() of every node in the heap, stale or not; for the invariants."""
        return {id(entry[2]) for entry in self._heap}

    def _rebuild(self) -> None:
        live = {id(node): node for _, _, node in self._heap if is_evictable_leaf(node)}
        self._heap = [(self._key(leaf), leaf.seq, leaf) for leaf in live.values()]
        heapify(self._heap)
        self._size_after_rebuild = len(self._heap)
