"""A matrix and the linear layer around it.

The reference implementation multiplies with any matrix: one in the bits of its format is dequantized for every call. A
device replaces `Linear` by its own class, with the weights in the layout of its kernels (`engine/cpu/linear.py`).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.lora import AddAdapters


class PackedWeight(Protocol):
    """A matrix [N, K], or those of all experts [E, N, K], in the bits of its format."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Its values."""


Matrix = Tensor | PackedWeight


def expanded(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The values of a matrix; a tensor is returned as it is."""
    return matrix if isinstance(matrix, Tensor) else matrix.dequantize(dtype)


class Linear:
    """x W' + b. name: that of W in its layer (`layout.py`), by which adapters know it."""

    __slots__ = ("bias", "name", "weight")

    def __init__(self, weight: Matrix, bias: Tensor | None = None, name: str = "") -> None:
        self.weight, self.bias, self.name = weight, bias, name

    def __call__(self, x: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        y = self._multiply(x)
        if adapt is not None:
            adapt(self.name, x, y)
        return y

    def add_to(self, x: Tensor, y: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        """x + y W' + b, for the residual stream x."""
        return x + self(y, adapt)

    def _multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, expanded(self.weight, x.dtype), self.bias)

    @property
    def tensor(self) -> Tensor:
        """The weight, where it cannot be packed."""
        assert isinstance(self.weight, Tensor), f"{self.name} is packed as {type(self.weight).__name__}"
        return self.weight
