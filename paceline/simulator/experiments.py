"""Experiments that show what scheduling is worth, on the real scheduler with a virtual device behind it.

Each is a function of its parameters, and a named one prints as a table and a plot: `paceline sim experiment`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paceline.config import SchedulerConfig, WorkloadConfig
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.request import Request, SamplingParams
from paceline.scheduler import Scheduler
from paceline.simulator.compare import scheduler_config
from paceline.simulator.profile import load_profile
from paceline.simulator.run import SimulationResult, simulate
from paceline.simulator.workloads import Arrival, make_workload
from paceline.testing import Harness

GPU = "h200-qwen3-0.6b"


def seats_used(batching: str, steps: int = 500) -> float:
    """8 seats; one request of 500 tokens, seven of 10, and 343 more of 10 waiting: the share of seats in use."""
    scheduler = Scheduler(SchedulerConfig(max_running=8, batching=batching, num_pages=4096))
    clock = VirtualClock()
    executor = VirtualExecutor(clock)
    for number in range(351):
        params = SamplingParams(max_tokens=500 if number == 0 else 10, ignore_eos=True)
        scheduler.add(Request(f"request-{number}", np.array([number, 1, 2, 3]), params), clock())
    rows = 0
    for _ in range(steps):
        plan = scheduler.plan(clock())
        if plan is None:
            break
        rows += plan.num_rows
        scheduler.commit(plan, executor.launch(plan).wait().tokens, clock())
    return rows / (8 * steps)


@dataclass(frozen=True, slots=True)
class Shared:
    """What became of the tokens that requests of one kind have in common."""

    computed: int
    total: int

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed / self.total


def _run(requests: Sequence[Request], prefix_tokens: dict[str, int], **options: Any) -> Shared:
    """Runs `requests`, which arrive at once, and counts what was computed of each one's first `prefix_tokens`."""
    scheduler = Scheduler(SchedulerConfig(max_wait=math.inf, **options))
    clock = VirtualClock()
    executor = VirtualExecutor(clock)
    for request in requests:
        scheduler.add(request, clock())
    computed = 0
    while scheduler.has_work:
        plan = scheduler.plan(clock())
        assert plan is not None, "requests are left and none can run"
        planned = scheduler.requests_of(plan)
        for row in range(plan.num_decodes, plan.num_rows):
            common = prefix_tokens.get(planned[row].id, 0)
            start, end = int(plan.starts[row]), int(plan.starts[row] + plan.lengths[row])
            computed += max(0, min(end, common) - start)
        scheduler.commit(plan, executor.launch(plan).wait().tokens, clock())
    return Shared(computed, sum(prefix_tokens.values()))


def shared_system_prompt(policy: str, *, seats: int, runs: int = 100) -> float:
    """24 requests with one 2,000-token system prompt and 8 unrelated ones of 2,000, in 100 shuffled arrivals.

    The mean hit rate over the sharers' shared tokens. With one seat there is room for one request at a time; with
    more there is memory for all of them, and nobody waits for a prefix that another one is computing.
    """
    rates = []
    for seed in range(runs):
        tokens = np.random.default_rng(seed)
        system = tokens.integers(0, 50_000, 2000)
        prompts = [np.concatenate([system, tokens.integers(0, 50_000, 40)]) for _ in range(24)]
        prompts += [tokens.integers(0, 50_000, 2040) for _ in range(8)]
        requests = [
            Request(f"request-{number}", prompt, SamplingParams(max_tokens=10, ignore_eos=True))
            for number, prompt in enumerate(prompts)
        ]
        shared = {f"request-{number}": 2000 for number in range(24)}
        random.Random(seed).shuffle(requests)
        options: dict[str, Any] = {"page_size": 10, "max_running": seats, "policy": policy}
        if seats == 1:
            options |= {"num_pages": 210}
        else:
            options |= {"num_pages": 100_000, "prefix_wait": False}
            options |= {"max_batch_tokens": 65_536, "max_prefill_tokens": 65_536, "chunk_tokens": 4096}
        rates.append(_run(requests, shared, **options).hit_rate)
    return float(np.mean(rates))


