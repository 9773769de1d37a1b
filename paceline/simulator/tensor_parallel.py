"""The profile of N GPUs with tensor parallelism, derived from the fitted profile of one: predicted, not measured.

Every coefficient of a profile belongs to a kind of work, and `RankWork` divides the kinds. What a decode batch takes
beyond reading its weights at the profile's own memory bandwidth (that of KV) is launches and is not divided.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paceline.config import ConfigError
from paceline.engine.pass_features import PassFeatures
from paceline.engine.virtual.tensor_parallel import RankWork
from paceline.model.shapes import SHAPES
from paceline.model.spec import ModelSpec
from paceline.simulator.profile import LinearCost, Profile


class ShardedProfile(Profile, frozen=True, dict=True, kw_only=True):
    """The times of one rank, and what all ranks exchange."""

    work: RankWork

    def device_s(self, features: PassFeatures) -> float:
        return super().device_s(features) + self.exchange_s(features)

    def exchange_s(self, features: PassFeatures) -> float:
        """The collectives of a pass. The padding of a CUDA graph is exchanged, too."""
        if features.has_prompts:
            num_tokens = features.num_prompt_tokens + features.num_decodes + features.num_drafts
            return self.work.exchange_s(num_tokens, features.num_sampled + features.num_drafts)
        num_rows = features.bucket + features.num_drafts
        return self.work.exchange_s(num_rows, num_rows)


def shard_profile(profile: Profile, num_ranks: int) -> Profile:
    """`profile` on `num_ranks` GPUs; itself for one."""
    if num_ranks == 1:
        return profile
    spec = _spec_of(profile)
    work = RankWork(spec, num_ranks, _bandwidth(profile, spec))
    fixed_s = max(0.0, min(profile.bucket_s) - work.weights_s)
    # The fit gives small prefill batches less than their weights take to read, so the base may have no launches left.
    # They are those of a decode batch at least.
    prompt_fixed_s = max(fixed_s, profile.prompt.base - work.weights_s)
    token_s = profile.prompt.per["num_prompt_tokens"]
    prompt_shares = {
        "num_prompt_tokens": work.token_s(token_s) / token_s,
        "num_decodes": work.weights,
        "prompt_pairs": work.heads,
        "own_tokens": work.kv,
        "repeated_tokens": work.kv,
        "num_moved_pages": work.kv,
        "has_decodes": 1.0,  # more launches
    }
    decode_shares = {
        "own_tokens": work.kv,
        "repeated_tokens": work.heads,
        "longest_context": 1.0,  # a latency
        "has_repeated": 1.0,  # more launches, as sharing_s; of profiles fitted before it
    }
    swap_token_s = None if profile.swap_token_s is None else profile.swap_token_s * work.kv  # each GPU has a link
    changed = {
        "kv_tokens": work.kv_tokens(profile.kv_tokens),
        "bucket_s": [work.batch_s(seconds, fixed_s) for seconds in profile.bucket_s],
        "decode": _divided(profile.decode.base, profile.decode, decode_shares),
        "prompt": _divided(work.batch_s(profile.prompt.base, prompt_fixed_s), profile.prompt, prompt_shares),
        "swap_token_s": swap_token_s,
        "draft_s": {depth: [one * work.weights for one in times] for depth, times in profile.draft_s.items()},
    }
    return ShardedProfile(**(msgspec.structs.asdict(profile) | changed), work=work)


def _divided(base: float, linear: LinearCost, shares: Mapping[str, float]) -> LinearCost:
    return LinearCost(base, {name: value * shares[name] for name, value in linear.per.items()})


def _spec_of(profile: Profile) -> ModelSpec:
    for spec in SHAPES.values():
        if spec.size_name == profile.model:
            return spec
    raise ConfigError(
        f"tp needs the sizes of the model, and the profile's model {profile.model!r} is no known shape: use a profile "
        f"of {', '.join(SHAPES)}."
    )


def _bandwidth(profile: Profile, spec: ModelSpec) -> float:
    """Bytes per second at which decode batches read KV."""
    token_s = profile.decode.per.get("own_tokens", 0.0)
    if not token_s:
        raise ConfigError(
            f"tp needs the memory bandwidth, and the profile of {profile.model} has no own_tokens: fit it to decode "
            "batches of several contexts."
        )
    return spec.kv_bytes_per_token(2) / token_s
