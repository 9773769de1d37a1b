"""A node of the prefix tree: a run of pages, who holds it and who waits at or below it."""

from __future__ import annotations

from typing import Any

from paceline.request import Request
from paceline.scheduler.page_pool import NO_PAGES, Pages

_GHOST_RANK = 1 << 40  # a ghost ranks behind every resident sibling, however many wait below it


class Node:
    """A run of pages below its parent. `depth` counts tokens from the root to this node's end."""

    __slots__ = (
        "born",
        "children",
        "depth",
        "hidden",
        "holder",
        "hosts",
        "key",
        "last_used",
        "locks",
        "moved",
        "name",
        "num_ending",
        "num_resident_children",
        "num_waiting",
        "num_waiting_resident",
        "order",
        "pages",
        "parent",
        "queue",
        "resident",
        "seq",
        "uses",
        "value",
        "waiters",
    )

    def __init__(self, parent: Node | None, name: Any, key: bytes, depth: int, seq: int) -> None:
        self.parent = parent
        self.name = name  # under which the parent knows it: the first page of the key, or the namespace
        self.key = key
        self.depth = depth
        self.seq = seq  # unique: keeps heaps from ever comparing nodes
        self.order = seq  # breaks ties between siblings; the older one first, also after a split
        self.pages: Pages = NO_PAGES
        self.hosts: Pages = NO_PAGES  # host pages with a copy of its KV; none, or one for each of its pages
        self.moved = 0  # the step with which its KV last went to the host or came back
        self.children: dict[Any, Node] = {}
        self.resident = False
        self.born = 0  # the step that computes it; in flight while that step is being planned
        self.locks = 0
        self.holder: Request | None = None  # who locked it first, as long as nobody else has
        self.last_used = 0
        self.uses = 0
        self.value = 0.0  # what eviction by cost weighs
        self.num_resident_children = 0
        self.num_waiting = 0  # requests waiting at or below this node and visible in this step
        self.num_waiting_resident = 0  # of these, below resident children
        self.waiters: list[tuple[int, Request]] = []  # a heap by arrival; entries may be stale
        self.queue: list[tuple[int, int, int, Node]] = []  # a heap of children by rank; entries may be stale
        self.hidden = False  # for this step, because a pass being planned computes it
        self.num_ending = 0  # requests that wait exactly here, visible or not

    @property
    def rank(self) -> int:
        """Which sibling is served first: resident ones, then the one most requests wait below."""
        return -self.num_waiting if self.resident else _GHOST_RANK - self.num_waiting

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_alive(self) -> bool:
        return self.parent is None or self.parent.children.get(self.name) is self
