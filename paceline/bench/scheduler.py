"""`paceline bench scheduler`: the time of plan + commit on one core, without a device.

256 requests run and many more wait; one finishes every few steps and another takes its slot, as in a busy server. The
executor is the virtual one, so all of the time is the scheduler's. The median is a step in which no request joins or
finishes; steps with a join are reported beside it.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.bench import scheduler_peaks
from paceline.bench.workloads import gsp
from paceline.config import POLICIES, SchedulerConfig
from paceline.engine.loop import Loop
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.request import FinishReason, Request, SamplingParams, as_tokens
from paceline.scheduler import Scheduler

RUNNING = 256
WAITING = (0, 100, 10_000, 100_000)


@dataclass(frozen=True, slots=True)
class StepCost:
    median_us: float
    join_us: float  # median of steps in which a request joined; nan if there is none
    p99_us: float
    add_us: float  # of one Scheduler.add
    joins_per_step: float


class RequestStream:
    """An endless stream of requests: 64 system prompts, 4 tenants, outputs of 500 to 1,500 tokens."""

    def __init__(self) -> None:
        self._tokens = np.random.default_rng(0)
        self._systems = self._tokens.integers(0, 1000, (64, 64))
        self._count = 0

    def __next__(self) -> Request:
        self._count += 1
        own = self._tokens.integers(0, 1000, 64)
        prompt = np.concatenate([self._systems[self._count % 64], own])
        # The first ones have short outputs, so that requests finish from the first steps on.
        shortest = 500 if self._count > RUNNING else 2
        params = SamplingParams(max_tokens=int(self._tokens.integers(shortest, 1500)), ignore_eos=True)
        return Request(f"request-{self._count}", prompt, params, tenant=f"tenant-{self._count % 4}")


def step_cost(policy: str, num_waiting: int, num_steps: int = 600) -> StepCost:
    """Time of plan + commit with RUNNING requests and `num_waiting` waiting ones; each that finishes is replaced."""
    scheduler = Scheduler(
        SchedulerConfig(num_pages=40_000, max_running=RUNNING, policy=policy, max_waiting=max(WAITING) + RUNNING)
    )
    clock, stream = VirtualClock(), RequestStream()
    executor = VirtualExecutor(clock)
    requests = [next(stream) for _ in range(RUNNING + num_waiting)]
    started = time.perf_counter()
    for request in requests:
        scheduler.add(request, clock())
    add_us = (time.perf_counter() - started) / len(requests) * 1e6
    loop = Loop(scheduler, executor, clock, overlap=False)

    def refill() -> None:
        while len(scheduler.requests) < RUNNING + num_waiting:
            scheduler.add(next(stream), clock())

    while scheduler.num_running < RUNNING:
        loop.step()
        refill()
    gc.collect()
    gc.freeze()  # as the server does after startup
    everything: list[float] = []
    joining: list[float] = []
    while len(everything) < num_steps:
        before = time.perf_counter()
        plan = scheduler.plan(clock())
        planned = time.perf_counter()
        assert plan is not None, "requests are running"
        result = executor.launch(plan).wait()
        launched = time.perf_counter()
        scheduler.commit(plan, result.tokens, clock(), result.device_s)
        spent = (planned - before + time.perf_counter() - launched) * 1e6
        everything.append(spent)
        if plan.joins:
            joining.append(spent)
        refill()
    gc.unfreeze()
    p99 = float(np.percentile(everything, 99))
    return StepCost(
        statistics.median(everything),
        float(np.median(joining)) if joining else math.nan,
        p99,
        add_us,
        len(joining) / len(everything),
    )


def match_32k_us() -> float:
    """Time to match a fully cached prompt of 32k tokens, at page size 16."""
    tokens = as_tokens(np.random.default_rng(0).integers(0, 50_000, 32_768))
    scheduler = Scheduler(SchedulerConfig(num_pages=4_096, context_tokens=40_000))
    clock = VirtualClock()
    scheduler.add(Request("first", tokens, SamplingParams(max_tokens=1)), clock())
    Loop(scheduler, VirtualExecutor(clock), clock).drain()
    times = []
    for number in range(200):
        probe = Request(f"probe-{number}", tokens)
        before = time.perf_counter()
        matched = scheduler.match(probe)
        times.append((time.perf_counter() - before) * 1e6)
        assert matched == 32_752, f"{matched} cached tokens were matched"
    return statistics.median(times)


def gsp_hit_rate(max_wait: float, num_tokens: int = 100_000) -> float:
    """Prefix cache hit rate of gsp with a KV cache of `num_tokens`."""
    config = SchedulerConfig(num_pages=num_tokens // 16, page_size=16, max_wait=max_wait, context_tokens=4_096)
    scheduler, clock = Scheduler(config), VirtualClock()
    for request in gsp():
        scheduler.add(request, clock())
    Loop(scheduler, VirtualExecutor(clock), clock).drain()
    assert scheduler.counters.finished[FinishReason.LENGTH] == 1024, "every request of gsp finishes by length"
    return scheduler.counters.hit_rate


def run(console: Console) -> dict[str, float]:
    """Prints the table and returns the values of the JSON line."""
    table = Table(title=f"plan + commit in µs, {RUNNING} running requests, by number of waiting requests")
    table.add_column("policy")
    for num_waiting in WAITING:
        table.add_column(f"{num_waiting:,}", justify="right")
    for title in ("ratio", "join", "p99", "add"):
        table.add_column(title, justify="right")
    figures: dict[str, float] = {}
    for policy in POLICIES:
        costs = {num_waiting: step_cost(policy, num_waiting) for num_waiting in WAITING}
        most = costs[WAITING[-1]]
        ratio = most.median_us / costs[100].median_us
        cells = [*(cost.median_us for cost in costs.values()), most.join_us, most.p99_us, most.add_us]
        texts = ["-" if math.isnan(cell) else f"{cell:.0f}" for cell in cells]
        table.add_row(policy, *texts[: len(WAITING)], f"{ratio:.2f}", *texts[len(WAITING) :])
        figures[f"ratio_{policy}"] = round(ratio, 2)
        if policy == "fair":
            figures |= {f"plan_us_{waiting}": round(cost.median_us, 1) for waiting, cost in costs.items()}
            figures |= {f"join_us_{waiting}": round(cost.join_us, 1) for waiting, cost in costs.items()}
    console.print(table)
    console.print("ratio: 100,000 waiting requests over 100; join, p99, add: with 100,000 waiting requests")
    figures |= scheduler_peaks.run(console)
    figures["match_32k_us"] = round(match_32k_us(), 1)
    figures["gsp_100k_hit_rate"] = round(gsp_hit_rate(math.inf), 4)
    figures["gsp_100k_hit_rate_default_wait"] = round(gsp_hit_rate(0.2), 4)
    console.print(f"matching a cached prompt of 32k tokens: {figures['match_32k_us']} µs")
    console.print(
        f"gsp with a KV cache of 100,000 tokens: hit rate {figures['gsp_100k_hit_rate']} "
        f"(with the default max_wait {figures['gsp_100k_hit_rate_default_wait']}; the maximum is 0.8824)"
    )
    return figures


def main() -> None:
    figures = run(Console())
    print(json.dumps(figures))
