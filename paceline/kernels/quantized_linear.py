"""GEMMs with FP8 weights and 16-bit activations, for few rows: weights are converted in registers.

They take as long as reading their weight, so half the bytes is what counts. Activations are float16 (RMSNorm writes
them so): a weight becomes a float16 without rounding, by one instruction for two, and the result is that of the
dequantized weights, up to the order of the sums. With more rows this conversion would take longer than reading.

As in linear.py, the activation of a gate, a bias and the residual add are part of the kernel, and split_k has a fixed
order.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.kernels._triton import cdiv, launched, pdl_launch_dependents, pdl_wait, tl, triton
from paceline.kernels.fp8 import FP8, to_operand
from paceline.kernels.linear import LinearTuning, LinearWorkspace


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A weight [N, K] on a device: values [N, K] FP8, times the factor [N] float32 of their row."""

    values: torch.Tensor
    factors: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.factors.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The reference implementation of what the kernels compute with."""
        return (self.values.float() * self.factors[:, None]).to(dtype)


def quantize_fp8(weight: torch.Tensor) -> QuantizedMatrix:
    """Rounds a weight [N, K] to FP8, with a factor per row."""
    factors = weight.abs().amax(1).float().clamp_min(1e-12) / 448.0
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    for first in range(0, len(weight), 4096):  # in parts: float32 takes four times the memory
        rows = slice(first, first + 4096)
        values[rows] = (weight[rows].float() / factors[rows, None]).clamp(-448, 448).to(FP8)
    return QuantizedMatrix(values, factors)


class Dequantizable(Protocol):
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor: ...


def quantized_linear_reference(
    x: torch.Tensor,
    weight: Dequantizable,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float64."""
    out = x.double() @ weight.dequantize(torch.float64).T
    if bias is not None:
        out += bias.double()
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = torch.nn.functional.silu(gate) * up
    return out if residual is None else out + residual.double()


@triton.jit
def store_sums(
    acc,
    bias,
    residual,
    out,
    partials,
    arrived,
    M,
    N,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The end of a GEMM: adds the sums [BLOCK_M, WIDTH] of all splits, then bias, gate and residual, and stores."""
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1)
    split = tl.program_id(2)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
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
    if HAS_BIAS:
        wide_n = tl.arange(0, WIDTH)
        column = tile_n * BLOCK_N + wide_n % BLOCK_N
        row = column + wide_n // BLOCK_N * N
        acc += tl.load(bias + row, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if WIDTH > BLOCK_N:
        acc, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if HAS_RESIDUAL:
        acc += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, to_operand(acc, out.dtype.element_ty), mask=inside)


@launched
@triton.jit(do_not_specialize=["M"])
def _quantized_linear_kernel(
    x,
    weight,
    factors,
    bias,
    residual,
    out,
    partials,
    arrived,
    M,
    N,
    x_stride,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1)
    split = tl.program_id(2)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_m = m < M
    # With a gate, the columns of a tile are those of the gate followed by the matching columns of up.
    wide_n = tl.arange(0, WIDTH)
    column = tile_n * BLOCK_N + wide_n % BLOCK_N
    inside_w = column < N
    row = column + wide_n // BLOCK_N * N
    tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    per_split: tl.constexpr = (tiles + SPLIT_K - 1) // SPLIT_K
    first = split * per_split
    end = tl.minimum(first + per_split, tiles)
    factor = tl.load(factors + row, mask=inside_w, other=0.0)
    kind: tl.constexpr = x.dtype.element_ty
    pdl_wait()
    pdl_launch_dependents()
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    k = tl.arange(0, BLOCK_K)
    weights = weight + (row.to(tl.int64) * K)[:, None] + k[None, :]
    inputs = x + (m.to(tl.int64) * x_stride)[:, None] + k[None, :]
    for tile in tl.range(first, end, num_stages=STAGES):
        start = tile * BLOCK_K
        if K % BLOCK_K == 0:
            a = tl.load(inputs + start, mask=inside_m[:, None], other=0.0)
            w = tl.load(weights + start, mask=inside_w[:, None], other=0.0)
        else:
            inside_k = (start + k < K)[None, :]
            a = tl.load(inputs + start, mask=inside_m[:, None] & inside_k, other=0.0)
            w = tl.load(weights + start, mask=inside_w[:, None] & inside_k, other=0.0)
        acc = tl.dot(a, tl.trans(w.to(kind)), acc)
    store_sums(
        acc * factor[None, :],
        bias,
        residual,
        out,
        partials,
        arrived,
        M,
        N,
        HAS_BIAS=HAS_BIAS,
        HAS_RESIDUAL=HAS_RESIDUAL,
        SPLIT_K=SPLIT_K,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        WIDTH=WIDTH,
    )


def quantized_linear(
    x: torch.Tensor,
    weight: QuantizedMatrix,
    out: torch.Tensor,
    tuning: LinearTuning,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    workspace: LinearWorkspace | None = None,
    pdl: bool = False,
) -> None:
    """out [M, N] = f(x [M, K] @ weight [N, K]ᵀ + bias [N]) + residual [M, N], as `linear` without a norm.

    x is float16 (or float32, in tests). out may be residual. A gate needs split_k = 1.
    """
    rows, width = x.shape
    columns = out.shape[1]
    t = tuning
    assert t.split_k == 1 or (workspace is not None and not gated), "split_k needs a workspace and excludes a gate"
    _quantized_linear_kernel[(cdiv(rows, t.block_m), cdiv(columns, t.block_n), t.split_k)](
        x,
        weight.values,
        weight.factors,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        weight.factors if workspace is None else workspace.partials,
        weight.factors if workspace is None else workspace.arrived,
        rows,
        columns,
        x.stride(0),
        K=width,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        SPLIT_K=t.split_k,
        BLOCK_M=t.block_m,
        BLOCK_N=t.block_n,
        WIDTH=t.block_n * (2 if gated else 1),
        BLOCK_K=t.block_k,
        STAGES=t.num_stages,
        num_warps=t.num_warps,
        launch_pdl=pdl,
    )
