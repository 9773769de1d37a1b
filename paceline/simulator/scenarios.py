"""Scenarios of the experiments: the real scheduler on a virtual GPU, each as a function of its parameters.

`experiments.py` makes tables and plots of them; the tests assert their results.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.bench.workloads import TimedRequest
from paceline.bench.workloads import prefill_overload as overload_requests
from paceline.bench.workloads import small_behind_large as burst_requests
from paceline.config import ReplicaConfig, SchedulerConfig, WorkloadConfig, config_from
from paceline.engine.executor import Result
from paceline.request import Request, SamplingParams, as_tokens
from paceline.scheduler import Plan, Scheduler
from paceline.simulator.compare import scheduler_config
from paceline.simulator.profile import load_profile
from paceline.simulator.run import Column, SimulationResult, simulate
from paceline.simulator.tensor_parallel import ShardedProfile, shard_profile
from paceline.simulator.workloads import DEFAULTS, Arrival, make_workload, random_tokens, unique_ids
from paceline.testing import Harness

SMALL, LARGE = "h200-qwen3-0.6b", "h200-qwen3-14b"


class PassRecorder:
    """An observer that keeps, for every forward pass, its rows and when it was committed."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.times: list[float] = []

    def launched(self, plan: Plan, result: Result, host: tuple[float, float], device: tuple[float, float]) -> None:
        self.rows.append(plan.num_rows)

    def committed(self, scheduler: Scheduler, now: float) -> None:
        self.times.append(now)


