"""Recorded runs once more, on the virtual GPU: what the simulator is worth.

A recording that names its runs with marks is cut at them; each run's requests arrive as they did, in an engine with the
recorded options, and the time to the last token is compared with the recorded one. It counts from when all had arrived
that the first pass was planned with. (What a caller measures has a little more in it: reading prompts before and
collecting outputs after.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import SchedulerConfig
from paceline.engine.recording import Header
from paceline.simulator.fit import Recording, Stretch, can_fit, fit, halves
from paceline.simulator.profile import Profile
from paceline.simulator.run import simulate
from paceline.simulator.traces import read_trace
from paceline.simulator.workloads import Arrival


@dataclass(frozen=True, slots=True)
class Replayed:
    name: str
    measured_s: float
    simulated_s: float
    measured_pass_s: float  # mean of a pass on the device
    simulated_pass_s: float
    measured_passes: int
    simulated_passes: int

    @property
    def total_error(self) -> float:
        return self.simulated_s / self.measured_s - 1

    @property
    def pass_error(self) -> float:
        return self.simulated_pass_s / self.measured_pass_s - 1


def recorded_config(header: Header) -> SchedulerConfig:
    options: dict[str, Any] = {name: math.inf if value == "inf" else value for name, value in header.options.items()}
    sizes = {"page_size": header.page_size, "num_pages": header.num_pages, "max_running": header.max_running}
    return SchedulerConfig(**options | sizes)


def replay(path: Path, recording: Recording, profile: Profile) -> list[Replayed]:
    """Its runs, each on its own."""
    arrivals = read_trace(path, rebased=False)
    return [one for run in recording.runs for one in _replay(arrivals, recording, run, profile)]


def replay_held_out(paths: Sequence[Path], recordings: Sequence[Recording]) -> list[Replayed]:
    """The same runs of all recordings, each by a profile that is fitted to the half of them it does not belong to;
    none if there is too little for two fits."""
    first, second = halves(recordings)
    if not (can_fit(first) and can_fit(second)):
        return []
    by_first, by_second = (fit(side, "the other half").profile for side in (first, second))
    found: list[Replayed] = []
    for path, recording, ours in zip(paths, recordings, first, strict=True):
        arrivals = read_trace(path, rebased=False)
        for run in recording.runs:
            found.extend(_replay(arrivals, recording, run, by_second if run in ours.runs else by_first))
    return found


def span_of(recording: Recording, run: Stretch) -> tuple[float, float]:
    """When a run began and when its last token came. Requests that came before the first pass was launched came
    together: it was planned with all of them in sight."""
    requests = [one for one in recording.requests if one.at in run]
    launched = min(one.at for one in recording.passes if one.at in run)
    first = max((one.at for one in requests if one.at <= launched), default=requests[0].at)
    return first, max(one.at + (one.finished_s or 0.0) for one in requests)


def _replay(arrivals: Sequence[Arrival], recording: Recording, run: Stretch, profile: Profile) -> Iterator[Replayed]:
    requests = [one for one in recording.requests if one.at in run]
    passes = [one for one in recording.passes if one.at in run and one.device_s]
    if not requests or not passes:
        return
    first, last = span_of(recording, run)
    if profile.swap_token_s is None:  # nothing was fetched, or moving is part of the passes, as on a CPU
        profile = msgspec.structs.replace(profile, swap_token_s=0.0)
    coming = [one.later(-min(one.at, first)) for one in arrivals if one.at in run]
    found = simulate(coming, recorded_config(recording.header), profile, overlap=recording.header.overlap != "off")
    measured = sum(one.device_s or 0.0 for one in passes)
    yield Replayed(run.name, last - first, found.seconds, measured / len(passes), found.busy_s / found.passes,
                   len(passes), found.passes)  # fmt: skip
