"""The layers of a model as values: what each computes, with all of its sizes and options, and no tensors.

    x = x + residual_scale * norm(mixer(norm(x)))      mixes positions: `Attention`
    x = x + residual_scale * norm(ffn(norm(x)))        transforms each position: `Dense` or `Experts`

Every value checks itself, knows its costs and its part on one rank, so layers may differ in any of it: a model adds up
its layers. Readers make these values, and decoders dispatch on their types once, when they are built. A new kind of
mixer or FFN is a class here with the same methods, a branch in `layout.py`, and one in every decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

from paceline.model.errors import ModelError, require_at_least, require_choice, require_positive

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
NORM_PLACEMENTS = ("pre", "post", "both")
QK_NORMS = ("none", "heads", "whole")
ROUTERS = ("softmax", "sigmoid")
STATE_ALIGN = 64  # bytes: a mixer can view its state in any type


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


class Division(Protocol):
    """What the values here ask of `layout.Shard`, which divides a model among ranks."""

    def heads(self, mixer: Attention) -> tuple[slice, slice]: ...
    def width(self, name: str, count: int) -> int: ...
    def check_divides(self, name: str, count: int) -> None: ...


class Rotation(NamedTuple):
    """What a table of rotary positions depends on. Layers with the same one share a table."""

    rope: RopeSpec
    head_dim: int
    rotary_dim: int


class Pool(Enum):
    """Where the units of a cache group come from."""

    PAGES = "pages"  # a unit is one page id's: the same id in all groups of this pool
    SLOTS = "slots"  # a unit is one running request's: that of its slot


@dataclass(frozen=True, slots=True)
class PagedKv:
    """A layer keeps keys and values of every position, in pages that requests with a common prefix share."""

    pool: ClassVar[Pool] = Pool.PAGES
    num_kv_heads: int
    head_dim: int  # of keys
    v_head_dim: int
    window: int | None  # later positions never read older ones; None: all are kept

    @property
    def group(self) -> PagedKv:
        """What layers of one cache group have in common. Pages behind a window are kept, so it makes no difference."""
        return replace(self, window=None)

    def num_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one position in one layer."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * dtype_bytes

    def unit_bytes(self, dtype_bytes: int, page_size: int) -> int:
        return page_size * self.num_bytes(dtype_bytes)


@dataclass(frozen=True, slots=True)
class State:
    """A layer keeps a fixed number of bytes of a running request, whatever its length; all zero at its beginning. They
    belong to the last computed position: a request cannot resume at an earlier one, and none can share its prefix."""

    pool: ClassVar[Pool] = Pool.SLOTS
    name: str
    num_bytes: int

    @property
    def group(self) -> State:
        return self

    def unit_bytes(self, dtype_bytes: int, page_size: int) -> int:
        return -(-self.num_bytes // STATE_ALIGN) * STATE_ALIGN


Cache = PagedKv | State


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention over cached keys and values: MHA, GQA or MQA."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # sliding window, including the token itself; None: all positions
    rope: RopeSpec | None = RopeSpec()
    # Leading dimensions of a head that are rotated (Phi-4-mini); None: all. Weights are rearranged for it (stored.py).
    rotary_dim: int | None = None
    qk_norm: str = "none"  # RMSNorm of queries and keys: head by head (heads), or over all heads together (whole)
    qkv_bias: bool = False
    out_bias: bool = False
    # Every query head has a learned score that is in the denominator of its softmax, and that of no key (gpt-oss).
    sinks: bool = False
    scale: float | None = None  # factor of the scores; None: head_dim ** -0.5
    score_cap: float | None = None  # soft cap of the scores: cap * tanh(score / cap)

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_heads", "num_kv_heads", "head_dim", "window")
        require_positive(self, "scale", "score_cap")
        require_choice(self, "qk_norm", QK_NORMS)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"Attention.num_heads is {self.num_heads}, which is not a multiple of num_kv_heads = "
                f"{self.num_kv_heads}: give the same number of query heads to every KV head."
            )
        if self.head_dim % 2:
            raise ModelError(f"Attention.head_dim is {self.head_dim}: give an even number, for rotary positions.")
        if self.sinks and self.score_cap is not None:
            raise ModelError(f"Attention.score_cap is {self.score_cap}: sinks with a cap are not supported, give None.")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise ModelError(
                f"Attention.rotary_dim is {self.rotary_dim}: give an even number up to head_dim = {self.head_dim}."
            )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores before the softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotation(self) -> Rotation | None:
        """None: no rotary positions."""
        return None if self.rope is None else Rotation(self.rope, self.head_dim, self.rotary_dim or self.head_dim)

    @property
    def cache(self) -> PagedKv:
        return PagedKv(self.num_kv_heads, self.head_dim, self.head_dim, self.window)

    @property
    def position_macs(self) -> int:
        """Multiply-accumulates of a token for every position that it attends to."""
        return 2 * self.q_size

    def num_macs(self, hidden_size: int) -> int:
        """Multiply-accumulates of a token in the GEMMs."""
        return hidden_size * (self.qkv_size + self.q_size)

    def num_parameters(self, hidden_size: int) -> int:
        return (
            self.num_macs(hidden_size)
            + (self.qkv_size if self.qkv_bias else 0)
            + (hidden_size if self.out_bias else 0)
            + (self.num_heads if self.sinks else 0)
            + {"none": 0, "heads": 2 * self.head_dim, "whole": self.q_size + self.kv_size}[self.qk_norm]
        )

    def shard(self, shard: Division) -> Attention:
        """The heads of one rank."""
        shard.check_divides("Attention.num_heads", self.num_heads)
        queries, kv = shard.heads(self)
        return replace(self, num_heads=queries.stop - queries.start, num_kv_heads=kv.stop - kv.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """What an MLP does with its gate and up projections. clamped_swiglu (gpt-oss) is (up + 1) * gate * sigmoid(alpha *
    gate), with gate <= limit and |up| <= limit."""

    kind: str = "silu"  # of the gate, or of both: one of ACTIVATIONS
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        require_choice(self, "kind", ACTIVATIONS)
        require_positive(self, "swiglu_alpha", "swiglu_limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A gated MLP."""

    size: int
    activation: Activation = Activation()
    bias: bool = False  # of all three projections

    def __post_init__(self) -> None:
        require_at_least(self, 1, "size")

    def num_macs(self, hidden_size: int) -> int:
        """Multiply-accumulates of a token."""
        return 3 * hidden_size * self.size

    def num_parameters(self, hidden_size: int) -> int:
        return self.num_macs(hidden_size) + (2 * self.size + hidden_size if self.bias else 0)

    def num_active_parameters(self, hidden_size: int) -> int:
        return self.num_parameters(hidden_size)

    def shard(self, shard: Division) -> Dense:
        return replace(self, size=shard.width("Dense.size", self.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router chooses the experts of a token from their scores."""

    kind: str = "softmax"  # scores: one of ROUTERS
    renormalise: bool = True  # the weights of a token's experts add up to 1

    def __post_init__(self) -> None:
        require_choice(self, "kind", ROUTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: gated MLPs, of which a router chooses some for each token."""

    count: int
    per_token: int  # top k
    size: int  # of one expert's MLP
    routing: Routing = Routing()
    activation: Activation = Activation()
    bias: bool = False  # of the router and of the projections of experts (gpt-oss)
    shared_size: int = 0  # of an expert that all tokens use, with a gate of its own (Qwen2-MoE); 0: none

    def __post_init__(self) -> None:
        require_at_least(self, 1, "count", "size", "per_token")
        require_at_least(self, 0, "shared_size")
        if self.per_token > self.count:
            raise ModelError(f"Experts.per_token is {self.per_token}: give 1 to count = {self.count}.")
        if self.bias and self.shared_size:
            raise ModelError("Experts.bias is True: a shared expert beside it is not supported, give False.")

    def num_macs(self, hidden_size: int) -> int:
        """Multiply-accumulates of a token."""
        return hidden_size * (3 * (self.per_token * self.size + self.shared_size) + self.count)

    def num_parameters(self, hidden_size: int) -> int:
        shared = hidden_size * (3 * self.shared_size + 1) if self.shared_size else 0
        biases = self.count * (2 * self.size + hidden_size + 1) if self.bias else 0
        return self.num_expert_parameters(hidden_size) + hidden_size * self.count + shared + biases

    def num_expert_parameters(self, hidden_size: int) -> int:
        """Those of the matrices of routed experts."""
        return self.count * 3 * hidden_size * self.size

    def num_active_parameters(self, hidden_size: int) -> int:
        """Those that one token uses."""
        unused = self.count - self.per_token
        return self.num_parameters(hidden_size) - self.num_expert_parameters(hidden_size) * unused // self.count

    def read_share(self, num_tokens: int) -> float:
        """The share of the experts that so many tokens use, if the router chooses at random."""
        return float(1 - (1 - self.per_token / self.count) ** num_tokens)

    def shard(self, shard: Division) -> Experts:
        """Some columns of every expert."""
        shared = shard.width("Experts.shared_size", self.shared_size) if self.shared_size else 0
        return replace(self, size=shard.width("Experts.size", self.size), shared_size=shared)


Mixer = Attention
Ffn = Dense | Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer of a model."""

    mixer: Mixer
    ffn: Ffn
    norms: str = "pre"  # RMSNorm before mixer and FFN (pre), after them (post; OLMo 2), or both (Gemma 2)
    residual_scale: float = 1.0  # factor of what both add (Granite); weights contain it from load on (stored.py)

    def __post_init__(self) -> None:
        require_choice(self, "norms", NORM_PLACEMENTS)
        require_positive(self, "residual_scale")

    def num_macs(self, hidden_size: int) -> int:
        """Multiply-accumulates of a token in the GEMMs."""
        return self.mixer.num_macs(hidden_size) + self.ffn.num_macs(hidden_size)

    def num_parameters(self, hidden_size: int) -> int:
        norms = (4 if self.norms == "both" else 2) * hidden_size
        return self.mixer.num_parameters(hidden_size) + self.ffn.num_parameters(hidden_size) + norms

    def shard(self, shard: Division) -> LayerSpec:
        """Its part on one rank."""
        return replace(self, mixer=self.mixer.shard(shard), ffn=self.ffn.shard(shard))


def varied_layers(
    layers: Sequence[LayerSpec],
    *,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeSpec | None] | None = None,
    ffns: Sequence[Ffn] | None = None,
) -> tuple[LayerSpec, ...]:
    """These layers with other values: each is given for all of them, one per layer."""
    each: tuple[tuple[str, Sequence[Any] | None], ...] = (("window", windows), ("rope", ropes), ("ffn", ffns))
    given = {name: values for name, values in each if values is not None}
    for name, values in given.items():
        if len(values) != len(layers):
            raise ModelError(f"{name}s has {len(values)} entries for {len(layers)} layers: give one per layer.")
    found = []
    for index, layer in enumerate(layers):
        own = {name: values[index] for name, values in given.items()}
        ffn = own.pop("ffn", layer.ffn)
        found.append(replace(layer, mixer=replace(layer.mixer, **own), ffn=ffn))
    return tuple(found)
