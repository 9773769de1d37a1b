"""The layout of the weights: stored parameters by name, and the fused tensors of the decoder that they are copied to.

q, k and v become one matrix, and gate and up another, so that a layer has four GEMMs. The table defines which
parameters a model has: a stored name that is not in it is unexpected, and a name in it that no file has is missing.

A `Shard` selects the part of one rank for tensor parallelism:

    split by rows (column-parallel)     q, k, v, gate, up and their biases; embedding and head by vocabulary
    split by columns (row-parallel)     out, down; the sum over ranks is the layer's output, so only rank 0 has the bias
    replicated                          norms; KV heads if there are fewer of them than ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.model.spec import ModelError, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that rank `rank` of `size` holds. The default is the whole model."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ModelError(f"shard size is {self.size}: give at least 1 rank.")
        if not 0 <= self.rank < self.size:
            raise ModelError(f"shard rank is {self.rank}: give a rank from 0 to {self.size - 1}.")

    def part(self, count: int, item_size: int = 1) -> slice:
        """This rank's part of `count` items of `item_size` rows each; one item if there are fewer items than ranks."""
        first = self.rank * count // self.size
        return slice(first * item_size, (first + max(1, count // self.size)) * item_size)

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with the sizes of this rank: its heads, KV heads, MLP columns and vocabulary rows."""
        for name in ("num_heads", "ffn_size", "vocab_size"):
            if getattr(spec, name) % self.size:
                raise ModelError(
                    f"{name} is {getattr(spec, name)}, which {self.size} ranks cannot split evenly: "
                    "choose a number of ranks that divides it."
                )
        if spec.num_kv_heads % self.size and self.size % spec.num_kv_heads:
            raise ModelError(
                f"num_kv_heads is {spec.num_kv_heads}, which {self.size} ranks can neither split evenly nor replicate "
                "evenly: choose a number of ranks that divides it or is a multiple of it."
            )
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=max(1, spec.num_kv_heads // self.size),
            ffn_size=spec.ffn_size // self.size,
            vocab_size=spec.vocab_size // self.size,
        )


WHOLE_MODEL = Shard()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a model file that has not been read yet."""

    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[], Tensor]  # on the CPU, in the dtype it is stored in


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Where a stored parameter goes: `source` of it becomes rows `row` to `row + num_rows` of the tensor `target`.

    A part with fewer dimensions than its target is repeated over the rows: the QK-norm weights are stored once per
    layer and kept once per head, so that queries and keys are normed together.
    """

    target: str
    shape: tuple[int, ...]  # of the whole parameter, as stored
    row: int
    num_rows: int
    source: tuple[slice, ...] = ()  # this rank's rows and columns; empty: all of them


# The norms of a layer: stored name (of Llama, OLMo 2 and Gemma 2) and name in the decoder.
_NORMS: dict[str, dict[str, str]] = {
    "pre": {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
    "post": {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"},
    "both": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
}


def target_shapes(spec: ModelSpec, shard: Shard = WHOLE_MODEL) -> dict[str, tuple[int, ...]]:
    """The fused tensors of the decoder on one rank, by name."""
    local = shard.spec(spec)
    hidden, qkv = spec.hidden_size, local.q_size + 2 * local.kv_size
    shapes: dict[str, tuple[int, ...]] = {"embedding": (local.vocab_size, hidden), "norm": (hidden,)}
    if not spec.tied:
        shapes["head"] = (local.vocab_size, hidden)
    for layer in range(spec.num_layers):
        at = f"{layer}."
        shapes.update({at + name: (hidden,) for name in _NORMS[spec.norm_placement].values()})
        shapes[at + "qkv"] = (qkv, hidden)
        shapes[at + "out"] = (hidden, local.q_size)
        shapes[at + "gate_up"] = (2 * local.ffn_size, hidden)
        shapes[at + "down"] = (hidden, local.ffn_size)
        if spec.qkv_bias:
            shapes[at + "qkv_bias"] = (qkv,)
        if spec.out_bias and shard.rank == 0:
            shapes[at + "out_bias"] = (hidden,)
        if spec.mlp_bias:
            shapes[at + "gate_up_bias"] = (2 * local.ffn_size,)
        if spec.mlp_bias and shard.rank == 0:
            shapes[at + "down_bias"] = (hidden,)
        if spec.qk_norm:
            shapes[at + "qk_norm"] = (local.num_heads + local.num_kv_heads, spec.head_dim)
    return shapes


def stored_parts(spec: ModelSpec, shard: Shard = WHOLE_MODEL) -> dict[str, StoredPart]:
    """The parameters that one rank reads, by their Hugging Face names."""
    shard.spec(spec)  # raises if the sizes do not divide
    vocabulary, shape = shard.part(spec.vocab_size), (spec.vocab_size, spec.hidden_size)
    parts = {
        "model.embed_tokens.weight": _rows("embedding", shape, vocabulary),
        "model.norm.weight": _whole("norm", (spec.hidden_size,)),
    }
    if not spec.tied:
        parts["lm_head.weight"] = _rows("head", shape, vocabulary)
    for layer in range(spec.num_layers):
        parts.update(_layer_parts(spec, shard, f"model.layers.{layer}.", f"{layer}."))
    return parts


def _layer_parts(spec: ModelSpec, shard: Shard, stored: str, at: str) -> Iterator[tuple[str, StoredPart]]:
    hidden, ffn = spec.hidden_size, spec.ffn_size
    for name, target in _NORMS[spec.norm_placement].items():
        yield f"{stored}{name}.weight", _whole(at + target, (hidden,))
    q = shard.part(spec.num_heads, spec.head_dim)
    kv = shard.part(spec.num_kv_heads, spec.head_dim)
    row = 0
    for name, size, rows in (("q", spec.q_size, q), ("k", spec.kv_size, kv), ("v", spec.kv_size, kv)):
        yield f"{stored}self_attn.{name}_proj.weight", _rows(at + "qkv", (size, hidden), rows, row)
        if spec.qkv_bias:
            yield f"{stored}self_attn.{name}_proj.bias", _rows(at + "qkv_bias", (size,), rows, row)
        row += rows.stop - rows.start
    yield stored + "self_attn.o_proj.weight", _columns(at + "out", (hidden, spec.q_size), q)
    if spec.out_bias and shard.rank == 0:
        yield stored + "self_attn.o_proj.bias", _whole(at + "out_bias", (hidden,))
    if spec.qk_norm:
        local, shape = shard.spec(spec), (spec.head_dim,)
        for name, row, heads in (("q", 0, local.num_heads), ("k", local.num_heads, local.num_kv_heads)):
            yield f"{stored}self_attn.{name}_norm.weight", StoredPart(at + "qk_norm", shape, row, heads)
    part = shard.part(ffn)
    num_rows = part.stop - part.start
    for row, name in ((0, "gate"), (num_rows, "up")):
        yield f"{stored}mlp.{name}_proj.weight", _rows(at + "gate_up", (ffn, hidden), part, row)
        if spec.mlp_bias:
            yield f"{stored}mlp.{name}_proj.bias", _rows(at + "gate_up_bias", (ffn,), part, row)
    yield stored + "mlp.down_proj.weight", _columns(at + "down", (hidden, ffn), part)
    if spec.mlp_bias and shard.rank == 0:
        yield stored + "mlp.down_proj.bias", _whole(at + "down_bias", (hidden,))


def _whole(target: str, shape: tuple[int, ...]) -> StoredPart:
    return StoredPart(target, shape, 0, shape[0])


def _rows(target: str, shape: tuple[int, ...], rows: slice, row: int = 0) -> StoredPart:
    return StoredPart(target, shape, row, rows.stop - rows.start, (rows,))


def _columns(target: str, shape: tuple[int, ...], columns: slice) -> StoredPart:
    return StoredPart(target, shape, 0, shape[0], (slice(None), columns))
