"""The specification of a model: all sizes and options that the decoder and the KV cache need, and no tensors.

A spec is read from a config.json (`registry.spec_from_config`) or GGUF metadata (`gguf.py`), or taken from the table of
named shapes (`registry.py`). An option that cannot be computed exactly is refused before any weight is read: a model
that loads and gives slightly wrong outputs is worse than one that does not load.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.request import PacelineError

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
NORM_PLACEMENTS = ("pre", "post", "both")
ROUTERS = ("softmax", "sigmoid")
_PER_LAYER = ("windows", "layer_ropes", "sparse_layers")  # fields of ModelSpec with one entry per layer


class ModelError(PacelineError, ValueError):
    """A model cannot be used. The message names the file or field, its value and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions map to angles. `rope.py` computes the table.

    `kind` is plain, linear, llama3, yarn, divisors or longrope. The last two divide each frequency by its own number:
    `divisors` is how GGUF files store the llama3 scaling, longrope (Phi-3) has a second set for contexts longer than
    the original one.
    """

    theta: float = 10_000.0
    kind: str = "plain"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn, longrope: the context before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the borders of the ramp to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: factor of cos and sin
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()  # longrope: where more positions than original_context are served


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
    # clamped_swiglu (gpt-oss): (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and |up| <= limit
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    norm_placement: str = "pre"  # RMSNorm before each block (pre), after it (post; OLMo 2), or both (Gemma 2)
    attention_scale: float | None = None  # factor of the attention scores; None: head_dim ** -0.5
    score_cap: float | None = None  # soft cap of the attention scores: cap * tanh(score / cap)
    # Every query head has a learned score that is in the denominator of its softmax, and that of no key (gpt-oss).
    attention_sinks: bool = False
    logit_cap: float | None = None  # soft cap of the final logits
    embedding_scale: float = 1.0  # factor of the embeddings (Gemma, Granite)
    residual_scale: float = 1.0  # factor of what a block adds (Granite); weights contain it from load on (stored.py)
    logit_scale: float = 1.0  # factor of the logits (Granite), before their cap
    # Leading dimensions of a head that are rotated (Phi-4-mini); None: all. Weights are rearranged for it (stored.py).
    rotary_dim: int | None = None
    tied: bool = False  # the LM head is the embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    full_qk_norm: bool = False  # QK-norm over all heads together (OLMo 2) instead of head by head
    windows: tuple[int | None, ...] = ()  # per layer: sliding window, including the token itself; None: all positions
    num_experts: int = 0  # of a mixture of experts; 0: all layers are dense
    experts_per_token: int = 0  # top k
    expert_ffn_size: int = 0
    router: str = "softmax"  # scores of the experts: one of ROUTERS
    renormalise_experts: bool = True  # the weights of a token's experts add up to 1
    expert_bias: bool = False  # the router and the projections of experts have biases (gpt-oss)
    shared_expert_ffn_size: int = 0  # of an expert that all tokens use, with a gate of its own (Qwen2-MoE); 0: none
    sparse_layers: tuple[bool, ...] = ()  # per layer: has experts; dense ones have an MLP of ffn_size
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # of the stored weights

    def __post_init__(self) -> None:
        # An empty tuple means that all layers are alike. It is expanded here, so that no reader handles two forms.
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if not self.layer_ropes:
            object.__setattr__(self, "layer_ropes", (0,) * self.num_layers)
        if not self.sparse_layers:
            object.__setattr__(self, "sparse_layers", (self.num_experts > 0,) * self.num_layers)
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
        for name in _PER_LAYER:
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
        if any(self.sparse_layers):
            self._check_experts()
        for name, choices in (
            ("activation", ACTIVATIONS),
            ("norm_placement", NORM_PLACEMENTS),
            ("router", ROUTERS),
        ):
            if getattr(self, name) not in choices:
                raise ModelError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(choices)}.")
        for name in ("attention_scale", "score_cap", "logit_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ModelError(f"{name} is {value}: give a positive number, or None for the default.")
        for name in ("embedding_scale", "residual_scale", "logit_scale", "swiglu_alpha", "swiglu_limit"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelError(f"{name} is {getattr(self, name)}: give a positive number.")
        if self.attention_sinks and self.score_cap is not None:
            raise ModelError(f"score_cap is {self.score_cap}: attention sinks with a cap are not supported, give None.")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise ModelError(f"rotary_dim is {self.rotary_dim}: give an even number up to head_dim = {self.head_dim}.")

    def _check_experts(self) -> None:
        for name in ("num_experts", "expert_ffn_size"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}: give at least 1.")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelError(
                f"experts_per_token is {self.experts_per_token}: give 1 to num_experts = {self.num_experts}."
            )
        if self.shared_expert_ffn_size < 0:
            raise ModelError(f"shared_expert_ffn_size is {self.shared_expert_ffn_size}: give 0 for none, or a size.")
        if self.mlp_bias:
            raise ModelError("mlp_bias is True: layers with experts have expert_bias instead, choose another model.")
        if self.expert_bias and self.shared_expert_ffn_size:
            raise ModelError("expert_bias is True: a shared expert with biases is not supported, choose another model.")

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
        return max(1, self.layer_gemms // (4 * self.q_size))

    @property
    def num_sparse_layers(self) -> int:
        return sum(self.sparse_layers)

    @property
    def has_dense_layers(self) -> bool:
        return not all(self.sparse_layers)

    @property
    def layer_gemms(self) -> int:
        """Multiplications of a token in the GEMMs of a layer, on average."""
        sparse = self.experts_per_token * self.expert_ffn_size + self.shared_expert_ffn_size
        num_sparse = self.num_sparse_layers
        ffn = (num_sparse * sparse + (self.num_layers - num_sparse) * self.ffn_size) / self.num_layers
        router = self.num_experts * num_sparse / self.num_layers
        return int(self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * ffn + router))

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: of a mixture of experts, only those of its experts."""
        unused = self.num_experts - self.experts_per_token
        return self.num_parameters - self.num_expert_parameters * unused // max(self.num_experts, 1)

    @property
    def num_expert_parameters(self) -> int:
        """Those of the matrices of routed experts."""
        return self.num_sparse_layers * self.num_experts * 3 * self.hidden_size * self.expert_ffn_size

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
            + (4 if self.norm_placement == "both" else 2) * self.hidden_size
            + (self.q_size + 2 * self.kv_size if self.qkv_bias else 0)
            + (self.hidden_size if self.out_bias else 0)
            + (self.num_heads if self.attention_sinks else 0)
            + (2 * self.ffn_size + self.hidden_size if self.mlp_bias else 0)
            + (0 if not self.qk_norm else self.q_size + self.kv_size if self.full_qk_norm else 2 * self.head_dim)
        )
        shared = 3 * self.shared_expert_ffn_size + 1 if self.shared_expert_ffn_size else 0
        sparse = self.hidden_size * (self.num_experts * (3 * self.expert_ffn_size + 1) + shared)
        if self.expert_bias:
            sparse += self.num_experts * (2 * self.expert_ffn_size + self.hidden_size + 1)
        dense = 3 * self.hidden_size * self.ffn_size
        mlps = self.num_sparse_layers * sparse + (self.num_layers - self.num_sparse_layers) * dense
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * per_layer + mlps + embeddings + self.hidden_size

    def num_read_parameters(self, num_tokens: int) -> int:
        """Parameters that a forward pass of so many tokens reads, if the router chooses experts at random."""
        return self.num_parameters - int(self.num_expert_parameters * (1 - self.read_share_of_experts(num_tokens)))

    def read_share_of_experts(self, num_tokens: int) -> float:
        """The share of the experts that a forward pass of so many tokens reads, in the same sense."""
        if not self.num_experts:
            return 1.0
        return float(1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens)

    def with_layers(self, layers: Sequence[int]) -> ModelSpec:
        """The same model with these of its layers."""
        per_layer: dict[str, Any] = {name: tuple(getattr(self, name)[one] for one in layers) for name in _PER_LAYER}
        return dataclasses.replace(self, num_layers=len(layers), **per_layer)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of one position in the KV cache, over all layers."""
        return 2 * self.num_layers * self.kv_size * dtype_bytes
