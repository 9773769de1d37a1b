"""Scheduling policies: fixed key (FCFS, SJF, ...), response ratio (HRRN), depth-first (DFS), longest prefix (LPM).

A policy is asked for one candidate at a time (`next`) and notified of the outcome, so its cost per step depends on how
many requests are admitted and never on how many wait. Nothing is sorted or matched again while it waits: cache-aware
policies walk the prefix tree, whose counts and ranks are updated on every change.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush, nsmallest
from typing import Protocol

from paceline.scheduler.node import Node
from paceline.scheduler.now import Now
from paceline.scheduler.prefix_tree import PrefixTree
from paceline.scheduler.tracked_request import TrackedRequest

MAX_OVERTAKES_BY_RATIO = 15  # policy hrrn: requests admitted before the oldest one for their higher ratio


class Policy(Protocol):
    def add(self, request: TrackedRequest) -> None:
        """`request` begins to wait."""

    def remove(self, request: TrackedRequest) -> None:
        """`request` was admitted or has ended. Called once `request.queued` is false."""

    def next(self, now: Now) -> TrackedRequest | None:
        """The best candidate that is not skipped in this step."""

    def on_admitted(self, request: TrackedRequest, num_tokens: int, now: Now) -> None:
        """`request` was admitted and has `num_tokens` to compute. Called while it is still queued."""

    def charge(self, tenant: str, num_tokens: float) -> None:
        """Tokens are computed for a tenant, in units of prompt tokens."""

    def on_released(self, request: TrackedRequest) -> None:
        """A running request released its slot."""

    def on_served(self, request: TrackedRequest, seconds: float) -> None:
        """A request that was admitted has finished or is retracted; it took so much device time."""

    def end_step(self) -> None:
        """The step is planned: skipped requests are candidates again."""


class BasePolicy:
    """The notifications that most policies ignore."""

    def remove(self, request: TrackedRequest) -> None:
        pass

    def on_admitted(self, request: TrackedRequest, num_tokens: int, now: Now) -> None:
        pass

    def charge(self, tenant: str, num_tokens: float) -> None:
        pass

    def on_released(self, request: TrackedRequest) -> None:
        pass

    def on_served(self, request: TrackedRequest, seconds: float) -> None:
        pass

    def end_step(self) -> None:
        pass


class KeyPolicy(BasePolicy):
    """Smallest key first; the key is fixed on arrival. Equal keys are served in order of arrival."""

    def __init__(self, key: Callable[[TrackedRequest], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, TrackedRequest]] = []
        self._skipped: list[tuple[float, int, TrackedRequest]] = []
        self._num_queued = 0

    def add(self, request: TrackedRequest) -> None:
        self._num_queued += 1
        heappush(self._heap, (self._key(request), request.number, request))

    def remove(self, request: TrackedRequest) -> None:
        self._num_queued -= 1
        if len(self._heap) > 64 + 2 * self._num_queued:  # mostly aborted requests that never reached the top
            self._heap = [entry for entry in self._heap if entry[2].queued]
            heapify(self._heap)

    def next(self, now: Now) -> TrackedRequest | None:
        heap = self._heap
        while heap:
            request = heap[0][2]
            if not request.queued:
                heappop(heap)
            elif request.skipped:
                self._skipped.append(heappop(heap))
            else:
                return request
        return None

    def first(self, count: int) -> list[TrackedRequest]:
        """The next `count` requests in order of admission. Call it between two steps."""
        # A request that was queued twice has two entries.
        found = nsmallest(count, {entry[1]: entry for entry in self._heap if entry[2].queued}.values())
        return [request for _, _, request in found]

    def end_step(self) -> None:
        for entry in self._skipped:
            heappush(self._heap, entry)
        self._skipped.clear()


class FcfsPolicy(KeyPolicy):
    """First come, first served."""

    def __init__(self) -> None:
        super().__init__(lambda request: request.number)


class ResponseRatioPolicy(BasePolicy):
    """Highest response ratio next (HRRN): (waiting time + service time) / service time.

    By ratio alone a long request would wait for as long as more short ones arrive than can be served: their ratios grow
    faster than its own. So after MAX_OVERTAKES_BY_RATIO others it is the turn of the oldest request, until it is
    admitted. A request with n older ones before it is admitted after 16 (n + 1) admissions, if it fits into memory.

    Requests of similar service time form a class with one service time. Within a class the oldest has the highest
    ratio, so only the heads of a few dozen classes are compared.
    """

    def __init__(self, service_s: Callable[[TrackedRequest], float]) -> None:
        self._service_s = service_s
        self._classes: dict[int, FcfsPolicy] = {}
        self._class_of: OrderedDict[TrackedRequest, int] = OrderedDict()  # in order of arrival
        self._num_overtakes = 0  # admissions since that of the oldest request

    @property
    def _oldest(self) -> TrackedRequest | None:
        return next(iter(self._class_of), None)

    def add(self, request: TrackedRequest) -> None:
        number = self._class_of[request] = round(2 * math.log2(max(1e-6, self._service_s(request))))
        if number not in self._classes:
            self._classes[number] = FcfsPolicy()
        self._classes[number].add(request)

    def remove(self, request: TrackedRequest) -> None:
        self._classes[self._class_of.pop(request)].remove(request)

    def on_admitted(self, request: TrackedRequest, num_tokens: int, now: Now) -> None:
        if request.queued:
            self._num_overtakes = 0 if request is self._oldest else self._num_overtakes + 1

    def next(self, now: Now) -> TrackedRequest | None:
        oldest = self._oldest
        if oldest is not None and not oldest.skipped and self._num_overtakes >= MAX_OVERTAKES_BY_RATIO:
            return oldest
        best: tuple[float, int] | None = None
        chosen = None
        for number, members in self._classes.items():
            head = members.next(now)
            if head is not None:
                rank = (-(now.time - head.arrival) / 2 ** (number / 2), head.number)
                if best is None or rank < best:
                    best, chosen = rank, head
        return chosen

    def end_step(self) -> None:
        for members in self._classes.values():
            members.end_step()


class DepthFirstPolicy(BasePolicy):
    """Depth-first (DFS) over cached and waiting prompts: requests that share a prefix run together.

    The cursor stays at the node of the last admission. Next is another request at that node, else one below the nearest
    ancestor with waiting requests, through its best child: a resident one, else the one with the most waiting requests.
    """

    def __init__(self, tree: PrefixTree, top: Callable[[], Node | None]) -> None:
        self._tree = tree
        self._top = top
        self._cursor: Node = tree.root

    def add(self, request: TrackedRequest) -> None:
        pass

    def next(self, now: Now) -> TrackedRequest | None:
        top = self._top()
        if top is None or top.hidden or not top.num_waiting:
            return None
        node = self._visible_cursor(top)
        while not node.num_waiting:
            assert node.parent is not None, "requests wait below the top"
            node = node.parent
        return _first_request(self._tree, node)

    def on_admitted(self, request: TrackedRequest, num_tokens: int, now: Now) -> None:
        # Only an admission moves the cursor. A candidate that did not fit must not move it away from the cluster that
        # is being served.
        self._cursor = self._tree.waiting_nodes[request]

    def _visible_cursor(self, top: Node) -> Node:
        node = self._cursor
        while not node.is_alive:
            assert node.parent is not None, "the root is alive"
            node = node.parent
        start, below_top = node, False
        current: Node | None = node
        while current is not None:
            if current.hidden:
                assert current.parent is not None, "the root is never hidden"
                start = current.parent
            below_top = below_top or current is top
            current = current.parent
        return start if below_top else top


class LongestPrefixPolicy(BasePolicy):
    """Longest prefix match (LPM): deepest cached prefix first; among equals the cluster with the most waiting requests,
    then the oldest request."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._skipped: list[tuple[int, int, Node]] = []

    def add(self, request: TrackedRequest) -> None:
        pass

    def next(self, now: Now) -> TrackedRequest | None:
        tree = self._tree
        while tree.frontier:
            node = tree.frontier[0][2]
            if node.computed_step == now.step or tree.is_below_hidden(node):
                self._skipped.append(heappop(tree.frontier))
            elif not node.is_alive or not node.resident or node.num_waiting <= node.num_waiting_resident:
                heappop(tree.frontier)
            else:
                return _first_request(tree, node)
        return None

    def end_step(self) -> None:
        for entry in self._skipped:
            heappush(self._tree.frontier, entry)
        self._skipped.clear()


def _first_request(tree: PrefixTree, node: Node) -> TrackedRequest:
    """The first visible request at `node`, else below it through its best child. There must be one."""
    while (request := tree.first_waiter(node)) is None:
        child = tree.first_visible_child(node)
        assert child is not None, f"{node.num_waiting} requests are counted below a node, and none is found"
        node = child
    return request
