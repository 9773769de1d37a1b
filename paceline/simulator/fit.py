"""Coefficients from recordings: `paceline sim fit`.

Decodes, prompts and the host are fitted each on their own, by least squares without negative coefficients; short
passes weigh more than their seconds. What loads, compiles or waits for its launch says nothing about a device and is
left out, run by run where marks name runs, else pass by pass. Every fifth pass is held out: the error printed is of
passes that the fit has not seen. The profile that is kept is fitted to all of them.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.config import ConfigError
from paceline.engine.pass_features import FinishedRequests, PassFeatures
from paceline.engine.recording import Header, Mark, RecordedPass, RecordedRequest, read_recording
from paceline.simulator.profile import DECODE_TERMS, ENDED_TERMS, HOST_TERMS, PROMPT_TERMS, Linear, Profile

Matrix = npt.NDArray[np.float64]
_HELD_OUT = 5
_DECODES, _PROMPTS = 20, 5  # passes that a fit needs at least
_FAR = 1.5  # times what a first fit predicts: something was loaded or compiled on the way
_COMPILED_S = 0.05  # no launch takes so long, unless it compiles or waits
_ROUNDING_S = 2e-6  # of recorded times, added up
# By whether a pass has prompts and whether its rows have a prefix in common
_KIND = {
    (True, True): "with prompts", (True, False): "with prompts", (False, True): "decodes that share a prefix",
    (False, False): "decodes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of a recording: from a mark to the mark `end of` it."""

    name: str
    begins: float
    ends: float
    compiles: bool

    @property
    def workload(self) -> str:
        return self.name.partition(" ")[0]

    def __contains__(self, at: float) -> bool:
        return self.begins <= at <= self.ends


@dataclass(frozen=True, slots=True)
class Recording:
    header: Header
    passes: list[RecordedPass]
    requests: list[RecordedRequest]
    runs: list[Stretch]
    cut_off: list[str]  # names of runs that have no end
    ended: dict[int, FinishedRequests]  # by step: the requests that ended since the launch before it

    @classmethod
    def read(cls, path: Path) -> Recording:
        header, passes, requests, marks = None, [], [], []
        for line in read_recording(path):
            if isinstance(line, Header):
                header = line
            elif isinstance(line, RecordedPass):
                passes.append(line)
            elif isinstance(line, RecordedRequest):
                requests.append(line)
            else:
                marks.append(line)
        if header is None or not passes:
            raise ConfigError(f"{path.name} has no passes: record a run with --record.")
        runs, cut_off = _stretches(marks, passes)
        return cls(header, passes, requests, runs, cut_off, _ended(requests, passes))

    def only(self, runs: Iterable[Stretch]) -> Recording:
        """Nothing but these runs of it."""
        chosen = list(runs)
        passes = [line for line in self.passes if any(line.at in run for run in chosen)]
        return replace(self, passes=passes, runs=chosen)

    def warm(self) -> Recording:
        """Without runs that compile or are cut off, or what lies between runs; all of it if nothing would be left."""
        runs = [run for run in self.runs if not run.compiles]
        return self.only(runs) if runs else self


def halves(recordings: Sequence[Recording]) -> tuple[list[Recording], list[Recording]]:
    """Every second run of each workload, and the others."""
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    sides = [[(next(numbers[run.workload]) % 2, run) for run in one.runs] for one in recordings]
    first, second = (
        [one.only(run for at, run in side if at == which) for one, side in zip(recordings, sides, strict=True)]
        for which in (0, 1)
    )
    return first, second


def _stretches(marks: Sequence[Mark], passes: Sequence[RecordedPass]) -> tuple[list[Stretch], list[str]]:
    """The runs that are whole, and the names of others."""
    began: dict[str, float] = {}
    found = []
    compiled = _compiled(passes)
    for mark in marks:
        name = mark.name.removeprefix("end of ")
        if name == mark.name:
            began[name] = mark.at
            continue
        begins = began.pop(name)
        compiles = any(begins <= one.at <= mark.at for one in compiled)
        found.append(Stretch(name, begins, mark.at, compiles))
    return found, list(began)


