"""The bound on waiting: a first-come lane beside any order that could overtake somebody for ever."""

from __future__ import annotations

import math
from collections import deque

from paceline.config import SchedulerConfig
from paceline.request import Request
from paceline.scheduler.orders import BaseOrder, KeyOrder, Order
from paceline.scheduler.prefix_tree import PrefixTree


class Lane:
    """First come, first served, for requests that better-cached ones have overtaken for too long.

    While somebody is overdue the lane earns `share` of the tokens admitted beside it; as soon as that pays for the
    oldest one, it goes next. So a request waits for what was there before it, plus a bounded part of what came
    later: later arrivals alone can never push it back for ever.
    """

    def __init__(self, tree: PrefixTree, max_wait: float, share: float) -> None:
        self._tree = tree
        self._max_wait = max_wait
        self._share = share
        self._queue: deque[Request] = deque()
        self.credit = 0.0

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def next(self, now: float) -> Request | None:
        head = self._overdue(now)
        if head is None or head.set_aside or self._is_hidden(head):
            return None
        return head if self.credit >= self._cost(head) else None

    def admitted(self, request: Request, num_tokens: int, now: float) -> None:
        """Called while `request` still stands in the queue."""
        head = self._overdue(now)
        if head is None:
            self.credit = 0.0  # nobody is overdue: nothing is saved up for a later rush
        elif head is request:
            self.credit = max(0.0, self.credit - num_tokens)
        else:
            self.credit += self._share * num_tokens

    def _overdue(self, now: float) -> Request | None:
        queue = self._queue
        while queue and not queue[0].queued:
            queue.popleft()
        return queue[0] if queue and now - queue[0].arrival >= self._max_wait else None

    def _cost(self, request: Request) -> int:
        assert request.node is not None, f"request {request.id} is queued but not in the tree"
        return request.num_tokens - self._tree.hit(request.node).depth

    def _is_hidden(self, request: Request) -> bool:
        node = request.node
        while node is not None:
            if node.hidden:
                return True
            node = node.parent
        return False


class Aging(BaseOrder):
    """Another order, with a first-come lane for those it has kept waiting."""

    def __init__(self, inner: Order, lane: Lane) -> None:
        self._inner = inner
        self._lane = lane

    def add(self, request: Request) -> None:
        self._lane.add(request)
        self._inner.add(request)

    def remove(self, request: Request) -> None:
        self._inner.remove(request)

    def next(self, now: float) -> Request | None:
        return self._lane.next(now) or self._inner.next(now)

    def admitted(self, request: Request, num_tokens: int, now: float) -> None:
        self._lane.admitted(request, num_tokens, now)
        # Depth-first, the whole cluster of an overdue request follows it: honouring age costs one prefix, not one
        # a pick. The resident cluster it left half-served is what it returns to.
        self._inner.admitted(request, num_tokens, now)

    def restore(self) -> None:
        self._inner.restore()


def aged(inner: Order, tree: PrefixTree, config: SchedulerConfig) -> Order:
    """`inner` with its first-come lane. At either end of max_wait there is only one of the two."""
    if config.max_wait == 0:
        return KeyOrder(lambda request: request.number)
    if math.isinf(config.max_wait):
        return inner
    return Aging(inner, Lane(tree, config.max_wait, config.lane_share))
