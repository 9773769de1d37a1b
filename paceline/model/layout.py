"""The layout of the weights: stored parameters by name, and the fused tensors of the decoder that they are copied to.

q, k and v become one matrix, and gate and up another, so that a layer has four GEMMs. The table defines which
parameters a model has: a stored name that is not in it is unexpected, and a name in it that no file has is missing.

A `Shard` selects the part of one rank for tensor parallelism:

    split by rows (column-parallel)     q, k, v, gate, up and their biases; sinks; embedding and head by vocabulary
    split by columns (row-parallel)     out, down; the sum over ranks is the layer's output, so only rank 0 has the bias
    replicated                          norms, routers; KV heads if there are fewer of them than ranks

Experts are divided in the same way: each rank has some columns of every expert, and not some of the experts. So ranks
have the same work whatever the router chooses, and the sum over ranks that a dense layer needs is all they exchange.

or that of one stage for pipeline parallelism: consecutive layers, the first stage with the embedding, the last with the
final norm and the head.

Parts need not be equal: nine query heads of three KV heads are three and six for two ranks. Kernels need the same
number of query heads for every KV head of a rank, so KV heads are divided with all their query heads, unless there are
fewer of them than ranks: then ranks share a KV head and divide its query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.model.layers import Attention, Dense, Experts, LayerSpec
from paceline.model.spec import ModelError, ModelSpec
from paceline.weight_formats import MatrixKind, WeightFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paceline.model.quantized import PackedTensor

_ALIGN = 64  # columns of the MLP and rows of the vocabulary that stay together, where the size allows: kernels like it


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one process holds: rank `rank` of `size` (tensor parallelism) of stage `stage` of
    `num_stages` (pipeline parallelism). The default is the whole model."""

    rank: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ModelError(f"shard size is {self.size}: give at least 1 rank.")
        if not 0 <= self.rank < self.size:
            raise ModelError(f"shard rank is {self.rank}: give a rank from 0 to {self.size - 1}.")
        if not 0 <= self.stage < self.num_stages:
            raise ModelError(f"shard stage is {self.stage}: give a stage from 0 to {self.num_stages - 1}.")

    @property
    def num_ranks(self) -> int:
        """Processes that have a part of the model."""
        return self.size * self.num_stages

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def layers(self, spec: ModelSpec) -> range:
        """The layers of this stage. In a decode batch all stages take about as long: the head counts as the layers that
        have as many parameters."""
        return range(self._first_layer(spec, self.stage), self._first_layer(spec, self.stage + 1))

    def _first_layer(self, spec: ModelSpec, stage: int) -> int:
        if stage == self.num_stages:
            return spec.num_layers
        head = spec.vocab_size * spec.hidden_size
        layer = (spec.num_parameters - head * (1 if spec.tied else 2)) / spec.num_layers
        even = int((spec.num_layers + head / layer) * stage / self.num_stages + 0.5)
        return max(stage, min(even, spec.num_layers - (self.num_stages - stage)))  # each has one at least

    def part(self, count: int, first: int = 0) -> slice:
        """This rank's part of `count` items from `first` on. Parts differ by one item at most."""
        return slice(first + self.rank * count // self.size, first + (self.rank + 1) * count // self.size)

    def aligned_part(self, count: int) -> slice:
        """As `part`, in multiples of a power of two."""
        unit = _ALIGN
        while count % unit or count // unit < self.size:
            unit //= 2
        items = self.part(count // unit)
        return slice(items.start * unit, items.stop * unit)

    def heads(self, mixer: Attention) -> tuple[slice, slice]:
        """This rank's query heads and KV heads. mixer: of the whole model, here and in `kv_share`."""
        count, group = mixer.num_kv_heads, mixer.num_heads // mixer.num_kv_heads
        if self.size <= count:
            kv = self.part(count)
            return slice(kv.start * group, kv.stop * group), kv
        head = next(head for head in range(count) if self.rank < (head + 1) * self.size // count)
        first, end = head * self.size // count, (head + 1) * self.size // count  # the ranks of this KV head
        queries = Shard(self.rank - first, end - first).part(group, head * group)
        return queries, slice(head, head + 1)

    def kv_share(self, mixer: Attention) -> float:
        """The part of this rank in its KV heads, which several ranks have if there are fewer of them than ranks."""
        if self.size <= mixer.num_kv_heads:
            return 1.0
        mine = self.heads(mixer)[1]
        return 1 / sum(Shard(rank, self.size).heads(mixer)[1] == mine for rank in range(self.size))

    def vocabulary(self, spec: ModelSpec) -> slice:
        """The token ids whose embeddings and logits this rank has."""
        return self.aligned_part(spec.vocab_size)

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with the sizes of this rank: its layers, heads, KV heads and MLP columns. The vocabulary stays whole:
        token ids mean the same on every rank."""
        if spec.num_layers < self.num_stages:
            raise ModelError(
                f"num_layers is {spec.num_layers}, which {self.num_stages} stages cannot divide among them: "
                f"choose pp {spec.num_layers} or less."
            )
        if self.num_stages > 1:
            spec = spec.with_layers(self.layers(spec))
        if self.size == 1:
            return spec
        self.check_divides("vocab_size", spec.vocab_size)
        return replace(spec, layers=tuple(layer.shard(self) for layer in spec.layers))

    def width(self, name: str, count: int) -> int:
        """How many of so many MLP columns this rank has. name: of their field."""
        self.check_divides(name, count)
        part = self.aligned_part(count)
        return int(part.stop - part.start)

    def check_divides(self, name: str, count: int) -> None:
        if count < self.size:
            raise ModelError(
                f"{name} is {count}, which {self.size} ranks cannot divide among them: choose tp {count} or less."
            )


WHOLE_MODEL = Shard()


def different_shards(spec: ModelSpec, size: int) -> list[Shard]:
    """One rank for every combination of sizes that a rank can have."""
    found: dict[tuple[ModelSpec, int], Shard] = {}
    for rank in range(size):
        shard = Shard(rank, size)
        ids = shard.vocabulary(spec)
        found.setdefault((shard.spec(spec), ids.stop - ids.start), shard)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How a stored matrix is read in the bits of a weight format."""

    format: WeightFormat
    read: Callable[[tuple[slice, ...], str | torch.device], PackedTensor]  # these rows and columns, on a device
    group: int = 0  # columns with one scale; 0: all
    block_rows: int = 1  # rows with one scale
    is_stored: bool = True  # False: it is rounded, since most other matrices of the file are stored so


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a model file that has not been read yet."""

    shape: tuple[int, ...]
    num_bytes: int
    # The rows and columns of these slices, or all of it, on the CPU, in the dtype it is stored in. A file that can be
    # read in part is: a rank never has more of a model in memory than its own part and one tensor.
    read: Callable[[tuple[slice, ...]], Tensor]
    packed: PackedForm | None = None  # None: it can only be expanded


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Where a stored parameter goes: `source` of it becomes rows `row` to `row + num_rows` of the tensor `target`.

    A part with fewer dimensions than its target is repeated over the rows: the QK-norm weights are stored once per
    layer and kept once per head, so that queries and keys are normed together. Those of a norm over all heads
    (`qk_norm` whole) are stored one head after the other, and `source` selects heads.
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
    local, hidden, ids = shard.spec(spec), spec.hidden_size, shard.vocabulary(spec)
    vocabulary = (ids.stop - ids.start, hidden)
    shapes: dict[str, tuple[int, ...]] = {}
    if shard.is_first or (shard.is_last and spec.tied):
        shapes["embedding"] = vocabulary
    if shard.is_last:
        shapes["norm"] = (hidden,)
        if not spec.tied:
            shapes["head"] = vocabulary
    for index, layer in enumerate(local.layers):
        shapes.update({f"{index}.{name}": shape for name, shape in _layer_shapes(layer, hidden, shard).items()})
    return shapes


def _layer_shapes(layer: LayerSpec, hidden: int, shard: Shard) -> dict[str, tuple[int, ...]]:
    """layer: of this rank. `random_weights` depends on the order: matrices first."""
    mixer = layer.mixer
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_NORMS[layer.norms].values(), (hidden,))
    shapes |= {"qkv": (mixer.qkv_size, hidden), "out": (hidden, mixer.q_size)}
    shapes |= _ffn_shapes(layer.ffn, hidden, shard)
    if mixer.qkv_bias:
        shapes["qkv_bias"] = (mixer.qkv_size,)
    if mixer.out_bias and shard.rank == 0:
        shapes["out_bias"] = (hidden,)
    if mixer.qk_norm != "none":
        shapes["qk_norm"] = (mixer.num_heads + mixer.num_kv_heads, mixer.head_dim)
    if mixer.sinks:
        shapes["sinks"] = (mixer.num_heads,)
    return shapes


def _ffn_shapes(ffn: Dense | Experts, hidden: int, shard: Shard) -> dict[str, tuple[int, ...]]:
    """The tensors of an MLP or of a mixture of experts, of this rank. Those of all experts follow each other: gate and
    up of expert 0, gate and up of expert 1, ..."""
    shapes: dict[str, tuple[int, ...]]
    if isinstance(ffn, Dense):
        shapes = {"gate_up": (2 * ffn.size, hidden), "down": (hidden, ffn.size)}
        if ffn.bias:
            shapes["gate_up_bias"] = (2 * ffn.size,)
        if ffn.bias and shard.rank == 0:
            shapes["down_bias"] = (hidden,)
        return shapes
    shapes = {
        "router": (ffn.count, hidden),
        "expert_gate_up": (ffn.count * 2 * ffn.size, hidden),
        "expert_down": (ffn.count * hidden, ffn.size),
    }
    if ffn.bias:
        shapes["router_bias"] = (ffn.count,)
        shapes["expert_gate_up_bias"] = (ffn.count * 2 * ffn.size,)
    if ffn.bias and shard.rank == 0:
        shapes["expert_down_bias"] = (ffn.count * hidden,)
    if ffn.shared_size:
        shapes["shared_gate"] = (1, hidden)
        shapes["shared_gate_up"] = (2 * ffn.shared_size, hidden)
        shapes["shared_down"] = (hidden, ffn.shared_size)
    return shapes


_MATRICES = ("embedding", "head", "qkv", "out", "gate_up", "down", "router")
_EXPERT_MATRICES = ("expert_gate_up", "expert_down", "shared_gate", "shared_gate_up", "shared_down")


def is_matrix(name: str) -> bool:
    """Whether a fused tensor is multiplied, and not a norm or a bias."""
    return name.rpartition(".")[2] in (*_MATRICES, *_EXPERT_MATRICES)


def matrix_kind(name: str) -> MatrixKind:
    """Of a fused tensor that is multiplied."""
    _, _, matrix = name.rpartition(".")
    if matrix in ("embedding", "head"):
        return MatrixKind.TABLE
    if matrix in ("expert_gate_up", "expert_down"):
        return MatrixKind.EXPERTS
    return MatrixKind.OTHER if matrix in ("router", *_EXPERT_MATRICES) else MatrixKind.LINEAR


def stored_parts(spec: ModelSpec, shard: Shard = WHOLE_MODEL) -> dict[str, StoredPart]:
    """The parameters that one rank reads, by their Hugging Face names."""
    shard.spec(spec)  # raises if there are too many ranks
    vocabulary, shape = shard.vocabulary(spec), (spec.vocab_size, spec.hidden_size)
    parts: dict[str, StoredPart] = {}
    if shard.is_first or (shard.is_last and spec.tied):
        parts["model.embed_tokens.weight"] = _rows("embedding", shape, vocabulary)
    if shard.is_last:
        parts["model.norm.weight"] = _whole("norm", (spec.hidden_size,))
        if not spec.tied:
            parts["lm_head.weight"] = _rows("head", shape, vocabulary)
    for index, layer in enumerate(shard.layers(spec)):
        one, names = spec.layers[layer], (f"model.layers.{layer}.", f"{index}.")
        parts.update(_layer_parts(one, spec.hidden_size, shard, *names))
        if isinstance(one.ffn, Dense):
            parts.update(_mlp_parts(one.ffn, spec.hidden_size, shard, *names))
        else:
            parts.update(_expert_parts(one.ffn, spec.hidden_size, shard, *names))
    return parts


def _layer_parts(layer: LayerSpec, hidden: int, shard: Shard, stored: str, at: str) -> Iterator[tuple[str, StoredPart]]:
    """Norms and attention. layer: of the whole model."""
    mixer = layer.mixer
    for name, target in _NORMS[layer.norms].items():
        yield f"{stored}{name}.weight", _whole(at + target, (hidden,))
    heads = shard.heads(mixer)
    q, kv = (slice(one.start * mixer.head_dim, one.stop * mixer.head_dim) for one in heads)
    row = 0
    for name, size, rows in (("q", mixer.q_size, q), ("k", mixer.kv_size, kv), ("v", mixer.kv_size, kv)):
        yield f"{stored}self_attn.{name}_proj.weight", _rows(at + "qkv", (size, hidden), rows, row)
        if mixer.qkv_bias:
            yield f"{stored}self_attn.{name}_proj.bias", _rows(at + "qkv_bias", (size,), rows, row)
        row += rows.stop - rows.start
    yield stored + "self_attn.o_proj.weight", _columns(at + "out", (hidden, mixer.q_size), q)
    if mixer.out_bias and shard.rank == 0:
        yield stored + "self_attn.o_proj.bias", _whole(at + "out_bias", (hidden,))
    if mixer.qk_norm != "none":
        row = 0
        for name, size, rows, own in (("q", mixer.q_size, q, heads[0]), ("k", mixer.kv_size, kv, heads[1])):
            shape, source = ((size,), (rows,)) if mixer.qk_norm == "whole" else ((mixer.head_dim,), ())
            count = own.stop - own.start
            yield f"{stored}self_attn.{name}_norm.weight", StoredPart(at + "qk_norm", shape, row, count, source)
            row += count
    if mixer.sinks:
        yield stored + "self_attn.sinks", _rows(at + "sinks", (mixer.num_heads,), heads[0])


def _mlp_parts(mlp: Dense, hidden: int, shard: Shard, stored: str, at: str) -> Iterator[tuple[str, StoredPart]]:
    part = shard.aligned_part(mlp.size)
    num_rows = part.stop - part.start
    for row, name in ((0, "gate"), (num_rows, "up")):
        yield f"{stored}mlp.{name}_proj.weight", _rows(at + "gate_up", (mlp.size, hidden), part, row)
        if mlp.bias:
            yield f"{stored}mlp.{name}_proj.bias", _rows(at + "gate_up_bias", (mlp.size,), part, row)
    yield stored + "mlp.down_proj.weight", _columns(at + "down", (hidden, mlp.size), part)
    if mlp.bias and shard.rank == 0:
        yield stored + "mlp.down_proj.bias", _whole(at + "down_bias", (hidden,))


def _expert_parts(
    experts: Experts, hidden: int, shard: Shard, stored: str, at: str
) -> Iterator[tuple[str, StoredPart]]:
    """One name per expert, as Qwen's files have them; `experts.py` renames those of other files."""
    ffn, shared = experts.size, experts.shared_size
    yield stored + "mlp.gate.weight", _whole(at + "router", (experts.count, hidden))
    part = shard.aligned_part(ffn)
    num_rows = part.stop - part.start
    for expert in range(experts.count):
        names, row = f"{stored}mlp.experts.{expert}.", 2 * expert * num_rows
        yield names + "gate_proj.weight", _rows(at + "expert_gate_up", (ffn, hidden), part, row)
        yield names + "up_proj.weight", _rows(at + "expert_gate_up", (ffn, hidden), part, row + num_rows)
        columns = (slice(None), part)
        down = StoredPart(at + "expert_down", (hidden, ffn), expert * hidden, hidden, columns)
        yield names + "down_proj.weight", down
        if experts.bias:
            target = at + "expert_gate_up_bias"
            yield names + "gate_proj.bias", _rows(target, (ffn,), part, row)
            yield names + "up_proj.bias", _rows(target, (ffn,), part, row + num_rows)
        if experts.bias and shard.rank == 0:
            whole = StoredPart(at + "expert_down_bias", (hidden,), expert * hidden, hidden)
            yield names + "down_proj.bias", whole
    if experts.bias:
        yield stored + "mlp.gate.bias", _whole(at + "router_bias", (experts.count,))
    if shared:
        part = shard.aligned_part(shared)
        yield stored + "mlp.shared_expert_gate.weight", _whole(at + "shared_gate", (1, hidden))
        names, target = stored + "mlp.shared_expert.", at + "shared_gate_up"
        yield names + "gate_proj.weight", _rows(target, (shared, hidden), part)
        yield names + "up_proj.weight", _rows(target, (shared, hidden), part, part.stop - part.start)
        yield names + "down_proj.weight", _columns(at + "shared_down", (hidden, shared), part)


def _whole(target: str, shape: tuple[int, ...]) -> StoredPart:
    return StoredPart(target, shape, 0, shape[0])


def _rows(target: str, shape: tuple[int, ...], rows: slice, row: int = 0) -> StoredPart:
    return StoredPart(target, shape, row, rows.stop - rows.start, (rows,))


def _columns(target: str, shape: tuple[int, ...], columns: slice) -> StoredPart:
    return StoredPart(target, shape, 0, shape[0], (slice(None), columns))
