"""Matrices in FP8, a scale per row. With many rows activations are rounded to FP8, too, a scale per row.

    few rows     norm -> qkv -> attention -> out [+ x] -> norm -> gate,up silu -> down [+ x]
    many rows    [+ x, norm, round] qkv -> attention -> [round] out -> [+ x, norm, round] gate,up -> [silu, round] down

The library's kernel then has twice the rate of 16 bits. Its fastest kernels for up to 1,024 rows know one scale per
matrix only: they multiply without scales, and whoever reads their output applies those of rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.linear.base import Place, Setting
from paceline.engine.linear.packed import PackedLinear, PackedWork, operand_dtype
from paceline.engine.linear.stream import Projected, ResidualStream, Scales
from paceline.kernels.linear import LinearTuning, LinearWorkspace
from paceline.kernels.quantize_rows import quantize_rows
from paceline.kernels.quantized_linear import QuantizedMatrix, quantized_linear

_MAX_FEW_ROWS = 16  # rows up to which FP8 weights are converted in registers
_MAX_UNSCALED_ROWS = 1024  # rows up to which the library's kernel without scales is faster (docs/log/gemms.md)


class Fp8Work(PackedWork):
    def __init__(self, setting: Setting, matrices: Sequence[QuantizedMatrix]) -> None:
        tokens, device, hidden = setting.max_tokens, setting.device, setting.spec.hidden_size
        self.max_fused_rows = 0 if setting.has_ranks else _MAX_FEW_ROWS
        few = min(tokens, _MAX_FEW_ROWS)
        self.inputs = torch.zeros(few, hidden, dtype=operand_dtype(setting.dtype), device=device)
        widest = max(setting.spec.linear_columns)
        self._rounded = torch.zeros(tokens * widest, dtype=torch.float8_e4m3fn, device=device)
        self._scales, self.one = torch.ones(tokens, device=device), torch.ones((), device=device)

    def rows(self, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
        """For rounded activations, and their scales."""
        return self._rounded[: num_rows * width].view(num_rows, width), self._scales[:num_rows]


class Fp8Linear(PackedLinear):
    kernel = quantized_linear

    def __init__(self, matrix: QuantizedMatrix, place: Place, work: Fp8Work, workspace: LinearWorkspace) -> None:
        super().__init__(matrix, place, work, workspace)
        self._matrix, self._work = matrix, work

    def tuning(self, num_rows: int) -> LinearTuning:
        # The fastest of nine tiles for the linear layers of Qwen3-14B at one row on an H200 (docs/log/gemms.md).
        return LinearTuning(16, 64, 128, 4, 4, 1 if self.gated else 4)

    def multiply(self, source: Tensor, out: Tensor, *, add: bool = False) -> None:
        rounded, rows = self._work.rows(*source.shape)
        quantize_rows(source, rounded, rows)
        self._finish(out, self._multiply(rounded, rows, out), may_wait=False)

    def project_many(self, stream: ResidualStream, out: Tensor, activated: Tensor | None) -> Projected:
        source, residual, scales = stream.take()
        rounded, rows = self._work.rows(*source.shape)
        columns = None if scales is None else scales.columns
        quantize_rows(source, rounded, rows, self.norm, stream.eps, residual=residual, factors=columns)
        found = self._multiply(rounded, rows, out)
        # Attention does not apply them.
        return Projected(out, activated, scales=self._finish(out, found, may_wait=activated is not None))

    def add_many(self, source: Projected, stream: ResidualStream) -> None:
        if source.activated is not None and (stream.gelu or source.normed_by is not None):
            source = Projected(stream.activated(source))  # what the rounding cannot do
        rounded, rows = self._work.rows(len(source.values), self.shape[1])
        columns = None if source.scales is None else source.scales.columns
        quantize_rows(source.values, rounded, rows, gated=source.activated is not None, factors=columns)
        out = stream.partial_buffer
        found = self._multiply(rounded, rows, out)
        stream.add(out, self.norm_behind, self._finish(out, found, may_wait=True))

    def load_library(self, stream: ResidualStream, source: Tensor, out: Tensor, *, add: bool = False) -> None:
        if not self.runs_fused(len(stream), fused=stream.fused):
            out = stream.partial_buffer if add else out
            self._multiply(*self._work.rows(len(stream), self.shape[1]), out)

    def _multiply(self, x: Tensor, rows: Tensor, out: Tensor) -> Scales | None:
        values, columns = self._matrix.values, self._matrix.factors
        if len(x) > _MAX_UNSCALED_ROWS:
            scaled_mm(x, values, out, rows[:, None], columns[None, :])
            return None
        scaled_mm(x, values, out, self._work.one, self._work.one)
        return Scales(rows, columns)

    def _finish(self, out: Tensor, scales: Scales | None, *, may_wait: bool) -> Scales | None:
        """Adds the bias, after the scales. may_wait: the scales may be left to whoever reads the output."""
        if scales is not None and not (may_wait and self.bias is None):
            scales.apply_to(out)
            scales = None
        if self.bias is not None:
            out.add_(self.bias)
        return scales


def scaled_mm(x: Tensor, weight: Tensor, out: Tensor, scales: Tensor, factors: Tensor) -> None:
    """out [M, N] = x @ weightᵀ * scales * factors, of FP8 numbers. scales are [M, 1] and factors [1, N], or both are
    scalars."""
    if x.device.type == "cuda":
        torch._scaled_mm(
            x,
            weight.T,
            scale_a=scales,
            scale_b=factors,
            out_dtype=out.dtype,
            use_fast_accum=True,  # all sums in the tensor core, which keeps fewer bits of them (docs/log/gemms.md)
            out=out,
        )
    elif x.device.type == "cpu":
        out.copy_(x.float() @ weight.float().T * scales * factors)