class TokenRecorder:
    """An observer that keeps when each request got each of its tokens; for requests that run to their full length and
    are not retracted."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._launched: deque[tuple[Plan, Result]] = deque()
        self._slots: dict[int, str] = {}

    def launched(self, plan: Plan, result: Result, host: tuple[float, float], device: tuple[float, float]) -> None:
        self._launched.append((plan, result))

    def committed(self, scheduler: Scheduler, now: float) -> None:
        plan, result = self._launched.popleft()
        self._slots |= {join.slot: join.request_id for join in plan.joins}
        counts = 1 if result.counts is None else result.counts
        for slot in np.repeat(plan.slots[plan.samples], counts).tolist():
            self.times.setdefault(self._slots[slot], []).append(now)

    @property
    def itl(self) -> Column:
        """Seconds between two tokens of a request."""
        return np.concatenate([np.diff(times) for times in self.times.values()])


# ---------------------------------------------------------------------- batching

SLOTS = 8


@dataclass(frozen=True, slots=True)
class Batching:
    result: SimulationResult
    utilization: list[float]  # share of the slots in use, by forward pass
    times: list[float]  # when each forward pass was committed

    def finished_after(self, passes: int) -> int:
        """Requests that have finished after this many forward passes."""
        until = self.times[min(passes, len(self.times)) - 1]
        return sum(one.finished <= until for one in self.result.served)


def batching(mode: str, *, copies: int = 0) -> Batching:
    """Eight slots for one request of 500 tokens and 350 of 10, or for `copies` times one of 500 and seven of 10."""
    options = DEFAULTS["one-long"]
    groups = [options] if not copies else [options | {"requests": SLOTS, "seed": seed} for seed in range(copies)]
    arrivals = [one for group in groups for one in make_workload("one-long", config_from(WorkloadConfig, group))]
    recorder = PassRecorder()
    config = SchedulerConfig(max_running=SLOTS, batching=mode, policy="fcfs")
    result = simulate(unique_ids(arrivals), config, load_profile(LARGE), observer=recorder)
    return Batching(result, [rows / SLOTS for rows in recorder.rows], recorder.times)


@dataclass(frozen=True, slots=True)
class Stalls:
    itl: Column  # seconds between two tokens of a request
    ttft: Column  # of the long prompts
    result: SimulationResult
    token_times: dict[str, list[float]]

    @classmethod
    def of(cls, recorder: TokenRecorder, result: SimulationResult) -> Stalls:
        return cls(recorder.itl, ttft_of(result, "long"), result, recorder.times)


def ttft_of(result: SimulationResult, kind: str) -> Column:
    """Of the requests whose id begins with `kind`."""
    return np.array([one.first_token - one.arrival for one in result.served if one.id.startswith(kind)])


def long_prompts(**options: object) -> Stalls:
    """32 requests decode; eight prompts of 8,000 tokens arrive meanwhile, one every 0.7 s."""
    rng = np.random.default_rng(0)
    arrivals = [
        Arrival(0.0, f"short-{number}", random_tokens(rng, 100), np.zeros(400, np.int32)) for number in range(32)
    ]
    arrivals += [
        Arrival(0.7 * (1 + number), f"long-{number}", random_tokens(rng, 8000), np.zeros(10, np.int32))
        for number in range(8)
    ]
    recorder = TokenRecorder()
    result = simulate(
        arrivals, config_from(SchedulerConfig, options, num_pages=10_000), load_profile(LARGE), observer=recorder
    )
    return Stalls.of(recorder, result)


def prefill_overload(**options: object) -> Stalls:
    """190 requests decode; 60 prompts of 3,000 to 6,000 tokens arrive in 10 s and decode, too."""
    recorder = TokenRecorder()
    return Stalls.of(recorder, _simulate(overload_requests(), LARGE, options, recorder))


@dataclass(frozen=True, slots=True)
class Burst:
    small: Column  # TTFT
    large: Column
    result: SimulationResult


def small_behind_large(gpu: str, **options: object) -> Burst:
    """11 prompts of 256 tokens arrive right after 18 of 2,560."""
    result = _simulate(burst_requests(), gpu, options)
    return Burst(ttft_of(result, "small"), ttft_of(result, "large"), result)


def _simulate(
    work: Sequence[TimedRequest], gpu: str, options: Mapping[str, object], recorder: TokenRecorder | None = None
) -> SimulationResult:
    rng, profile = np.random.default_rng(0), load_profile(gpu)
    arrivals = [
        Arrival(
            one.at, f"{one.kind}-{index}", random_tokens(rng, one.num_prompt_tokens),
            np.zeros(one.num_output_tokens, np.int32),
        )
        for index, one in enumerate(work)
    ]  # fmt: skip
    config = scheduler_config(arrivals, profile, {"chunk_context": profile.chunk_context, **options})
    return simulate(arrivals, config, profile, observer=recorder)


# ---------------------------------------------------------------------- shared prefixes

PREFIX_POLICIES = ("fcfs", "sjf", "lpm", "dfs", "fair")
PREFIX_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the requests, with the common prefix
_AMPLE = {
    "max_running": 16, "num_pages": 10_000, "max_batch_tokens": 65_536, "max_prefill_tokens": 65_536,
    "chunk_tokens": 4096,
}  # fmt: skip
CONDITIONS: dict[str, dict[str, int]] = {
    "1 slot": {"max_running": 1, "num_pages": 206},
    "16, no wait": {**_AMPLE, "prefix_wait": False},
    "16, wait": _AMPLE,
}


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    hit_rate: float  # of all prompt tokens
    shared_hit_rate: float  # of the tokens of the common prefix, in all prompts that begin with it
    waits: Column


def shared_prefixes(policy: str, share: float, *, runs: int = 8, **options: object) -> PrefixReuse:
    """32 requests arrive at once in an empty cache; a `share` of them begins with the same 2,000 of 2,040 tokens.

    The mean of `runs` random orders; `options` is one of CONDITIONS.
    """
    requests, prefix, own = 32, 2000, 40
    sharing = round(requests * share)
    config = config_from(SchedulerConfig, options, page_size=10, policy=policy, max_wait=math.inf)
    hits, waits = 0, []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        system = random_tokens(rng, prefix)
        prompts = [np.concatenate([system, random_tokens(rng, own)]) for _ in range(sharing)]
        prompts += [random_tokens(rng, prefix + own) for _ in range(requests - sharing)]
        arrivals = [
            # Output lengths give `sjf` something to order by; they have nothing to do with the prefixes.
            Arrival(0.0, f"request-{number}", prompts[chosen], np.zeros(int(rng.integers(2, 9)), np.int32))
            for number, chosen in enumerate(rng.permutation(requests))
        ]
        found = simulate(arrivals, config, load_profile(LARGE))
        hits += found.counters.hit_tokens
        waits.append(found.waits)
    # Only the common prefix can be found in the cache: the other tokens are random.
    return PrefixReuse(
        hits / (runs * requests * (prefix + own)), hits / max(1, runs * sharing * prefix), np.concatenate(waits)
    )


def two_prefixes(policy: str, pool_tokens: int, **options: object) -> int:
    """Prefix tokens computed for requests A, B, A, B, A, B with prefixes of 2,000 (A) and 1,500 (B) tokens."""
    rng = np.random.default_rng(0)
    prefixes = [random_tokens(rng, 2000), random_tokens(rng, 1500)]
    arrivals = [
        Arrival(
            0.0, f"{number}", np.concatenate([prefixes[number % 2], random_tokens(rng, 90)]), np.zeros(10, np.int32)
        )
        for number in range(6)
    ]
    settings: dict[str, object] = {"page_size": 10, "max_running": 4, "look_ahead": 0, "max_wait": math.inf, **options}
    config = config_from(SchedulerConfig, settings, num_pages=pool_tokens // 10, policy=policy)
    found = simulate(arrivals, config, load_profile(LARGE), overlap=False)
    return 3 * (2000 + 1500) - found.counters.hit_tokens


MAX_WAITS = (0.0, 0.05, 0.2, 1.0, 5.0, math.inf)


def waiting_curve(max_wait: float, requests: int = 400, **options: object) -> SimulationResult:
    """An overloaded GPU, and 40 system prompts of 1,500 tokens in a KV cache that holds ten of them."""
    work = WorkloadConfig(
        requests=requests, rate=80, prompt_tokens=2000, shared=0.75, groups=40, output_tokens=64, seed=1
    )
    config = config_from(
        SchedulerConfig, options, num_pages=1000, max_running=8, max_wait=max_wait, context_tokens=16_384
    )
    return simulate(make_workload("prefixes", work), config, load_profile(SMALL))


def cold_and_cached(max_wait: float, policy: str) -> SimulationResult:
    """22 requests a second: 70% begin with one of 4 popular prefixes of 3,000 tokens, the others with one of 60, in a
    KV cache that holds ten. Without cache hits the GPU can serve about 8 a second."""
    rng = np.random.default_rng(0)
    popular, rare = ([random_tokens(rng, 3000) for _ in range(count)] for count in (4, 60))
    arrivals = []
    for number, at in enumerate(np.cumsum(rng.exponential(1 / 22, 500)).tolist()):
        name, prefixes = ("popular", popular) if rng.random() < 0.7 else ("rare", rare)
        prompt = np.concatenate([prefixes[int(rng.integers(len(prefixes)))], random_tokens(rng, 100)])
        arrivals.append(Arrival(at, f"{name}-{number}", prompt, np.zeros(int(rng.integers(16, 48)), np.int32)))
    config = SchedulerConfig(num_pages=2000, max_running=16, policy=policy, max_wait=max_wait, context_tokens=16_384)
    return simulate(arrivals, config, load_profile(LARGE))


# ---------------------------------------------------------------------- overlap


def overlap(rows: int, enabled: bool, gpu: str = SMALL) -> SimulationResult:
    """`rows` prompts of 128 tokens, outputs of 256: nearly all forward passes are decode batches."""
    rng = np.random.default_rng(0)
    arrivals = [
        Arrival(0.0, f"request-{number}", random_tokens(rng, 128), np.zeros(256, np.int32)) for number in range(rows)
    ]
    config = SchedulerConfig(num_pages=rows * 26, max_running=max(rows, 1))
    return simulate(arrivals, config, load_profile(gpu), overlap=enabled)


# ---------------------------------------------------------------------- speculative decoding


def speculation(rows: int, draft_tokens: int, acceptance: float, gpu: str = LARGE) -> SimulationResult:
    """`rows` requests that decode 128 tokens at the same time, after a short prompt each."""
    rng, tokens = np.random.default_rng(0), 64
    arrivals = [
        Arrival(0.0, f"request-{number}", random_tokens(rng, tokens), np.zeros(128, np.int32)) for number in range(rows)
    ]
    # All prompts are computed in one forward pass, so that TPOT is that of decode batches.
    config = SchedulerConfig(
        num_pages=rows * 14,
        max_running=rows,
        draft_tokens=draft_tokens,
        itl_target=math.inf,
        max_batch_tokens=256 * tokens,
        max_prefill_tokens=256 * tokens,
    )
    return simulate(arrivals, config, load_profile(gpu), acceptance=acceptance)


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class SmallPool:
    retractions: int
    outputs: dict[str, list[int]]


def small_pool(num_pages: int, expected: Mapping[str, int] | None = None) -> SmallPool:
    """40 requests of up to 48 output tokens with `num_pages` of KV cache, on the toy model.

    `expected` are the output lengths that admission expects, by request; None: it learns them from finished requests.
    """
    scheduler = Scheduler(SchedulerConfig(num_pages=num_pages, page_size=4, max_running=16))
    harness = Harness(scheduler, vocab=512)
    rng = np.random.default_rng(0)
    for number in range(40):
        name = f"request-{number}"
        prompt = as_tokens(rng.integers(0, 50, int(rng.integers(4, 24))))
        tokens = None if expected is None else expected[name]
        harness.add(Request(name, prompt, SamplingParams(max_tokens=48), eos_token_ids=(0,), expected_tokens=tokens))
    harness.run()
    harness.assert_reference()
    return SmallPool(scheduler.counters.retractions, harness.outputs)


CHAT_POOL = 100_000  # size of the KV cache on the device, in tokens


def host_memory(host_tokens: int, requests: int = 300, gpu: str = LARGE) -> SimulationResult:
    """Conversations that grow to 17,000 tokens and do not fit into the KV cache, with `host_tokens` of host memory."""
    work = WorkloadConfig(requests=requests, rate=0.8, prompt_tokens=6000, shared=0.1, output_tokens=200, seed=1)
    arrivals, profile = make_workload("chat", work), load_profile(gpu)
    options = {"num_pages": CHAT_POOL // 16, "num_host_pages": host_tokens // 16}
    return simulate(arrivals, scheduler_config(arrivals, profile, options), profile)


# ---------------------------------------------------------------------- several GPUs


REPLICAS = 4


def routing(router: str, requests: int = 1500, rate: float = 90.0) -> SimulationResult:
    """Four replicas, each with a KV cache for a quarter of 200 system prompts of 1,840 tokens."""
    work = WorkloadConfig(requests=requests, rate=rate, groups=200, prompt_tokens=2048, shared=0.9, output_tokens=64)
    arrivals, profile = make_workload("prefixes", work), load_profile(LARGE)
    config = scheduler_config(arrivals, profile, {"num_pages": CHAT_POOL // 16})
    return simulate(arrivals, config, profile, replicas=ReplicaConfig(replicas=REPLICAS, router=router))


@dataclass(frozen=True, slots=True)
class Ranks:
    result: SimulationResult
    itl: float  # seconds, p50: a decode batch of all rows
    exchange_s: float  # the collectives of that batch


def tensor_parallel(rows: int, num_ranks: int, gpu: str = LARGE) -> Ranks:
    """`rows` requests of 1,024 prompt tokens and 128 output tokens, all at once, on `num_ranks` GPUs."""
    rng, output = np.random.default_rng(0), np.zeros(128, np.int32)
    arrivals = [Arrival(0.0, f"request-{number}", random_tokens(rng, 1024), output) for number in range(rows)]
    profile = shard_profile(load_profile(gpu), num_ranks)
    config = scheduler_config(arrivals, profile, {"max_running": rows})
    recorder = TokenRecorder()
    result = simulate(arrivals, config, profile, observer=recorder)
    exchange_s = profile.work.exchange_s(rows, rows) if isinstance(profile, ShardedProfile) else 0.0
    return Ranks(result, float(np.median(recorder.itl)), exchange_s)
