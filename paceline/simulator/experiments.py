"""Experiments that show what scheduling is worth, on the real scheduler with no device behind it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.config import SchedulerConfig
from paceline.engine.virtual import VirtualClock, VirtualExecutor
from paceline.request import Request, SamplingParams
from paceline.scheduler import Scheduler
from paceline.testing import Harness


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
        for row in range(plan.num_decodes, plan.num_rows):
            common = prefix_tokens.get(plan.requests[row].id, 0)
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
