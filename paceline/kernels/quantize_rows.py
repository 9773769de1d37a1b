"""Rounds activations to FP8 with a scale per row, for FP8 GEMMs: as they are, after RMSNorm, or after SiLU of a gate.

The row is in registers when its largest value is known, so it is read once. A norm adds to the residual stream first
where the previous GEMM could not. If that GEMM did not apply its scales, they are applied here, or alone by
`apply_scales`.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch

from paceline.kernels._triton import cdiv, launched, next_power_of_2, tl, triton
from paceline.kernels.fp8 import FP8_MAX, to_fp8_reference, to_stored
from paceline.kernels.rms_norm import rms_norm_reference
from paceline.kernels.silu_mul import silu_mul_reference

_FP8_MAX = tl.constexpr(FP8_MAX)
_APPLY_COLUMNS = 2048  # of one program


def quantize_rows_reference(
    x: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    gemm_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 numbers and the scale of each row. residual: x is added to it in place. gemm_scales: those of the rows and
    columns of x, if they are not applied."""
    wide = x.float()
    if gemm_scales is not None:
        x = wide = wide * gemm_scales[0][:, None] * gemm_scales[1]
    if norm is not None:
        wide, stream = rms_norm_reference(x, norm, eps, residual)
        if residual is not None and stream is not None:
            residual.copy_(stream)
    elif gated:
        wide = silu_mul_reference(x)
    wide = wide.float()
    scales = (wide.abs().amax(1) / FP8_MAX).clamp_min(1e-12)
    return to_fp8_reference(wide, scales[:, None]), scales


@triton.jit
def _columns(
    x,
    residual,
    factors,
    row,
    row_scale,
    column,
    inside,
    x_stride,
    width,
    HAS_RESIDUAL: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Some columns of a row, in float32; added to the residual stream, or after SiLU of the gate."""
    place = x + row * x_stride + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        value = value * row_scale * tl.load(factors + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        stream = residual + row * width + column
        total = (value + tl.load(stream, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(stream, total, mask=inside)
        value = total.to(tl.float32)
    if GATED:
        up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
        if HAS_FACTORS:
            up = up * row_scale * tl.load(factors + width + column, mask=inside, other=0.0)
        value = value / (1.0 + tl.exp(-value)) * up
    return value


@triton.jit
def _normed(value, rstd, norm, column, inside):
    return value * rstd * tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)


@launched
@triton.jit
def _quantize_rows_kernel(
    x,
    residual,
    norm,
    factors,
    out,
    scales,
    x_stride,
    width,
    eps,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_scale = 1.0
    if HAS_FACTORS:
        row_scale = tl.load(scales + row)  # that of x; overwritten below
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = _columns(
        x, residual, factors, row, row_scale, column, inside, x_stride, width, HAS_RESIDUAL, HAS_FACTORS, GATED
    )
    if REST:
        last = BLOCK + tl.arange(0, REST)
        is_last = last < width
        rest = _columns(
            x, residual, factors, row, row_scale, last, is_last, x_stride, width, HAS_RESIDUAL, HAS_FACTORS, GATED
        )
    if HAS_NORM:
        squares = tl.sum(value * value, axis=0)
        if REST:
            squares += tl.sum(rest * rest, axis=0)
        rstd = 1.0 / tl.sqrt(squares / width + eps)
        value = _normed(value, rstd, norm, column, inside)
        if REST:
            rest = _normed(rest, rstd, norm, last, is_last)
    largest = tl.max(tl.abs(value), axis=0)
    if REST:
        largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=0))
    scale = tl.maximum(largest / _FP8_MAX, 1.0e-12)
    tl.store(scales + row, scale)
    out += row * width
    tl.store(out + column, to_stored(value, scale, out.dtype.element_ty, True), mask=inside)
    if REST:
        tl.store(out + last, to_stored(rest, scale, out.dtype.element_ty, True), mask=is_last)


def quantize_rows(
    x: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> None:
    """out [T, W] FP8 and scales [T] float32, of x [T, W]; gated: x is [T, 2 W], gate first. With `residual` [T, W],
    residual += x in place, and the norm is that of the sum. With `factors` float32, one per column of x, x is first
    multiplied by them and by `scales`, which then still has those of its rows."""
    tokens, width = out.shape
    block, rest = _split(width)
    _quantize_rows_kernel[(tokens,)](
        x,
        x if residual is None else residual,
        x if norm is None else norm,
        scales if factors is None else factors,
        out,
        scales,
        x.stride(0),
        width,
        eps,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_FACTORS=factors is not None,
        GATED=gated,
        BLOCK=block,
        REST=rest,
        num_warps=min(max(block // 512, 1), 16),
    )


def _split(width: int) -> tuple[int, int]:
    """Columns in two blocks, which are powers of two: one alone may be twice as wide as the row. 0: no second block."""
    block = 1 << (width.bit_length() - 1)
    return block, next_power_of_2(width - block) if width > block else 0


@launched
@triton.jit
def _apply_scales_kernel(x, scales, factors, x_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = x + row * x_stride + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) * tl.load(scales + row)
    value = value * tl.load(factors + column, mask=inside, other=0.0)
    tl.store(place, value.to(x.dtype.element_ty), mask=inside)


def apply_scales(x: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor) -> None:
    """x [T, W] *= scales [T, 1] * factors [W], in place; both are float32."""
    tokens, width = x.shape
    block = min(next_power_of_2(width), _APPLY_COLUMNS)
    _apply_scales_kernel[(tokens, cdiv(width, block))](
        x, scales, factors, x.stride(0), width, BLOCK=block, num_warps=max(block // 512, 1)
    )
