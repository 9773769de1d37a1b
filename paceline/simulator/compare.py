"""Several runs of one workload, side by side and in as many processes as there are cores."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from paceline.config import ConfigError, SchedulerConfig
from paceline.simulator.profile import Profile
from paceline.simulator.run import Run, simulate
from paceline.simulator.workloads import Arrival


def scheduler_config(arrivals: Sequence[Arrival], profile: Profile, options: Mapping[str, Any]) -> SchedulerConfig:
    """What was asked for; else all the memory of the profile's device, and a context as long as the longest request."""
    page_size = int(options.get("page_size", SchedulerConfig().page_size))
    longest = max((len(one.prompt) + (one.max_tokens or len(one.output)) for one in arrivals), default=2)
    defaults = {
        "num_pages": max(1, profile.kv_tokens // max(1, page_size)),
        "context_tokens": max(SchedulerConfig().context_tokens, longest),
    }
    chosen = {**defaults, **options}
    if "max_batch_tokens" not in options and isinstance(chosen.get("max_running"), int):
        chosen["max_batch_tokens"] = max(SchedulerConfig().max_batch_tokens, chosen["max_running"])
    return SchedulerConfig(**chosen)


_job: tuple[Sequence[Arrival], Profile, bool] | None = None  # of this process: arrivals are sent once, not per run


def _begin(arrivals: Sequence[Arrival], profile: Profile, overlap: bool) -> None:
    global _job  # noqa: PLW0603 (a worker process has no other place for it)
    _job = arrivals, profile, overlap


def _one(config: SchedulerConfig) -> Run:
    assert _job is not None, "the process was given its work when it began"
    return simulate(_job[0], config, _job[1], overlap=_job[2])


def compare(
    arrivals: Sequence[Arrival],
    configs: Mapping[str, SchedulerConfig],
    profile: Profile,
    *,
    overlap: bool = True,
    processes: int | None = None,
) -> Iterator[tuple[str, Run]]:
    """Runs the same arrivals under each config; the runs come in their order."""
    count = min(len(configs), processes or os.cpu_count() or 1)
    if count <= 1:
        for name, config in configs.items():
            yield name, simulate(arrivals, config, profile, overlap=overlap)
        return
    with ProcessPoolExecutor(count, get_context("fork"), _begin, (arrivals, profile, overlap)) as pool:
        yield from zip(configs, pool.map(_one, configs.values()), strict=True)


def faster(arrivals: Iterable[Arrival], speed: float) -> list[Arrival]:
    return [dataclasses.replace(one, at=one.at / speed) for one in arrivals]


def speed_up_until(
    arrivals: Sequence[Arrival],
    queue: float,
    config: SchedulerConfig,
    profile: Profile,
    *,
    overlap: bool = True,
    note: Callable[[float, float], None] = lambda speed, waiting: None,
) -> float:
    """By how much arrivals must be faster for fcfs to have `queue` requests waiting on average. In steps of a tenth."""
    first_come = dataclasses.replace(config, policy="fcfs")
    speed = 1.0
    for _ in range(60):
        waiting = simulate(faster(arrivals, speed), first_come, profile, overlap=overlap).mean_waiting
        note(speed, waiting)
        if waiting >= queue:
            return speed
        speed *= 1.1
    raise ConfigError(f"queue is {queue}: with arrivals {speed:.0f} times as fast, only {waiting:.1f} wait on average.")
