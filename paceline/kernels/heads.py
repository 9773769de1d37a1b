"""What the attention kernels share: heads of any size, and scores with a scale and a soft cap.

Tiles have a power of two of columns, PADDED; a head of D elements fills the first of them, and the others are loaded as
zeros and never stored. Caches, queries and outputs have D columns. With PADDED == D no mask is computed.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch

from paceline.kernels._triton import LOG2_E, tl, triton


def score_factors(scale: float, cap: float | None) -> tuple[float, float]:
    """`scale` and `CAP` of the kernels: their softmax is in base 2, and tanh(x) is 1 - 2 / (1 + exp(2 x))."""
    return (scale * LOG2_E, 0.0) if cap is None else (scale * 2 * LOG2_E / cap, cap * LOG2_E)


def scores_reference(products: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    scores = products * scale
    return scores if cap is None else cap * torch.tanh(scores / cap)


@triton.jit
def scaled_scores(products, scale, CAP: tl.constexpr):
    if CAP > 0.0:
        scores = CAP - 2.0 * CAP / (1.0 + tl.exp2(products * scale))
    else:
        scores = products * scale
    return scores


@triton.jit
def within_head(mask, D: tl.constexpr, PADDED: tl.constexpr):
    """`mask` of rows, for tiles of [rows, PADDED]."""
    if PADDED != D:
        mask = (tl.arange(0, PADDED) < D)[None, :] & mask
    return mask


@triton.jit
def load_heads(pointers, D: tl.constexpr, PADDED: tl.constexpr):
    """Tiles of [rows, PADDED] whose rows all exist."""
    if PADDED != D:
        found = tl.load(pointers, mask=(tl.arange(0, PADDED) < D)[None, :], other=0.0)
    else:
        found = tl.load(pointers)
    return found
