"""Aging: the overdue queue, beside any policy that could otherwise let a request wait forever."""

from __future__ import annotations

import math
from collections import deque

from paceline.config import SchedulerConfig
from paceline.request import Request
from paceline.scheduler.node import Node
from paceline.scheduler.now import Now
from paceline.scheduler.policies import BasePolicy, FcfsPolicy, Policy
from paceline.scheduler.prefix_tree import PrefixTree


class OverdueQueue:
    """First come, first served, for requests that have waited longer than `max_wait`.

    While a request is overdue the queue earns credit: `share` of the tokens that are admitted beside it. As soon as the
    credit covers the oldest overdue request, that one is admitted next. So a request waits for what was there before
    it, plus a bounded share of what came later: later arrivals alone cannot delay it forever.
    """

    def __init__(self, tree: PrefixTree, max_wait: float, share: float) -> None:
        self._tree = tree
        self._max_wait = max_wait
        self._share = share
        self._queue: deque[Request] = deque()
        self.credit = 0.0

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def next(self, now: Now) -> Request | None:
        head = self._overdue(now)
        if head is None or head.skipped or self._is_hidden(head):
            return None
        return head if self.credit >= self._cost(head, now) else None

    def on_admitted(self, request: Request, num_tokens: int, now: Now) -> None:
        """Called while `request` is still queued."""
        head = self._overdue(now)
        if head is None:
            self.credit = 0.0  # no request is overdue: credit is not saved for later
        elif head is request:
            self.credit = max(0.0, self.credit - num_tokens)
        else:
            self.credit += self._share * num_tokens

    def _overdue(self, now: Now) -> Request | None:
        queue = self._queue
        while queue and not queue[0].queued:
            queue.popleft()
        return queue[0] if queue and now.time - queue[0].arrival >= self._max_wait else None

    def _cost(self, request: Request, now: Now) -> int:
        return request.num_tokens - self._tree.hit(self._tree.waiting_nodes[request], now.step).depth

    def _is_hidden(self, request: Request) -> bool:
        node: Node | None = self._tree.waiting_nodes[request]
        while node is not None:
            if node.hidden:
                return True
            node = node.parent
        return False


class AgingPolicy(BasePolicy):
    """Another policy, with a queue for the requests that it has delayed for too long."""

    def __init__(self, inner: Policy, overdue: OverdueQueue) -> None:
        self._inner = inner
        self._overdue = overdue

    def add(self, request: Request) -> None:
        self._overdue.add(request)
        self._inner.add(request)

    def remove(self, request: Request) -> None:
        self._inner.remove(request)

    def next(self, now: Now) -> Request | None:
        return self._overdue.next(now) or self._inner.next(now)

    def on_admitted(self, request: Request, num_tokens: int, now: Now) -> None:
        self._overdue.on_admitted(request, num_tokens, now)
        # Under depth-first the whole cluster of an overdue request follows it, so aging costs one prefix and not one
        # per request. The cluster that was interrupted is resident, so the policy returns to it.
        self._inner.on_admitted(request, num_tokens, now)

    def end_step(self) -> None:
        self._inner.end_step()


def with_aging(inner: Policy, tree: PrefixTree, config: SchedulerConfig) -> Policy:
    """`inner` with an overdue queue. With max_wait 0 the queue alone remains, with infinite max_wait `inner` alone."""
    if config.max_wait == 0:
        return FcfsPolicy()
    if math.isinf(config.max_wait):
        return inner
    return AgingPolicy(inner, OverdueQueue(tree, config.max_wait, config.lane_share))
