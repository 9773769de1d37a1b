"""The matrices of all experts of a layer in 8 bits, and what a GEMM needs to multiply with them.

    FP8     e4m3 numbers, with a float32 scale for each row, or for each block of rows and columns

Numbers become float16 in registers, without rounding, and sums of columns with one scale are scaled in float32. So the
result is that of the dequantised weights, up to the order of the sums. Inputs are float16: RMSNorm writes them so.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import cdiv, tl, triton
from paceline.kernels.fp8 import FP8, FP8_MAX


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Experts:
    """Matrices [E, N, K]: values times the scale of their rows and columns."""

    values: torch.Tensor  # [E, N, K] FP8
    scales: torch.Tensor  # [E, groups of columns, groups of rows] float32
    rows: int  # with one scale; N is a multiple
    columns: int  # with one scale; the last group may have fewer

    def __post_init__(self) -> None:
        experts, rows, columns = self.values.shape
        expected = (experts, cdiv(columns, self.columns), rows // self.rows)
        assert self.scales.shape == expected and rows % self.rows == 0, f"scales of shape {list(self.scales.shape)}"
        assert self.columns >= columns or self.columns in (16, 32, 64, 128), f"groups of {self.columns} columns"

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, columns = self.values.shape
        return experts, rows, columns

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The reference implementation of what the kernels compute with."""
        scales = self.scales.transpose(1, 2).repeat_interleave(self.rows, 1).repeat_interleave(self.columns, 2)
        return (self.values.float() * scales[:, :, : self.values.shape[2]]).to(dtype)


ExpertMatrices = torch.Tensor | Fp8Experts  # [E, N, K]


def quantise_fp8_experts(weight: torch.Tensor, block: tuple[int, int] | None = None) -> Fp8Experts:
    """Rounds matrices [E, N, K] to FP8, with a scale per row, or per block of so many rows and columns."""
    experts, num_rows, num_columns = weight.shape
    rows, columns = (1, num_columns) if block is None else block
    groups = cdiv(num_columns, columns)
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(experts, groups, num_rows // rows, device=weight.device)
    for expert in range(experts):  # one at a time: float32 takes four times the memory
        padded = torch.nn.functional.pad(weight[expert].float(), (0, groups * columns - num_columns))
        blocks = padded.view(num_rows // rows, rows, groups, columns)
        scale = blocks.abs().amax((1, 3)).clamp_min(1e-12) / FP8_MAX
        rounded = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        values[expert] = rounded.view(num_rows, -1)[:, :num_columns]
        scales[expert] = scale.T
    return Fp8Experts(values, scales, rows, columns)


def values_of(weight: ExpertMatrices) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.values


def scales_of(weight: ExpertMatrices) -> torch.Tensor:
    """Those of quantised matrices; others have none, and the kernel gets a tensor that it does not read."""
    return weight if isinstance(weight, torch.Tensor) else weight.scales


def format_options(weight: ExpertMatrices) -> dict[str, int]:
    """The constants of a kernel that depend on the format: its number, and rows and columns with one scale."""
    if isinstance(weight, torch.Tensor):
        return {"FORMAT": 0, "SCALE_N": 1, "SCALE_K": weight.shape[2]}
    return {"FORMAT": 1, "SCALE_N": weight.rows, "SCALE_K": weight.columns}


def max_block_k(weight: ExpertMatrices) -> int:
    """Columns that a step of a GEMM may have: those of one scale."""
    if isinstance(weight, torch.Tensor):
        return 1 << 30
    _, _, columns = weight.shape
    return 1 << 30 if weight.columns >= columns else weight.columns


@triton.jit
def load_tile(pointers, inside, rest, WIDTH: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A tile [rows, WIDTH], of which `inside` rows and the first `rest` columns are read; the others are 0."""
    if MASK_COLUMNS:
        inside_k = (tl.arange(0, WIDTH) < rest)[None, :]
        tile = tl.load(pointers, mask=inside[:, None] & inside_k, other=0.0)
    elif MASK_ROWS:
        tile = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def add_product(acc, a, w, scales, inside, SCALED: tl.constexpr):
    """acc [M, N] + a [M, K] @ w [N, K]ᵀ. SCALED: times the scale of each row of w, at `scales` [N]."""
    if SCALED:
        scale = tl.load(scales, mask=inside, other=0.0)
        acc += tl.dot(a, tl.trans(w.to(a.dtype))) * scale[None, :]
    else:
        acc = tl.dot(a, tl.trans(w.to(a.dtype)), acc)
    return acc
