"""Linear layers in float32 on the CPU, with weights arranged for its GEMM kernels.

The reference implementation is `model.linear.Linear`; a test compares the two. They differ where a measurement gave a
reason (one Xeon core, SmolLM2-135M; milliseconds for all GEMMs of a forward pass):

    rows           1    2    4    8   16   32
    F.linear      38   39   76  120   92  117     the weight as it is stored
    transposed    31   45   61   97   93  102     one row is a sum of contiguous rows
    packed        42   40   51   68   67   95     oneDNN's own layout, packed once

So one row, and more than 32, use the transposed weight; counts between use the packed copy, if memory allows both. Norm
weights are folded into the matrices that follow them: a forward pass of one row is a thousand small calls, and each
costs as much as its arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.engine.kv_sizing import free_memory
from paceline.model.decoder import Decoder, MixtureOfExperts
from paceline.model.linear import Linear
from paceline.model.lora import AddAdapters
from paceline.model.norm import Norm

_PACKED_MEMORY_FRACTION = 0.2  # of the free memory: the most that the packed copies may take
_TUNED_ROWS = 16  # the number of rows that the packing is tuned for
_MAX_PACKED_ROWS = 32  # with more rows the transposed weight is faster again


class CpuLinear(Linear):
    """With the copy of W that is faster for the number of rows. `weight` is a view of the transposed one."""

    __slots__ = ("_packed", "_transposed")

    def __init__(self, linear: Linear, factors: Tensor | None = None, *, packed: bool) -> None:
        """factors: of the columns of W, such as the weight of a norm."""
        weight = linear.tensor if factors is None else linear.tensor * factors
        self._transposed = weight.t().contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TUNED_ROWS) if packed else None
        super().__init__(self._transposed.t(), linear.bias, linear.name)

    def add_to(self, x: Tensor, y: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        if self._uses_packed(y) or self.bias is not None or adapt is not None:
            return self(y, adapt).add_(x)
        return torch.addmm(x, y, self._transposed)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._uses_packed(x):
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return result
        if self.bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self.bias, x, self._transposed)

    def _uses_packed(self, x: Tensor) -> bool:
        return self._packed is not None and 1 < len(x) <= _MAX_PACKED_ROWS


def arrange(decoder: Decoder) -> Decoder:
    """Rearranges the weights of a float32 decoder on the CPU in place, one matrix after the other, so that memory holds
    them once and not twice. Others stay: torch has good 16-bit GEMMs for weights as stored, and packed ones are
    dequantized."""
    if decoder.dtype is not torch.float32 or decoder.device.type != "cpu" or decoder.is_packed:
        return decoder
    packed = bool(torch.backends.mkldnn.is_available()) and (  # type: ignore[no-untyped-call, unused-ignore]
        decoder.spec.num_parameters * 4 <= _PACKED_MEMORY_FRACTION * free_memory()
    )
    for layer in decoder.layers:
        layer.qkv = CpuLinear(layer.qkv, _fold(layer.attention_norm), packed=packed)
        layer.out = CpuLinear(layer.out, packed=packed)
        mlp, factors = layer.dense, _fold(layer.mlp_norm)
        if isinstance(layer.mlp, MixtureOfExperts) and factors is not None:
            _fold_into(layer.mlp, factors)
            factors = None
        if mlp is not None:
            mlp.gate_up = CpuLinear(mlp.gate_up, factors, packed=packed)
            mlp.down = CpuLinear(mlp.down, packed=packed)
    if decoder.shard.is_last:
        decoder.head = CpuLinear(decoder.head, decoder.norm.fold() * decoder.logit_scale, packed=packed)
        decoder.logit_scale = 1.0
    return decoder


def _fold(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.fold()


def _fold_into(experts: MixtureOfExperts, norm: Tensor) -> None:
    # In place: a copy of all experts may not fit into memory.
    shared = () if experts.shared is None else (experts.shared_gate, experts.shared.gate_up.weight)
    for weight in (experts.expert_gate_up, experts.router, *shared):
        if isinstance(weight, Tensor):
            weight.mul_(norm)
    norm.fill_(1)  # otherwise a second decoder of these weights would fold it again
