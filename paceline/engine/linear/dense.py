"""Matrices in the dtype of the model: one fused kernel for few rows (kernels/linear.py), cuBLAS for more.

The norm before a matrix is folded into it. What remains of the norm is one factor per row. The fused kernel applies it
by the sums of squares that the matrix before left; after cuBLAS, attention or the activation may (`can_defer`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.linear.base import CudaLinear, Place, Setting, Work
from paceline.engine.linear.stream import Projected, ResidualStream
from paceline.engine.precision import LARGE_MATRIX
from paceline.kernels.linear import (
    LinearTuning,
    LinearWorkspace,
    decode_tuning,
    few_rows_tuning,
    linear,
    num_squares,
    summed_tuning,
)
from paceline.model.linear import Linear

_MAX_FUSED_ROWS = 128
_MAX_SUMMED_ROWS = 2  # with more, weights are read from the L2 cache too often
_LARGE_MATRIX_WITH_EXPERTS = 3 << 22


class DenseWork(Work):
    def __init__(self, setting: Setting, matrices: Sequence[Tensor]) -> None:
        has_experts, is_default = setting.spec.has_experts, setting.tuning is decode_tuning
        # Experts take most of the time of a layer: its other GEMMs are fused for the launches that this saves.
        self.tuning = few_rows_tuning if has_experts and is_default else setting.tuning
        self.max_summed_rows = 0
        if not setting.has_ranks:  # squares are of the sum over ranks
            limit = _LARGE_MATRIX_WITH_EXPERTS if has_experts else LARGE_MATRIX
            is_small = max(one.numel() for one in matrices) < limit
            self.max_fused_rows = _MAX_FUSED_ROWS if is_small else 1
            self.max_summed_rows = min(_MAX_SUMMED_ROWS, self.max_fused_rows) if is_default else 0


class DenseLinear(CudaLinear):
    can_accumulate = True

    def __init__(self, weight: Tensor, place: Place, work: DenseWork, workspace: LinearWorkspace) -> None:
        """The weight is changed in place."""
        super().__init__(place)
        if place.norm is not None:
            weight.mul_(place.norm)
        self.weight, self._work, self._workspace = weight, work, workspace
        self.can_defer = place.bias is None  # it must be added after the factor is applied

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return rows, columns

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def load(self, other: Linear, norm: Tensor | None = None) -> None:
        self.weight.copy_(other.tensor)
        if norm is not None:
            self.weight.mul_(norm.to(self.weight.device))
        if self.bias is not None and other.bias is not None:
            self.bias.copy_(other.bias)

    def multiply(self, source: Tensor, out: Tensor, *, add: bool = False) -> None:
        if add:
            torch.addmm(out, source, self.weight.T, out=out)
            if self.bias is not None:
                out.add_(self.bias)
        elif self.bias is None:
            torch.mm(source, self.weight.T, out=out)
        else:
            torch.addmm(self.bias, source, self.weight.T, out=out)

    def runs_fused(self, num_rows: int, *, fused: bool) -> bool:
        return fused and self._tuning(num_rows) is not None

    def reads_squares(self, num_rows: int, *, fused: bool) -> bool:
        return self.runs_fused(num_rows, fused=fused)

    def project(
        self, stream: ResidualStream, out: Tensor, activated: Tensor | None = None, *, defer: bool = False
    ) -> Projected:
        tuning = self._tuning(len(stream)) if stream.fused else None
        by_squares = stream.norms == "pre"  # otherwise x is normed already, or needs no norm
        if tuning is None or (by_squares and not stream.square_columns):
            return self.plainly_project(stream, out, activated, defer=defer)
        target = out if activated is None else activated
        linear(
            stream.x if by_squares else stream.input(None),
            self.weight,
            target,
            tuning,
            bias=self.bias,
            squares=stream.squares if by_squares else None,
            eps=stream.eps,
            gated=self.gated,
            workspace=self._workspace if tuning.split_k > 1 else None,
            pdl=stream.pdl,
            gelu=stream.gelu and self.gated,
        )
        return Projected(target)

    def add(self, source: Projected, stream: ResidualStream) -> None:
        tuning = self._tuning(len(stream)) if stream.fused else None
        if tuning is None:
            self.plainly_add(source, stream)
            return
        values, squares, residual = stream.activated(source), None, None
        out = stream.partial_buffer
        if stream.adds_directly(self.norm_behind):
            stream.square_columns = num_squares(self.shape[0], tuning)
            out, squares, residual = stream.x, stream.squares, stream.x
        linear(
            values,
            self.weight,
            out,
            tuning,
            bias=self.bias,
            residual=residual,
            squares_out=squares,
            workspace=self._workspace,
            pdl=stream.pdl,
        )
        if residual is None:
            stream.add(out, self.norm_behind)

    def load_library(self, stream: ResidualStream, source: Tensor, out: Tensor, *, add: bool = False) -> None:
        if self.runs_fused(len(stream), fused=stream.fused):
            return
        is_sum = add and stream.adds_directly(self.norm_behind)
        self.multiply(source, stream.partial_buffer if add and not is_sum else out, add=is_sum)

    def _tuning(self, num_rows: int) -> LinearTuning | None:
        """The fused kernel for so many rows; None for cuBLAS."""
        (rows, width), work = self.shape, self._work
        columns = rows // 2 if self.gated else rows
        if num_rows > work.max_fused_rows:
            return None
        if num_rows <= work.max_summed_rows:
            return summed_tuning(width, columns, self.gated)
        tuning = work.tuning(num_rows, columns, self.gated)
        if tuning is None or tuning.block_m == 1:
            return tuning
        return None if width % (tuning.split_k * tuning.block_k) else tuning