def two_prefixes(policy: str, pool_tokens: int, **options: Any) -> int:
    """A, B, A, B, A, B with prefixes of 2,000 and 1,500 tokens and 100 own ones: prefix tokens computed."""
    tokens = np.random.default_rng(0)
    prefixes = [tokens.integers(0, 50_000, 2000), tokens.integers(0, 50_000, 1500)]
    requests, shared = [], {}
    for number in range(6):
        prefix = prefixes[number % 2]
        prompt = np.concatenate([prefix, tokens.integers(0, 50_000, 90)])
        requests.append(Request(f"request-{number}", prompt, SamplingParams(max_tokens=10, ignore_eos=True)))
        shared[f"request-{number}"] = len(prefix)
    settings = {"page_size": 10, "num_pages": pool_tokens // 10, "max_running": 4, "policy": policy, "look_ahead": 0}
    return _run(requests, shared, **settings | options).computed


@dataclass(frozen=True, slots=True)
class SmallPool:
    retractions: int
    outputs: dict[str, list[int]]


def small_pool(num_pages: int, **options: Any) -> SmallPool:
    """40 requests that expect short outputs and produce long ones, in a pool of `num_pages`, on the toy model."""
    scheduler = Scheduler(SchedulerConfig(num_pages=num_pages, page_size=4, max_running=16, **options))
    harness = Harness(scheduler, vocab=512)
    tokens = np.random.default_rng(0)
    for number in range(40):
        prompt = tokens.integers(0, 50, int(tokens.integers(4, 24)))
        harness.add(
            Request(f"request-{number}", prompt, SamplingParams(max_tokens=48), eos_token_ids=(0,), expected_tokens=2)
        )
    harness.run()
    harness.assert_reference()
    return SmallPool(scheduler.counters.retractions, harness.outputs)


MAX_WAITS = (0.0, 0.05, 0.2, 1.0, 5.0, math.inf)
LANE_SHARES = (1.0, 0.5, 0.25)


def waiting_curve(max_wait: float, requests: int = 400, **options: Any) -> SimulationResult:
    """More than the GPU can do, and 40 system prompts of 1,500 tokens in a pool that holds ten of them."""
    work = WorkloadConfig(
        requests=requests, rate=80, prompt_tokens=2000, shared=0.75, groups=40, output_tokens=64, seed=1
    )
    config = SchedulerConfig(num_pages=1000, max_running=8, max_wait=max_wait, context_tokens=16_384, **options)
    return simulate(make_workload("prefixes", work), config, load_profile(GPU))


def overlap(rows: int, enabled: bool, gpu: str = GPU) -> SimulationResult:
    """`rows` prompts of 128 tokens, 256 out: long enough that nearly all passes decode."""
    tokens = np.random.default_rng(0)
    arrivals = [
        Arrival(0.0, f"request-{number}", tokens.integers(0, 50_000, 128, dtype=np.int32), np.zeros(256, np.int32))
        for number in range(rows)
    ]
    config = SchedulerConfig(num_pages=rows * 26, max_running=max(rows, 1))
    return simulate(arrivals, config, load_profile(gpu), overlap=enabled)


CHAT_POOL = 100_000  # tokens of KV on the device


def host_memory(host_tokens: int, requests: int = 300, gpu: str = "h200-qwen3-14b") -> SimulationResult:
    """Turns of chats that grow to 17,000 tokens, more than the pool holds, with so much host memory behind it."""
    work = WorkloadConfig(requests=requests, rate=0.8, prompt_tokens=6000, shared=0.1, output_tokens=200, seed=1)
    arrivals, profile = make_workload("chat", work), load_profile(gpu)
    options = {"num_pages": CHAT_POOL // 16, "num_host_pages": host_tokens // 16}
    return simulate(arrivals, scheduler_config(arrivals, profile, options), profile)


# ---------------------------------------------------------------------- by name


@dataclass(frozen=True, slots=True)
class Plot:
    """Bars, or one line for each of `labels`: y[i][j] belongs to labels[i] and x[j]."""

    kind: Literal["bars", "lines"]
    x: list[str] | list[float]
    y: list[list[float]]
    labels: list[str]
    x_title: str
    y_title: str
    points: list[str] | None = None  # a name for each point of a line


@dataclass(frozen=True, slots=True)
class Report:
    columns: list[str]
    rows: list[list[str | float]]
    note: str
    plot: Plot


@dataclass(frozen=True, slots=True)
class Experiment:
    title: str
    run: Callable[[], Report]


def _seats() -> Report:
    shares = {mode: seats_used(mode) for mode in ("static", "mixed")}
    names = {"static": "static", "mixed": "continuous"}
    return Report(
        ["batching", "seats in use"],
        [[names[mode], round(share, 4)] for mode, share in shares.items()],
        "8 seats for 500 steps; one request of 500 tokens, seven of 10, and 343 more of 10 waiting.",
        Plot("bars", [names[mode] for mode in shares], [list(shares.values())], ["seats in use"], "", "share of seats"),
    )


def _system_prompt() -> Report:
    cases = [("lpm", 1), ("fair", 1), ("dfs", 1), ("fcfs", 1), ("fcfs", 16)]
    rates = [shared_system_prompt(policy, seats=seats) for policy, seats in cases]
    names = [f"{policy}, {seats} seat{'s' if seats > 1 else ''}" for policy, seats in cases]
    return Report(
        ["order", "seats", "hit rate"],
        [[policy, seats, round(rate, 4)] for (policy, seats), rate in zip(cases, rates, strict=True)],
        "24 requests share 2,000 tokens, 8 do not; mean of 100 shuffled arrivals. With 16 seats there is ample memory, "
        "and nobody waits for a prefix that another one is computing. 23/24 is 0.9583.",
        Plot("bars", names, [rates], ["hit rate"], "", "hit rate of shared tokens"),
    )


def _two_prefixes() -> Report:
    pools, policies = (8_000, 2_600), ("fcfs", "lpm", "dfs", "fair")
    whole = {policy: [two_prefixes(policy, pool, partial_eviction=False) for pool in pools] for policy in policies}
    partial = {policy: [two_prefixes(policy, pool) for pool in pools] for policy in policies}
    return Report(
        ["order", "pool 8,000", "pool 2,600", "pool 2,600, only the pages needed evicted"],
        [[policy, *whole[policy], partial[policy][1]] for policy in policies],
        "Prefix tokens computed for A, B, A, B, A, B; each prefix once would be 3,500.",
        Plot("bars", list(policies), [[float(whole[policy][at]) for policy in policies] for at in (0, 1)],
             ["pool of 8,000", "pool of 2,600"], "", "prefix tokens computed"),
    )  # fmt: skip


def _max_wait() -> Report:
    names = ["∞" if math.isinf(max_wait) else f"{max_wait:g} s" for max_wait in MAX_WAITS]
    waits = [waiting_curve(max_wait).summary() for max_wait in MAX_WAITS]
    lanes = [waiting_curve(0.05, lane_share=share).summary() for share in LANE_SHARES]
    rows: list[list[str | float]] = [
        [name, share, round(found["hit_rate"], 4), round(found["wait_p50_ms"] / 1e3, 3),
         round(found["wait_p99_ms"] / 1e3, 3), round(found["tokens_per_s"])]
        for name, share, found in [
            *zip(names, ["1/8"] * len(names), waits, strict=True),
            *zip(["0.05 s"] * len(lanes), ["1", "1/2", "1/4"], lanes, strict=True),
        ]
    ]  # fmt: skip
    # From first come to cache alone, through the lane's shares; the default is the share of 1/8.
    curve = [(waits[0], "max_wait 0")]
    curve += [(found, f"lane {share}") for found, share in zip(lanes, ("1", "1/2", "1/4"), strict=True)]
    curve += [(waits[MAX_WAITS.index(0.2)], "the default"), (waits[-1], "max_wait ∞")]
    return Report(
        ["max_wait", "lane_share", "hit rate", "p50 wait s", "p99 wait s", "tokens a second"],
        rows,
        "400 requests of 40 groups, policy fair, a pool of 16,000 tokens. max_wait says from when on a request is "
        "overdue, lane_share how much of the work goes to overdue ones first.",
        Plot("lines", [found["wait_p99_ms"] / 1e3 for found, _ in curve], [[found["hit_rate"] for found, _ in curve]],
             ["max_wait"], "p99 wait, s", "hit rate", [name for _, name in curve]),
    )  # fmt: skip


def _overlap() -> Report:
    sizes = (1, 16, 64, 256)
    rows: list[list[str | float]] = []
    shares: dict[bool, list[float]] = {False: [], True: []}
    for size in sizes:
        found = {enabled: overlap(size, enabled) for enabled in (False, True)}
        for enabled, run in found.items():
            shares[enabled].append(1 - run.busy_s / run.seconds)
        speeds = [found[enabled].summary()["tokens_per_s"] for enabled in (False, True)]
        rows.append([size, *(round(shares[enabled][-1], 4) for enabled in (False, True)), *map(round, speeds),
                     round(speeds[1] / speeds[0], 3)])  # fmt: skip
    return Report(
        ["requests", "GPU idle, off", "GPU idle, on", "tokens/s, off", "tokens/s, on", "ratio"],
        rows,
        f"Prompts of 128 tokens, 256 out, {GPU}, overlap off and on.",
        Plot("bars", [str(size) for size in sizes], [shares[False], shares[True]], ["overlap off", "overlap on"],
             "requests at once", "share of time the GPU is idle"),
    )  # fmt: skip


def _small_pool() -> Report:
    large = small_pool(4_000)
    pools = (45, 60, 90, 150, 4_000)
    found = {pool: small_pool(pool) for pool in pools}
    same = {pool: run.outputs == large.outputs for pool, run in found.items()}
    return Report(
        ["pages", "retractions", "output as with ample memory"],
        [[pool, run.retractions, "identical" if same[pool] else "DIFFERENT"] for pool, run in found.items()],
        "40 requests that expect 2 tokens and produce up to 48, on the toy model, whose every token depends on all KV "
        "before it.",
        Plot("bars", [f"{pool:,}" for pool in pools], [[float(run.retractions) for run in found.values()]],
             ["retractions"], "pages in the pool", "retractions"),
    )  # fmt: skip


def _host_memory() -> Report:
    sizes = [times * CHAT_POOL for times in (0, 1, 2, 4)]
    runs = {size: host_memory(size) for size in sizes}
    shares: dict[str, list[float]] = {"on the device": [], "fetched": [], "computed": []}
    rows: list[list[str | float]] = []
    for size, run in runs.items():
        found, counters = run.summary(), run.counters
        parts = (counters.hit_tokens, counters.fetched_tokens, counters.computed_tokens)
        for name, part in zip(shares, parts, strict=True):
            shares[name].append(round(part / counters.prompt_tokens, 2))
        rows.append([size, *(share[-1] for share in shares.values()), round(found["ttft_p50_ms"] / 1e3, 3),
                     round(found["ttft_p99_ms"] / 1e3, 2), round(found["busy"], 3)])  # fmt: skip
    return Report(
        ["host memory, tokens", "found on the device", "fetched", "computed", "first token p50 s", "p99 s", "GPU busy"],
        rows,
        f"300 turns of chats on a 14B with {CHAT_POOL:,} tokens of KV memory; shares of all prompt tokens.",
        Plot("bars", [f"{size:,}" for size in sizes], list(shares.values()), list(shares), "tokens of host memory",
             "share of prompt tokens"),
    )  # fmt: skip


EXPERIMENTS: dict[str, Experiment] = {
    "seats": Experiment("Seats in use, static and continuous batching", _seats),
    "system-prompt": Experiment("A shared system prompt: hit rate by order", _system_prompt),
    "two-prefixes": Experiment("Two prefixes in a pool for one", _two_prefixes),
    "max-wait": Experiment("Hit rate against waiting, as max_wait goes from 0 to infinity", _max_wait),
    "overlap": Experiment("GPU idle time and throughput, with and without overlap", _overlap),
    "small-pool": Experiment("A pool too small for its load", _small_pool),
    "host-memory": Experiment("Chats that do not fit, with and without host memory", _host_memory),
}
