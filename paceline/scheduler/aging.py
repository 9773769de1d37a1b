"""Aging: bounds how much a policy may give to younger requests ahead of an older one.

A waiting request is *overdue* when younger requests were given `max_wait` of device time since it arrived, and half as
much as older ones on top. While it is overdue, no younger request is admitted. So it waits at most 1.5 times as long as
under first come, first served, plus `max_wait` and a constant: docs/waiting.md has the bound and its proof.

That holds while memory is ample. While it is short, first come, first served would evict the prefixes of requests that
wait, and compute them again. Then up to 16 younger requests are admitted between two overdue ones.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import islice

from paceline.config import SchedulerConfig
from paceline.scheduler.now import Now
from paceline.scheduler.policies import BasePolicy, FcfsPolicy, Policy
from paceline.scheduler.prefix_tree import PrefixTree
from paceline.scheduler.tracked_request import TrackedRequest

_FACTOR = 1.5  # of the bound: device time for younger requests is at most half of that for older ones
_MAX_TRIED = 16  # overdue requests that are looked at when the first ones cannot be admitted in this step
_SHORT_STEPS = 64  # memory counts as short for so long after a prefix that waiting requests need was evicted
_MAX_PASSED = 16  # younger requests admitted between two overdue ones while memory is short


class AgingPolicy(BasePolicy):
    """Another policy, whose choice stands unless an older request is overdue.

    `_given_s` counts the device time of all requests admitted so far: the predicted time of a request when it is
    admitted, replaced by the real one when it ends. With S of that for older requests since a request arrived, and Y
    for younger ones, it grows by S + Y, and the request is overdue from S + Y >= max_wait + 1.5 S on.
    """

    def __init__(self, inner: Policy, tree: PrefixTree, allowance: Callable[[], float]) -> None:
        self._inner = inner
        self._tree = tree
        self._allowance = allowance  # device time that younger requests may have ahead of one that arrives now
        self._given_s = 0.0
        self._limits = GivenLimits()
        self._charged: dict[TrackedRequest, tuple[float, int]] = {}  # predicted time, youngest request at that time
        self._num_passed = 0  # requests admitted ahead of an older overdue one since an overdue one was admitted

    def add(self, request: TrackedRequest) -> None:
        self._limits.append(request, self._given_s + self._allowance())
        self._inner.add(request)

    def remove(self, request: TrackedRequest) -> None:
        self._limits.discard(request)
        self._inner.remove(request)

    def next(self, now: Now) -> TrackedRequest | None:
        chosen = self._inner.next(now)
        if self._num_passed < _MAX_PASSED and now.step - self._tree.needed_evicted_step <= _SHORT_STEPS:
            return chosen
        for overdue in islice(self._limits.reached(self._given_s), _MAX_TRIED):
            if chosen is not None and chosen.number <= overdue.number:
                break
            if not overdue.skipped and not self._tree.is_hidden(overdue):
                return overdue
        return chosen

    def on_admitted(self, request: TrackedRequest, num_tokens: int, now: Now) -> None:
        oldest = next(self._limits.reached(self._given_s), None)
        self._num_passed = 0 if oldest is None or request.number <= oldest.number else self._num_passed + 1
        self._charged[request] = request.predicted_s, self._limits.last_number
        self._charge(request, request.predicted_s, self._limits.last_number)
        # Under depth-first the requests that share the prefix of an overdue request follow it, as far as others are not
        # overdue. The cluster that was interrupted is resident, so the policy returns to it.
        self._inner.on_admitted(request, num_tokens, now)

    def on_served(self, request: TrackedRequest, seconds: float) -> None:
        if request in self._charged:
            predicted, last = self._charged.pop(request)
            self._charge(request, seconds - predicted, last)

    def end_step(self) -> None:
        self._inner.end_step()

    def _charge(self, request: TrackedRequest, seconds: float, last: int) -> None:
        """Gives `seconds` to a request that was admitted when the youngest one had the number `last`."""
        self._given_s += seconds
        self._limits.move(request.number, _FACTOR * seconds)
        self._limits.move(last, (1 - _FACTOR) * seconds)  # for these, the time before they arrived does not count


class GivenLimits:
    """The given device time at which each waiting request becomes overdue: a segment tree of minima, oldest first.

    The leaf of position i is node _size + i. The minimum of a node is that of its children plus what was added to the
    node as a whole, so moving the limits of all younger requests and finding those reached cost O(log n) each.
    """

    def __init__(self) -> None:
        self._rebuild([])

    @property
    def last_number(self) -> int:
        """The arrival number of the youngest request."""
        return self._numbers[-1] if self._numbers else 0

    def append(self, request: TrackedRequest, limit: float) -> None:
        if len(self._requests) == self._size:
            self._rebuild([(self._requests[at], self._limit(at)) for at in self._positions.values()])
        position = self._place(request)
        self._low[position + self._size] = 0.0
        # What was added before it arrived does not apply to it.
        self._low[position + self._size] = limit - self._limit(position)
        self._update_above(position + self._size)

    def discard(self, request: TrackedRequest) -> None:
        position = self._positions.pop(request)
        self._low[position + self._size] = math.inf
        self._update_above(position + self._size)

    def move(self, number: int, seconds: float) -> None:
        """Adds `seconds` to the limits of all requests with a greater arrival number."""
        if number >= self.last_number or not seconds:
            return
        position = bisect_right(self._numbers, number)
        low, moved = self._low, self._moved
        node = position + self._size
        low[node] += seconds
        while node > 1:
            if not node & 1:  # its right sibling is younger as a whole
                low[node + 1] += seconds
                moved[node + 1] += seconds
            older, younger = low[node & ~1], low[node | 1]
            node >>= 1
            low[node] = (older if older < younger else younger) + moved[node]

    def reached(self, given_s: float) -> Iterator[TrackedRequest]:
        """Requests whose limit is not above `given_s`, oldest first."""
        stack = [(1, 0.0)]
        while stack:
            node, moved = stack.pop()
            if self._low[node] + moved > given_s:
                continue
            if node >= self._size:
                yield self._requests[node - self._size]
            else:
                moved += self._moved[node]
                stack += [(2 * node + 1, moved), (2 * node, moved)]

    def _place(self, request: TrackedRequest) -> int:
        position = self._positions[request] = len(self._requests)
        self._requests.append(request)
        self._numbers.append(request.number)
        return position

    def _limit(self, position: int) -> float:
        node = position + self._size
        total = self._low[node]
        while node > 1:
            node >>= 1
            total += self._moved[node]
        return total

    def _update_above(self, node: int) -> None:
        low, moved = self._low, self._moved
        while node > 1:
            one, other = low[node], low[node ^ 1]
            node >>= 1
            lowest = (one if one < other else other) + moved[node]
            if low[node] == lowest:
                return  # as before, so nothing changes further up
            low[node] = lowest

    def _rebuild(self, limits: list[tuple[TrackedRequest, float]]) -> None:
        """Starts over with these alone, and space for as many again."""
        self._size = max(64, 1 << (2 * len(limits)).bit_length())
        self._low = [math.inf] * (2 * self._size)
        self._moved = [0.0] * (2 * self._size)
        self._requests: list[TrackedRequest] = []  # by position; also those that have left
        self._numbers: list[int] = []  # their arrival numbers, ascending
        self._positions: dict[TrackedRequest, int] = {}
        for request, limit in limits:
            self._low[self._place(request) + self._size] = limit
        for node in range(self._size - 1, 0, -1):
            self._low[node] = min(self._low[2 * node], self._low[2 * node + 1])


def with_aging(inner: Policy, tree: PrefixTree, config: SchedulerConfig, share: Callable[[], float]) -> Policy:
    """`inner` with aging, for requests that have a `share` of the device. With max_wait 0 it is first come, first
    served, with an infinite max_wait `inner` alone."""
    if config.max_wait == 0:
        return FcfsPolicy()
    if math.isinf(config.max_wait):
        return inner
    return AgingPolicy(inner, tree, lambda: config.max_wait * share())
