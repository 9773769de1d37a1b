"""One simulation: the real scheduler and loop on one or more virtual GPUs, from the first arrival to the last token.

A simulation is deterministic: the same arrivals, options and profile give the same decisions.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.config import ReplicaConfig, SchedulerConfig
from paceline.request import FinishReason
from paceline.scheduler.journal import Counters
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.simulator.profile import Profile
from paceline.simulator.replica import Observer, VirtualReplica
from paceline.simulator.routing import SimulatedRouter
from paceline.simulator.workloads import Arrival

Column = npt.NDArray[np.float64]
_SAMPLES = 400  # points of a time series
_FAIRNESS_WINDOWS = 50


@dataclass(slots=True, eq=False)
class Series:
    """Time series, sampled evenly; rates are means since the previous sample."""

    time: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    used: list[float] = field(default_factory=list)  # share of pages in use by running requests
    cached: list[float] = field(default_factory=list)  # share of pages that are cached and evictable
    busy: list[float] = field(default_factory=list)  # share of time that the device is busy
    tokens: list[float] = field(default_factory=list)  # output tokens per second
    hit_rate: list[float] = field(default_factory=list)  # of all requests admitted so far
    retractions: list[int] = field(default_factory=list)  # so far


class ServedRequest(NamedTuple):
    """One request after the simulation; times are seconds of the virtual clock."""

    id: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    retractions: int
    arrival: float
    admitted: float
    first_token: float
    finished: float

    @classmethod
    def of(cls, request: TrackedRequest) -> ServedRequest:
        def at(time: float | None) -> float:
            return math.nan if time is None else time

        return cls(
            request.id,
            request.tenant,
            len(request.prompt),
            len(request.output),
            request.num_cached,
            request.retractions,
            request.arrival,
            at(request.first_admitted),
            at(request.first_token),
            at(request.finished),
        )


@dataclass(slots=True, eq=False)
class SimulationResult:
    """Requests, counters and time series of one simulation."""

    config: SchedulerConfig
    served: list[ServedRequest]
    refused: list[str]
    counters: Counters
    journal: str  # hash over all decisions: equal runs have equal hashes
    seconds: float  # virtual time to the last token
    busy_s: float
    host_s: float
    wall_s: float  # real time of the simulation
    passes: int
    mean_waiting: float  # mean number of waiting requests over time
    series: Series

    @property
    def ttft(self) -> Column:
        return _known([one.first_token - one.arrival for one in self.served])

    @property
    def waits(self) -> Column:
        """Seconds from arrival to the first admission."""
        return _known([one.admitted - one.arrival for one in self.served])

    @property
    def tpot(self) -> Column:
        """Seconds per output token after the first."""
        return _known(
            [(one.finished - one.first_token) / (one.output_tokens - 1) for one in self.served if one.output_tokens > 1]
        )

    @property
    def latency(self) -> Column:
        """Seconds from arrival to the last token."""
        return _known([one.finished - one.arrival for one in self.served])

    def summary(self) -> dict[str, float]:
        """Metrics by name: fractions and seconds, or milliseconds where the name ends in _ms."""
        counters, output = self.counters, sum(one.output_tokens for one in self.served)
        found: dict[str, float] = {
            "requests": len(self.served),
            "finished": len(self.latency),
            "refused": len(self.refused),
            "seconds": self.seconds,
            "passes": self.passes,
            "tokens_per_s": output / self.seconds if self.seconds else 0.0,
            "requests_per_s": len(self.latency) / self.seconds if self.seconds else 0.0,
            "hit_rate": counters.hit_rate,
            "fetch_rate": counters.fetched_tokens / max(1, counters.prompt_tokens),
            "busy": self.busy_s / self.seconds if self.seconds else 0.0,
            "retractions": counters.retractions,
            "evicted_pages": counters.evicted_pages,
            "spilled_pages": counters.spilled_pages,
            "mean_waiting": self.mean_waiting,
            "fairness": self.fairness(),
        }
        if self.config.draft_tokens:
            drafted, accepted, decoded = counters.drafted_tokens, counters.accepted_tokens, counters.decoded_tokens
            found["drafted_tokens"], found["accepted_tokens"] = drafted, accepted
            found["tokens_per_decode"] = decoded / max(1, decoded - accepted)
        columns = {"wait": self.waits, "ttft": self.ttft, "tpot": self.tpot, "latency": self.latency}
        for name, values in columns.items():
            found[f"{name}_mean_ms"] = float(values.mean() * 1e3) if len(values) else 0.0
            for percent in (50, 90, 99):
                found[f"{name}_p{percent}_ms"] = float(np.percentile(values, percent) * 1e3) if len(values) else 0.0
        return {name: round(value, 6) for name, value in found.items()}

    def tenant_waits(self) -> dict[str, float]:
        """Mean waiting time in seconds by tenant, in order of the tokens it sent, most first."""
        tokens: dict[str, int] = defaultdict(int)
        waits: dict[str, list[float]] = defaultdict(list)
        for one in self.served:
            tokens[one.tenant] += one.prompt_tokens + one.output_tokens
            waits[one.tenant].append(one.admitted - one.arrival)
        found = {name: _known(waits[name]) for name in sorted(tokens, key=lambda name: -tokens[name])}
        return {name: float(values.mean()) if len(values) else 0.0 for name, values in found.items()}

    def fairness(self) -> float:
        """Jain's fairness index over the service of tenants while they compete: 1 is fair, 1/n is all for one of n.

        Service is what policy `fair` charges: computed prompt tokens and weighted output tokens, counted when a request
        is admitted. It is divided by the tenant's weighted max-min share, so a tenant that asks for less than an equal
        share and gets it is served fairly. Time is divided into windows; those in which fewer than two tenants have
        requests to admit, or after which none is left waiting, do not count.

        Latency would be the wrong measure: first come, first served delays all tenants alike, although the tokens in
        front of a request may all be those of one tenant.
        """
        admitted = _known([one.admitted for one in self.served])
        names = sorted({one.tenant for one in self.served})
        if len(names) < 2 or not len(admitted):
            return 1.0
        edges = np.linspace(0.0, admitted.max(), _FAIRNESS_WINDOWS + 1)
        service, demand = [], []
        for name in names:
            own = [one for one in self.served if one.tenant == name]
            cost = np.array([self._cost(one) for one in own])
            arrived = _total_until(edges[1:], np.array([one.arrival for one in own]), cost)
            started = _total_until(edges[1:], np.nan_to_num([one.admitted for one in own], nan=math.inf), cost)
            before = np.append(0.0, started[:-1])
            service.append(started - before)
            demand.append(arrived - before)
        weights = np.array([self.config.tenant_weights.get(name, 1.0) for name in names])
        served, fair = np.zeros(len(names)), np.zeros(len(names))
        for got, wanted in zip(np.array(service).T, np.array(demand).T, strict=True):
            if wanted.sum() > got.sum() + 0.5 and np.count_nonzero(wanted > 0.5) > 1:
                served += got
                fair += max_min_shares(wanted, got.sum(), weights)
        relative = served[fair > 0] / fair[fair > 0]
        return float(relative.sum() ** 2 / (len(relative) * (relative**2).sum())) if relative.any() else 1.0

    def _cost(self, one: ServedRequest) -> float:
        return one.prompt_tokens - one.cached_tokens + self.config.output_weight * one.output_tokens


def max_min_shares(demand: Column, capacity: float, weights: Column) -> Column:
    """Weighted max-min shares of `capacity`: who demands less than an equal share gets it all, the others split the
    rest in proportion to their weights."""
    shares = np.zeros(len(demand))
    weight = weights.sum()
    for index in np.argsort(demand / weights):
        shares[index] = min(demand[index], capacity * weights[index] / weight)
        capacity -= shares[index]
        weight -= weights[index]
    return shares


def _total_until(edges: Column, times: Column, values: Column) -> Column:
    """The sum of the `values` whose time is not after each edge."""
    order = np.argsort(times)
    sums = np.append(0.0, np.cumsum(values[order]))
    total: Column = sums[np.searchsorted(times[order], edges, side="right")]
    return total


def _known(values: list[float]) -> Column:
    found = np.array(values, np.float64)
    known: Column = found[~np.isnan(found)]
    return known


def simulate(
    arrivals: Sequence[Arrival],
    config: SchedulerConfig,
    profile: Profile,
    *,
    overlap: bool = True,
    acceptance: float | None = None,
    observer: Observer | None = None,
    max_passes: int | None = None,
    replicas: ReplicaConfig | None = None,
) -> SimulationResult:
    """Runs until all `arrivals` have finished, or for `max_passes` forward passes. With `draft_tokens`, `acceptance` is
    the probability that a draft is right; None: as recorded, else the default. An observer follows a single replica."""
    began = time.perf_counter()
    count = 1 if replicas is None else replicas.replicas
    assert observer is None or count == 1, "an observer follows a single replica"
    gpus = [VirtualReplica(arrivals, config, profile, overlap, acceptance, observer) for _ in range(count)]
    router = None if replicas is None or count == 1 else SimulatedRouter(gpus, replicas.router)
    recorder = _SeriesRecorder(gpus, arrivals[-1].at if arrivals else 0.0)
    upcoming = deque(sorted(arrivals, key=lambda one: one.at))
    passes = 0

    def add_arrived(until: float) -> None:
        while upcoming and upcoming[0].at <= until:
            one = upcoming.popleft()
            if router is None:
                gpus[0].add(one)
            else:
                router.add(one)

    while max_passes is None or passes < max_passes:
        busy = [gpu for gpu in gpus if gpu.scheduler.has_work]
        # The replica whose time is the earliest is next, so what happens is decided in order of time.
        gpu = min(busy, key=lambda gpu: gpu.clock.now, default=None)
        if upcoming and (gpu is None or upcoming[0].at <= gpu.clock.now):
            add_arrived(upcoming[0].at)
            continue
        if gpu is None:
            break
        output = gpu.step()
        passes += 1
        if router is not None:
            router.stepped(gpu, output)
        recorder.note(min((one.clock.now for one in gpus if one.scheduler.has_work), default=gpu.clock.now))
        if observer is not None:
            add_arrived(gpu.clock.now)  # an observer sees every request that has arrived by now
            observer.committed(gpu.scheduler, gpu.clock.now)
    seconds = max(gpu.clock.now for gpu in gpus)
    recorder.close(seconds)
    requests = sorted((request for gpu in gpus for request in gpu.requests), key=lambda request: request.arrival)
    displaced = [request.id for request in requests if request.finish_reason is FinishReason.DISPLACED]
    return SimulationResult(
        config,
        [ServedRequest.of(request) for request in requests if request.finish_reason is not FinishReason.DISPLACED],
        [*(id for gpu in gpus for id in gpu.refused), *displaced],
        Counters.total([gpu.scheduler.counters for gpu in gpus]),
        "-".join(gpu.scheduler.journal.digest() for gpu in gpus),
        seconds,
        sum(gpu.executor.busy_s for gpu in gpus) / count,
        sum(gpu.timing.host_s for gpu in gpus),
        time.perf_counter() - began,
        passes,
        recorder.mean_waiting(seconds),
        recorder.series,
    )


class _SeriesRecorder:
    """Samples the scheduler after a pass and keeps between `_SAMPLES` and twice as many points: at the limit every
    second one is dropped."""

    def __init__(self, gpus: Sequence[VirtualReplica], horizon: float) -> None:
        self._gpus = gpus
        self._schedulers = [gpu.scheduler for gpu in gpus]
        self.series = Series()
        self._every = max(horizon / _SAMPLES, 1e-3)
        self._next = 0.0
        self._before = (0.0, 0.0, 0)  # time, busy, decoded
        self._last = 0.0
        self._area = 0.0

    def note(self, now: float) -> None:
        now = max(now, self._last)  # a replica that was idle may begin again earlier than others have come to
        self._area += sum(one.num_waiting for one in self._schedulers) * (now - self._last)
        self._last = now
        if now >= self._next:
            self._sample(now)
            self._next = now + self._every
            if len(self.series.time) >= 2 * _SAMPLES:
                self._every *= 2
                for name in Series.__slots__:
                    del getattr(self.series, name)[::2]

    def close(self, now: float) -> None:
        self._sample(now)

    def mean_waiting(self, now: float) -> float:
        return self._area / now if now else 0.0

    def _sample(self, now: float) -> None:
        schedulers, series = self._schedulers, self.series
        pages = sum(one.config.num_pages for one in schedulers)
        counters = Counters.total([one.counters for one in schedulers])
        busy_s = sum(gpu.executor.busy_s for gpu in self._gpus) / len(self._gpus)
        state = (now, busy_s, counters.decoded_tokens)
        seconds, busy, decoded = (new - old for new, old in zip(state, self._before, strict=True))
        self._before = state
        series.time.append(now)
        series.running.append(sum(one.num_running for one in schedulers))
        series.waiting.append(sum(one.num_waiting for one in schedulers))
        series.cached.append(sum(one.memory.tree.num_evictable_pages for one in schedulers) / pages)
        series.used.append(1 - sum(one.memory.num_available_pages for one in schedulers) / pages)
        series.busy.append(min(1.0, busy / seconds) if seconds else 0.0)
        series.tokens.append(decoded / seconds if seconds else 0.0)
        series.hit_rate.append(counters.hit_rate)
        series.retractions.append(counters.retractions)
