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

What differs between families is a field of `ModelSpec`; there is one `if` per option and no class per model. This is
the reference implementation: `CpuModel` and `CudaModel` compute the same with rearranged weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.rank_group import RankGroup, StageLink, embed, shard_of
from paceline.model.rope import rope_table, rotate
from paceline.model.spec import ModelSpec

# attend(layer, q[T, heads, D], k[T, kv heads, D], v[T, kv heads, D]) -> [T, heads * D]. Writes k and v into the KV
# cache at the rows' positions, then computes causal attention with the layer's window, scale and score cap of the
# spec. The three inputs are views of one buffer: their rows are strided, so copy or index them, never assume that they
# are contiguous.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """The gated MLP of a layer: down(activation(gate(x)) * up(x)). A mixture of experts can take its place."""

    gate_up: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return F.linear(self.activation(gate) * up, self.down, self.down_bias)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one layer. `norm_placement` decides which norms there are: before a block, after it, or both."""

    qkv: Tensor
    out: Tensor
    mlp: Mlp
    attention_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    qk_norm: Tensor | None = None


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
    ) -> None:
        """`spec` is that of the whole model, `weights` are the fused tensors of `layout.target_shapes(spec, shard)`.
        Positions below `max_positions` (default: the model's context) can be used."""
        self.whole_spec, self.group, self.stages = spec, group, stages
        self.shard = shard_of(group or stages)
        self.spec = spec = self.shard.spec(spec)
        some = weights["0.qkv"]
        self.device, self.dtype = some.device, some.dtype
        self.precision = str(self.dtype).removeprefix("torch.")
        none = some.new_empty(0)  # of a stage that does not need it
        self.embedding = weights["embedding"] if self.shard.is_first else none
        self.head = weights["embedding" if spec.tied else "head"] if self.shard.is_last else none
        self.norm = weights["norm"] if self.shard.is_last else none
        self.max_positions = max_positions or spec.context_tokens
        self.rope_tables = [rope_table(rope, spec.head_dim, self.max_positions, self.device) for rope in spec.ropes]
        self.layers = [_layer(spec, weights, f"{layer}.") for layer in range(spec.num_layers)]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden] after the final norm, of tokens[T] at positions[T] (both integer). Of a stage that
        is not the last: before the norm, and sent on."""
        # One gather per rope for all layers; [T, 1, D] broadcasts over heads.
        rotations = [table[positions].unsqueeze(1) for table in self.rope_tables]
        if self.stages is None or self.shard.is_first:
            x = embed(self.group, self.spec, self.embedding, tokens)
        else:
            x = self.stages.receive(len(tokens), self.spec.hidden_size, self.dtype)
        for index, layer in enumerate(self.layers):
            rope = self.spec.layer_ropes[index]
            cos_sin = None if rope is None else rotations[rope]
            attended = self._sum(self._attention(index, self._norm(x, layer.attention_norm), cos_sin, attend))
            x = x + self._norm(attended, layer.attention_post_norm)
            x = x + self._norm(self._sum(layer.mlp(self._norm(x, layer.mlp_norm))), layer.mlp_post_norm)
        if self.stages is not None and not self.shard.is_last:
            self.stages.send(x)
            return x
        return self._norm(x, self.norm)

    def states(self, hidden: Tensor) -> Tensor:
        """Hidden states as the model defines them: here, what `forward` returns."""
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of rows of `forward`'s result, in the model's dtype; of a rank, those of its token ids.
        Pass only the rows that sample: this is the largest matrix of a small model."""
        return soft_cap(F.linear(hidden, self.head), self.spec.logit_cap)

    def _attention(self, index: int, x: Tensor, cos_sin: Tensor | None, attend: Attend) -> Tensor:
        spec, layer = self.spec, self.layers[index]
        qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        heads = qkv.view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        # Queries and keys are normed and rotated together: half the kernel launches.
        qk, v = torch.split(heads, [spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (spec.head_dim,), None, spec.rms_eps) * layer.qk_norm
        if cos_sin is not None:
            qk = rotate(qk, cos_sin)
        q, k = torch.split(qk, [spec.num_heads, spec.num_kv_heads], dim=1)
        return F.linear(attend(index, q, k, v), layer.out, layer.out_bias)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.group is None else self.group.all_reduce(x)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else F.rms_norm(x, (self.spec.hidden_size,), weight, self.spec.rms_eps)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """x limited smoothly to (-cap, cap); x itself without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


def _layer(spec: ModelSpec, weights: Mapping[str, Tensor], prefix: str) -> DecoderLayer:
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    in_mlp = {name: own.pop(name) for name in ("gate_up", "gate_up_bias", "down", "down_bias") if name in own}
    return DecoderLayer(mlp=Mlp(**in_mlp, activation=ACTIVATION_FUNCTIONS[spec.activation]), **own)
