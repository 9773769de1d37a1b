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
option and no class per model. This is the reference implementation: `CpuModel` and `CudaModel` compute the same with
rearranged weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.layers import Activation, Attention, Dense, Experts, LayerSpec, Rotation
from paceline.model.lora import AddAdapters, LoraRows, LoraWeights
from paceline.model.rank_group import RankGroup, StageLink, embed, shard_of
from paceline.model.rope import rope_table, rotate
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


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """The gated MLP of a layer: down(activation(gate(x)) * up(x))."""

    gate_up: Tensor
    down: Tensor
    activation: GatedActivation
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __call__(self, x: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        between = F.linear(x, self.gate_up, self.gate_up_bias)
        if adapt is not None:
            adapt("gate_up", x, between)
        activated = self.activation(*between.chunk(2, dim=-1))
        out = F.linear(activated, self.down, self.down_bias)
        if adapt is not None:
            adapt("down", activated, out)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class MixtureOfExperts:
    """A mixture of experts: the weighted sum of the MLPs that the router chooses for each row, and of a shared expert
    that all rows use, if there is one.

    The reference is `masked`: each expert computes all rows, and nothing is read on the host. On a CPU, where reading
    costs nothing, each expert computes only the rows that chose it.
    """

    router: Tensor  # [E, H]
    expert_gate_up: Tensor  # [E, 2F, H]
    expert_down: Tensor  # [E, H, F]
    activation: GatedActivation
    options: Experts
    router_bias: Tensor | None = None  # [E]
    expert_gate_up_bias: Tensor | None = None  # [E, 2F]
    expert_down_bias: Tensor | None = None  # [E, H]; of ranks, only the first has it
    shared_gate: Tensor | None = None  # [1, H]
    shared: Mlp | None = None

    def __call__(self, x: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        """adapt: changes nothing, since experts have no adapters."""
        ids, weights = route(F.linear(x, self.router, self.router_bias), self.options)
        if x.device.type == "cpu":
            out = torch.zeros_like(x)
            add_chosen(out, x, ids, weights, self)
        else:
            out = self.masked(x, ids, weights)
        if self.shared is not None and self.shared_gate is not None:
            out += torch.sigmoid(F.linear(x, self.shared_gate)) * self.shared(x)
        return out

    def masked(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts [T, k] of the rows of x, weighted and added up."""
        out = torch.zeros_like(x)
        for expert in range(len(self.router)):
            is_chosen = ids == expert
            weight = torch.where(is_chosen, weights, 0.0).sum(-1, keepdim=True).to(x.dtype)
            value = self._mlp(expert)(x) * weight
            out += torch.where(is_chosen.any(-1, keepdim=True), value, 0.0)
        return out

    def _mlp(self, expert: int) -> Mlp:
        biases = (None if one is None else one[expert] for one in (self.expert_gate_up_bias, self.expert_down_bias))
        return Mlp(self.expert_gate_up[expert], self.expert_down[expert], self.activation, *biases)


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
        gate, up = F.linear(x[rows[own]], experts.expert_gate_up[expert], bias).chunk(2, dim=-1)
        value = F.linear(experts.activation(gate, up).mul_(scales[own]), experts.expert_down[expert])
        if down_bias is not None:
            value.addcmul_(scales[own], down_bias[expert])
        out.index_add_(0, rows[own], value)  # no row twice: the experts of a row differ
        first += count
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one layer. `LayerSpec.norms` decides which norms there are: before a block, after it, or both."""

    mixer: Attention  # of this rank
    whole_mixer: Attention  # of all ranks
    rope: int | None  # index of its table; None: no rotary positions
    qkv: Tensor
    out: Tensor
    mlp: Mlp | MixtureOfExperts
    attention_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    qk_norm: Tensor | None = None
    sinks: Tensor | None = None  # [heads]


class Decoder:
    """A model with its weights, or one rank's part of it, on one device, for inference."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
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
        some = next(iter(weights.values()))  # not a matrix of a layer, which may be quantized
        self.device, self.dtype = some.device, some.dtype
        self.kv_dtype = self.dtype
        self.precision = str(self.dtype).removeprefix("torch.")
        none = some.new_empty(0)  # of a stage that does not need it
        self.embedding = weights["embedding"] if self.shard.is_first else none
        self.head = weights["embedding" if spec.tied else "head"] if self.shard.is_last else none
        self.norm = weights["norm"] if self.shard.is_last else none
        self.max_positions = max_positions or spec.context_tokens
        rotations = spec.rotations
        self.rope_tables = [rope_table(one, self.max_positions, self.device) for one in rotations]
        wholes = self.whole_spec.with_layers(self.shard.layers(self.whole_spec)).layers
        self.layers = [
            _layer(layer, whole, rotations, weights, f"{index}.")
            for index, (layer, whole) in enumerate(zip(spec.layers, wholes, strict=True))
        ]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, lora: LoraRows | None = None) -> Tensor:
        """Hidden states [T, hidden] after the final norm, of tokens[T] rotated by positions[T] (both integer); `attend`
        alone knows where they are cached. Of a stage that is not the last: before the norm, and sent on. lora: rows
        with adapters, as `prepare_adapter` returns them."""
        # One gather per rope for all layers; [T, 1, D] broadcasts over heads.
        rotations = [table[positions].unsqueeze(1) for table in self.rope_tables]
        if self.stages is None or self.shard.is_first:
            x = scaled(embed(self.group, self.spec, self.embedding, tokens), self.spec.embedding_scale)
        else:
            x = self.stages.receive(len(tokens), self.spec.hidden_size, self.dtype)
        for index, layer in enumerate(self.layers):
            cos_sin = None if layer.rope is None else rotations[layer.rope]
            adapt = None if lora is None else partial(lora.add, index)
            attended = self._sum(self._attention(index, self._norm(x, layer.attention_norm), cos_sin, attend, adapt))
            x = x + self._norm(attended, layer.attention_post_norm)
            x = x + self._norm(self._sum(layer.mlp(self._norm(x, layer.mlp_norm), adapt)), layer.mlp_post_norm)
        if self.stages is not None and not self.shard.is_last:
            self.stages.send(x)
            return x
        return self._norm(x, self.norm)

    def prepare_adapter(self, weights: LoraWeights) -> LoraWeights:
        """The matrices of an adapter as `forward` uses them: here, as they are."""
        return weights

    def states(self, hidden: Tensor) -> Tensor:
        """Hidden states as the model defines them: here, what `forward` returns."""
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of rows of `forward`'s result, in the model's dtype; of a rank, those of its token ids.
        Pass only the rows that sample: this is the largest matrix of a small model."""
        return soft_cap(scaled(F.linear(hidden, self.head), self.spec.logit_scale), self.spec.logit_cap)

    def _attention(
        self, index: int, x: Tensor, cos_sin: Tensor | None, attend: Attend, adapt: AddAdapters | None = None
    ) -> Tensor:
        layer = self.layers[index]
        mixer, num_kv, eps = layer.mixer, layer.mixer.num_kv_heads, self.spec.rms_eps
        qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        if adapt is not None:
            adapt("qkv", x, qkv)
        heads = qkv.view(-1, mixer.num_heads + 2 * num_kv, mixer.head_dim)
        # Queries and keys are normed and rotated together: half the kernel launches.
        qk, v = torch.split(heads, [mixer.num_heads + num_kv, num_kv], dim=1)
        if layer.qk_norm is not None and mixer.qk_norm == "whole":
            factors = whole_qk_factors(self.group, layer.whole_mixer, mixer, qk, eps)
            qk = (qk.float() * factors * layer.qk_norm).to(qk.dtype)
        elif layer.qk_norm is not None:
            qk = F.rms_norm(qk, (mixer.head_dim,), None, eps) * layer.qk_norm
        if cos_sin is not None:
            qk = rotate(qk, cos_sin)
        q, k = torch.split(qk, [mixer.num_heads, num_kv], dim=1)
        attended = attend(index, q, k, v, layer.sinks)
        out = F.linear(attended, layer.out, layer.out_bias)
        if adapt is not None:
            adapt("out", attended, out)
        return out

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.group is None else self.group.all_reduce(x)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else F.rms_norm(x, (self.spec.hidden_size,), weight, self.spec.rms_eps)


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


def _layer(
    layer: LayerSpec, whole: LayerSpec, rotations: Sequence[Rotation], weights: Mapping[str, Tensor], prefix: str
) -> DecoderLayer:
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    mlp = _mlp(layer.ffn, own) if isinstance(layer.ffn, Dense) else _experts(layer.ffn, own)
    rotation = layer.mixer.rotation
    rope = None if rotation is None else rotations.index(rotation)
    return DecoderLayer(mixer=layer.mixer, whole_mixer=whole.mixer, rope=rope, mlp=mlp, **own)


def _mlp(ffn: Dense, own: dict[str, Tensor]) -> Mlp:
    """Takes the tensors of an MLP out of those of a layer."""
    found = {name: own.pop(name) for name in ("gate_up", "gate_up_bias", "down", "down_bias") if name in own}
    return Mlp(**found, activation=gated_activation(ffn.activation))


def _experts(ffn: Experts, own: dict[str, Tensor]) -> MixtureOfExperts:
    """Takes the tensors of a mixture of experts out of those of a layer."""
    activation = gated_activation(ffn.activation)

    def biases(name: str) -> Tensor | None:
        return own.pop(name).view(ffn.count, -1) if name in own else None

    def matrices(name: str) -> Tensor:
        found = own.pop(name)
        # Quantized ones have this shape.
        return found.view(ffn.count, -1, found.shape[1]) if isinstance(found, Tensor) else found

    shared = None
    if "shared_gate_up" in own:
        shared = Mlp(own.pop("shared_gate_up"), own.pop("shared_down"), activation)
    return MixtureOfExperts(
        router=own.pop("router"),
        expert_gate_up=matrices("expert_gate_up"),
        expert_down=matrices("expert_down"),
        activation=activation,
        options=ffn,
        router_bias=own.pop("router_bias", None),
        expert_gate_up_bias=biases("expert_gate_up_bias"),
        expert_down_bias=biases("expert_down_bias"),
        shared_gate=own.pop("shared_gate", None),
        shared=shared,
    )
