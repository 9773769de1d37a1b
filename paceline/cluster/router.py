"""The router: chooses the replica of each request. Plain Python: no I/O, no threads, and the time is an argument.

The cost of a replica is the time that the request would take there, in seconds:

    predicted wait + prompt tokens that it does not hold * time of one + output tokens * time of a decode step
    + predicted wait * the tenant's share of the requests there

Load comes from the reports of the engines, plus what was routed since the last one. The tenant's share is a penalty:
engines serve tenants in turn, so its further requests wait for its own, and they spread over the replicas. The whole is
multiplied by how much slower the replica has served than it predicts (`ServiceMeter`).

Hysteresis: a replica that holds half of the prompt or more is kept as long as its cost is at most `_HYSTERESIS` above
the least. If it is beyond, it is overloaded, and the prefix is computed, and from then on held, by a second replica.
Replicas that cost about the same take turns by how much they were given to compute, so that prompts which share nothing
fill all caches.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.cluster.block_hash import block_hashes, root_hash
from paceline.cluster.load import LoadReport
from paceline.cluster.page_index import PageIndex
from paceline.cluster.service import ServiceMeter
from paceline.request import PacelineError, Tokens
from paceline.scheduler.step_time import StepTime

LATE_S = 5.0  # without a report for so long, a replica is late
ALLOWED_S = 0.05  # between two reports of a replica with work, besides two passes
ASSUME_S = 10.0  # how long after the predicted wait an assumed page counts without an event
_HYSTERESIS = 0.25
_SIMILAR = 0.05  # costs that differ by less are the same
_FIRST_OUTPUT_TOKENS = 128.0  # expected of a request before any has finished
_OUTPUT_WEIGHT = 0.02  # of a finished request in the expected output
_PRESSURE_GROWTH = 1.02  # weight of a routed request relative to the one before
_MAX_PRESSURE = 1e100
# Before the first report with measured passes: a GPU with a small model. Only ratios matter.
_FIRST_STEP_TIME = StepTime(base=5e-3, per_prefill_token=2e-5, per_decode=2e-5, per_context_token=3e-8)


class NoReplica(PacelineError):
    """Every replica is down or draining."""


class Reason(StrEnum):
    CACHE = "cache"  # holds the longest part of the prompt
    REPLICATE = "replicate"  # another one holds more of the prompt and is overloaded
    LOAD = "load"  # none holds enough of the prompt: the least cost
    LATE = "late"  # no reports: the fewest requests
    STRATEGY = "strategy"  # another strategy than cache


@dataclass(frozen=True, slots=True, eq=False)
class RouteRequest:
    """What the router reads of a request."""

    id: str  # unique among those that have not finished
    keys: Tokens  # of its prompt, one for each token
    namespace: tuple[str, ...]  # requests share KV only within one
    tenant: str = "default"
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    replica: int
    reason: Reason
    number: int  # of the request, among those routed to this replica since it was started, from 1
    num_cached_tokens: int  # expected there


# What a decision reads of a replica, in seconds: the predicted wait, a prompt token, a decode step with one more
# request but without its context, and a token of context in such a step. A plain tuple: it is read for every replica.
_Times = tuple[float, float, float, float]


@dataclass(slots=True, eq=False)
class _Routed:
    replica: int
    number: int
    tenant: str
    num_tokens: int  # of the prompt
    num_computed: int  # of the prompt, expected: those that were not cached


@dataclass(slots=True, eq=False)
class _Replica:
    index: int
    is_up: bool = False
    is_draining: bool = False
    load: LoadReport = field(default_factory=LoadReport)
    num_routed: int = 0
    num_requests: int = 0  # routed and not finished
    # Routed since the last report
    unreported: dict[int, _Routed] = field(default_factory=dict)
    num_new_tokens: int = 0  # prompt tokens of those
    num_new_computed: int = 0  # of these, not cached
    service: ServiceMeter = field(default_factory=ServiceMeter)
    pressure: float = 0.0  # prompt tokens routed here and not cached; recent ones weigh more

    def times(self, typical: StepTime) -> _Times:
        load = self.load
        times = load.step_time or typical
        num_rows = load.num_running + load.num_waiting + len(self.unreported) + 1
        return (
            load.wait_s + times.per_prefill_token * self.num_new_computed,
            times.per_prefill_token,
            times.seconds(0, num_rows, load.num_context_tokens + self.num_new_tokens),
            times.per_context_token,
        )


class Router:
    def __init__(self, num_replicas: int, page_size: int, strategy: str = "cache") -> None:
        """`strategy` is one of `ROUTERS`. Replicas are down until `start`."""
        self._page_size, self._strategy = page_size, strategy
        self._random = random.Random(0)
        self._turn = 0
        self._pages = PageIndex(num_replicas)
        self._replicas = [_Replica(index) for index in range(num_replicas)]
        self._excluded = list(range(num_replicas))  # down or draining
        self._reported = [-math.inf] * num_replicas
        self._times: list[_Times] = [(0.0, 0.0, 0.0, 0.0)] * num_replicas
        self._routed: dict[str, _Routed] = {}  # by request id
        self._tenants: dict[str, Counter[int]] = {}  # their requests that have not finished, by replica
        self._step_time = _FIRST_STEP_TIME  # of replicas that have not measured theirs
        self._output_tokens = _FIRST_OUTPUT_TOKENS
        self._weight = 1.0  # of the next request in `pressure`

    # ------------------------------------------------------------------ replicas

    def start(self, replica: int, now: float) -> None:
        """A replica is up, and its cache is empty."""
        self.stop(replica)
        one = self._replicas[replica]
        one.is_up, self._reported[replica] = True, now
        self._find_excluded()
        self._times[one.index] = one.times(self._step_time)

    def stop(self, replica: int) -> None:
        """A replica is down: its requests are forgotten, and it gets no new ones."""
        self._pages.clear(replica)
        for id, routed in list(self._routed.items()):
            if routed.replica == replica:
                self._leave(self._routed.pop(id))
        self._replicas[replica] = _Replica(replica, is_draining=self._replicas[replica].is_draining)
        self._reported[replica] = -math.inf
        self._find_excluded()

    def drain(self, replica: int, draining: bool) -> None:
        """A draining replica gets no new requests; those it has go on."""
        self._replicas[replica].is_draining = draining
        self._find_excluded()

    def _find_excluded(self) -> None:
        self._excluded = [one.index for one in self._replicas if not one.is_up or one.is_draining]

    def report(self, replica: int, load: LoadReport, now: float, num_seen: int) -> None:
        """What a replica says of its load. `num_seen`: how many of this router's requests it had received by then."""
        one = self._replicas[replica]
        if not one.is_up:  # it was sent before the replica went down
            return
        one.service.reported(now, self._allowed_s(one))  # by what it knew until now
        one.load, self._reported[replica] = load, now
        for number in [number for number in one.unreported if number <= num_seen]:
            self._forget_unreported(one, number)
        if load.step_time is not None:
            self._step_time = load.step_time
        for other in self._replicas:
            if other is one or other.load.step_time is None:  # which uses the step time of others
                self._times[other.index] = other.times(self._step_time)
        self._pages.check_capacity(replica, load.num_pages)
        self._pages.expire(now)

    # ------------------------------------------------------------------ KV events

    def stored(self, replica: int, hashes: Sequence[int]) -> None:
        self._pages.stored(replica, hashes)

    def removed(self, replica: int, hashes: Sequence[int]) -> None:
        self._pages.removed(replica, hashes)

    def cleared(self, replica: int) -> None:
        """All pages are gone, or events were lost, so that nothing is known."""
        self._pages.clear(replica)

    # ------------------------------------------------------------------ requests

    def choose(self, request: RouteRequest, now: float) -> Decision:
        """The replica of a request, which counts as routed there until `finished`."""
        assert request.id not in self._routed, f"request {request.id} is routed already"
        if len(self._excluded) == len(self._replicas):
            raise NoReplica("Every replica is down or draining: retry in a moment.")
        if self._strategy != "cache":
            index = self._by_strategy()
            return Decision(index, Reason.STRATEGY, self._add(self._replicas[index], request, 0, now), 0)
        self._pages.expire(now)
        hashes = block_hashes(request.keys, self._page_size, root_hash(request.namespace)).tolist()
        prefixes = self._pages.prefix_pages(hashes)
        since, excluded = now - LATE_S, self._excluded
        if min(self._reported) < since:
            excluded = [
                one.index
                for one, at in zip(self._replicas, self._reported, strict=True)
                if at < since or one.is_draining
            ]
        if len(excluded) < len(self._replicas):
            index, reason = self._cheapest(excluded, request, prefixes, len(hashes), now)
        else:
            index, reason = self._least_loaded(), Reason.LATE
        self._pages.assume(index, hashes[prefixes[index] :], now + self._times[index][0] + ASSUME_S)
        num_cached = prefixes[index] * self._page_size
        return Decision(index, reason, self._add(self._replicas[index], request, num_cached, now), num_cached)

    def finished(self, request_id: str, num_output_tokens: int = 0) -> None:
        """A request has ended, or was never sent. Unknown ids are those of a replica that went down."""
        routed = self._routed.pop(request_id, None)
        if routed is None:
            return
        one = self._replicas[routed.replica]
        one.num_requests -= 1
        if not one.num_requests:
            one.service.ended()
        self._leave(routed)
        if routed.number in one.unreported:
            self._forget_unreported(one, routed.number)
            self._times[one.index] = one.times(self._step_time)
        if num_output_tokens:
            self._output_tokens += _OUTPUT_WEIGHT * (num_output_tokens - self._output_tokens)

    # ------------------------------------------------------------------ costs

    def _least_loaded(self) -> int:
        return min((one.num_requests, one.index) for one in self._replicas if one.index not in self._excluded)[1]

    def _by_strategy(self) -> int:
        """By one of the strategies that others are compared with; they know neither load reports nor KV events."""
        if self._strategy == "least-loaded":
            return self._least_loaded()
        usable = [one.index for one in self._replicas if one.index not in self._excluded]
        if self._strategy == "random":
            return self._random.choice(usable)
        self._turn += 1
        return usable[self._turn % len(usable)]

    def _cheapest(
        self, excluded: Sequence[int], request: RouteRequest, prefixes: list[int], num_pages: int, now: float
    ) -> tuple[int, Reason]:
        costs = self._costs(request, prefixes)
        for one in self._replicas:
            costs[one.index] *= self._slowdown(one, now)
        for index in excluded:
            costs[index], prefixes[index] = math.inf, 0
        least, longest = min(costs), max(prefixes)
        holds_half = 2 * longest >= num_pages > 0
        if holds_half:
            limit = least * (1 + _HYSTERESIS)
            held, _, index = min([(-prefixes[index], cost, index) for index, cost in enumerate(costs) if cost <= limit])
            if -2 * held >= num_pages:
                return index, Reason.CACHE
        limit = least * (1 + _SIMILAR)
        _, index = min([(self._replicas[index].pressure, index) for index, cost in enumerate(costs) if cost <= limit])
        return index, Reason.REPLICATE if holds_half else Reason.LOAD

    def _slowdown(self, one: _Replica, now: float) -> float:
        service = one.service
        if now - service.since <= ALLOWED_S:
            return service.slowdown
        return service.slowdown_at(now, self._allowed_s(one))

    def _allowed_s(self, one: _Replica) -> float:
        """Between two reports: two passes, with the prompts that it knows of and that it was sent."""
        _, token_s, step_s, _ = self._times[one.index]
        num_tokens = one.num_new_computed + (one.load.max_prefill_tokens if one.load.num_waiting else 0)
        num_tokens = min(num_tokens + one.load.num_prompt_tokens, one.load.max_prefill_tokens)
        return ALLOWED_S + 2 * (step_s + token_s * num_tokens)

    def _costs(self, request: RouteRequest, prefixes: Sequence[int]) -> list[float]:
        """Of all replicas, in seconds."""
        num_tokens, page_size, output = len(request.keys), self._page_size, self._output_tokens
        if request.max_tokens is not None and request.max_tokens < output:
            output = request.max_tokens
        costs = [
            wait_s + output * step_s + (token_s + output * context_s) * num_tokens - num_pages * page_size * token_s
            for (wait_s, token_s, step_s, context_s), num_pages in zip(self._times, prefixes, strict=True)
        ]
        for index, count in self._tenants.get(request.tenant, {}).items():
            costs[index] += self._times[index][0] * count / self._replicas[index].num_requests
        return costs

    # ------------------------------------------------------------------ requests in progress

    def _add(self, one: _Replica, request: RouteRequest, num_cached: int, now: float) -> int:
        if not one.num_requests:
            one.service.began(now)
        one.num_routed += 1
        one.num_requests += 1
        num_tokens = len(request.keys)
        routed = _Routed(one.index, one.num_routed, request.tenant, num_tokens, num_tokens - num_cached)
        self._routed[request.id] = one.unreported[one.num_routed] = routed
        self._tenants.setdefault(request.tenant, Counter())[one.index] += 1
        one.num_new_tokens += routed.num_tokens
        one.num_new_computed += routed.num_computed
        self._times[one.index] = one.times(self._step_time)
        one.pressure += self._weight * routed.num_computed
        self._weight *= _PRESSURE_GROWTH
        if self._weight > _MAX_PRESSURE:
            for other in self._replicas:
                other.pressure /= self._weight
            self._weight = 1.0
        return one.num_routed

    def _leave(self, routed: _Routed) -> None:
        counts = self._tenants[routed.tenant]
        counts[routed.replica] -= 1
        if not counts[routed.replica]:
            del counts[routed.replica]
            if not counts:
                del self._tenants[routed.tenant]

    def _forget_unreported(self, one: _Replica, number: int) -> None:
        routed = one.unreported.pop(number)
        one.num_new_tokens -= routed.num_tokens
        one.num_new_computed -= routed.num_computed
