"""Gumbel noise as a hash of (seed, position, token): a request draws the same noise alone or in a batch, before and
after a retraction. Kernels call `noise_keys` once per row, then `gumbel` for each token."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch

from paceline.kernels._triton import tl, triton
from paceline.kernels.layouts import SamplingWord

_SEED_LOW = tl.constexpr(SamplingWord.SEED_LOW.value)
_SEED_HIGH = tl.constexpr(SamplingWord.SEED_HIGH.value)
_MASK = 0xFFFFFFFF


def _mix_reference(h: torch.Tensor) -> torch.Tensor:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def gumbel_reference(seed: int, position: int, vocab: int) -> torch.Tensor:
    """[V] float64."""

    def word(n: int) -> torch.Tensor:
        return torch.tensor(n & _MASK)

    first = _mix_reference(word(seed) ^ _mix_reference(word(position + 0x9E3779B9)))
    second = _mix_reference((word(seed >> 32) + first * 0x9E3779B1) & _MASK)
    h = (torch.arange(vocab) * 0x9E3779B1 + first) & _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15) ^ second) * 0x846CA68B) & _MASK
    h = h ^ (h >> 16)
    uniform = (h.double() + 0.5) / 2**32
    return -torch.log(-torch.log1p(-uniform))


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def noise_keys(params, position):
    low = tl.load(params + _SEED_LOW).to(tl.uint32, bitcast=True)
    high = tl.load(params + _SEED_HIGH).to(tl.uint32, bitcast=True)
    first = _mix(low ^ _mix(position.to(tl.uint32) + 0x9E3779B9))
    return first, _mix(high + first * 0x9E3779B1)


@triton.jit
def _log(x, APPROX: tl.constexpr):
    """The hardware's approximate logarithm on a GPU: the exact one takes twenty instructions, twice per token."""
    if APPROX:
        return 0.6931471805599453 * tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log(x)


@triton.jit
def gumbel(token, first, second, APPROX: tl.constexpr):
    # One round is enough, since the keys are mixed already. At 256 rows the hash is most of the sampling time.
    h = token.to(tl.uint32) * 0x9E3779B1 + first
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15) ^ second) * 0x846CA68B
    h = h ^ (h >> 16)
    uniform = (h.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # -log1p(-u): near zero the plain logarithm would lose the bits that decide which token wins.
    small = uniform < 0.001
    exponential = tl.where(
        small, uniform + 0.5 * uniform * uniform, -_log(1.0 - tl.minimum(uniform, 0.99999994), APPROX)
    )
    return -_log(exponential, APPROX)
