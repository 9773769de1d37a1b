"""The specification of a model: all sizes and options that the decoder and the KV cache need, and no tensors.

A spec is read from a config.json (`registry.spec_from_config`) or GGUF metadata (`gguf.py`), or taken from the table of
named shapes (`registry.py`). An option that cannot be computed exactly is refused before any weight is read: a model
that loads and gives slightly wrong outputs is worse than one that does not load.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.request import PacelineError

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu_tanh")
NORM_PLACEMENTS = ("pre", "post", "both")


class ModelError(PacelineError, ValueError):
    """A model cannot be used. The message names the file or field, its value and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions map to angles. `rope.py` computes the table.

    `kind` is plain, linear, llama3, yarn or divisors; the last one divides each frequency by its own number, which is
    how GGUF files store the llama3 scaling.
    """

    theta: float = 10_000.0
    kind: str = "plain"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn: the context before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the borders of the ramp to whole dimensions
    attention_factor: float = 1.0  # yarn: factor of cos and sin
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only model. Every option of every family is a field, so that one decoder runs all of them."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_tokens: int
    ropes: tuple[RopeSpec, ...] = (RopeSpec(),)  # one per kind of layer; most models have one
    layer_ropes: tuple[int | None, ...] = ()  # per layer: index into `ropes`; None: no rotary positions (SmolLM3)
    rms_eps: float = 1e-5
    activation: str = "silu"  # of the gate in the MLP: one of ACTIVATIONS
    norm_placement: str = "pre"  # RMSNorm before each block (pre), after it (post; OLMo 2), or both (Gemma 2)
    attention_scale: float | None = None  # factor of the attention scores; None: head_dim ** -0.5
    score_cap: float | None = None  # soft cap of the attention scores: cap * tanh(score / cap)
    logit_cap: float | None = None  # soft cap of the final logits
    tied: bool = False  # the LM head is the embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # per layer: sliding window, including the token itself; None: all positions
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # of the stored weights

    def __post_init__(self) -> None:
        # An empty tuple means that all layers are alike. It is expanded here, so that no reader handles two forms.
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if not self.layer_ropes:
            object.__setattr__(self, "layer_ropes", (0,) * self.num_layers)
        self._check()

    def _check(self) -> None:
        for name in (
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_size",
            "vocab_size",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}: give at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads is {self.num_heads}, which is not a multiple of num_kv_heads = {self.num_kv_heads}: "
                "give the same number of query heads to every KV head."
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}: give an even number, which rotary positions need.")
        if self.context_tokens < 2:
            raise ModelError(f"context_tokens is {self.context_tokens}: give at least 2.")
        if self.dtype not in DTYPES:
            raise ModelError(f"dtype is {self.dtype!r}: choose one of {', '.join(DTYPES)}.")
        for name in ("windows", "layer_ropes"):
            if len(getattr(self, name)) != self.num_layers:
                raise ModelError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers: give one per layer."
                )
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError(f"sliding window is {min(w for w in self.windows if w is not None)}: give at least 1.")
        for rope in self.layer_ropes:
            if rope is not None and not 0 <= rope < len(self.ropes):
                raise ModelError(
                    f"layer_ropes has the index {rope}, but ropes has {len(self.ropes)} entries: "
                    f"give an index below {len(self.ropes)}, or None for no rotary positions."
                )
        for name, choices in (("activation", ACTIVATIONS), ("norm_placement", NORM_PLACEMENTS)):
            if getattr(self, name) not in choices:
                raise ModelError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(choices)}.")
        for name in ("attention_scale", "score_cap", "logit_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ModelError(f"{name} is {value}: give a positive number, or None for the default.")

    def refuse(self, backend: str, fields: Sequence[str], remedy: str) -> None:
        """Raises if one of `fields` differs from its default: `backend` does not compute it yet."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in fields and value != field.default:
                raise ModelError(f"{field.name} is {value!r}, which {backend} does not support: {remedy}.")

    @property
    def softmax_scale(self) -> float:
        """Factor of the attention scores before the softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def double_cost_context(self) -> int:
        """Context at which the attention of a token takes as long as its GEMMs, which run at twice the speed."""
        gemms = self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.ffn_size)
        return max(1, gemms // (4 * self.q_size))

    @property
    def size_name(self) -> str:
        """Family and size: the name of the model in recordings and in profiles fitted to them."""
        return f"{self.family}-{self.num_parameters / 1e9:.2f}b"

    @property
    def num_parameters(self) -> int:
        """Parameters as stored: a tied LM head counts once."""
        per_layer = (
            self.hidden_size * (self.q_size + 2 * self.kv_size)
            + self.q_size * self.hidden_size
            + 3 * self.hidden_size * self.ffn_size
            + (4 if self.norm_placement == "both" else 2) * self.hidden_size
            + (self.q_size + 2 * self.kv_size if self.qkv_bias else 0)
            + (self.hidden_size if self.out_bias else 0)
            + (2 * self.ffn_size + self.hidden_size if self.mlp_bias else 0)
            + (2 * self.head_dim if self.qk_norm else 0)
        )
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * per_layer + embeddings + self.hidden_size

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of one position in the KV cache, over all layers."""
        return 2 * self.num_layers * self.kv_size * dtype_bytes


def read_rope(config: Mapping[str, Any], default_theta: float) -> RopeSpec:
    """The RoPE settings of a config.json, in the old form (rope_theta, rope_scaling) or the new one
    (rope_parameters)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelError("rope_parameters differ by layer type: this is not supported, choose another model.")
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or default_theta)
    partial = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(
            f"partial_rotary_factor is {partial}: only models that rotate whole heads are supported, choose another "
            "model."
        )
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
        if kind == "yarn":
            return _read_yarn(theta, scaling, int(config["max_position_embeddings"]))
    except KeyError as error:
        raise ModelError(
            f"rope scaling {kind!r} lacks {error.args[0]!r}: config.json is incomplete, fetch it again."
        ) from None
    raise ModelError(
        f"rope scaling is {kind!r}: supported are default, linear, dynamic, llama3 and yarn, choose another model."
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
