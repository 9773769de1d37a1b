"""Performance profile of a device: how long a forward pass takes on the device and on the host, fitted to recordings.

A decode batch runs as a CUDA graph: it takes the base time of the bucket, more where rows share a prefix, plus a
term per KV position read, once for rows that share it. A prefill or mixed batch takes a term per new token, per
query-key pair in attention, and per KV position that its decodes read; its kernels are launched one by one while the
device runs the first of them. Host time is results, text and planning, most of it when requests finish or join. Pages
are spilled to host memory and fetched beside the passes (`HostLink`), at a fixed rate each way. Draft tokens
(speculative decoding) add a time by graph and depth (`draft_s`), or what as many more rows would take where that was
not measured. No coefficient is negative: more work never takes less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from paceline.config import ConfigError
from paceline.engine.pass_features import FinishedRequests, PassFeatures, read_features
from paceline.engine.virtual.executor import VirtualClock
from paceline.scheduler.plan import Finished, Plan

_FOLDER = Path(__file__).parent / "profiles"
# Terms of each kind of batch and of the host: fields of PassFeatures, and of FinishedRequests
DECODE_TERMS = ("own_tokens", "repeated_tokens", "longest_context")
PROMPT_TERMS = (
    "num_prompt_tokens",
    "prompt_pairs",
    "own_tokens",
    "repeated_tokens",
    "num_decodes",
    "has_decodes",
    "num_moved_pages",
)
HOST_TERMS = (
    "num_decodes",
    "has_prompts",
    "num_joins",
    "join_tokens",
    "has_page_changes",
    "num_page_changes",
    "num_spilled_pages",
    "num_fetched_pages",
)
ENDED_TERMS = ("has_requests", "num_requests", "prompt_tokens", "output_tokens")


class Linear(msgspec.Struct, frozen=True, dict=True):
    """A linear model of seconds: a base plus a coefficient per feature."""

    base: float
    per: dict[str, float]

    def seconds(self, features: PassFeatures | FinishedRequests) -> float:
        total = self.base
        for name, coefficient in self.per.items():
            total += coefficient * getattr(features, name)
        return total


class Profile(msgspec.Struct, frozen=True, dict=True):
    """A device running a model. `buckets`: rows of each decode CUDA graph; `bucket_s`: its time without any KV."""

    device: str
    model: str
    source: str  # where the coefficients come from
    kv_tokens: int  # size of the KV cache beside the model
    buckets: list[int]
    bucket_s: list[float]
    decode: Linear  # added to the time of the graph
    prompt: Linear
    host: Linear  # one step of the loop: results of a pass, planning and launching the next
    ended: Linear  # host time for requests that finished in between
    launch_s: float  # host time to launch a prefill batch while the device runs its first kernels
    swap_token_s: float | None = None  # to copy the KV of a token to or from host memory; None: unknown
    swap_source: str = ""  # where swap_token_s comes from
    draft_s: dict[int, list[float]] = {}  # by drafts per row: what they add to the time of each bucket
    sharing_s: list[float] = []  # what a shared prefix adds to the time of each bucket; empty: nothing

    @cached_property
    def _by_bucket(self) -> dict[int, float]:
        return dict(zip(self.buckets, self.bucket_s, strict=True))

    def device_s(self, features: PassFeatures) -> float:
        seconds = self.batch_s(features)
        if features.num_drafts:
            seconds += self._draft_s(features)
        return seconds

    def _draft_s(self, features: PassFeatures) -> float:
        if features.has_prompts:
            return self._token_s * features.num_drafts
        if features.bucket not in self._by_bucket or not self.draft_s:
            return self.draft_rows_s(features.bucket, features.num_drafts)
        index = self.buckets.index(features.bucket)
        depths = sorted(self.draft_s)
        times = [0.0, *(self.draft_s[depth][index] for depth in depths)]
        found = float(np.interp(features.num_drafts / features.num_decodes, [0, *depths], times))
        deepest = depths[-1] * features.num_decodes
        if features.num_drafts > deepest:
            rows_s = [self.draft_rows_s(features.bucket, count) for count in (deepest, features.num_drafts)]
            found += rows_s[1] - rows_s[0]
        return found

    def draft_rows_s(self, bucket: int, num_drafts: int) -> float:
        """What the drafts of a decode batch would take if each were a row without KV to read: weights are read once for
        all rows. Past the largest bucket, where compute is the limit, each takes as long as a prompt token."""
        last, tokens = self.buckets[-1], bucket + num_drafts
        before, after = np.interp([bucket, tokens], self.buckets, self._rising_s)
        return float(after - before) + self._token_s * (max(last, tokens) - max(last, bucket))

    def spread_drafts(self, depth: int, known: Sequence[int], seconds: Sequence[float]) -> list[float]:
        """What `depth` drafts per row add to the time of each bucket, from those of `known` buckets: interpolated, and
        beyond the last one growing as with as many more rows."""
        rows_s = {bucket: self.draft_rows_s(bucket, depth * bucket) for bucket in (*self.buckets, known[-1])}
        beyond = [max(0.0, rows_s[one] - rows_s[known[-1]]) if one > known[-1] else 0.0 for one in self.buckets]
        found: list[float] = (np.interp(self.buckets, known, seconds) + beyond).tolist()
        return found

    @property
    def _token_s(self) -> float:
        return self.prompt.per.get("num_prompt_tokens", 0.0)

    @cached_property
    def _rising_s(self) -> list[float]:
        """`bucket_s`, where no graph takes less time than a smaller one."""
        rising: list[float] = np.maximum.accumulate(self.bucket_s).tolist()
        return rising

    def batch_s(self, features: PassFeatures) -> float:
        """Without drafts."""
        if features.has_prompts:
            return self.prompt.seconds(features)
        base = self._by_bucket.get(features.bucket)
        if base is None:  # more rows than were recorded: extrapolated from the last two buckets
            rows, seconds = self.buckets[-2:], self.bucket_s[-2:]
            slope = max(0.0, (seconds[1] - seconds[0]) / (rows[1] - rows[0]))
            base = seconds[1] + slope * (features.bucket - rows[1])
        if features.has_repeated and self.sharing_s:
            base += float(np.interp(features.bucket, self.buckets, self.sharing_s))
        return base + self.decode.seconds(features)

    def host_s(self, features: PassFeatures, ended: FinishedRequests) -> float:
        """Host time until an idle device can start the pass."""
        return self.host.seconds(features) + self.ended.seconds(ended)

    def swap_page_s(self, page_size: int) -> float:
        """Time to copy a page to or from host memory."""
        if self.swap_token_s is None:
            raise ConfigError(
                f"num_host_pages is set, but the profile of {self.model} has no swap_token_s (time to copy KV to host "
                "memory): set it, or fit the profile to a recording with num_host_pages."
            )
        return page_size * self.swap_token_s

    def host_page_cost(self, page_size: int) -> float:
        """The scheduler option of that name: prompt tokens computed in the time a page is fetched."""
        return round(self.swap_page_s(page_size) / self.prompt.per["num_prompt_tokens"], 3)

    @property
    def chunk_context(self) -> int:
        """The scheduler option of that name, which an engine computes from the sizes of its model."""
        return round(self.prompt.per["num_prompt_tokens"] / self.prompt.per["prompt_pairs"])

    def save(self, path: Path) -> None:
        text = msgspec.json.encode(_rounded(msgspec.to_builtins(self)))
        path.write_bytes(msgspec.json.format(text, indent=1) + b"\n")


def _rounded(value: object) -> object:
    """Six significant digits, more than a measurement has."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