def _compiled(passes: Sequence[RecordedPass]) -> list[RecordedPass]:
    """Those with a long launch of which the device lost half or more: it idled before the pass, or took longer than
    with passes like it. A launch that waits for passes in flight is as long, but then the device is at work."""
    medians = _medians([one for one in passes if one.launch_s <= _COMPILED_S])

    def usual_s(one: RecordedPass) -> float:
        """Of those with the number of prompt tokens next to its own: all that have as many may have waited."""
        bucket, bits, repeated = _likeness(one.features)
        alike = [(abs(at - bits), seconds) for (b, at, r), seconds in medians.items() if (b, r) == (bucket, repeated)]
        return min(alike, default=(0, 0.0))[1]

    def lost_s(one: RecordedPass) -> float:
        return (one.idle_s or 0.0) + (one.device_s or 0.0) - usual_s(one)

    return [one for one in passes if one.launch_s > _COMPILED_S and lost_s(one) > one.launch_s / 2]


def _ended(requests: Sequence[RecordedRequest], passes: Sequence[RecordedPass]) -> dict[int, FinishedRequests]:
    """By time: the thread that launches also commits, so an end lies between two launches."""
    launches = [one.at for one in passes]
    groups: dict[int, list[RecordedRequest]] = defaultdict(list)
    for request in requests:
        if request.finished_s is not None:
            index = bisect.bisect_left(launches, request.at + request.finished_s - _ROUNDING_S)
            if index < len(passes):
                groups[passes[index].step].append(request)
    return {
        step: FinishedRequests(
            len(group), sum(one.prompt_tokens for one in group), sum(one.output_tokens for one in group)
        )
        for step, group in groups.items()
    }


class Turn(NamedTuple):
    """One turn of the loop: a pass, and what had ended when it was launched."""

    line: RecordedPass
    ended: FinishedRequests


@dataclass(frozen=True, slots=True)
class Error:
    """Predicted against measured device seconds."""

    count: int
    measured_s: float
    predicted_s: float
    mean_absolute: float  # of a pass, relative

    @property
    def total(self) -> float:
        return self.predicted_s / self.measured_s - 1 if self.measured_s else 0.0


@dataclass(frozen=True, slots=True)
class Fitted:
    profile: Profile
    held_out: dict[str, Error]  # by kind of pass


def non_negative(features: Matrix, target: Matrix) -> Matrix:
    """Least squares with no coefficient below 0 (Lawson and Hanson's active set)."""
    scale = np.maximum(np.abs(features).max(0), 1e-300)
    a = features / scale
    count = a.shape[1]
    inside = np.zeros(count, bool)
    x = np.zeros(count)
    for _ in range(10 * count + 10):
        gradient = a.T @ (target - a @ x)
        gradient[inside] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10 * max(1e-300, float(np.abs(a.T @ target).max())):
            break
        inside[best] = True
        while True:
            trial = np.zeros(count)
            trial[inside] = np.linalg.lstsq(a[:, inside], target, rcond=None)[0]
            if (trial[inside] > 0).all():
                x = trial
                break
            # Go towards the trial until the first coefficient reaches 0, and leave that one out.
            falling = inside & (trial <= 0)
            step = float((x[falling] / np.maximum(x[falling] - trial[falling], 1e-300)).min())
            x = x + step * (trial - x)
            inside &= x > 1e-14
            x[~inside] = 0.0
    found: Matrix = x / scale
    return found


def _columns(values: Iterable[PassFeatures | FinishedRequests], terms: Sequence[str]) -> Matrix:
    return np.array([[float(getattr(one, term)) for term in terms] for one in values])


def _linear(base: float, terms: Sequence[str], found: Iterable[float]) -> Linear:
    return Linear(float(base), {term: float(value) for term, value in zip(terms, found, strict=True) if value})


