"""The weights of a linear layer on a GPU, quantized or not, with what is computed beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.groupwise_linear import GroupwiseMatrix
from paceline.kernels.lora import AdapterMatrix
from paceline.kernels.quantized_linear import QuantizedMatrix
from paceline.model.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """A linear layer, weight [N, K]. gated: the first half of its columns is the gate, the second half is up."""

    weight: Tensor  # empty if it is quantized
    bias: Tensor | None
    gated: bool = False
    quantized: QuantizedMatrix | GroupwiseMatrix | None = None
    norm: Tensor | None = None  # the RMSNorm before it, if that is not folded into the weight
    adapters: AdapterMatrix | None = None  # LoRA, where that is enabled

    @classmethod
    def taken_over(
        cls,
        linear: Linear,
        norm: Tensor | None = None,
        *,
        gated: bool = False,
        adapters: AdapterMatrix | None = None,
    ) -> LinearWeights:
        """norm: of its input. It is folded into a weight, and kept beside a quantized one."""
        if isinstance(linear.weight, QuantizedMatrix | GroupwiseMatrix):
            assert adapters is None, "adapters are refused with quantized weights"
            return cls(torch.empty(0), linear.bias, gated, linear.weight, norm)
        if norm is not None:
            linear.tensor.mul_(norm)
        return cls(linear.tensor, linear.bias, gated, adapters=adapters)

    @property
    def columns(self) -> int:
        rows = (self.weight if self.quantized is None else self.quantized).shape[0]
        return rows // (2 if self.gated else 1)

    def load(self, linear: Linear, norm: Tensor | None = None) -> None:
        """Copies other weights in place; `norm` is folded into them."""
        self.weight.copy_(linear.tensor)
        if norm is not None:
            self.weight.mul_(norm.to(self.weight.device))
        if self.bias is not None and linear.bias is not None:
            self.bias.copy_(linear.bias)
