"""RMSNorm: alone, after adding to the residual stream, or of what is added to it.

Most forward passes launch it only once, before the logits. The weight of every other norm is folded into the GEMM that
follows, and the remaining factor is the same for a whole row: fused GEMMs apply it to their accumulators (linear.py);
after a cuBLAS GEMM, the kernel that reads the output applies it (`row_factor`).

Where a model norms the output of a block (Gemma 2, OLMo 2), one launch does that, adds the result to the residual
stream and norms it for the next block (`post_norm`).
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch

from paceline.kernels._triton import launched, next_power_of_2, pdl_launch_dependents, pdl_wait, tl, triton


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (normed, residual + x). The sum is rounded to the stream's dtype before the norm, as in the kernel."""
    total = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype), total


def row_factor_reference(stream: torch.Tensor, eps: float) -> torch.Tensor:
    """[T, 1] float32."""
    return torch.rsqrt(stream.float().square().mean(-1, keepdim=True) + eps)


@triton.jit
def row_factor(stream, row, eps, H: tl.constexpr):
    """The RMSNorm factor of a row of the residual stream [T, H]; it also applies to any GEMM of that row."""
    column = tl.arange(0, triton.next_power_of_2(H))
    value = tl.load(stream + row * H + column, mask=column < H, other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / H + eps)


@launched
@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    out_stride,
    hidden,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait()
    pdl_launch_dependents()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        stream = residual + row * hidden + column
        total = (value + tl.load(stream, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(stream, total, mask=inside)
        value = total.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / hidden + eps)
    tl.store(out + row * out_stride + column, (value * rstd * scale).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out [T, H] = norm(x [T, H]) * weight [H]; with `residual` [T, H]: residual += x in place, out = norm(residual).

    Rows of x and out may be strided; residual is contiguous, and out may be x.
    """
    tokens, hidden = x.shape
    block = next_power_of_2(hidden)
    _rms_norm_kernel[(tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        out.stride(0),
        hidden,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
        launch_pdl=pdl,
    )


def post_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm(residual + norm(x) * weight), residual + norm(x) * weight)."""
    wide = x.float()
    added = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    total = (residual.float() + added).to(residual.dtype)
    return rms_norm_reference(total, torch.ones_like(weight), eps)[0], total


@launched
@triton.jit
def _post_norm_kernel(x, residual, weight, out, x_stride, hidden, eps, HAS_OUT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait()
    pdl_launch_dependents()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    stream = residual + row * hidden + column
    before = tl.load(stream, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / hidden + eps)
    total = (before + value * rstd * scale).to(residual.dtype.element_ty)
    tl.store(stream, total, mask=inside)
    if HAS_OUT:
        value = total.to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / hidden + eps)
        tl.store(out + row * hidden + column, (value * rstd).to(out.dtype.element_ty), mask=inside)


def post_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """residual [T, H] += norm(x [T, H]) * weight [H]; then out [T, H] = norm(residual), without a weight. Rows of x may
    be strided; residual and out are contiguous."""
    tokens, hidden = x.shape
    block = next_power_of_2(hidden)
    _post_norm_kernel[(tokens,)](
        x,
        residual,
        weight,
        x if out is None else out,
        x.stride(0),
        hidden,
        eps,
        HAS_OUT=out is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
        launch_pdl=pdl,
    )
