"""A device in numbers: how long a pass takes it and its host, fitted from a recording.

A pass of decodes runs as a graph: it takes what the graph's bucket takes with nothing to read, and something for every
KV position read, once where rows have a prefix in common. A pass with prompts takes something for each new token, each
pair of tokens that meet in attention, and what its decodes read; its kernels are launched one by one while the device
runs the first of them. The host's time is results, text and planning; most of it where requests end or join. Pages go
to host memory and come back beside the passes (`HostLink`), at so many tokens a second each way.
No coefficient is negative: a pass does not get faster by having more to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import ConfigError
from paceline.engine.pass_features import FinishedRequests, PassFeatures, read_features
from paceline.engine.virtual.executor import VirtualClock
from paceline.scheduler.plan import Finished, Plan

_FOLDER = Path(__file__).parent / "profiles"
# What the time of each kind of pass, and of the host, may depend on: names of PassFeatures, and of FinishedRequests
DECODE_TERMS = ("own_tokens", "has_repeated", "longest_context")
PROMPT_TERMS = ("num_prompt_tokens", "prompt_pairs", "own_tokens", "repeated_tokens", "num_decodes", "has_decodes")
HOST_TERMS = ("num_decodes", "has_prompts", "num_joins", "join_tokens", "num_page_changes", "num_moved_pages")
ENDED_TERMS = ("num_requests", "prompt_tokens", "output_tokens")


class Linear(msgspec.Struct, frozen=True, dict=True):
    """Seconds: a base and so much for each of some features."""

    base: float
    per: dict[str, float]

    def seconds(self, features: PassFeatures | FinishedRequests) -> float:
        total = self.base
        for name, coefficient in self.per.items():
            total += coefficient * getattr(features, name)
        return total


class Profile(msgspec.Struct, frozen=True, dict=True):
    """A device with a model. `buckets`: rows of each decode graph, and seconds of it with nothing to read."""

    device: str
    model: str
    source: str  # where the coefficients are from
    kv_tokens: int  # that its memory holds beside the model
    buckets: list[int]
    bucket_s: list[float]
    decode: Linear  # beside the graph's own time
    prompt: Linear
    host: Linear  # of one turn of the loop: results of a pass, planning and launching another
    ended: Linear  # of the host, for requests that ended in between
    launch_s: float  # of the host, for kernels of a pass with prompts that it launches while the device runs others
    swap_token_s: float | None = None  # to bring a token's KV to host memory, or back; None: not known
    swap_source: str = ""  # where that is from

    @cached_property
    def _by_bucket(self) -> dict[int, float]:
        return dict(zip(self.buckets, self.bucket_s, strict=True))

    def device_s(self, features: PassFeatures) -> float:
        if features.has_prompts:
            return self.prompt.seconds(features)
        base = self._by_bucket.get(features.bucket)
        if base is None:  # more rows than were ever recorded: each costs what the last ones did
            rows, seconds = self.buckets[-2:], self.bucket_s[-2:]
            slope = max(0.0, (seconds[1] - seconds[0]) / (rows[1] - rows[0]))
            base = seconds[1] + slope * (features.bucket - rows[1])
        return base + self.decode.seconds(features)

    def host_s(self, features: PassFeatures, ended: FinishedRequests) -> float:
        """Until the device can begin with the pass, if it has nothing else to do."""
        return self.host.seconds(features) + self.ended.seconds(ended)

    def swap_page_s(self, page_size: int) -> float:
        """Of a page, each way."""
        if self.swap_token_s is None:
            raise ConfigError(
                f"num_host_pages is given, and the profile of {self.model} does not say how long KV takes to host "
                "memory: set its swap_token_s, or fit it to a recording with num_host_pages."
            )
        return page_size * self.swap_token_s

    def host_page_cost(self, page_size: int) -> float:
        """The scheduler's option: prompt tokens that are computed while a page comes back."""
        return round(self.swap_page_s(page_size) / self.prompt.per["num_prompt_tokens"], 3)

    def save(self, path: Path) -> None:
        text = msgspec.json.encode(_rounded(msgspec.to_builtins(self)))
        path.write_bytes(msgspec.json.format(text, indent=1) + b"\n")


def _rounded(value: Any) -> Any:
    """Six digits are more than a measurement has."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


class _Swap(msgspec.Struct, frozen=True):
    swap_token_s: float | None = None
    swap_source: str = ""


def keep_swap(profile: Profile, path: Path) -> Profile:
    """With the time to host memory that is in `path` already, where the profile says none."""
    if profile.swap_token_s is not None or not path.exists():
        return profile
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Swap)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path.name} is there and no profile: {error}.") from None
    return msgspec.structs.replace(profile, swap_token_s=kept.swap_token_s, swap_source=kept.swap_source)


def profile_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or one that `paceline sim fit` wrote."""
    path = _FOLDER / f"{name}.json"
    if name not in profile_names():
        path = Path(name)
        if not path.is_file():
            raise ConfigError(
                f"gpu is {name!r}: choose one of {', '.join(profile_names())}, or give a file of `sim fit`."
            )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path.name} is no profile: {error}.") from None


class Charged:
    """A profile's times on a clock: the host's pass when a pass is launched, so what overlap hides can be seen; the
    device's, and what is launched beside it, are what the virtual executor is told."""

    def __init__(self, profile: Profile, clock: VirtualClock) -> None:
        self._profile, self._clock = profile, clock
        self._ended = FinishedRequests()
        self.host_s = 0.0

    def ended(self, finished: Sequence[Finished]) -> None:
        """These came with the last results; the host is busy with them before the next launch."""
        self._ended = FinishedRequests.of(one.request for one in finished)

    def of(self, plan: Plan) -> float:
        features = read_features(plan, self._profile.buckets)
        host_s = self._profile.host_s(features, self._ended)
        self._ended = FinishedRequests()
        self.host_s += host_s
        self._clock.advance(host_s)
        return self._profile.device_s(features)

    def launching(self, plan: Plan) -> float:
        seconds = self._profile.launch_s if plan.num_prefill_tokens else 0.0
        self.host_s += seconds
        return seconds
