"""The decoder: tokens in, hidden states and logits out, for every supported family.

    tokens -> embedding -> layers -> norm -> hidden -> logits
    a layer: norm -> q,k,v -> rotate -> attend -> out -> add -> norm -> gate,up -> down -> add

A batch is ragged: the tokens of all its requests lie one after the other, T rows in all, and only
`attend`, which the executor supplies, knows where one request ends and the next begins. It is also the
only place that touches the KV cache. Nothing here looks at a value on the host or loops over requests, so
a whole step can be one CUDA graph.

What differs between families is in `ModelSpec`; there is one `if` per option and no class per model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.rope import rope_table, rotate
from paceline.model.spec import ModelSpec

# attend(layer, q[T, heads, D], k[T, kv heads, D], v[T, kv heads, D]) -> [T, heads * D]. Writes k and v
# into the cache at the rows' positions, then attends causally within `spec.windows[layer]`, scaled by D
# ** -0.5. The three inputs are views of one buffer: rows are strided, so copy or index them, never assume
# they are contiguous.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    qk_norm: Tensor | None = None


class Decoder:
    """A model with its weights, on one device, for inference."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], *, max_positions: int | None = None) -> None:
        """`weights` are the fused tensors of `layout.target_shapes(spec)`; positions up to
        `max_positions` (the model's context if not given) can be used."""
        self.spec = spec
        self.embedding = weights["embedding"]
        self.head = weights["embedding" if spec.tied else "head"]
        self.norm = weights["norm"]
        self.device = self.embedding.device
        self.dtype = self.embedding.dtype
        self.max_positions = max_positions or spec.context_tokens
        self.cos_sin = rope_table(spec.rope, spec.head_dim, self.max_positions, self.device)
        self.layers = [_layer(weights, f"{layer}.") for layer in range(spec.num_layers)]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden] after the last norm, of tokens[T] at positions[T] (both integer)."""
        # One gather for all layers; [T, 1, D] broadcasts over heads.
        cos_sin = self.cos_sin[positions].unsqueeze(1)
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            x = x + self._attention(index, layer, x, cos_sin, attend)
            x = x + self._mlp(layer, x)
        return self._norm(x, self.norm)

    def states(self, hidden: Tensor) -> Tensor:
        """What `forward` returns are the states themselves; its rearranged twin has to finish them."""
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of rows of `forward`'s result, in the model's dtype. Take only the rows that
        sample: this is the largest matrix of a small model."""
        return F.linear(hidden, self.head)

    def _attention(self, index: int, layer: _Layer, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        spec = self.spec
        qkv = F.linear(self._norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        heads = qkv.view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        # Queries and keys go through norm and rotation side by side: half the kernel launches.
        qk, v = torch.split(heads, [spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (spec.head_dim,), None, spec.rms_eps) * layer.qk_norm
        if spec.rope_layers[index]:
            qk = rotate(qk, cos_sin)
        q, k = torch.split(qk, [spec.num_heads, spec.num_kv_heads], dim=1)
        return F.linear(attend(index, q, k, v), layer.out, layer.out_bias)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate_up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down, layer.down_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.spec.hidden_size,), weight, self.spec.rms_eps)


def _layer(weights: Mapping[str, Tensor], at: str) -> _Layer:
    return _Layer(**{name.removeprefix(at): tensor for name, tensor in weights.items() if name.startswith(at)})
