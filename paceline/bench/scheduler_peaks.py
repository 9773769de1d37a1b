"""The slowest steps of the scheduler, a part of `paceline bench scheduler`: loads that give it much to decide at once.

Times are CPU times, and every repetition of a load makes the same decisions, so a step takes the least of its times in
all repetitions: what is left is the scheduler's, not that of other processes.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.config import SchedulerConfig
from paceline.engine.executor import Result
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.request import Request, SamplingParams, as_tokens
from paceline.scheduler import Scheduler
from paceline.scheduler.plan import Plan

REPETITIONS = 5
ROWS = (256, 1024)
TENANTS = (100, 2_048, 10_000)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are added before the first step, or `per_step` before each; those that finish are replaced if
    `is_refilled`. Prompts get longer by one token after `per_step` requests, so that all rows fill their pages in the
    same step."""

    name: str
    config: SchedulerConfig
    num_requests: int
    per_step: int
    prompt_tokens: int
    outputs: tuple[int, int]  # shortest and longest
    num_steps: int
    expected_tokens: int | None = None
    is_refilled: bool = False

    def requests(self) -> Iterator[Request]:
        """Random prompts that share nothing. The virtual model never ends an output; the scheduler cannot know that."""
        rng = np.random.default_rng(0)
        for number in itertools.count():
            yield Request(
                f"request-{number}",
                as_tokens(
                    rng.integers(2, 1000, self.prompt_tokens + min(number, self.num_requests - 1) // self.per_step)
                ),
                SamplingParams(max_tokens=int(rng.integers(self.outputs[0], self.outputs[1] + 1))),
                tenant=f"tenant-{number % 4}",
                priority=int(rng.integers(8)),
                eos_token_ids=(1,),
                expected_tokens=self.expected_tokens,
            )


def loads(rows: int) -> tuple[Load, ...]:
    tokens = rows + 8192

    def config(num_pages: int, policy: str = "fair", retract_gap: float = float("inf")) -> SchedulerConfig:
        return SchedulerConfig(
            num_pages=num_pages, max_running=rows, policy=policy, retract_gap=retract_gap, max_batch_tokens=tokens
        )

    return (
        Load(
            "priority, retract_gap 1, short memory, 300 waiting",
            config(10 * rows, "priority", 1),
            rows + 300,
            rows + 300,
            64,
            (100, 400),
            600,
            is_refilled=True,
        ),
        Load(
            "retraction storm: all rows need a page at once",
            config(5 * rows),
            rows,
            rows // 16,
            64,
            (40, 40),
            300,
            1,
        ),
        Load("burst of short requests", config(40 * rows), rows, rows, 8, (16, 16), 100),
    )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one plan and of one commit, in ms."""

    plan_median: float
    plan_max: float
    commit_median: float
    commit_max: float
    most_admissions: int  # in one step
    most_retractions: int


def step_times(load: Load, repetitions: int = REPETITIONS) -> StepTimes:
    runs, digests = [], set()
    for _ in range(repetitions):
        times, counts, digest = _run(load)
        runs.append(times)
        digests.add(digest)
    assert len(digests) == 1, f"repetitions of {load.name!r} decided differently"
    plans, commits = (np.min(runs, axis=0).T * 1e3).tolist()
    most_admissions, most_retractions = np.max(counts, axis=0).tolist()
    median = statistics.median
    return StepTimes(median(plans), max(plans), median(commits), max(commits), most_admissions, most_retractions)


def _run(load: Load) -> tuple[list[tuple[float, float]], list[tuple[int, int]], str]:
    """Seconds of plan and commit of each step, its admissions and retractions, and the journal's digest."""
    scheduler, clock, stream = Scheduler(load.config), VirtualClock(), load.requests()
    executor = VirtualExecutor(clock)
    times: list[tuple[float, float]] = []
    counts: list[tuple[int, int]] = []
    launched: deque[tuple[Plan, Result]] = deque()
    gc.collect()
    gc.disable()  # the server collects while it is idle
    counters = scheduler.counters
    while len(times) < load.num_steps and (scheduler.has_work or not times):
        missing = load.num_requests - (len(scheduler.requests) if load.is_refilled else counters.added)
        for _ in range(min(load.per_step, missing)):
            scheduler.add(next(stream), clock())
        admitted, retracted = counters.admitted, counters.retractions
        began = time.thread_time()
        plan = scheduler.plan(clock())
        planned = time.thread_time() - began
        counts.append((counters.admitted - admitted, counters.retractions - retracted))
        if plan is not None:
            launched.append((plan, executor.launch(plan).wait()))
        committed = 0.0
        if launched and (plan is None or len(launched) > 1):  # overlapped: one pass stays in flight
            one, result = launched.popleft()
            began = time.thread_time()
            scheduler.commit(one, result.tokens, clock(), result.device_s)
            committed = time.thread_time() - began
        times.append((planned, committed))
    gc.enable()
    return times, counts, scheduler.journal.digest()


def add_us(num_tenants: int, num_calls: int = 512) -> float:
    """Median time of one `add`, each by a new tenant, while `num_tenants` others have a request waiting."""
    scheduler = Scheduler(SchedulerConfig(max_waiting=num_tenants + num_calls))
    requests = [Request(f"request-{n}", np.array([n]), tenant=f"tenant-{n}") for n in range(num_tenants + num_calls)]
    for request in requests[:num_tenants]:
        scheduler.add(request, 0.0)
    times = []
    for request in requests[num_tenants:]:
        began = time.thread_time()
        scheduler.add(request, 0.0)
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e6


def run(console: Console) -> dict[str, float]:
    """Prints the tables and returns the values of the JSON line."""
    figures: dict[str, float] = {}
    table = Table(title=f"one plan and one commit in ms; each step the fastest of {REPETITIONS} equal runs")
    for title in ("load", "rows", "plan: median", "max", "commit: median", "max", "admitted at once", "retracted"):
        table.add_column(title, justify="left" if title == "load" else "right")
    for number, name in enumerate(("priority", "storm", "burst")):
        for rows in ROWS:
            load = loads(rows)[number]
            times = step_times(load)
            cells = (times.plan_median, times.plan_max, times.commit_median, times.commit_max)
            counts = (times.most_admissions, times.most_retractions)
            table.add_row(load.name, f"{rows:,}", *(f"{cell:.2f}" for cell in cells), *map(str, counts))
            figures[f"{name}_plan_ms_{rows}"] = round(times.plan_median, 2)
            figures[f"{name}_plan_max_ms_{rows}"] = round(times.plan_max, 2)
            figures[f"{name}_commit_max_ms_{rows}"] = round(times.commit_max, 2)
    console.print(table)
    for tenants in TENANTS:
        figures[f"add_us_{tenants}_tenants"] = round(add_us(tenants), 1)
        console.print(f"add, with {tenants:,} active tenants: {figures[f'add_us_{tenants}_tenants']} µs")
    return figures
