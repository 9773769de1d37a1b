"""Coefficients from recordings: `paceline sim fit`.

Decodes, prompts and the host are fitted each on their own, by least squares without negative coefficients; short
passes weigh more than their seconds. Every fifth pass is held out: the error printed is of passes that the fit has not
seen. The profile that is kept is fitted to all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.config import ConfigError
from paceline.engine.pass_features import PassFeatures
from paceline.engine.recording import Header, Mark, RecordedPass, RecordedRequest, read_recording
from paceline.simulator.profile import DECODE_TERMS, HOST_TERMS, PROMPT_TERMS, SHARED_TERMS, Linear, Profile

Matrix = npt.NDArray[np.float64]
_HELD_OUT = 5
_FAR = 1.5  # times what a first fit predicts: something was loaded or compiled on the way
# By whether a pass has prompts and whether its rows have a prefix in common
_KIND = {
    (True, True): "with prompts", (True, False): "with prompts", (False, True): "decodes that share a prefix",
    (False, False): "decodes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recording:
    header: Header
    passes: list[RecordedPass]
    requests: list[RecordedRequest]
    marks: list[Mark]

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
        return cls(header, passes, requests, marks)


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


def _linear(passes: Sequence[RecordedPass], seconds: Matrix, terms: Sequence[str], rounds: int = 1) -> Linear:
    """With more `rounds` the fit goes from the mean to the median: a host is now and then busy with something else."""
    rows = np.array([[1.0, *(float(getattr(one.features, term)) for term in terms)] for one in passes])
    weights = 1 / np.sqrt(np.maximum(seconds, 1e-9))
    for _ in range(rounds):
        found = non_negative(rows * weights[:, None], seconds * weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(rows @ found - seconds), 1e-5))
    return Linear(float(found[0]), {term: float(value) for term, value in zip(terms, found[1:], strict=True) if value})


def _decodes(passes: Sequence[PassFeatures], seconds: Matrix, buckets: Sequence[int]) -> tuple[list[float], Linear]:
    """Each graph's own time, and what all of them have in common."""
    present = [bucket for bucket in buckets if any(one.bucket == bucket for one in passes)]
    rows = np.array(
        [
            [
                *(float(one.bucket == bucket) for bucket in present),
                *(float(getattr(one, term)) for term in DECODE_TERMS),
            ]
            for one in passes
        ]
    )
    weights = 1 / np.sqrt(seconds)
    found = non_negative(rows * weights[:, None], seconds * weights)
    bases = np.interp(buckets, present, found[: len(present)])  # graphs that never ran: between their neighbours
    per = {term: float(value) for term, value in zip(DECODE_TERMS, found[len(present) :], strict=True) if value}
    return [float(base) for base in bases], Linear(0.0, per)


def _fit(passes: Sequence[RecordedPass], header: Header, source: str) -> Profile:
    prompts = [one for one in passes if one.features.has_prompts]
    shared = [one for one in passes if not one.features.has_prompts and one.features.repeated_tokens]
    decodes = [one for one in passes if not one.features.has_prompts and not one.features.repeated_tokens]
    if len(decodes) < 20 or len(prompts) < 5:
        raise ConfigError(
            f"{source} has {len(decodes)} passes of decodes and {len(prompts)} with prompts: a fit needs 20 and 5."
        )
    buckets = header.buckets or sorted({one.features.bucket for one in decodes})
    bases, decode = _decodes([one.features for one in decodes], _seconds(decodes), buckets)
    busy = [one for one in passes if one.host_s + one.launch_s < 0.05]  # longer ones slept: there was nothing to do
    return Profile(
        device=header.device,
        model=header.model,
        source=source,
        kv_tokens=header.num_pages * header.page_size,
        buckets=list(buckets),
        bucket_s=bases,
        decode=decode,
        shared=_linear(shared, _seconds(shared), SHARED_TERMS) if len(shared) >= 20 else None,
        prompt=_linear(prompts, _seconds(prompts), PROMPT_TERMS),
        host=_linear(busy, np.array([one.host_s + one.launch_s for one in busy]), HOST_TERMS, rounds=20),
    )


def _seconds(passes: Iterable[RecordedPass]) -> Matrix:
    return np.array([one.device_s for one in passes], np.float64)


def fit(recordings: Sequence[Recording], source: str) -> Fitted:
    """A profile from recordings of one device and model, and how wrong a fit is on passes it has not seen."""
    headers = {(one.header.device, one.header.model, tuple(one.header.buckets)) for one in recordings}
    if len(headers) > 1:
        raise ConfigError(f"the recordings are of different devices, models or graphs: {sorted(headers)}.")
    source_header = recordings[0].header
    passes = [line for one in recordings for line in one.passes if line.device_s]
    first = _fit(_usual(passes), source_header, source)
    passes = [one for one in passes if (one.device_s or 0.0) <= _FAR * first.device_s(one.features)]
    held = [one for index, one in enumerate(passes) if index % _HELD_OUT == 0]
    seen = [one for index, one in enumerate(passes) if index % _HELD_OUT]
    trial = _fit(seen, source_header, source)
    groups: dict[str, list[RecordedPass]] = defaultdict(list)
    for one in held:
        groups[_KIND[one.features.has_prompts, one.features.repeated_tokens > 0]].append(one)
        groups["all"].append(one)
    errors = {name: error(trial.device_s, group) for name, group in sorted(groups.items())}
    return Fitted(_fit(passes, source_header, source), errors)


def _usual(passes: Sequence[RecordedPass]) -> list[RecordedPass]:
    """Without those that took three times as long as the median of passes like them."""

    def kind(one: RecordedPass) -> tuple[int, int, bool]:
        return one.features.bucket, one.features.num_prompt_tokens.bit_length(), one.features.repeated_tokens > 0

    kinds: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
    for one in passes:
        kinds[kind(one)].append(one.device_s or 0.0)
    medians = {name: float(np.median(values)) for name, values in kinds.items()}
    return [one for one in passes if (one.device_s or 0.0) <= 3 * medians[kind(one)]]


def error(predict: Callable[[PassFeatures], float], passes: Sequence[RecordedPass]) -> Error:
    measured = _seconds(passes)
    predicted = np.array([predict(one.features) for one in passes])
    absolute = float(np.abs(predicted / measured - 1).mean()) if len(passes) else 0.0
    return Error(len(passes), float(measured.sum()), float(predicted.sum()), absolute)
