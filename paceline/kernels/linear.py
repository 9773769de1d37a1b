"""Matrix products at decode sizes, with what stands around them fused in.

At up to 256 rows a product only reads its weight, in a few microseconds; a norm, an activation or a residual add as
a launch of its own costs as much again. So one kernel does, by flags: norm the input on the way in (the row's factor
is applied to the sum at the end, since it is the same for the whole row), multiply, add a bias, pair gate and up
columns through silu, add to the residual stream.

Weights are [N, K] as torch.nn.Linear keeps them. With split_k, partial sums are folded in order by whoever arrives
last, so results do not vary from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import cdiv, tl, triton


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float64, except that the normed input is rounded to its own type as the kernel must."""
    wide = x.double()
    factor = torch.ones(x.shape[0], 1, dtype=torch.float64, device=x.device)
    if norm is not None:
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        wide = (x.float() * norm.float()).to(x.dtype).double()
    out = wide @ weight.double().T * factor
    if bias is not None:
        out += bias.double()
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = torch.nn.functional.silu(gate) * up
    return out if residual is None else out + residual.double()


@triton.jit
def _prefetch(pointer):
    """Asks for the cache lines of `pointer`, a block of addresses, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _linear_kernel(
    x,
    weight,
    bias,
    norm,
    residual,
    out,
    partials,
    arrived,
    M,
    N,
    x_stride,
    eps,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    # Rows vary fastest: programs that read the same weights run at the same time and share them in the L2.
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
    weight_rows = weight + (n.to(tl.int64) * K)[:, None]
    if PREFETCH:
        # Weights do not depend on the launch before: fetch them while it is still running.
        line = tl.arange(0, per_split // 64)
        _prefetch(weight_rows + first + line[None, :] * 64)
        if GATED:
            _prefetch(weight_rows + N * K + first + line[None, :] * 64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    x_rows = x + (m.to(tl.int64) * x_stride)[:, None]
    for start in tl.range(first, first + per_split, BLOCK_K, num_stages=STAGES):
        column = start + k
        a = tl.load(x_rows + column[None, :], mask=inside_m[:, None], other=0.0)
        w = tl.load(weight_rows + column[None, :], mask=inside_n[:, None], other=0.0)
        if HAS_NORM:
            wide = a.to(tl.float32)
            square += tl.sum(wide * wide, axis=1)
            a = (wide * tl.load(norm + column).to(tl.float32)[None, :]).to(x.dtype.element_ty)
        acc = tl.dot(a, tl.trans(w), acc)
        if GATED:
            w_up = tl.load(weight_rows + N * K + column[None, :], mask=inside_n[:, None], other=0.0)
            acc_up = tl.dot(a, tl.trans(w_up), acc_up)

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
        factor = 1.0 / tl.sqrt(square / K + eps)
        acc = acc * factor[:, None]
        acc_up = acc_up * factor[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias + N + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    if HAS_RESIDUAL:
        acc += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class LinearTuning:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class LinearWorkspace:
    """For split_k > 1. Products of one stream run in order, so they share one. Counts are zero between launches."""

    partials: torch.Tensor  # float32, at least split_k * M * N elements
    arrived: torch.Tensor  # int32, at least one per tile


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tuning: LinearTuning,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    workspace: LinearWorkspace | None = None,
    pdl: bool = False,
) -> None:
    """out [M, N] = f(rms_norm(x [M, K]) @ weight [N, K]ᵀ + bias [N]) + residual [M, N].

    norm [K] is the norm's weight; without it x is taken as it is. gated: weight is [2N, K] (and bias [2N]), gate
    rows first, and f(gate, up) = silu(gate) * up. out may be residual: the stream is then updated in place. K must
    be a multiple of split_k * block_k; a norm or a gate needs split_k = 1 (each program must see whole rows).
    """
    rows, width = x.shape
    columns = out.shape[1]
    t = tuning
    assert width % (t.split_k * t.block_k) == 0, f"K = {width} is not a multiple of {t.split_k} x {t.block_k}"
    assert t.split_k == 1 or not (gated or norm is not None), "split_k excludes a fused norm or gate"
    assert t.split_k == 1 or workspace is not None, "split_k needs a workspace"
    lines = width // t.split_k // 64
    _linear_kernel[(cdiv(rows, t.block_m), cdiv(columns, t.block_n), t.split_k)](
        x,
        weight,
        x if bias is None else bias,
        x if norm is None else norm,
        x if residual is None else residual,
        out,
        x if workspace is None else workspace.partials,
        x if workspace is None else workspace.arrived,
        rows,
        columns,
        x.stride(0),
        eps,
        K=width,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        SPLIT_K=t.split_k,
        BLOCK_M=t.block_m,
        BLOCK_N=t.block_n,
        BLOCK_K=t.block_k,
        STAGES=t.num_stages,
        PREFETCH=pdl and rows <= 64 and lines & (lines - 1) == 0 and columns % t.block_n == 0,
        PDL=pdl,
        num_warps=t.num_warps,
        launch_pdl=pdl,
    )
