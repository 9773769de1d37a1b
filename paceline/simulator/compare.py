"""Several simulations of one workload, in as many processes as there are cores."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from paceline.config import ConfigError, ReplicaConfig, SchedulerConfig
from paceline.simulator.profile import Profile
from paceline.simulator.run import SimulationResult, simulate
from paceline.simulator.workloads import Arrival


def scheduler_config(arrivals: Sequence[Arrival], profile: Profile, options: Mapping[str, Any]) -> SchedulerConfig:
    """`options`; by default the KV cache of the profile's device and a context as long as the longest request. If all
    requests arrive at once there is no `itl_target`, as in `LLM.generate`."""
    page_size = int(options.get("page_size", SchedulerConfig().page_size))
    longest = max((len(one.prompt) + (one.max_tokens or len(one.output)) for one in arrivals), default=2)
    defaults: dict[str, float] = {
        "num_pages": max(1, profile.kv_tokens // max(1, page_size)),
        "context_tokens": max(SchedulerConfig().context_tokens, longest),
    }
    if not any(one.at for one in arrivals):
        defaults["itl_target"] = math.inf
    if options.get("num_host_pages"):
        defaults["host_page_cost"] = profile.host_page_cost(page_size)
    chosen = {**defaults, **options}
    max_running, draft_tokens = (chosen.get(name, getattr(SchedulerConfig(), name)) for name in _ROW_OPTIONS)
    if "max_batch_tokens" not in options and isinstance(max_running, int) and isinstance(draft_tokens, int):
        chosen["max_batch_tokens"] = max(SchedulerConfig().max_batch_tokens, max_running * (1 + draft_tokens))
    return SchedulerConfig(**chosen)


_ROW_OPTIONS = ("max_running", "draft_tokens")  # the tokens of a decode batch
_Simulate = Callable[[list[Arrival], SchedulerConfig], SimulationResult]
_job: tuple[Sequence[Arrival], _Simulate] | None = None  # of a worker process: arrivals are sent once, not per run


def _begin(arrivals: Sequence[Arrival], run: _Simulate) -> None:
    global _job  # noqa: PLW0603 (the initializer of a worker process)
    _job = arrivals, run


def _one(config: SchedulerConfig, speed: float) -> SimulationResult:
    assert _job is not None, "the initializer has run"
    arrivals, run = _job
    return run(faster(arrivals, speed), config)


def process_pool(processes: int, begin: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """Up to `processes`, at most one per core. Forked ones share what `begin` holds; elsewhere it is copied to each."""
    how = get_context("fork" if sys.platform == "linux" else "spawn")
    return ProcessPoolExecutor(min(processes, os.cpu_count() or 1), how, begin)


class Comparison:
    """Simulations of the same arrivals, in as many processes as there are cores. A context manager."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        profile: Profile,
        *,
        overlap: bool = True,
        acceptance: float | None = None,
        replicas: ReplicaConfig | None = None,
        processes: int | None = None,
    ) -> None:
        self._count = processes or os.cpu_count() or 1
        run = partial(simulate, profile=profile, overlap=overlap, acceptance=acceptance, replicas=replicas)
        self._pool = process_pool(self._count, partial(_begin, arrivals, run))

    def runs(
        self, configs: Mapping[str, SchedulerConfig], speed: float = 1.0
    ) -> Iterator[tuple[str, SimulationResult]]:
        """One simulation per config, in order, with arrivals `speed` times as fast."""
        yield from zip(configs, self._pool.map(_one, configs.values(), [speed] * len(configs)), strict=True)

    def speed_for(
        self, queue: float, config: SchedulerConfig, note: Callable[[float, float], None] = lambda speed, waiting: None
    ) -> float:
        """The speed at which policy fcfs has `queue` requests waiting on average, found in steps of 1.25.

        Runs as many steps at a time as there are processes.
        """
        first_come = dataclasses.replace(config, policy="fcfs")
        step, waiting = 0, 0.0
        while step < 60:
            speeds = [1.25 ** (step + ahead) for ahead in range(self._count)]
            for speed, run in zip(speeds, self._pool.map(_one, [first_come] * self._count, speeds), strict=True):
                waiting = run.mean_waiting
                note(speed, waiting)
                if waiting >= queue:
                    return speed
            step += self._count
        raise ConfigError(f"queue is {queue}: at most {waiting:.1f} requests wait on average at any speed.")

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def faster(arrivals: Iterable[Arrival], speed: float) -> list[Arrival]:
    return [dataclasses.replace(one, at=one.at / speed) for one in arrivals]
