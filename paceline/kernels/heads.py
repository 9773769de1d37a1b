"""What the attention kernels share: heads of any size, scores with a scale and a soft cap, and attention sinks.

Tiles have a power of two of columns, PADDED; a head of D elements fills the first of them, and the others are loaded as
zeros and never stored. Caches, queries and outputs have D columns. With PADDED == D no mask is computed.

A sink is a score of a query head that adds to the denominator of its softmax, and to nothing else. It is added where
the output is written: by the one program that has, or merges, all keys of a query, never to a partial result.
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


def softmax_reference(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last dimension of scores [..., kv heads, G, keys]; sinks [heads]."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(*scores.shape[-3:-1], 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


@triton.jit
def sink_weight(sinks, head, inside, top):
    """What the sinks of heads add to the sum of exp2(score - top). A sink far above all scores makes the output 0, and
    does not overflow."""
    score = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
    return tl.exp2(tl.minimum(score - top, 126.0))


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