def _mean(rows: Matrix, seconds: Matrix) -> Matrix:
    weights = 1 / np.sqrt(seconds)
    return non_negative(rows * weights[:, None], seconds * weights)


def _robust(rows: Matrix, seconds: Matrix) -> Matrix:
    """Of errors above 3 ms it counts on which side they are, not how large: a host is now and then busy with something
    else, for any time."""
    weights = 1 / np.sqrt(np.maximum(seconds, 1e-9))
    for _ in range(20):
        found = non_negative(rows * weights[:, None], seconds * weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(rows @ found - seconds), 3e-3))
    return found


def _decodes(passes: Sequence[PassFeatures], seconds: Matrix, buckets: Sequence[int]) -> tuple[list[float], Linear]:
    """Each graph's own time, and what all of them have in common."""
    present = [bucket for bucket in buckets if any(one.bucket == bucket for one in passes)]
    graphs = np.array([[float(one.bucket == bucket) for bucket in present] for one in passes])
    found = _mean(np.hstack([graphs, _columns(passes, DECODE_TERMS)]), seconds)
    bases = np.interp(buckets, present, found[: len(present)])  # graphs that never ran: between their neighbours
    return [float(base) for base in bases], _linear(0.0, DECODE_TERMS, found[len(present) :])


def _prompts(passes: Sequence[RecordedPass]) -> Linear:
    working = [one for one in passes if not _waits_for_launch(one)]
    chosen = working if len(working) >= _PROMPTS else passes
    ones = np.ones((len(chosen), 1))
    found = _mean(np.hstack([ones, _columns((one.features for one in chosen), PROMPT_TERMS)]), _seconds(chosen))
    return _linear(found[0], PROMPT_TERMS, found[1:])


def _waits_for_launch(one: RecordedPass) -> bool:
    """A device that waits for kernels to be launched is not at work. Such a pass ends with its launch: it did not if it
    took longer than that, or still had to be waited for when the next one was launched."""
    return one.features.has_prompts and (one.device_s or 0.0) <= one.launch_s and one.wait_s <= 1e-3


def _host(turns: Sequence[Turn]) -> tuple[Linear, Linear, float]:
    """A turn of the loop, what ended requests add to it, and what of a launch runs beside the device."""
    turns = [one for one in turns if one.line.num_in_flight]  # with nothing in flight the host may have slept
    ours = np.hstack([np.ones((len(turns), 1)), _columns((one.line.features for one in turns), HOST_TERMS)])
    rows = np.hstack([ours, _columns((one.ended for one in turns), ENDED_TERMS)])
    launch = np.array([one.line.launch_s for one in turns])
    launch_s = float(_robust(rows, launch)[1 + HOST_TERMS.index("has_prompts")])
    beside = launch_s * ours[:, 1 + HOST_TERMS.index("has_prompts")]
    before = np.array([one.line.host_s for one in turns]) + np.maximum(0.0, launch - beside)
    base, *found = _robust(rows, before).tolist()
    host, ended = found[: len(HOST_TERMS)], found[len(HOST_TERMS) :]
    return _linear(base, HOST_TERMS, host), _linear(0.0, ENDED_TERMS, ended), launch_s


def _fit(turns: Sequence[Turn], header: Header, source: str) -> Profile:
    prompts = [one.line for one in turns if one.line.features.has_prompts]
    decodes = [one.line for one in turns if not one.line.features.has_prompts]
    if len(decodes) < _DECODES or len(prompts) < _PROMPTS:
        raise ConfigError(
            f"{source} has {len(decodes)} passes of decodes and {len(prompts)} with prompts: "
            f"a fit needs {_DECODES} and {_PROMPTS}."
        )
    buckets = header.buckets or sorted({one.features.bucket for one in decodes})
    bases, decode = _decodes([one.features for one in decodes], _seconds(decodes), buckets)
    host, ended, launch_s = _host(turns)
    return Profile(
        device=header.device,
        model=header.model,
        source=source,
        kv_tokens=header.num_pages * header.page_size,
        buckets=list(buckets),
        bucket_s=bases,
        decode=decode,
        prompt=_prompts(prompts),
        host=host,
        ended=ended,
        launch_s=launch_s,
    )


