"""Reads the RoPE settings of a config.json. `rope.py` computes the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.model.errors import ModelError
from paceline.model.layers import RopeSpec


def read_ropes(config: Mapping[str, Any], default_theta: float, local_theta: float | None) -> tuple[RopeSpec, ...]:
    """The RoPE settings of a config.json, in the old form (rope_theta, rope_scaling) or the new one (rope_parameters).
    local_theta: layers with a sliding window have their own (the second one), by default with this theta."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    by_kind = any(isinstance(value, Mapping) for value in given.values())
    if local_theta is None:
        if by_kind:
            raise ModelError("rope_parameters differ by layer type: this is not supported, choose another model.")
        return (_read_rope(config, given, default_theta),)
    if by_kind:
        everywhere, local = given.get("full_attention") or {}, given.get("sliding_attention") or {}
        return _read_rope(config, everywhere, default_theta), _read_rope({}, local, local_theta)
    # Scaling is that of the layers that see all positions.
    return _read_rope(config, given, default_theta), RopeSpec(
        theta=float(config.get("rope_local_base_freq", local_theta))
    )


def read_rotary_dim(config: Mapping[str, Any], head_dim: int) -> int | None:
    """`Attention.rotary_dim` of a config.json."""
    scaling = config.get("rope_parameters") or {}
    partial = float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    return None if partial == 1.0 else int(head_dim * partial)


def _read_rope(config: Mapping[str, Any], scaling: Mapping[str, Any], default_theta: float) -> RopeSpec:
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or default_theta)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    try:
        if kind in ("default", "dynamic"):
            # Dynamic scaling is plain up to max_position_embeddings; beyond that it would change keys that are already
            # cached. So it is served as plain, and the context ends where the two begin to differ.
            return RopeSpec(theta=theta)
        if kind == "linear":
            return RopeSpec(theta=theta, kind="linear", factor=float(scaling["factor"]))
        if kind == "llama3":
            return RopeSpec(
                theta=theta,
                kind="llama3",
                factor=float(scaling["factor"]),
                original_context=int(scaling["original_max_position_embeddings"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
            )
        if kind in ("longrope", "su") or "short_factor" in scaling:  # older configs name it su or yarn
            return _read_longrope(theta, config, scaling)
        if kind == "yarn":
            return _read_yarn(theta, scaling, int(config["max_position_embeddings"]))
    except KeyError as error:
        raise ModelError(
            f"rope scaling {kind!r} lacks {error.args[0]!r}: config.json is incomplete, fetch it again."
        ) from None
    raise ModelError(
        f"rope scaling is {kind!r}: supported are default, linear, dynamic, llama3, yarn and longrope, choose another "
        "model."
    )


def _read_yarn(theta: float, scaling: Mapping[str, Any], context: int) -> RopeSpec:
    original = int(scaling.get("original_max_position_embeddings") or context)
    factor = float(scaling.get("factor") or context / original)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = (
            yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
            if mscale and mscale_all_dim
            else yarn_attention_factor(factor)
        )
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=float(attention_factor),
    )


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The default factor of cos and sin for YaRN."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope(theta: float, config: Mapping[str, Any], scaling: Mapping[str, Any]) -> RopeSpec:
    context = int(config["max_position_embeddings"])
    key = "original_max_position_embeddings"
    original = int(config.get(key) or scaling.get(key) or context)
    factor = context / original if context != original else float(scaling.get("factor") or 1.0)
    given = scaling.get("attention_factor")
    return longrope(theta, scaling["short_factor"], scaling["long_factor"], original, factor, given)


def longrope(
    theta: float,
    short: Sequence[float],
    long: Sequence[float],
    original_context: int,
    factor: float,
    attention_factor: float | None = None,
) -> RopeSpec:
    """factor: by how much the context was extended, from which the attention factor follows if there is none."""
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))
    return RopeSpec(
        theta=theta,
        kind="longrope",
        original_context=original_context,
        attention_factor=float(attention_factor),
        divisors=tuple(map(float, short)),
        long_divisors=tuple(map(float, long)),
    )
