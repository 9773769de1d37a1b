"""FP8 numbers (e4m3): 3 bits of mantissa, normal from 2^-6 to 448. Conversion that saturates, in kernels and in torch.

A number is stored divided by a scale. Kernels convert stored numbers to float16, which has all of them exactly and
takes one instruction for two numbers on a Hopper GPU (to bfloat16 it takes five), and apply the scale to the sum.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch

from paceline.kernels._triton import INTERPRETED, tl, triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_FP8_MAX, _FLOAT16_MAX = tl.constexpr(FP8_MAX), tl.constexpr(65504.0)


def to_fp8_reference(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, saturated. NaN stays NaN."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


@triton.jit
def to_stored(x, scale, TYPE: tl.constexpr, SCALED: tl.constexpr):
    """x in the type of a tensor that is stored; SCALED: as FP8, divided by its scale and saturated."""
    if SCALED:
        # Conversion alone saturates on a GPU, but not in every version of the interpreter.
        x = tl.clamp(x / scale, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(TYPE)


@triton.jit
def to_operand(x, TYPE: tl.constexpr):
    """A float32 operand of a GEMM whose other operand has the type TYPE, saturated."""
    if tl.float16 == TYPE:
        x = tl.clamp(x, -_FLOAT16_MAX, _FLOAT16_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(TYPE)


@triton.jit
def unpack_pairs(pairs):
    """Two FP8 numbers in 16 bits: the first ones and the second ones, in float16. Three instructions for four numbers.

    A GEMM operand whose rows are along K is read from shared memory with a transposition, which exists for 16 bits and
    not for 8: one byte at a time would take longer than everything else.
    """
    if INTERPRETED:
        first = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # The first bytes of two pairs, and their second bytes, each as two numbers in float16.
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 first, second;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {first, second}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return first, second
