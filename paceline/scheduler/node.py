"""A node of the prefix tree: a run of pages, the requests that lock it and the requests that wait at or below it."""

from __future__ import annotations

import math
from typing import Protocol

from paceline.scheduler.page_pool import NO_PAGES, Pages
from paceline.scheduler.tracked_request import TrackedRequest

# A tenant, a salt and adapter, or the first page of a key; None: the root.
NodeName = str | tuple[str, str] | bytes | None
_GHOST_RANK = 1 << 40  # a ghost ranks behind every resident sibling, however many requests wait below it


class PageHashes(Protocol):
    """What a listener to KV events calls the pages of a node. It is kept with the node, until nodes are merged."""

    def split(self, num_upper: int) -> tuple[PageHashes, PageHashes]:
        """The names of the first `num_upper` pages and of the others."""


class Node:
    """A run of pages below its parent. `depth` counts tokens from the root to this node's end."""

    __slots__ = (
        "children",
        "computed_step",
        "depth",
        "hashes",
        "hidden",
        "holder",
        "host_pages",
        "key",
        "last_used",
        "locks",
        "name",
        "num_resident_children",
        "num_waiting",
        "num_waiting_here",
        "num_waiting_resident",
        "pages",
        "parent",
        "priority",
        "queue",
        "resident",
        "seq",
        "sibling_order",
        "swap_step",
        "unproven",
        "uses",
        "value",
        "waiters",
    )

    def __init__(self, parent: Node | None, name: NodeName, key: bytes, depth: int, seq: int) -> None:
        self.parent = parent
        self.name = name  # its key in parent.children: the first page of `key`, or the namespace
        self.key = key
        self.depth = depth
        self.seq = seq  # unique, so that heaps never compare nodes
        self.sibling_order = seq  # breaks ties between siblings: older first, also after a split
        self.pages: Pages = NO_PAGES
        self.host_pages: Pages = NO_PAGES  # pages in host memory with a copy of its KV: none, or one per page
        self.hashes: PageHashes | None = None  # made by a listener to KV events
        self.swap_step = 0  # the last step that spilled or fetched its KV
        self.children: dict[NodeName, Node] = {}
        self.resident = False
        self.computed_step = 0  # the step that computes it; in flight while that step is being planned
        # Number of the request that computed it, until a token was sampled from it: it contains no NaN. Then 0.
        self.unproven = 0
        self.locks = 0
        self.holder: TrackedRequest | None = None  # the request that locked it first, as long as no other has
        self.last_used = 0
        self.uses = 0
        self.value = 0.0  # under cost-aware eviction
        self.priority = -math.inf  # highest of the requests that used it since it became resident
        self.num_resident_children = 0
        self.num_waiting = 0  # requests that wait at or below this node and are visible in this step
        self.num_waiting_resident = 0  # of these, below resident children
        self.waiters: list[tuple[int, TrackedRequest]] = []  # heap by arrival; entries may be stale
        self.queue: list[tuple[int, int, int, Node]] = []  # heap of children by rank; entries may be stale
        self.hidden = False  # in this step, because the pass being planned computes it
        self.num_waiting_here = 0  # requests whose path ends exactly here, visible or not

    @property
    def start(self) -> int:
        """Tokens from the root to this node's beginning."""
        return 0 if self.parent is None else self.parent.depth

    @property
    def rank(self) -> int:
        """Order among siblings: resident ones first, then the one with the most waiting requests below it."""
        return -self.num_waiting if self.resident else _GHOST_RANK - self.num_waiting

    @property
    def is_alive(self) -> bool:
        return self.parent is None or self.parent.children.get(self.name) is self
