"""activation(gate) * up, from the output of one GEMM that computes both side by side."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.kernels._triton import cdiv, launched, pdl_launch_dependents, pdl_wait, tl, triton
from paceline.kernels.rms_norm import row_factor, row_factor_reference


def gated_reference(gate_up: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


def silu_mul_reference(
    gate_up: torch.Tensor,
    stream: torch.Tensor | None = None,
    eps: float = 0.0,
    weights: torch.Tensor | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    wide = gate_up.float() if stream is None else gate_up.float() * row_factor_reference(stream, eps)
    value = gated_reference(wide, gelu)
    return (value if weights is None else value * weights[:, None]).to(gate_up.dtype)


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """silu(gate) * up, or with GELU in its tanh form: x * sigmoid(u) both, since (1 + tanh(v)) / 2 is sigmoid(2 v)."""
    inner = gate
    if GELU:
        inner = tl.maximum(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate), -80.0)
    return gate / (1.0 + tl.exp(-inner)) * up


@launched
@triton.jit
def _silu_mul_kernel(
    gate_up,
    out,
    stream,
    weights,
    width,
    eps,
    H: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        pdl_wait()
        pdl_launch_dependents()
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    if H:
        factor = row_factor(stream, row, eps, H)
        gate *= factor
        up *= factor
    value = gated(gate, up, GELU)
    if WEIGHTED:
        value *= tl.load(weights + row)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    stream: torch.Tensor | None = None,
    eps: float = 0.0,
    weights: torch.Tensor | None = None,
    pdl: bool = False,
    gelu: bool = False,
) -> None:
    """out [T, F] = silu(gate_up[:, :F]) * gate_up[:, F:], for contiguous gate_up [T, 2F]; gelu: with GELU instead. With
    `stream` [T, H], gate_up was computed from the hidden states before RMSNorm, and the norm's factor is applied here.
    weights [T] float32: factors of the rows of out."""
    tokens, width = out.shape
    block = 1024
    _silu_mul_kernel[(tokens, cdiv(width, block))](
        gate_up,
        out,
        out if stream is None else stream,
        out if weights is None else weights,
        width,
        eps,
        H=0 if stream is None else stream.shape[1],
        WEIGHTED=weights is not None,
        GELU=gelu,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
