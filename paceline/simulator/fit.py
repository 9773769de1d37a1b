"""`paceline sim fit`: the coefficients of a profile, fitted to recordings.

Decode batches, prefill batches and the host are fitted separately, by non-negative least squares in which short passes
have more weight. Passes that load, compile or wait for their launch say nothing about the device and are left out: by
run where marks name runs, otherwise by pass. Every fifth pass is held out for the error that is printed; the profile
that is saved is fitted to all of them. Passes with drafts (speculative decoding) are fitted last, on top of the others
or of a given profile: by number of rows and of drafts per row, as there is a CUDA graph for each.
"""

from __future__ import annotations

import bisect
import itertools
import math
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
from paceline.scheduler.plan import DRAFT_DEPTHS
from paceline.simulator.profile import DECODE_TERMS, ENDED_TERMS, HOST_TERMS, PROMPT_TERMS, LinearCost, Profile

Matrix = npt.NDArray[np.float64]
_HELD_OUT = 5
_DECODES, _PROMPTS, _DRAFTED = 20, 5, 5  # minimum number of passes for a fit; of one graph with drafts
_FAR = 1.5  # times the prediction of a first fit: the pass loaded or compiled something
_COMPILED_S = 0.05  # a longer launch compiles or waits
_ROUNDING_S = 2e-6  # accumulated rounding of recorded times
# By whether a pass has prompt tokens and whether its rows share a prefix
_KIND = {
    (True, True): "prefill or mixed",
    (True, False): "prefill or mixed",
    (False, True): "decode, shared prefix",
    (False, False): "decode",
}
_DRAFTS = "with drafts"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run within a recording, from the mark `NAME` to the mark `end of NAME`."""

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
    runs: list[RecordedRun]
    cut_off: list[str]  # names of runs without an end
    ended: dict[int, FinishedRequests]  # by step: the requests that finished since the previous launch

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
            raise ConfigError(f"{path.name} has no forward passes: record a run with --record.")
        runs, cut_off = _recorded_runs(marks, passes)
        return cls(header, passes, requests, runs, cut_off, _ended(requests, passes))

    def only(self, runs: Iterable[RecordedRun]) -> Recording:
        """The same recording, restricted to these runs."""
        chosen = list(runs)
        passes = [line for line in self.passes if any(line.at in run for run in chosen)]
        return replace(self, passes=passes, runs=chosen)

    def warm(self) -> Recording:
        """Without runs that compile or are cut off, and without passes between runs; everything if no run is left."""
        runs = [run for run in self.runs if not run.compiles]
        return self.only(runs) if runs else self


def halves(recordings: Sequence[Recording]) -> tuple[list[Recording], list[Recording]]:
    """Splits the runs of each workload: every second one, and the others."""
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    sides = [[(next(numbers[run.workload]) % 2, run) for run in one.runs] for one in recordings]
    first, second = (
        [one.only(run for at, run in side if at == which) for one, side in zip(recordings, sides, strict=True)]
        for which in (0, 1)
    )
    return first, second


def _recorded_runs(marks: Sequence[Mark], passes: Sequence[RecordedPass]) -> tuple[list[RecordedRun], list[str]]:
    """The complete runs, and the names of the incomplete ones."""
    began: dict[str, float] = {}
    found = []
    compiled = _compiling_passes(passes)
    for mark in marks:
        name = mark.name.removeprefix("end of ")
        if name == mark.name:
            began[name] = mark.at
            continue
        begins = began.pop(name)
        compiles = any(begins <= one.at <= mark.at for one in compiled)
        found.append(RecordedRun(name, begins, mark.at, compiles))
    return found, list(began)


def _compiling_passes(passes: Sequence[RecordedPass]) -> list[RecordedPass]:
    """Passes with a long launch that cost the device half of it or more, as idle time or as a longer pass than similar
    ones. A launch that waits for passes in flight is as long, but then the device is busy."""
    medians = _medians([one for one in passes if one.launch_s <= _COMPILED_S])

    def usual_s(one: RecordedPass) -> float:
        """The median of passes with the nearest number of prompt tokens: all with as many may have waited."""
        bucket, bits, *others = _group_key(one.features)
        similar = [
            (abs(at - bits), seconds) for (b, at, *o), seconds in medians.items() if (b, *o) == (bucket, *others)
        ]
        return min(similar, default=(0, 0.0))[1]

    def lost_s(one: RecordedPass) -> float:
        return (one.idle_s or 0.0) + (one.device_s or 0.0) - usual_s(one)

    return [one for one in passes if one.launch_s > _COMPILED_S and lost_s(one) > one.launch_s / 2]


def _ended(requests: Sequence[RecordedRequest], passes: Sequence[RecordedPass]) -> dict[int, FinishedRequests]:
    """Assigned by time: the thread that launches also commits, so a request finishes between two launches."""
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


class LoopStep(NamedTuple):
    """One step of the loop: a forward pass, and the requests that finished before its launch."""

    line: RecordedPass
    ended: FinishedRequests


@dataclass(frozen=True, slots=True)
class FitError:
    """Predicted and measured device seconds."""

    count: int
    measured_s: float
    predicted_s: float
    mean_absolute: float  # relative, per pass

    @property
    def total(self) -> float:
        return self.predicted_s / self.measured_s - 1 if self.measured_s else 0.0


@dataclass(frozen=True, slots=True)
class FitResult:
    profile: Profile
    held_out: dict[str, FitError]  # by kind of batch


def non_negative(features: Matrix, target: Matrix) -> Matrix:
    """Non-negative least squares (Lawson and Hanson's active set method)."""
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
            # Move towards the trial until the first coefficient reaches 0, and remove that one.
            falling = inside & (trial <= 0)
            step = float((x[falling] / np.maximum(x[falling] - trial[falling], 1e-300)).min())
            x = x + step * (trial - x)
            inside &= x > 1e-14
            x[~inside] = 0.0
    found: Matrix = x / scale
    return found


def _columns(values: Iterable[PassFeatures | FinishedRequests], terms: Sequence[str]) -> Matrix:
    return np.array([[float(getattr(one, term)) for term in terms] for one in values])


def _linear(base: float, terms: Sequence[str], found: Iterable[float]) -> LinearCost:
    return LinearCost(float(base), {term: float(value) for term, value in zip(terms, found, strict=True) if value})


def _mean(rows: Matrix, seconds: Matrix) -> Matrix:
    weights = 1 / np.sqrt(seconds)
    return non_negative(rows * weights[:, None], seconds * weights)


def _robust(rows: Matrix, seconds: Matrix) -> Matrix:
    """Absolute instead of squared errors above 0.3 ms, since other processes delay the host at times. Short times have
    more weight: in small batches they are all that a pass waits for."""
    relative = 1 / np.sqrt(np.maximum(seconds, 2e-4))
    weights = relative
    for _ in range(20):
        found = non_negative(rows * weights[:, None], seconds * weights)
        weights = relative / np.sqrt(np.maximum(np.abs(rows @ found - seconds), 3e-4))
    return found


class _DecodeFit(NamedTuple):
    bucket_s: list[float]
    sharing_s: list[float]
    decode: LinearCost


def _decodes(passes: Sequence[PassFeatures], seconds: Matrix, buckets: Sequence[int]) -> _DecodeFit:
    """The base time of each CUDA graph, what sharing a prefix adds to it, and the terms that all of them share."""
    present = [bucket for bucket in buckets if any(one.bucket == bucket for one in passes)]
    shared, own = ({one.bucket for one in passes if one.has_repeated == has} for has in (True, False))
    # Where every pass shares, its cost cannot be told from the base time: it is that of the graphs around.
    known = sorted(shared & own or shared)
    rows = np.array([one.bucket for one in passes])
    graphs = (rows[:, None] == present).astype(np.float64)
    added = np.array([one.has_repeated for one in passes])[:, None] * _interpolation(rows, known)
    found = _mean(np.hstack([graphs, added, _columns(passes, DECODE_TERMS)]), seconds)
    bases, sharing, terms = np.split(found, [len(present), len(present) + len(known)])
    # Graphs that never ran are interpolated.
    bucket_s: list[float] = np.interp(buckets, present, bases).tolist()
    sharing_s: list[float] = np.interp(buckets, known, sharing).tolist() if known else []
    for index, bucket in enumerate(buckets):
        # Its base time is what the cost of sharing in other graphs has left: at least that of a smaller graph.
        smaller = [bucket_s[at] for at in range(index) if buckets[at] in own]
        if bucket in shared - own and smaller:
            lacking = max(0.0, max(smaller) - bucket_s[index])
            bucket_s[index] += lacking
            sharing_s[index] = max(0.0, sharing_s[index] - lacking)
    return _DecodeFit(bucket_s, sharing_s, _linear(0.0, DECODE_TERMS, terms))


def _interpolation(at: Matrix, points: Sequence[int]) -> Matrix:
    """The weights of `points` in a linear interpolation: [len(at), len(points)]."""
    weights = [np.interp(at, points, unit) for unit in np.eye(len(points))]
    return np.stack(weights, 1) if weights else np.zeros((len(at), 0))


def _prompts(passes: Sequence[RecordedPass]) -> LinearCost:
    working = [one for one in passes if not _waits_for_launch(one)]
    chosen = working if len(working) >= _PROMPTS else passes
    ones = np.ones((len(chosen), 1))
    found = _mean(np.hstack([ones, _columns((one.features for one in chosen), PROMPT_TERMS)]), _seconds(chosen))
    return _linear(found[0], PROMPT_TERMS, found[1:])


def _waits_for_launch(one: RecordedPass) -> bool:
    """Whether the device was waiting for kernel launches. Such a pass ends with its launch: it does not take longer,
    and the host does not wait for it after the next launch."""
    return one.features.has_prompts and (one.device_s or 0.0) <= one.launch_s and one.wait_s <= 1e-3


def _host(steps: Sequence[LoopStep]) -> tuple[LinearCost, LinearCost, float]:
    """Host time per step, per finished request, and the part of a launch that overlaps with the device."""
    steps = [one for one in steps if one.line.num_in_flight]  # with no pass in flight the host may have slept
    ours = np.hstack([np.ones((len(steps), 1)), _columns((one.line.features for one in steps), HOST_TERMS)])
    rows = np.hstack([ours, _columns((one.ended for one in steps), ENDED_TERMS)])
    launch = np.array([one.line.launch_s for one in steps])
    launch_s = float(_robust(rows, launch)[1 + HOST_TERMS.index("has_prompts")])
    beside = launch_s * ours[:, 1 + HOST_TERMS.index("has_prompts")]
    before = np.array([one.line.host_s for one in steps]) + np.maximum(0.0, launch - beside)
    base, *found = _robust(rows, before).tolist()
    host, ended = found[: len(HOST_TERMS)], found[len(HOST_TERMS) :]
    return _linear(base, HOST_TERMS, host), _linear(0.0, ENDED_TERMS, ended), launch_s


def _fit(every: Sequence[LoopStep], header: Header, source: str) -> Profile:
    steps = [one for one in every if not one.line.features.num_drafts]
    drafted = [one.line for one in every if one.line.features.num_drafts]
    prompts = [one.line for one in steps if one.line.features.has_prompts]
    decodes = [one.line for one in steps if not one.line.features.has_prompts]
    if len(decodes) < _DECODES or len(prompts) < _PROMPTS:
        raise ConfigError(
            f"{source} has {len(decodes)} decode batches and {len(prompts)} prefill or mixed batches without drafts: "
            f"a fit needs {_DECODES} and {_PROMPTS}."
        )
    buckets = header.buckets or sorted({one.features.bucket for one in decodes})
    decode = _decodes([one.features for one in decodes], _seconds(decodes), buckets)
    host, ended, launch_s = _host(steps)
    profile = Profile(
        device=header.device,
        model=header.model,
        source=source,
        kv_tokens=header.num_pages * header.page_size,
        buckets=list(buckets),
        bucket_s=decode.bucket_s,
        sharing_s=decode.sharing_s,
        decode=decode.decode,
        prompt=_prompts(prompts),
        host=host,
        ended=ended,
        launch_s=launch_s,
    )
    if len(drafted) < _DECODES:
        return profile
    return msgspec.structs.replace(profile, draft_s=_draft_times(profile, drafted))


def _draft_times(profile: Profile, passes: Sequence[RecordedPass]) -> dict[int, list[float]]:
    """What drafts add to the time of each bucket, by drafts per row: the median of the passes with that many."""
    times: dict[int, list[float]] = {}
    for depth in DRAFT_DEPTHS:
        seconds: dict[int, list[float]] = defaultdict(list)
        for one in passes:
            features = one.features
            if not features.has_prompts and features.num_drafts == depth * features.num_decodes:
                seconds[features.bucket].append((one.device_s or 0.0) - profile.batch_s(features))
        known = sorted(bucket for bucket, found in seconds.items() if len(found) >= _DRAFTED)
        if known:
            added = [max(0.0, float(np.median(seconds[bucket]))) for bucket in known]
            times[depth] = profile.spread_drafts(depth, known, added)
    return times


def _has_graph(features: PassFeatures, buckets: Sequence[int]) -> bool:
    """Whether the drafts of a pass ran as planned: for more tokens than the largest bucket has rows there is no graph,
    and fewer ran."""
    depth = math.ceil(features.num_drafts / max(1, features.num_decodes))
    return not depth or not buckets or features.bucket * (1 + depth) <= buckets[-1]


def _seconds(passes: Iterable[RecordedPass]) -> Matrix:
    return np.array([one.device_s for one in passes], np.float64)


def fit(recordings: Sequence[Recording], source: str) -> FitResult:
    """A profile fitted to recordings of one device and model, and the error of a fit on held-out passes."""
    _check_same(recordings)
    largest = max((one.header for one in recordings), key=lambda header: header.num_pages)
    # Of recordings with drafts only passes with drafts count, if there are others: such an engine runs more kernels.
    drafted = [any(line.features.num_drafts for line in one.passes) for one in recordings]
    steps = [
        LoopStep(line, one.ended.get(line.step, FinishedRequests()))
        for one, has_drafts in zip(recordings, drafted, strict=True)
        for line in one.passes
        if line.device_s and line.launch_s <= _COMPILED_S
        if line.features.num_drafts or not has_drafts or all(drafted)
        if _has_graph(line.features, one.header.buckets)
    ]
    first = _fit(_without_outliers(steps), largest, source)
    steps = [one for one in steps if (one.line.device_s or 0.0) <= _FAR * first.device_s(one.line.features)]
    held = [one.line for index, one in enumerate(steps) if index % _HELD_OUT == 0]
    trial = _fit([one for index, one in enumerate(steps) if index % _HELD_OUT], largest, source)
    groups: dict[str, list[RecordedPass]] = defaultdict(list)
    for one in held:
        if _waits_for_launch(one):
            continue  # its time is the host's
        kind = _DRAFTS if one.features.num_drafts else _KIND[one.features.has_prompts, one.features.has_repeated]
        groups[kind].append(one)
        groups["all"].append(one)
    errors = {name: error(trial.device_s, group) for name, group in sorted(groups.items())}
    profile = _fit(steps, largest, source)
    if (token_s := _swap_token_s(recordings)) is not None:
        profile = msgspec.structs.replace(profile, swap_token_s=token_s, swap_source=f"measured: {source}")
    return FitResult(profile, errors)


def fit_drafts(recordings: Sequence[Recording], base: Profile, source: str) -> FitResult:
    """The profile with the times of drafts of these recordings, and the error on held-out passes with drafts."""
    _check_same(recordings, base)
    passes = [
        line
        for one in recordings
        for line in one.passes
        if line.device_s and line.launch_s <= _COMPILED_S and line.features.num_drafts and not line.features.has_prompts
        if _has_graph(line.features, one.header.buckets)
    ]
    if len(passes) < _DECODES:
        raise ConfigError(f"{source} has {len(passes)} decode batches with drafts: a fit needs {_DECODES}.")

    def fitted(chosen: Sequence[RecordedPass]) -> Profile:
        both = f"{base.source}; drafts: {source}"
        return msgspec.structs.replace(base, draft_s=_draft_times(base, chosen), source=both)

    trial = fitted([one for index, one in enumerate(passes) if index % _HELD_OUT])
    return FitResult(fitted(passes), {_DRAFTS: error(trial.device_s, passes[::_HELD_OUT])})


def _check_same(recordings: Sequence[Recording], base: Profile | None = None) -> None:
    found = {(one.header.device, one.header.model, tuple(one.header.buckets)) for one in recordings}
    if base is not None:
        found.add((base.device, base.model, tuple(base.buckets)))
    if len(found) > 1:
        raise ConfigError(f"these are of different devices, models or CUDA graph sizes: {sorted(found)}.")


def _swap_token_s(recordings: Sequence[Recording]) -> float | None:
    """Mean time to fetch a token's KV; None if none was fetched."""
    seconds, tokens = 0.0, 0
    for one in recordings:
        for line in one.passes:
            if line.fetch_s is not None:
                seconds += line.fetch_s
                tokens += line.features.num_fetched_pages * one.header.page_size
    return seconds / tokens if tokens else None


def can_fit(recordings: Sequence[Recording]) -> bool:
    every = (line for one in recordings for line in one.passes)
    with_prompts = [line.features.has_prompts for line in every if line.device_s and not line.features.num_drafts]
    return with_prompts.count(False) >= 2 * _DECODES and with_prompts.count(True) >= 2 * _PROMPTS


def _without_outliers(steps: Sequence[LoopStep]) -> list[LoopStep]:
    """Without steps that took more than three times the median of similar passes."""
    medians = _medians([one.line for one in steps])
    return [one for one in steps if (one.line.device_s or 0.0) <= 3 * medians[_group_key(one.line.features)]]


def _group_key(features: PassFeatures) -> tuple[int, int, bool, int]:
    """Equal for passes that should take about the same time."""
    drafts = features.num_drafts.bit_length()
    return features.bucket, features.num_prompt_tokens.bit_length(), features.has_repeated, drafts


def _medians(passes: Sequence[RecordedPass]) -> dict[tuple[int, int, bool, int], float]:
    groups: dict[tuple[int, int, bool, int], list[float]] = defaultdict(list)
    for one in passes:
        groups[_group_key(one.features)].append(one.device_s or 0.0)
    return {key: float(np.median(seconds)) for key, seconds in groups.items()}


def error(predict: Callable[[PassFeatures], float], passes: Sequence[RecordedPass]) -> FitError:
    measured = _seconds(passes)
    predicted = np.array([predict(one.features) for one in passes])
    absolute = float(np.abs(predicted / measured - 1).mean()) if len(passes) else 0.0
    return FitError(len(passes), float(measured.sum()), float(predicted.sum()), absolute)
