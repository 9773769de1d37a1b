"""Which class computes a matrix: the one place that knows all formats of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from paceline.engine.linear.base import CudaLinear, Place, Setting, Work
from paceline.engine.linear.dense import DenseLinear, DenseWork
from paceline.engine.linear.fp8 import Fp8Linear, Fp8Work
from paceline.engine.linear.groupwise import GroupwiseLinear, GroupwiseWork
from paceline.kernels._triton import cdiv
from paceline.kernels.groupwise_linear import GroupwiseMatrix
from paceline.kernels.linear import LinearWorkspace
from paceline.kernels.quantized_linear import QuantizedMatrix
from paceline.model.linear import Matrix

# The class of a matrix as it is kept -> that of what such matrices share, and that which computes one.
_FORMATS: dict[type, tuple[Callable[..., Work], Callable[..., CudaLinear]]] = {
    Tensor: (DenseWork, DenseLinear),
    QuantizedMatrix: (Fp8Work, Fp8Linear),
    GroupwiseMatrix: (GroupwiseWork, GroupwiseLinear),
}
_MAX_SPLIT_K = 4
_MIN_SPLIT_ROWS = 32  # with half as many rows, K is split into twice as many parts


class Linears:
    """Makes the `CudaLinear`s of a model, and has what they share."""

    def __init__(self, setting: Setting, matrices: Iterable[Matrix], max_rows: int) -> None:
        """matrices: of all layers, without experts. max_rows: of a decode batch."""
        found: dict[type, list[Matrix]] = {}
        for one in matrices:
            found.setdefault(type(one), []).append(one)
        self._works: dict[type, Work] = {kind: _FORMATS[kind][0](setting, ones) for kind, ones in found.items()}
        works = self._works.values()
        rows = max(min(setting.max_tokens if one.fuses_prompts else max_rows, one.max_fused_rows) for one in works)
        widest = max(setting.spec.hidden_size, setting.spec.layers[0].mixer.qkv_size)
        self._workspace = LinearWorkspace(
            torch.empty(_MAX_SPLIT_K * max(rows, _MIN_SPLIT_ROWS) * widest, device=setting.device),
            torch.zeros(cdiv(max(rows, 16), 16) * cdiv(widest, 16), dtype=torch.int32, device=setting.device),
        )

    def make(self, matrix: Matrix, place: Place) -> CudaLinear:
        return _FORMATS[type(matrix)][1](matrix, place, self._works[type(matrix)], self._workspace)

    @property
    def has_packed(self) -> bool:
        return set(self._works) != {Tensor}

    def row_limits(self) -> Iterator[None]:
        """Sets what decides between kernels to each value that it can have, as `Work.row_limits`."""
        for work in self._works.values():
            yield from work.row_limits()
