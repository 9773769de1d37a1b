"""The plain orders: by a fixed key, by response ratio, depth-first, by longest cached prefix.

An order is asked for one candidate at a time (`next`) and told what became of it, so its cost per step depends on
how many requests are admitted and never on how many wait. Nothing is sorted or matched again while it waits:
orders that look at the cache walk the prefix tree, whose counts and ranks are kept up to date as things change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol

from paceline.request import Request
from paceline.scheduler.node import Node
from paceline.scheduler.prefix_tree import PrefixTree


class Order(Protocol):
    def add(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None:
        """The request was admitted or has ended. Called once `request.queued` is false."""

    def next(self, now: float) -> Request | None:
        """The best candidate that is not set aside in this step."""

    def admitted(self, request: Request, num_tokens: int, now: float) -> None:
        """`request` was admitted and has `num_tokens` to compute."""

    def charge(self, tenant: str, num_tokens: float) -> None:
        """Tokens were computed for a tenant, counted in prompt tokens."""

    def running_ended(self, request: Request) -> None:
        """A running request gave its slot back."""

    def restore(self) -> None:
        """The step is planned: what was set aside counts again."""


class BaseOrder:
    """What most orders need not care about."""

    def remove(self, request: Request) -> None:
        pass

    def admitted(self, request: Request, num_tokens: int, now: float) -> None:
        pass

    def charge(self, tenant: str, num_tokens: float) -> None:
        pass

    def running_ended(self, request: Request) -> None:
        pass

    def restore(self) -> None:
        pass


class KeyOrder(BaseOrder):
    """By a key that is fixed on arrival; the oldest first among equals."""

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, Request]] = []
        self._skipped: list[tuple[float, int, Request]] = []
        self._num_queued = 0

    def add(self, request: Request) -> None:
        self._num_queued += 1
        heappush(self._heap, (self._key(request), request.number, request))

    def remove(self, request: Request) -> None:
        self._num_queued -= 1
        if len(self._heap) > 64 + 2 * self._num_queued:  # mostly aborted ones that never came to the top
            self._heap = [entry for entry in self._heap if entry[2].queued]
            heapify(self._heap)

    def next(self, now: float) -> Request | None:
        heap = self._heap
        while heap:
            request = heap[0][2]
            if not request.queued:
                heappop(heap)
            elif request.set_aside:
                self._skipped.append(heappop(heap))
            else:
                return request
        return None

    def restore(self) -> None:
        for entry in self._skipped:
            heappush(self._heap, entry)
        self._skipped.clear()


class ResponseRatio(BaseOrder):
    """Highest response ratio next: (waited + service) / service.

    Requests of similar service share a class with one service time; inside a class the oldest has the highest
    ratio, so only the heads of some forty classes are compared.
    """

    def __init__(self, service: Callable[[Request], float]) -> None:
        self._service = service
        self._classes: dict[int, KeyOrder] = {}

    def add(self, request: Request) -> None:
        number = self._class_of(request)
        if number not in self._classes:
            self._classes[number] = KeyOrder(lambda request: request.number)
        self._classes[number].add(request)

    def remove(self, request: Request) -> None:
        self._classes[self._class_of(request)].remove(request)

    def _class_of(self, request: Request) -> int:
        return round(2 * math.log2(max(1.0, self._service(request))))

    def next(self, now: float) -> Request | None:
        best: tuple[float, int] | None = None
        chosen = None
        for number, members in self._classes.items():
            head = members.next(now)
            if head is not None:
                rank = (-(now - head.arrival) / 2 ** (number / 2), head.number)
                if best is None or rank < best:
                    best, chosen = rank, head
        return chosen

    def restore(self) -> None:
        for members in self._classes.values():
            members.restore()


class DepthFirst(BaseOrder):
    """Depth-first over cached and waiting prompts: a cluster that shares a prefix runs together.

    The cursor stays where the last request was admitted. Next is another one at that node, else one below the
    nearest ancestor with waiters, through its best child: a resident one, else the one most wait below.
    """

    def __init__(self, tree: PrefixTree, top: Callable[[], Node | None]) -> None:
        self._tree = tree
        self._top = top
        self._cursor: Node = tree.root

    def add(self, request: Request) -> None:
        pass

    def next(self, now: float) -> Request | None:
        top = self._top()
        if top is None or not top.num_waiting:
            return None
        node = self._visible_cursor(top)
        while not node.num_waiting:
            assert node.parent is not None, "the top has waiters"
            node = node.parent
        while True:
            request = self._tree.first_waiter(node)
            if request is not None:
                return request
            child = self._tree.first_visible_child(node)
            assert child is not None, f"{node.num_waiting} requests wait below a node, and none is found"
            node = child

    def admitted(self, request: Request, num_tokens: int, now: float) -> None:
        # Only an admission moves the cursor. One that was tried and did not fit must not draw it away from the
        # cluster that is being served.
        assert request.node is not None, f"request {request.id} is admitted and does not wait"
        self._cursor = request.node

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


class LongestPrefix(BaseOrder):
    """Deepest cached prefix first; among equals the cluster most wait for, then the oldest."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._skipped: list[tuple[int, int, Node]] = []

    def add(self, request: Request) -> None:
        pass

    def next(self, now: float) -> Request | None:
        tree = self._tree
        while tree.frontier:
            node = tree.frontier[0][2]
            if node.born == tree.step:
                self._skipped.append(heappop(tree.frontier))
            elif not node.is_alive or not node.resident or node.num_waiting <= node.num_waiting_resident:
                heappop(tree.frontier)
            else:
                break
        else:
            return None
        while True:
            request = tree.first_waiter(node)
            if request is not None:
                return request
            child = tree.first_visible_child(node)
            assert child is not None, f"{node.num_waiting} requests wait below a node, and none is found"
            node = child

    def restore(self) -> None:
        for entry in self._skipped:
            heappush(self._tree.frontier, entry)
        self._skipped.clear()
