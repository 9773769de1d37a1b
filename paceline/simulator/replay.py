"""Replays recorded runs on the virtual GPU, to measure how accurate the simulator is.

A recording is split into runs at its marks. The requests of a run arrive as recorded, in an engine with the recorded
options, and the time to the last token is compared with the recording. Time counts from the arrival of the last request
that the first pass was planned with. (A caller measures a little more: reading prompts before and collecting outputs
after.) Where a caller waited for all outputs before it sent more, as between turns of chats, so does the replay:
otherwise an error of one turn would be hidden by the recorded beginning of the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from paceline.config import SchedulerConfig
from paceline.engine.recording import DEFAULTS, Header
from paceline.simulator.fit import RecordedRun, Recording, can_fit, fit, halves
from paceline.simulator.profile import Profile
from paceline.simulator.run import simulate
from paceline.simulator.traces import read_trace
from paceline.simulator.workloads import Arrival


@dataclass(frozen=True, slots=True)
class ReplayedRun:
    name: str
    measured_s: float
    simulated_s: float
    measured_pass_s: float  # mean device time of a pass
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
    options: dict[str, object] = {name: math.inf if value == "inf" else value for name, value in header.options.items()}
    sizes = {"page_size": header.page_size, "num_pages": header.num_pages, "max_running": header.max_running}
    return SchedulerConfig(**DEFAULTS | options | sizes)


def replay(path: Path, recording: Recording, profile: Profile) -> list[ReplayedRun]:
    """Replays each run of the recording on its own."""
    arrivals = read_trace(path, rebased=False)
    return [one for run in recording.runs for one in _replay(arrivals, recording, run, profile)]


def replay_held_out(paths: Sequence[Path], recordings: Sequence[Recording]) -> list[ReplayedRun]:
    """Replays each run with a profile fitted to the other half of the runs; empty if there are too few for two fits."""
    first, second = halves(recordings)
    if not (can_fit(first) and can_fit(second)):
        return []
    by_first, by_second = (fit(side, "the other half").profile for side in (first, second))
    found: list[ReplayedRun] = []
    for path, recording, ours in zip(paths, recordings, first, strict=True):
        arrivals = read_trace(path, rebased=False)
        for run in recording.runs:
            found.extend(_replay(arrivals, recording, run, by_second if run in ours.runs else by_first))
    return found


def span_of(recording: Recording, run: RecordedRun) -> tuple[float, float]:
    """Start and end of a run: the last arrival before the first launch, whose plan saw all requests until then, and the
    last token."""
    requests = [one for one in recording.requests if one.at in run]
    launched = min((one.at for one in recording.passes if one.at in run), default=math.inf)
    first = max((one.at for one in requests if one.at <= launched), default=requests[0].at)
    return first, max(one.at + (one.finished_s or 0.0) for one in requests)


def _turns(recording: Recording, run: RecordedRun) -> list[RecordedRun]:
    """The parts of a run that begin with a request whose caller had waited for all earlier ones."""
    turns: list[RecordedRun] = []
    for one in sorted((one for one in recording.requests if one.at in run), key=lambda one: one.at):
        ends = one.at + (one.finished_s or 0.0)
        if turns and one.at <= turns[-1].ends:
            turns[-1] = replace(turns[-1], ends=max(ends, turns[-1].ends))
        else:
            turns.append(replace(run, begins=one.at, ends=ends))
    return turns


def _replay(
    arrivals: Sequence[Arrival], recording: Recording, run: RecordedRun, profile: Profile
) -> Iterator[ReplayedRun]:
    requests = [one for one in recording.requests if one.at in run]
    passes = [one for one in recording.passes if one.at in run and one.device_s]
    if not requests or not passes:
        return
    if profile.swap_token_s is None:  # no KV was fetched, or copies are part of the passes, as on a CPU
        profile = msgspec.structs.replace(profile, swap_token_s=0.0)
    config, overlap = recorded_config(recording.header), recording.header.overlap != "off"
    turns = _turns(recording, run)
    coming: list[Arrival] = []
    starts_s, ended = 0.0, span_of(recording, turns[0])[0]
    for turn in turns:
        first, last = span_of(recording, turn)
        starts_s += first - ended
        coming += [one.later(starts_s - min(one.at, first)) for one in arrivals if one.at in turn]
        found = simulate(coming, config, profile, overlap=overlap)
        starts_s, ended = found.seconds, last
    measured = sum(one.device_s or 0.0 for one in passes)
    yield ReplayedRun(
        run.name,
        ended - span_of(recording, turns[0])[0],
        found.seconds,
        measured / len(passes),
        found.busy_s / found.passes,
        len(passes),
        found.passes,
    )
