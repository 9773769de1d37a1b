"""The decoder in float32 on the CPU, arranged for how its matrix kernels like their weights.

The plain twin is `model.decoder.Decoder`; a test holds the two together. What differs, each for a measured reason
(one Xeon core, SmolLM2-135M; milliseconds for all matrices of a pass):

    rows           1    2    4    8   16   32
    F.linear      38   39   76  120   92  117     what torch does with a weight as it is stored
    columns       31   45   61   97   93  102     the weight transposed: one row is a sum of contiguous rows
    packed        42   40   51   68   67   95     oneDNN's own layout, packed once

So one row, and many, go through columns and several through the packed copy, if memory allows both. Norm weights
are multiplied into the matrices behind them, and rotation is one swap and two products: a pass of one row is a
thousand small calls, and each costs as much as its arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.engine.cpu.kv_cache import free_memory
from paceline.model.decoder import Attend, Decoder

_SECOND_COPY = 0.2  # of the free memory that the packed copy may take at most
_PACKED_ROWS = 16  # what the packing is tuned for
_MOST_PACKED_ROWS = 32  # beyond it the transposed weight is quicker again


class _Matrix:
    """y = x W' + b, by whichever copy of W is quicker for this many rows."""

    __slots__ = ("_bias", "_columns", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        self._columns = weight.t().contiguous()
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS) if packed else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None and 1 < len(x) <= _MOST_PACKED_ROWS:
            found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return found
        if self._bias is None:
            return torch.mm(x, self._columns)
        return torch.addmm(self._bias, x, self._columns)

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y W' + b: what every half of a layer ends with."""
        if self._packed is not None and 1 < len(x) <= _MOST_PACKED_ROWS:
            return self(y).add_(x)
        if self._bias is None:
            return torch.addmm(x, y, self._columns)
        return self(y).add_(x)


class CpuModel:
    """A decoder's weights, rearranged. The tensors of the one it is made from are let go one by one."""

    def __init__(self, plain: Decoder) -> None:
        assert plain.dtype == torch.float32 and plain.device.type == "cpu", "made for float32 on the CPU"
        self.spec, self.dtype = plain.spec, plain.dtype
        self._embedding = plain.embedding
        self._eps = torch.full((1, 1), plain.spec.rms_eps)
        cos, sin = plain.cos_sin.chunk(2, dim=-1)
        self._cos_sin = torch.cat((cos, cos, -sin, sin), dim=-1)  # rotated = x * cos + swapped halves of x * sin
        packed = bool(torch.backends.mkldnn.is_available()) and (  # type: ignore[no-untyped-call, unused-ignore]
            plain.spec.num_parameters * 4 <= _SECOND_COPY * free_memory()
        )
        self._norm = plain.norm
        self._head = _Matrix(plain.head * plain.norm, None, packed=packed)
        self._layers: list[tuple[_Matrix, _Matrix, _Matrix, _Matrix, Tensor | None]] = []
        while plain.layers:
            layer = plain.layers.pop(0)
            self._layers.append(
                (
                    _Matrix(layer.qkv * layer.attention_norm, layer.qkv_bias, packed=packed),
                    _Matrix(layer.out, layer.out_bias, packed=packed),
                    _Matrix(layer.gate_up * layer.mlp_norm, layer.gate_up_bias, packed=packed),
                    _Matrix(layer.down, layer.down_bias, packed=packed),
                    layer.qk_norm,
                )
            )

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden], scaled to unit mean square; the last norm's weight is in the head."""
        spec = self.spec
        num_qk, size, eps = spec.num_heads + spec.num_kv_heads, spec.head_dim, self._eps
        cos, sin = self._cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        x = F.embedding(tokens, self._embedding)
        for index, (qkv, out, gate_up, down, qk_norm) in enumerate(self._layers):
            heads = qkv(_scaled(x, eps)).view(-1, num_qk + spec.num_kv_heads, size)
            qk, v = torch.split(heads, [num_qk, spec.num_kv_heads], dim=1)
            if qk_norm is not None:
                qk = _scaled(qk, eps) * qk_norm
            if spec.rope_layers[index]:
                qk = torch.addcmul(qk * cos, qk.roll(size // 2, dims=-1), sin)
            q, k = torch.split(qk, [spec.num_heads, spec.num_kv_heads], dim=1)
            x = out.add_to(x, attend(index, q, k, v))
            gate, up = gate_up(_scaled(x, eps)).chunk(2, dim=-1)
            x = down.add_to(x, F.silu(gate).mul_(up))
        return _scaled(x, eps)

    @torch.inference_mode()
    def states(self, hidden: Tensor) -> Tensor:
        return hidden * self._norm

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


def _scaled(x: Tensor, eps: Tensor) -> Tensor:
    """x over its root mean square: a norm without its weight."""
    # Four calls; a mean alone is three of them inside.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
