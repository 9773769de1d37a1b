"""GEMMs with few rows (decode batches), with prologue and epilogue fused.

At up to 256 rows a GEMM only reads its weight, in a few microseconds; a norm, an activation or a residual add as a
launch of its own costs as much again. So one kernel does, by flags: multiply, scale each row by the RMSNorm factor of
its input, add a bias, apply SiLU to gate and multiply by up, add to the residual stream.

The norm is free here: its weight is folded into the GEMM's weight at load, and its factor is the same for a whole row,
so it is applied to the accumulator. The sums of squares it needs are written by the kernel that wrote the row
(`squares_out`): summing them inside the loop doubled its time.

Weights are [N, K] as in torch.nn.Linear. With split_k, the program that arrives last adds the partial sums in a fixed
order, so results are the same in every run.

One or two rows are multiplied without `tl.dot`, which computes 16 rows at least (`summed_tuning`): a program has one
row and a few columns, and loads their weights at once, before it waits for the previous kernel.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.kernels._triton import cdiv, launched, next_power_of_2, pdl_launch_dependents, pdl_wait, tl, triton
from paceline.kernels.silu_mul import gated as gated_activation
from paceline.kernels.silu_mul import gated_reference

_MAX_BLOCK_K = 4096  # of `summed_tuning`


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """In float64. With eps, RMSNorm is applied to x first."""
    wide = x.double()
    out = wide @ weight.double().T
    if eps is not None:
        out *= torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if bias is not None:
        out += bias.double()
    if gated:
        out = gated_reference(out, gelu)
    return out if residual is None else out + residual.double()


@launched
@triton.jit(do_not_specialize=["M"])  # one binary for all batches of a tile size: fewer compilations at start-up
def _linear_kernel(
    x,
    weight,
    bias,
    squares,
    residual,
    out,
    squares_out,
    partials,
    arrived,
    M,
    N,
    x_stride,
    squares_stride,
    squares_out_stride,
    eps,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GELU: tl.constexpr,
    LEAVE_SQUARES: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Rows vary fastest: programs that read the same weights run at the same time and share them in the L2 cache.
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1)
    split = tl.program_id(2)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    per_split: tl.constexpr = K // SPLIT_K
    first = split * per_split
    inside_m = m < M
    inside_n = n < N
    # With a gate, the columns of a tile are those of the gate followed by the matching columns of up.
    wide_n = tl.arange(0, WIDTH)
    column = tile_n * BLOCK_N + wide_n % BLOCK_N
    weights = weight + ((column + wide_n // BLOCK_N * N).to(tl.int64) * K)[:, None] + k[None, :]
    inputs = x + (m.to(tl.int64) * x_stride)[:, None] + k[None, :]
    if BLOCK_M == 1:
        pdl_launch_dependents()
        w = tl.load(weights, mask=(column < N)[:, None] & (k < K)[None, :], other=0.0)
        pdl_wait()
    else:
        pdl_wait()
        pdl_launch_dependents()

    if HAS_NORM:
        # Summed after the loop: a sum before it would delay the first loads of weights.
        part = tl.arange(0, BLOCK_S)
        inside_s = inside_m[:, None] & (part < NUM_SQUARES)[None, :]
        square = tl.load(squares + m[:, None] * squares_stride + part[None, :], mask=inside_s, other=0.0)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    if BLOCK_M == 1:
        for start in tl.static_range(0, K, BLOCK_K):
            inside_k = (start + k < K)[None, :]
            if start > 0:
                w = tl.load(weights + start, mask=(column < N)[:, None] & inside_k, other=0.0)
            a = tl.load(inputs + start, mask=inside_k, other=0.0)
            acc += tl.sum(a.to(tl.float32) * w.to(tl.float32), axis=1)[None, :]
    else:
        for start in tl.range(first, first + per_split, BLOCK_K, num_stages=STAGES):
            a = tl.load(inputs + start, mask=inside_m[:, None], other=0.0)
            w = tl.load(weights + start, mask=(column < N)[:, None], other=0.0)
            acc = tl.dot(a, tl.trans(w), acc)

    place = m.to(tl.int64)[:, None] * N + n[None, :]
    inside = inside_m[:, None] & inside_n[None, :]
    if SPLIT_K > 1:
        size = M.to(tl.int64) * N
        tl.store(partials + split * size + place, acc, mask=inside)
        tl.debug_barrier()
        count = arrived + tile_n * tl.num_programs(0) + tile_m
        is_last = tl.atomic_add(count, 1, sem="acq_rel") == SPLIT_K - 1
        inside = inside & is_last
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for other in tl.static_range(SPLIT_K):
            acc += tl.load(partials + other * size + place, mask=inside, other=0.0, cache_modifier=".cg")
        if is_last:
            tl.store(count, 0)
    if HAS_NORM:
        acc = acc * (1.0 / tl.sqrt(tl.sum(square, axis=1) / K + eps))[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + column + wide_n // BLOCK_N * N, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if WIDTH > BLOCK_N:
        acc, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
        acc = gated_activation(acc, up, GELU)
    if HAS_RESIDUAL:
        acc += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    rounded = acc.to(out.dtype.element_ty)
    tl.store(out + place, rounded, mask=inside)
    if LEAVE_SQUARES:
        wide = tl.where(inside, rounded.to(tl.float32), 0.0)
        target = squares_out + m * squares_out_stride + tile_n
        if SPLIT_K > 1:
            tl.store(target, tl.sum(wide * wide, axis=1), mask=inside_m & is_last)
        else:
            tl.store(target, tl.sum(wide * wide, axis=1), mask=inside_m)


@dataclass(frozen=True, slots=True)
class LinearTuning:
    block_m: int  # 1: without tl.dot
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1


GemmTuning = Callable[[int, int, bool], LinearTuning | None]  # rows, columns, gated; None: cuBLAS


@dataclass(frozen=True, slots=True, eq=False)
class LinearWorkspace:
    """For split_k > 1. GEMMs of one stream run in order and share it. Counts are zero between launches."""

    partials: torch.Tensor  # float32, at least split_k * M * N elements
    arrived: torch.Tensor  # int32, at least one per tile


def decode_tuning(rows: int, columns: int, gated: bool) -> LinearTuning | None:
    """The fastest tuning for the GEMMs of a Qwen3-0.6B layer on an H200; None where cuBLAS is at least as fast.

    Narrow GEMMs are split along K, since their tiles alone would leave most multiprocessors idle.
    """
    narrow = not gated and columns <= 1024
    if rows <= 16:
        return LinearTuning(16, 32, 128, 4, 5, 4 if narrow else 1)
    if rows <= 32:
        return LinearTuning(32, 16, 128, 2, 5) if gated else LinearTuning(32, 32, 128, 4, 5, 4 if narrow else 1)
    if rows <= 64:
        return LinearTuning(64, 32, 128, 4, 4, 4 if narrow else 1)
    if rows <= 128:
        return LinearTuning(64, 64, 64, 4, 5) if gated else LinearTuning(64, 32, 128, 4, 4, 2 if narrow else 1)
    return None


def few_rows_tuning(rows: int, columns: int, gated: bool) -> LinearTuning | None:
    """For GEMMs of 8 to 12 million weights beside experts, with up to 16 rows; None where cuBLAS is used. All are split
    along K, so that about 300 programs read."""
    if rows > 16:
        return None
    return LinearTuning(16, 32, 128, 4, 5, 1 if gated else 4 if columns <= 2048 or rows <= 4 else 2)


def summed_tuning(width: int, columns: int, gated: bool) -> LinearTuning:
    """For one row per program, of a weight [columns, width]: some hundred programs, 64 to 128 weights per thread."""
    block_n = (2 if width <= 2048 else 4) if gated else 8 if columns >= 2048 else 4
    block_k = next_power_of_2(width)
    if block_k > _MAX_BLOCK_K:  # as little padding as possible
        block_k = min((_MAX_BLOCK_K, _MAX_BLOCK_K // 2, _MAX_BLOCK_K // 4), key=lambda size: cdiv(width, size) * size)
    num_warps = min(max(block_n * (1 + gated) * block_k // 2048, 2), 8)
    return LinearTuning(1, block_n, block_k, num_warps, 1)


def num_squares(columns: int, tuning: LinearTuning) -> int:
    """How many columns of `squares_out` a GEMM of `columns` columns fills."""
    return cdiv(columns, tuning.block_n)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tuning: LinearTuning,
    bias: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    squares_out: torch.Tensor | None = None,
    workspace: LinearWorkspace | None = None,
    pdl: bool = False,
    gelu: bool = False,
) -> None:
    """out [M, N] = f(rms_norm(x [M, K]) @ weight [N, K]ᵀ + bias [N]) + residual [M, N].

    squares [M, any]: float32 whose row sums are the sums of squares of x's rows; without it x is not normed, with it
    weight must already contain the norm's weight. gated: weight is [2N, K] (and bias [2N]), gate rows first, and
    f(gate, up) = silu(gate) * up, or with `gelu` gelu(gate) * up. out may be residual: the residual stream is then
    updated in place. squares_out [M, num_squares(N, tuning)] receives the sums of squares of what is written. With
    block_m > 1, K must be a multiple of split_k * block_k; a gate needs split_k = 1.

    pdl: uses programmatic dependent launch: this kernel starts before the previous one has ended, and lets the next one
    do the same.
    """
    rows, width = x.shape
    columns = out.shape[1]
    t = tuning
    assert t.block_m == 1 or width % (t.split_k * t.block_k) == 0, (
        f"K = {width} is not a multiple of {t.split_k} x {t.block_k}"
    )
    assert t.block_m > 1 or t.split_k == 1, "split_k needs tl.dot"
    assert t.split_k == 1 or not gated, "split_k excludes a gate"
    assert t.split_k == 1 or workspace is not None, "split_k needs a workspace"
    _linear_kernel[(cdiv(rows, t.block_m), cdiv(columns, t.block_n), t.split_k)](
        x,
        weight,
        x if bias is None else bias,
        x if squares is None else squares,
        x if residual is None else residual,
        out,
        x if squares_out is None else squares_out,
        x if workspace is None else workspace.partials,
        x if workspace is None else workspace.arrived,
        rows,
        columns,
        x.stride(0),
        0 if squares is None else squares.stride(0),
        0 if squares_out is None else squares_out.stride(0),
        eps,
        K=width,
        HAS_BIAS=bias is not None,
        HAS_NORM=squares is not None,
        HAS_RESIDUAL=residual is not None,
        GELU=gelu,
        LEAVE_SQUARES=squares_out is not None,
        NUM_SQUARES=1 if squares is None else squares.shape[1],
        BLOCK_S=1 if squares is None else next_power_of_2(squares.shape[1]),
        SPLIT_K=t.split_k,
        BLOCK_M=t.block_m,
        BLOCK_N=t.block_n,
        WIDTH=t.block_n * (2 if gated else 1),
        BLOCK_K=t.block_k,
        STAGES=t.num_stages,
        num_warps=t.num_warps,
        launch_pdl=pdl,
    )
