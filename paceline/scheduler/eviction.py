"""Which cached prefix goes first when memory is short.

A heap of the leaves that can be evicted. Entries are not removed when a leaf is locked, grows a child or changes its
key; they are recognised as stale when they surface. So evicting costs O(evicted · log leaves), never a scan.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from paceline.scheduler.node import Node

Key = tuple[float, ...]
_COST_DEPTH = 4096.0  # tokens of context after which recomputing a token costs twice as much

# What somebody waits for goes last, whatever the policy.
_KEYS: dict[str, Callable[[Node], Key]] = {
    "lru": lambda node: (node.num_waiting > 0, node.last_used),
    "lfu": lambda node: (node.num_waiting > 0, node.uses, node.last_used),
    "cost": lambda node: (node.num_waiting > 0, node.value, node.last_used),
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

    def offer(self, node: Node) -> None:
        """Puts a node among the leaves, if it is one. To be called whenever it may have become one or colder."""
        if is_evictable_leaf(node):
            heappush(self._heap, (self._key(node), node.seq, node))
            if len(self._heap) > 64 + 4 * self._size_after_rebuild:  # mostly stale
                self._rebuild()

    def pop(self) -> Node:
        """The coldest leaf. There must be one."""
        while True:
            key, _, node = heappop(self._heap)
            if not is_evictable_leaf(node):
                continue
            if key != self._key(node):  # somebody began to wait for it
                self.offer(node)
                continue
            self._inflation = max(self._inflation, node.value)
            return node

    def used(self, node: Node) -> None:
        """Greedy-dual: a node is worth its recomputation per page times its uses, on top of what the last evicted
        one was worth; so what is not used again sinks below what is."""
        node.value = self._inflation + (1.0 + node.depth / _COST_DEPTH) * max(1, node.uses)

    def nodes(self) -> set[int]:
        """Identities of all nodes that would be found."""
        return {id(entry[2]) for entry in self._heap}

    def _rebuild(self) -> None:
        live = {id(node): node for _, _, node in self._heap if is_evictable_leaf(node)}
        self._heap = [(self._key(leaf), leaf.seq, leaf) for leaf in live.values()]
        heapify(self._heap)
        self._size_after_rebuild = len(self._heap)
