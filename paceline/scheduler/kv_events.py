"""KV events: what the prefix tree reports about cached pages, for routers that send requests where their prefix is.

A page is stored when the tree makes it resident, that is when the pass that computes it is planned: passes run in
order, so every request that arrives after the event can use the page. It is removed when it is evicted, flushed or
dropped, also if it contains NaN. The copy in host memory is reported apart, as another medium: a page that is spilled
is stored on the CPU and then removed from the GPU. Splitting or merging nodes reports nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from paceline.scheduler.node import Node


class Medium(StrEnum):
    """Where a page is, by the names of vLLM's KV events."""

    GPU = "GPU"  # the memory of the executor's device, also if that is a CPU
    CPU = "CPU"  # the host tier


class KvListener(Protocol):
    """Called for every change of the cache, in order, within plan, commit or a cache operation. `node.key` has the
    tokens of all its pages. The node changes later: keep what is needed of it, not the node."""

    def stored(self, node: Node, medium: Medium) -> None: ...

    def removed(self, node: Node, medium: Medium) -> None: ...

    def cleared(self) -> None:
        """Nothing is cached; events for what is cached after all follow."""