class _Optional(msgspec.Struct, frozen=True):
    """What a fit leaves open if its recordings have no such passes."""

    buckets: list[int] = []
    swap_token_s: float | None = None
    swap_source: str = ""
    draft_s: dict[int, list[float]] = {}


class _Removed(msgspec.Struct, frozen=True):
    """Fields that profiles had once."""

    draft_factor: float | None = None


def keep_measured(profile: Profile, path: Path) -> Profile:
    """`profile` with the times of swapping and of drafts stored in `path`, where it has none itself."""
    if not path.exists():
        return profile
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Optional)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path.name} exists and is not a profile: {error}.") from None
    if profile.swap_token_s is None:
        profile = msgspec.structs.replace(profile, swap_token_s=kept.swap_token_s, swap_source=kept.swap_source)
    if not profile.draft_s:
        drafts = kept.draft_s
        if kept.buckets != profile.buckets:
            drafts = {depth: profile.spread_drafts(depth, kept.buckets, seconds) for depth, seconds in drafts.items()}
        profile = msgspec.structs.replace(profile, draft_s=drafts)
    return profile


def profile_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or one that `paceline sim fit` wrote."""
    path = _FOLDER / f"{name}.json"
    if name not in profile_names():
        path = Path(name)
        if not path.is_file():
            raise ConfigError(
                f"gpu is {name!r}: choose one of {', '.join(profile_names())}, or give a file written by `sim fit`."
            )
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
        removed = msgspec.json.decode(path.read_bytes(), type=_Removed)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path.name} is not a profile: {error}.") from None
    if removed.draft_factor is not None:
        raise ConfigError(
            f"{path.name} has a draft_factor of {removed.draft_factor:g}, which draft_s replaces: fit the profile "
            "again, or remove the field."
        )
    return profile


class ProfileTiming:
    """The timing model of the virtual executor: advances the clock by the host time of a launch and returns the device
    time of the pass, so that overlap shows in the results."""

    def __init__(self, profile: Profile, clock: VirtualClock) -> None:
        self._profile, self._clock = profile, clock
        self._ended = FinishedRequests()
        self.host_s = 0.0

    def ended(self, finished: Sequence[Finished]) -> None:
        """These finished with the last results; the host processes them before the next launch."""
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
