"""The soft cap of logits, in place: cap * tanh(logits / cap)."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch

from paceline.kernels._triton import cdiv, launched, tl, triton

_BLOCK = 4096


def soft_cap_reference(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return (cap * torch.tanh(logits.float() / cap)).to(logits.dtype)


@launched
@triton.jit
def _soft_cap_kernel(logits, width, cap, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(logits + row * width + column, mask=inside, other=0.0).to(tl.float32)
    # tanh(x) by exp(-2 |x|), which does not overflow; NaN stays NaN, which sampling reports.
    small = tl.exp(-2.0 / cap * tl.abs(value))
    limited = cap * (1.0 - small) / (1.0 + small)
    value = tl.where(value < 0.0, -limited, limited)
    tl.store(logits + row * width + column, value.to(logits.dtype.element_ty), mask=inside)


def soft_cap(logits: torch.Tensor, cap: float) -> None:
    """logits [N, V], contiguous."""
    rows, width = logits.shape
    _soft_cap_kernel[(rows, cdiv(width, _BLOCK))](logits, width, float(cap), BLOCK=_BLOCK, num_warps=8)