def _seconds(passes: Iterable[RecordedPass]) -> Matrix:
    return np.array([one.device_s for one in passes], np.float64)


def fit(recordings: Sequence[Recording], source: str) -> Fitted:
    """A profile from recordings of one device and model, and how wrong a fit is on passes it has not seen."""
    headers = {(one.header.device, one.header.model, tuple(one.header.buckets)) for one in recordings}
    if len(headers) > 1:
        raise ConfigError(f"the recordings are of different devices, models or graphs: {sorted(headers)}.")
    largest = max((one.header for one in recordings), key=lambda header: header.num_pages)
    turns = [
        Turn(line, one.ended.get(line.step, FinishedRequests()))
        for one in recordings
        for line in one.passes
        if line.device_s and line.launch_s <= _COMPILED_S
    ]
    first = _fit(_usual(turns), largest, source)
    turns = [one for one in turns if (one.line.device_s or 0.0) <= _FAR * first.device_s(one.line.features)]
    held = [one.line for index, one in enumerate(turns) if index % _HELD_OUT == 0]
    trial = _fit([one for index, one in enumerate(turns) if index % _HELD_OUT], largest, source)
    groups: dict[str, list[RecordedPass]] = defaultdict(list)
    for one in held:
        if _waits_for_launch(one):
            continue  # it says how long the host takes
        groups[_KIND[one.features.has_prompts, one.features.has_repeated]].append(one)
        groups["all"].append(one)
    errors = {name: error(trial.device_s, group) for name, group in sorted(groups.items())}
    profile = _fit(turns, largest, source)
    if (token_s := _swap_token_s(recordings)) is not None:
        profile = msgspec.structs.replace(profile, swap_token_s=token_s, swap_source=f"measured: {source}")
    return Fitted(profile, errors)


def _swap_token_s(recordings: Sequence[Recording]) -> float | None:
    """Of all that was fetched together; None if nothing was."""
    seconds, tokens = 0.0, 0
    for one in recordings:
        for line in one.passes:
            if line.fetch_s is not None:
                seconds += line.fetch_s
                tokens += line.features.num_fetched_pages * one.header.page_size
    return seconds / tokens if tokens else None


def can_fit(recordings: Sequence[Recording]) -> bool:
    with_prompts = [line.features.has_prompts for one in recordings for line in one.passes if line.device_s]
    return with_prompts.count(False) >= 2 * _DECODES and with_prompts.count(True) >= 2 * _PROMPTS


def _usual(turns: Sequence[Turn]) -> list[Turn]:
    """Without those that took three times as long as the median of passes like them."""
    medians = _medians([one.line for one in turns])
    return [one for one in turns if (one.line.device_s or 0.0) <= 3 * medians[_likeness(one.line.features)]]


def _likeness(features: PassFeatures) -> tuple[int, int, bool]:
    """The same for passes that should take about as long."""
    return features.bucket, features.num_prompt_tokens.bit_length(), features.has_repeated


def _medians(passes: Sequence[RecordedPass]) -> dict[tuple[int, int, bool], float]:
    groups: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
    for one in passes:
        groups[_likeness(one.features)].append(one.device_s or 0.0)
    return {likeness: float(np.median(seconds)) for likeness, seconds in groups.items()}


def error(predict: Callable[[PassFeatures], float], passes: Sequence[RecordedPass]) -> Error:
    measured = _seconds(passes)
    predicted = np.array([predict(one.features) for one in passes])
    absolute = float(np.abs(predicted / measured - 1).mean()) if len(passes) else 0.0
    return Error(len(passes), float(measured.sum()), float(predicted.sum()), absolute)
