"""Recorded runs once more, on the virtual GPU: what the simulator is worth.

A recording that names its runs with marks is cut at them; each run's requests arrive as they did, in an engine with the
recorded options, and the time from the first arrival to the last token is compared with the recorded one. (What a
caller measures has a little more in it: reading prompts before and collecting outputs after.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import SchedulerConfig
from paceline.engine.recording import Header
from paceline.simulator.fit import Recording
from paceline.simulator.profile import Profile
from paceline.simulator.run import simulate
from paceline.simulator.traces import read_trace


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


def replay(path: Path, recording: Recording, profile: Profile) -> Iterator[Replayed]:
    """Every run that begins with a mark and ends with the mark `end of` it."""
    arrivals = read_trace(path, rebased=False)
    began: dict[str, float] = {}
    for mark in recording.marks:
        name = mark.name.removeprefix("end of ")
        if name == mark.name:
            began[name] = mark.at
            continue
        start, end = began[name], mark.at
        requests = [one for one in recording.requests if start <= one.at <= end]
        passes = [one for one in recording.passes if start <= one.at <= end and one.device_s]
        if not requests or not passes:
            continue
        first = min(one.at for one in requests)
        last = max(one.at + (one.finished_s or 0.0) for one in requests)
        # Those that came before the first pass was launched came together: it was planned with all of them in sight.
        together = min(one.at for one in recording.passes if one.at >= first)
        coming = [one.later(-one.at if one.at <= together else -first) for one in arrivals if start <= one.at <= end]
        run = simulate(coming, recorded_config(recording.header), profile, overlap=recording.header.overlap != "off")
        measured = sum(one.device_s or 0.0 for one in passes)
        yield Replayed(name, last - first, run.seconds, measured / len(passes), run.busy_s / run.passes, len(passes),
                       run.passes)  # fmt: skip
