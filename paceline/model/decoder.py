"""The decoder: tokens in, hidden states and logits out, for every supported family.

    tokens -> embedding -> layers -> norm -> hidden -> logits
    a layer: norm -> q,k,v -> rotate -> attend -> out -> add -> norm -> mlp -> add

A batch is ragged: the tokens of all its requests follow each other, T rows in total. Only `attend`, which the
executor supplies, knows where one request ends and the next begins, and only `attend` touches the KV cache. Nothing
here reads a value on the host or loops over requests, so a whole step can be one CUDA graph.

With a `RankGroup` (tensor parallelism) a decoder has the weights of one rank: `spec` has its heads and MLP columns, and
the outputs of attention and MLP are summed over all ranks. Logits are those of the rank's part of the vocabulary.

With a `StageLink` (pipeline parallelism) it has the layers of one stage: the stage before sends the hidden states that
it begins with, and all but the last send theirs on.

What differs between families is a field of a layer's values (`layers.py`) or of `ModelSpec`; there is one `if` per
option and no class per model. This is the reference implementation, and with its linear layers replaced
(`engine/cpu/linear.py`) also what a CPU computes in float32. `CudaModel` and `QuantizedModel` compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.layers import Activation, Attention, Dense, Experts, LayerSpec, Rotation
from paceline.model.linear import Linear, Matrix, expanded
from paceline.model.lora import AddAdapters, LayerAdapter, LoraRows, LoraWeights
from paceline.model.norm import Norm, rms_norm
from paceline.model.rank_group import RankGroup, StageLink, embed, shard_of
from paceline.model.rope import rope_table, rotate, rotation_at
from paceline.model.spec import ModelSpec

# attend(layer, q[T, heads, D], k[T, kv heads, D], v[T, kv heads, D], sinks) -> [T, heads * D]. Writes k and v into the
# KV cache at the rows' positions, then computes causal attention with the window, scale and score cap of the layer's
# mixer. sinks [heads]: scores in the denominator of the softmax that are no key's, or None. q, k and v are views of one
# buffer: their rows are strided, so copy or index them, never assume that they are contiguous.
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
GatedActivation = Callable[[Tensor, Tensor], Tensor]  # gate, up -> activation(gate) * up


def gated_activation(activation: Activation) -> GatedActivation:
    """What an MLP does with its gate and up projections."""
    if activation.kind == "gelu_tanh":
        return lambda gate, up: F.gelu(gate, approximate="tanh").mul_(up)
    if activation.kind == "clamped_swiglu":
        return partial(clamped_swiglu, alpha=activation.swiglu_alpha, limit=activation.swiglu_limit)
    return lambda gate, up: F.silu(gate).mul_(up)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


@dataclass(slots=True, eq=False)
class Mlp:
    """The gated MLP of a layer: down(activation(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear
    activation: GatedActivation

    def __call__(self, x: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        return self.down(self._activated(x, adapt), adapt)

    def add_to(self, x: Tensor, y: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        """x + mlp(y)."""
        return self.down.add_to(x, self._activated(y, adapt), adapt)

    def _activated(self, x: Tensor, adapt: AddAdapters | None) -> Tensor:
        return self.activation(*self.gate_up(x, adapt).chunk(2, dim=-1))


@dataclass(slots=True, eq=False)
class MixtureOfExperts:
    """A mixture of experts: the weighted sum of the MLPs that the router chooses for each row, and of a shared expert
    that all rows use, if there is one.

    The reference is `masked`: each expert computes all rows, and nothing is read on the host. On a CPU, where reading
    costs nothing, each expert computes only the rows that chose it, and these are counted.
    """

    router: Tensor  # [E, H]
    expert_gate_up: Matrix  # [E, 2F, H]
    expert_down: Matrix  # [E, H, F]
    activation: GatedActivation
    options: Experts
    router_bias: Tensor | None = None  # [E]
    expert_gate_up_bias: Tensor | None = None  # [E, 2F]
    expert_down_bias: Tensor | None = None  # [E, H]; of ranks, only the first has it
    shared_gate: Tensor | None = None  # [1, H]
    shared: Mlp | None = None
    num_rows: Tensor = field(init=False)  # [E]: rows that each expert has computed on a CPU

    def __post_init__(self) -> None:
        self.num_rows = torch.zeros(self.options.count, dtype=torch.int64)

    def __call__(self, x: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        """adapt: changes nothing, since experts have no adapters."""
        ids, weights = route(F.linear(x, self.router, self.router_bias), self.options)
        if x.device.type == "cpu":
            out = torch.zeros_like(x)
            self.num_rows += add_chosen(out, x, ids, weights, self)
        else:
            out = self.masked(x, ids, weights)
        if self.shared is not None and self.shared_gate is not None:
            out += torch.sigmoid(F.linear(x, self.shared_gate)) * self.shared(x)
        return out

    def add_to(self, x: Tensor, y: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        """x + experts(y)."""
        return x + self(y)

    def masked(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts [T, k] of the rows of x, weighted and added up."""
        out = torch.zeros_like(x)
        gate_up, down = expanded(self.expert_gate_up, x.dtype), expanded(self.expert_down, x.dtype)
        for expert in range(len(self.router)):
            is_chosen = ids == expert
            weight = torch.where(is_chosen, weights, 0.0).sum(-1, keepdim=True).to(x.dtype)
            biases = (None if one is None else one[expert] for one in (self.expert_gate_up_bias, self.expert_down_bias))
            first, last = map(Linear, (gate_up[expert], down[expert]), biases)
            value = Mlp(first, last, self.activation)(x) * weight
            out += torch.where(is_chosen.any(-1, keepdim=True), value, 0.0)
        return out


def route(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """The experts [T, k] of rows and their weights, from the router's logits [T, E]. In float32."""
    wide = logits.float()
    scores = torch.sigmoid(wide) if experts.routing.kind == "sigmoid" else torch.softmax(wide, dim=-1)
    weights, ids = torch.topk(scores, experts.per_token, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True) if experts.routing.renormalise else weights


def add_chosen(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, experts: MixtureOfExperts) -> Tensor:
    """out += the experts [T, k] of the rows of x, weighted. Rows are sorted by expert; how many each expert has is read
    on the host, and returned [E]."""
    gate_up_bias, down_bias = experts.expert_gate_up_bias, experts.expert_down_bias
    gate_up, down = expanded(experts.expert_gate_up, x.dtype), expanded(experts.expert_down, x.dtype)
    chosen = ids.flatten()
    counts = torch.bincount(chosen, minlength=len(experts.router))
    order = chosen.argsort(stable=True)
    rows, scales = order // ids.shape[1], weights.flatten()[order, None].to(x.dtype)
    first = 0
    for expert, count in enumerate(counts.tolist()):
        if not count:
            continue
        own = slice(first, first + count)
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        gate, up = F.linear(x[rows[own]], gate_up[expert], bias).chunk(2, dim=-1)
        value = F.linear(experts.activation(gate, up).mul_(scales[own]), down[expert])
        if down_bias is not None:
            value.addcmul_(scales[own], down_bias[expert])
        out.index_add_(0, rows[own], value)  # no row twice: the experts of a row differ
        first += count
    return counts


@dataclass(slots=True, eq=False)
class DecoderLayer:
    """The weights of one layer. `LayerSpec.norms` decides which norms there are: before a block, after it, or both."""

    mixer: Attention  # of this rank
    whole_mixer: Attention  # of all ranks
    rope: int | None  # index of its table; None: no rotary positions
    qkv: Linear
    out: Linear
    mlp: Mlp | MixtureOfExperts
    attention_norm: Norm | None = None
    attention_post_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    qk_norm: Tensor | None = None  # [heads, D]
    sinks: Tensor | None = None  # [heads]

    @property
    def dense(self) -> Mlp | None:
        """The MLP that all rows use: of a mixture of experts, the shared one."""
        return self.mlp.shared if isinstance(self.mlp, MixtureOfExperts) else self.mlp

    @property
    def linears(self) -> tuple[Linear, ...]:
        mlp = self.dense
        return (self.qkv, self.out) if mlp is None else (self.qkv, self.out, mlp.gate_up, mlp.down)

    def folded(self, adapter: LayerAdapter) -> LayerAdapter:
        """The adapter of this layer with the norms that are folded into its matrices."""
        norms = {"qkv": self.attention_norm, "gate_up": self.mlp_norm}
        weights = {name: norm.weight for name, norm in norms.items() if norm is not None and norm.is_folded}
        return {
            name: tuple(replace(part, a=part.a * weights[name]) for part in parts) if name in weights else parts
            for name, parts in adapter.items()
        }


class Decoder:
    """A model with its weights, or one rank's part of it, on one device, for inference."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Matrix],
        *,
        max_positions: int | None = None,
        group: RankGroup | None = None,
        stages: StageLink | None = None,
        kv_scales: Tensor | None = None,
    ) -> None:
        """`spec` is that of the whole model, `weights` are the fused tensors of `layout.target_shapes(spec, shard)`.
        Positions below `max_positions` (default: the model's context) can be used. kv_scales [layers, 2, 1]: those of
        an FP8 KV cache, if the model has some."""
        self.kv_scales = kv_scales
        self.whole_spec, self.group, self.stages = spec, group, stages
        self.shard = shard_of(group or stages)
        self.spec = spec = self.shard.spec(spec)
        tensors = {name: one for name, one in weights.items() if isinstance(one, Tensor)}
        some = next(iter(tensors.values()))
        self.device, self.dtype = some.device, some.dtype
        self.kv_dtype = self.dtype
        self.precision = str(self.dtype).removeprefix("torch.")
        none = some.new_empty(0)  # of a stage that does not need it
        self._eps = torch.full((1, 1), spec.rms_eps, device=self.device)
        self.embedding = tensors["embedding"] if self.shard.is_first else none
        self.head = Linear(tensors["embedding" if spec.tied else "head"] if self.shard.is_last else none, name="head")
        self.logit_scale = spec.logit_scale  # 1 if it is folded into the head
        self.norm = Norm(tensors["norm"] if self.shard.is_last else none, self._eps)
        self.max_positions = max_positions or spec.context_tokens
        rotations = spec.rotations
        self.rope_tables = [rope_table(one, self.max_positions, self.device) for one in rotations]
        wholes = self.whole_spec.with_layers(self.shard.layers(self.whole_spec)).layers
        self.layers = [
            _layer(layer, whole, rotations, _LayerWeights(weights, f"{index}.", self._eps))
            for index, (layer, whole) in enumerate(zip(spec.layers, wholes, strict=True))
        ]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, lora: LoraRows | None = None) -> Tensor:
        """Hidden states [T, hidden] after the final norm, of tokens[T] rotated by positions[T] (both integer); `attend`
        alone knows where they are cached. Of a stage that is not the last: before the norm, and sent on. lora: rows
        with adapters, as `prepare_adapter` returns them."""
        rotations = [rotation_at(table, positions) for table in self.rope_tables]  # one gather for all layers
        if self.stages is None or self.shard.is_first:
            x = scaled(embed(self.group, self.spec, self.embedding, tokens), self.spec.embedding_scale)
        else:
            x = self.stages.receive(len(tokens), self.spec.hidden_size, self.dtype)
        for index, layer in enumerate(self.layers):
            rotation = None if layer.rope is None else rotations[layer.rope]
            adapt = None if lora is None else partial(lora.add, index)
            attended = self._attend(index, _normed(x, layer.attention_norm), rotation, attend, adapt)
            x = self._add(x, layer.out, attended, layer.attention_post_norm, adapt)
            x = self._add(x, layer.mlp, _normed(x, layer.mlp_norm), layer.mlp_post_norm, adapt)
        if self.stages is not None and not self.shard.is_last:
            self.stages.send(x)
            return x
        return self.norm(x)

    def prepare_adapter(self, weights: LoraWeights) -> LoraWeights:
        """The matrices of an adapter as `forward` uses them: with the norms that are folded into the model's."""
        return LoraWeights(tuple(layer.folded(one) for layer, one in zip(self.layers, weights.layers, strict=True)))

    @torch.inference_mode()
    def states(self, hidden: Tensor) -> Tensor:
        """Hidden states as the model defines them, of what `forward` returns."""
        return hidden * self.norm.weight if self.norm.is_folded else hidden

    def linears(self) -> Iterator[tuple[int, str, Linear]]:
        """The linear layers of all layers, with the index of the layer and the name of the matrix in it."""
        for index, layer in enumerate(self.layers):
            yield from ((index, one.name, one) for one in layer.linears)

    @property
    def is_packed(self) -> bool:
        """Whether some matrices are in the bits of a format."""
        experts = [one for mlp in self.mixtures for one in (mlp.expert_gate_up, mlp.expert_down)]
        matrices = [linear.weight for _, _, linear in self.linears()]
        return not all(isinstance(one, Tensor) for one in (*matrices, *experts))

    @property
    def mixtures(self) -> list[MixtureOfExperts]:
        """Those of the layers with experts."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts)]

    @property
    def expert_rows(self) -> list[list[int]]:
        """Of each layer with experts: rows that each has computed."""
        return [one.num_rows.tolist() for one in self.mixtures]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of rows of `forward`'s result, in the model's dtype; of a rank, those of its token ids.
        Pass only the rows that sample: this is the largest matrix of a small model."""
        return soft_cap(scaled(self.head(hidden), self.logit_scale), self.spec.logit_cap)

    def _attend(
        self,
        index: int,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        attend: Attend,
        adapt: AddAdapters | None = None,
    ) -> Tensor:
        """What the heads of a layer attend to, before its output projection."""
        layer = self.layers[index]
        mixer, num_kv = layer.mixer, layer.mixer.num_kv_heads
        heads = layer.qkv(x, adapt).view(-1, mixer.num_heads + 2 * num_kv, mixer.head_dim)
        # Queries and keys are normed and rotated together: half the kernel launches.
        qk, v = torch.split(heads, [mixer.num_heads + num_kv, num_kv], dim=1)
        if layer.qk_norm is not None and mixer.qk_norm == "whole":
            factors = whole_qk_factors(self.group, layer.whole_mixer, mixer, qk, self.spec.rms_eps)
            qk = (qk.float() * factors * layer.qk_norm).to(qk.dtype)
        elif layer.qk_norm is not None:
            qk = rms_norm(qk, None, self._eps) * layer.qk_norm
        if rotation is not None:
            qk = rotate(qk, rotation)
        q, k = torch.split(qk, [mixer.num_heads, num_kv], dim=1)
        return attend(index, q, k, v, layer.sinks)

    def _add(
        self,
        x: Tensor,
        block: Linear | Mlp | MixtureOfExperts,
        y: Tensor,
        post_norm: Norm | None,
        adapt: AddAdapters | None,
    ) -> Tensor:
        """x + norm(block(y)), with the outputs of all ranks."""
        if self.group is None and post_norm is None:
            return block.add_to(x, y, adapt)
        out = block(y, adapt)
        return x + _normed(out if self.group is None else self.group.all_reduce(out), post_norm)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)


def whole_qk_factors(group: RankGroup | None, whole: Attention, mixer: Attention, qk: Tensor, eps: float) -> Tensor:
    """[T, heads, 1]: the factors of an RMSNorm over all query heads, and of one over all key heads; mixer: of this
    rank."""
    counts = [mixer.num_heads, mixer.num_kv_heads]
    sums = torch.stack([part.float().square().sum((1, 2)) for part in torch.split(qk, counts, dim=1)], dim=1)
    if group is not None:
        sums[:, 1] *= group.shard.kv_share(whole)
        sums = group.all_reduce(sums)
    means = zip(sums.unbind(1), (whole.q_size, whole.kv_size), counts, strict=True)
    factors = [torch.rsqrt(total / size + eps)[:, None].expand(-1, count) for total, size, count in means]
    return torch.cat(factors, dim=1).unsqueeze(-1)


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """x limited smoothly to (-cap, cap); x itself without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


class _LayerWeights:
    """The fused tensors of one layer."""

    def __init__(self, weights: Mapping[str, Matrix], prefix: str, eps: Tensor) -> None:
        self._weights, self._prefix, self._eps = weights, prefix, eps

    def matrix(self, name: str) -> Matrix:
        return self._weights[self._prefix + name]

    def tensor(self, name: str) -> Tensor | None:
        found = self._weights.get(self._prefix + name)
        assert found is None or isinstance(found, Tensor), f"{self._prefix}{name} is packed"
        return found

    def linear(self, name: str) -> Linear:
        return Linear(self.matrix(name), self.tensor(f"{name}_bias"), name)

    def norm(self, name: str) -> Norm | None:
        weight = self.tensor(name)
        return None if weight is None else Norm(weight, self._eps)

    def experts(self, name: str, count: int) -> Matrix:
        """Matrices [E, N, K]; packed ones have this shape."""
        found = self.matrix(name)
        return found.view(count, -1, found.shape[1]) if isinstance(found, Tensor) else found

    def expert_biases(self, name: str, count: int) -> Tensor | None:
        found = self.tensor(name)
        return None if found is None else found.view(count, -1)


def _layer(layer: LayerSpec, whole: LayerSpec, rotations: Sequence[Rotation], own: _LayerWeights) -> DecoderLayer:
    rotation = layer.mixer.rotation
    return DecoderLayer(
        mixer=layer.mixer,
        whole_mixer=whole.mixer,
        rope=None if rotation is None else rotations.index(rotation),
        qkv=own.linear("qkv"),
        out=own.linear("out"),
        mlp=_mlp(layer.ffn, own) if isinstance(layer.ffn, Dense) else _experts(layer.ffn, own),
        attention_norm=own.norm("attention_norm"),
        attention_post_norm=own.norm("attention_post_norm"),
        mlp_norm=own.norm("mlp_norm"),
        mlp_post_norm=own.norm("mlp_post_norm"),
        qk_norm=own.tensor("qk_norm"),
        sinks=own.tensor("sinks"),
    )


def _mlp(ffn: Dense | Experts, own: _LayerWeights, prefix: str = "") -> Mlp:
    return Mlp(own.linear(f"{prefix}gate_up"), own.linear(f"{prefix}down"), gated_activation(ffn.activation))


def _experts(ffn: Experts, own: _LayerWeights) -> MixtureOfExperts:
    router = own.tensor("router")
    assert router is not None, "experts have a router"
    return MixtureOfExperts(
        router=router,
        expert_gate_up=own.experts("expert_gate_up", ffn.count),
        expert_down=own.experts("expert_down", ffn.count),
        activation=gated_activation(ffn.activation),
        options=ffn,
        router_bias=own.tensor("router_bias"),
        expert_gate_up_bias=own.expert_biases("expert_gate_up_bias", ffn.count),
        expert_down_bias=own.expert_biases("expert_down_bias", ffn.count),
        shared_gate=own.tensor("shared_gate"),
        shared=_mlp(ffn, own, "shared_") if ffn.shared_size else None,
    )
