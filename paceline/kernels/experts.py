"""The GEMMs of a mixture of experts: one launch per projection for all experts.

    up to 16 rows     gate and up -> down: each expert of the list computes all rows, and a program of `down` adds up
                      all experts for its columns, and the residual stream
    more rows         gate and up -> down -> sum: a program computes a block of pairs of row and expert; the sum adds
                      the k outputs of a row to the residual stream

A decode batch only reads weights, so tiles are chosen for many bytes in flight; a prefill batch computes. The weight of
a pair is multiplied in between the two GEMMs, where values are still float32: `down` is linear, and its bias is
multiplied when it is added. The RMSNorm factor of a row, which the router has computed, is applied to the accumulators
of `gate` and `up`.

Weights have 16 bits, or fewer (expert_weights.py); a program converts its tiles in registers.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import cdiv, launched, next_power_of_2, pdl_launch_dependents, pdl_wait, tl, triton
from paceline.kernels.expert_tuning import ExpertTuning
from paceline.kernels.expert_weights import (
    ExpertMatrices,
    add_mxfp4_product,
    add_product,
    block_k,
    format_options,
    load_quarters,
    load_tile,
    scales_of,
    values_of,
)
from paceline.kernels.fp8 import to_operand
from paceline.kernels.route_experts import LISTED_ROWS, RoutedRows, max_blocks


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """`activation` clamped_swiglu of ModelSpec, instead of SiLU."""

    alpha: float
    limit: float


def activation_reference(gate: torch.Tensor, up: torch.Tensor, clamped: ClampedSwiglu | None) -> torch.Tensor:
    if clamped is None:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return (up + 1) * gate * torch.sigmoid(clamped.alpha * gate)


def experts_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    eps: float | None = None,
    residual: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    clamped: ClampedSwiglu | None = None,
) -> torch.Tensor:
    """In float64. ids, weights [T, k]: of `route_reference`. With eps, RMSNorm is applied to x first."""
    gate_up, down = (one if isinstance(one, torch.Tensor) else one.dequantize() for one in (gate_up, down))
    wide = x.double()
    if eps is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out = torch.zeros_like(wide) if residual is None else residual.double()
    for expert in ids.unique().tolist():
        rows, slots = torch.where(ids == expert)
        between = wide[rows] @ gate_up[expert].double().T
        if gate_up_bias is not None:
            between += gate_up_bias[expert].double()
        gate, up = between.chunk(2, dim=-1)
        value = activation_reference(gate, up, clamped) @ down[expert].double().T
        if down_bias is not None:
            value += down_bias[expert].double()
        out.index_add_(0, rows, value * weights[rows, slots, None].double())
    return out


@launched
@triton.jit(do_not_specialize=["M", "max_blocks"])
def _expert_gate_up_kernel(
    x,
    gate_up,
    scales,
    bias,
    act,
    active,
    matrix,
    sorted,
    blocks,
    factors,
    M,
    max_blocks,
    K: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    LISTED: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Columns vary fastest: programs that read the same rows run at the same time.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    k = tl.arange(0, 32 if FORMAT == 2 else BLOCK_K)
    if PDL:
        pdl_wait()
        pdl_launch_dependents()
    if LISTED:
        if block >= tl.load(active):
            return
        expert = tl.load(active + 1 + block)
        row = tl.arange(0, BLOCK_M)
        inside = row < M
        place = block * BLOCK_M + row
    else:
        expert = tl.load(blocks + block)
        if expert < 0:
            return
        place = tl.load(blocks + max_blocks + block) + tl.arange(0, BLOCK_M)
        inside = place < tl.load(blocks + 2 * max_blocks + block)
        pair = tl.load(sorted + place, mask=inside, other=0)
        row = pair // TOP_K
    weight = tl.load(matrix + row.to(tl.int64) * E + expert, mask=inside, other=0.0)
    inside_n = n < N
    WIDTH: tl.constexpr = (K + 127) // 128 * 32 if FORMAT == 2 else K  # elements of a row
    inputs = x + row.to(tl.int64)[:, None] * K + k[None, :]
    gates = gate_up + expert.to(tl.int64) * (2 * N * WIDTH) + n.to(tl.int64)[:, None] * WIDTH + k[None, :]
    MASK_N: tl.constexpr = N % BLOCK_N != 0
    MASK_K: tl.constexpr = K % BLOCK_K != 0
    SCALED: tl.constexpr = FORMAT != 0 and SCALE_K < K  # else there is one scale per row, for the sum of all columns
    NUM_SCALES: tl.constexpr = 2 * N // SCALE_N  # of a group of columns
    gate_scales = scales + expert.to(tl.int64) * (NUM_SCALES * ((K + SCALE_K - 1) // SCALE_K))
    gate_scales += n // SCALE_N
    up_scales = gate_scales + NUM_SCALES // 2
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        group = start // SCALE_K * NUM_SCALES
        if FORMAT == 2:
            a_0, a_1, a_2, a_3 = load_quarters(inputs + start, inside, K - start, MASK_K)
            w = load_tile(gates + start // 4, inside_n, 32, 32, MASK_N, False)
            v = load_tile(gates + (N * WIDTH + start // 4), inside_n, 32, 32, MASK_N, False)
            gate = add_mxfp4_product(gate, a_0, a_1, a_2, a_3, w, gate_scales + group, inside_n)
            up = add_mxfp4_product(up, a_0, a_1, a_2, a_3, v, up_scales + group, inside_n)
        else:
            a = load_tile(inputs + start, inside, K - start, BLOCK_K, True, MASK_K)
            w = load_tile(gates + start, inside_n, K - start, BLOCK_K, MASK_N, MASK_K)
            v = load_tile(gates + (N * WIDTH + start), inside_n, K - start, BLOCK_K, MASK_N, MASK_K)
            gate = add_product(gate, a, w, gate_scales + group, inside_n, SCALED)
            up = add_product(up, a, v, up_scales + group, inside_n, SCALED)
    if FORMAT == 1 and not SCALED:
        gate = gate * tl.load(gate_scales, mask=inside_n, other=0.0)[None, :]
        up = up * tl.load(up_scales, mask=inside_n, other=0.0)[None, :]
    if HAS_NORM:
        factor = tl.load(factors + row, mask=inside, other=0.0)[:, None]
        gate = gate * factor
        up = up * factor
    if HAS_BIAS:
        biases = bias + expert.to(tl.int64) * (2 * N) + n
        gate += tl.load(biases, mask=inside_n, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + N, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if LIMIT > 0.0:
        # Written so that NaN stays NaN.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        value = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0) * weight[:, None]
    else:
        value = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
    if LISTED:
        value = tl.where((weight == 0.0)[:, None], 0.0, value)  # rows that did not choose this expert
    target = act + place.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(target, to_operand(value, act.dtype.element_ty), mask=inside[:, None] & (n < N)[None, :])


@launched
@triton.jit(do_not_specialize=["max_blocks"])
def _expert_down_kernel(
    act,
    down,
    scales,
    bias,
    matrix,
    out,
    sorted,
    blocks,
    max_blocks,
    K: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    k = tl.arange(0, 32 if FORMAT == 2 else BLOCK_K)
    if PDL:
        pdl_wait()
        pdl_launch_dependents()
    expert = tl.load(blocks + block)
    if expert < 0:
        return
    place = tl.load(blocks + max_blocks + block) + tl.arange(0, BLOCK_M)
    inside = place < tl.load(blocks + 2 * max_blocks + block)
    pair = tl.load(sorted + place, mask=inside, other=0)
    inside_n = n < N
    WIDTH: tl.constexpr = (K + 127) // 128 * 32 if FORMAT == 2 else K
    inputs = act + place.to(tl.int64)[:, None] * K + k[None, :]
    columns = down + expert.to(tl.int64) * (N * WIDTH) + n.to(tl.int64)[:, None] * WIDTH + k[None, :]
    MASK_N: tl.constexpr = N % BLOCK_N != 0
    MASK_K: tl.constexpr = K % BLOCK_K != 0
    SCALED: tl.constexpr = FORMAT != 0 and SCALE_K < K
    NUM_SCALES: tl.constexpr = N // SCALE_N
    scales += expert.to(tl.int64) * (NUM_SCALES * ((K + SCALE_K - 1) // SCALE_K))
    scales += n // SCALE_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        group = start // SCALE_K * NUM_SCALES
        if FORMAT == 2:
            a_0, a_1, a_2, a_3 = load_quarters(inputs + start, inside, K - start, MASK_K)
            w = load_tile(columns + start // 4, inside_n, 32, 32, MASK_N, False)
            acc = add_mxfp4_product(acc, a_0, a_1, a_2, a_3, w, scales + group, inside_n)
        else:
            a = load_tile(inputs + start, inside, K - start, BLOCK_K, True, MASK_K)
            w = load_tile(columns + start, inside_n, K - start, BLOCK_K, MASK_N, MASK_K)
            acc = add_product(acc, a, w, scales + group, inside_n, SCALED)
    if FORMAT == 1 and not SCALED:
        acc = acc * tl.load(scales, mask=inside_n, other=0.0)[None, :]
    if HAS_BIAS:
        weight = tl.load(matrix + (pair // TOP_K).to(tl.int64) * E + expert, mask=inside, other=0.0)
        value = tl.load(bias + expert.to(tl.int64) * N + n, mask=inside_n, other=0.0).to(tl.float32)
        acc += weight[:, None] * value[None, :]
    target = out + pair.to(tl.int64)[:, None] * N + n[None, :]
    # Compared again: a mask that lives through the loop takes registers.
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside[:, None] & (n < N)[None, :])


@launched
@triton.jit
def _sum_experts_kernel(
    parts,
    ids,
    residual,
    out,
    squares_out,
    width,
    squares_stride,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LEAVE_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        pdl_wait()
        pdl_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for at in tl.static_range(TOP_K):
        is_computed = inside & (tl.load(ids + row * TOP_K + at) < E)  # not of padding
        total += tl.load(parts + (row * TOP_K + at) * width + column, mask=is_computed, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + row * width + column, rounded, mask=inside)
    if LEAVE_SQUARES:
        wide = rounded.to(tl.float32)
        tl.store(squares_out + row * squares_stride + tl.program_id(1), tl.sum(wide * wide, axis=0))


@launched
@triton.jit(do_not_specialize=["M"])
def _listed_down_kernel(
    act,
    down,
    scales,
    bias,
    matrix,
    residual,
    out,
    squares_out,
    active,
    partials,
    arrived,
    M,
    squares_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LEAVE_SQUARES: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile_n = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 32 if FORMAT == 2 else BLOCK_K)
    inside = (row < M)[:, None]
    inside_n = n < N
    WIDTH: tl.constexpr = (K + 127) // 128 * 32 if FORMAT == 2 else K
    inputs = act + row[:, None] * K + k[None, :]
    columns = down + n.to(tl.int64)[:, None] * WIDTH + k[None, :]
    if PDL:
        pdl_wait()
        pdl_launch_dependents()
    # The experts are one long GEMM, whose steps are divided evenly.
    per_expert: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    NUM_SCALES: tl.constexpr = N // SCALE_N
    per_matrix: tl.constexpr = NUM_SCALES * ((K + SCALE_K - 1) // SCALE_K)
    scales += n // SCALE_N
    num_active = tl.load(active)
    num_steps = num_active * per_expert
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(num_steps * split // SPLIT, num_steps * (split + 1) // SPLIT, num_stages=STAGES):
        slot = step // per_expert
        start = step % per_expert * BLOCK_K
        expert = tl.load(active + 1 + slot).to(tl.int64)
        group = expert * per_matrix + start // SCALE_K * NUM_SCALES
        if FORMAT == 2:
            a_0, a_1, a_2, a_3 = load_quarters(inputs + (slot * BLOCK_M * K + start), row < M, K - start, True)
            w = load_tile(columns + (expert * (N * WIDTH) + start // 4), inside_n, 32, 32, True, False)
            acc = add_mxfp4_product(acc, a_0, a_1, a_2, a_3, w, scales + group, inside_n)
        else:
            a = load_tile(inputs + (slot * BLOCK_M * K + start), row < M, K - start, BLOCK_K, True, True)
            w = load_tile(columns + (expert * (N * WIDTH) + start), inside_n, K - start, BLOCK_K, True, True)
            acc = add_product(acc, a, w, scales + group, inside_n, FORMAT != 0)
    if HAS_BIAS:
        for slot in range(num_active * split // SPLIT, num_active * (split + 1) // SPLIT):
            expert = tl.load(active + 1 + slot).to(tl.int64)
            weight = tl.load(matrix + row * E + expert, mask=row < M, other=0.0)
            value = tl.load(bias + expert * N + n, mask=inside_n, other=0.0).to(tl.float32)
            acc += weight[:, None] * value[None, :]
    place = row[:, None] * N + n[None, :]
    mask = inside & inside_n[None, :]
    if SPLIT > 1:
        # As in linear.py: the program that arrives last adds the partial sums in a fixed order.
        tl.store(partials + split * (BLOCK_M * N) + place, acc, mask=mask)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + tile_n, 1, sem="acq_rel") == SPLIT - 1
        mask = mask & is_last
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for other in tl.static_range(SPLIT):
            acc += tl.load(partials + other * (BLOCK_M * N) + place, mask=mask, other=0.0, cache_modifier=".cg")
        if is_last:
            tl.store(arrived + tile_n, 0)
    if HAS_RESIDUAL:
        acc += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    rounded = acc.to(out.dtype.element_ty)
    tl.store(out + place, rounded, mask=mask)
    if LEAVE_SQUARES:
        wide = tl.where(mask, rounded.to(tl.float32), 0.0)
        is_written = row < M
        if SPLIT > 1:
            is_written = is_written & is_last
        tl.store(squares_out + row * squares_stride + tile_n, tl.sum(wide * wide, axis=1), mask=is_written)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWorkspace:
    """Buffers for up to so many rows, shared by all layers."""

    act: torch.Tensor  # [pairs, F], or [experts * LISTED_ROWS, F] with few rows; in the type of the GEMMs' inputs
    parts: torch.Tensor  # [pairs, H]
    partials: torch.Tensor  # float32: of split programs
    arrived: torch.Tensor  # int32, zero between launches

    @classmethod
    def empty(
        cls,
        rows: int,
        num_chosen: int,
        experts: int,
        ffn: int,
        hidden: int,
        like: torch.Tensor,
        operands: torch.dtype | None = None,
    ) -> ExpertWorkspace:
        """like: has the type of the outputs, and of the inputs unless `operands` is given."""
        pairs, listed = rows * num_chosen, min(experts, LISTED_ROWS * num_chosen) * LISTED_ROWS
        return cls(
            # Zeros: padding rows of a graph must not become NaN or infinite.
            act=like.new_zeros(max(pairs, listed), ffn, dtype=operands),
            parts=like.new_zeros(pairs if rows > LISTED_ROWS else 1, hidden),
            partials=like.new_zeros(_MAX_SPLIT * LISTED_ROWS * hidden, dtype=torch.float32),
            arrived=like.new_zeros(cdiv(hidden, _MIN_BLOCK_N), dtype=torch.int32),
        )


_MAX_SPLIT = 8
_MIN_BLOCK_N = 4


def add_gate_up(
    x: torch.Tensor,
    gate_up: ExpertMatrices,
    routed: RoutedRows,
    workspace: ExpertWorkspace,
    tuning: ExpertTuning,
    *,
    bias: torch.Tensor | None = None,
    clamped: ClampedSwiglu | None = None,
    normed: bool = False,
    pdl: bool = False,
) -> None:
    """Writes the weighted activations of the experts of x [T, H] into `workspace`. `route` chose them with the same
    block_m. gate_up [E, 2F, H], gate rows first; bias [E, 2F]. clamped: the activation, instead of SiLU. normed: x was
    not normed, and the router computed its factors."""
    (rows, hidden), (experts, width, _) = x.shape, gate_up.shape
    ffn, chosen, tile = width // 2, routed.ids.shape[1], tuning.gate_up
    assert ffn % format_options(gate_up)["SCALE_N"] == 0, "a row of gate and one of up have one scale"
    listed = rows <= LISTED_ROWS
    num_blocks = min(rows * chosen, experts) if listed else max_blocks(rows * chosen, experts, tuning.block_m)
    _expert_gate_up_kernel[(cdiv(ffn, tile.block_n), num_blocks)](
        x,
        values_of(gate_up),
        scales_of(gate_up),
        x if bias is None else bias,
        workspace.act,
        routed.active,
        routed.matrix,
        routed.sorted,
        routed.blocks,
        routed.factors,
        rows,
        routed.blocks.shape[1],
        K=hidden,
        N=ffn,
        E=experts,
        TOP_K=chosen,
        HAS_NORM=normed,
        HAS_BIAS=bias is not None,
        ALPHA=0.0 if clamped is None else clamped.alpha,
        LIMIT=0.0 if clamped is None else clamped.limit,
        LISTED=listed,
        **format_options(gate_up),
        BLOCK_M=tuning.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k(gate_up, tile.block_k),
        STAGES=tile.num_stages,
        PDL=pdl,
        num_warps=tile.num_warps,
        launch_pdl=pdl,
    )


def add_down(
    down: ExpertMatrices,
    routed: RoutedRows,
    workspace: ExpertWorkspace,
    out: torch.Tensor,
    tuning: ExpertTuning,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    squares_out: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out [T, H] = residual + the down projections [E, H, F], with bias [E, H], of those activations, added up. Does
    not read x, so that out may be x. squares_out [T, num_squares(...)] float32 receives the sums of squares of what is
    written, as in linear.py."""
    (rows, hidden), (experts, _, ffn) = out.shape, down.shape
    chosen, tile = routed.ids.shape[1], tuning.down
    sizes = {"BLOCK_M": tuning.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": block_k(down, tile.block_k)}
    options = {"STAGES": tile.num_stages, "PDL": pdl, "num_warps": tile.num_warps, "launch_pdl": pdl}
    if rows <= LISTED_ROWS:
        assert tuning.split <= _MAX_SPLIT, f"split is {tuning.split}"
        _listed_down_kernel[(cdiv(hidden, tile.block_n), tuning.split)](
            workspace.act,
            values_of(down),
            scales_of(down),
            out if bias is None else bias,
            routed.matrix,
            out if residual is None else residual,
            out,
            out if squares_out is None else squares_out,
            routed.active,
            workspace.partials,
            workspace.arrived,
            rows,
            0 if squares_out is None else squares_out.stride(0),
            K=ffn,
            N=hidden,
            E=experts,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            LEAVE_SQUARES=squares_out is not None,
            SPLIT=tuning.split,
            **format_options(down),
            **sizes,
            **options,
        )
        return
    _expert_down_kernel[(cdiv(hidden, tile.block_n), max_blocks(rows * chosen, experts, tuning.block_m))](
        workspace.act,
        values_of(down),
        scales_of(down),
        out if bias is None else bias,
        routed.matrix,
        workspace.parts,
        routed.sorted,
        routed.blocks,
        routed.blocks.shape[1],
        K=ffn,
        N=hidden,
        E=experts,
        TOP_K=chosen,
        HAS_BIAS=bias is not None,
        **format_options(down),
        **sizes,
        **options,
    )
    block = _sum_block(hidden)
    _sum_experts_kernel[(rows, cdiv(hidden, block))](
        workspace.parts,
        routed.ids,
        out if residual is None else residual,
        out,
        out if squares_out is None else squares_out,
        hidden,
        0 if squares_out is None else squares_out.stride(0),
        E=experts,
        TOP_K=chosen,
        HAS_RESIDUAL=residual is not None,
        LEAVE_SQUARES=squares_out is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def num_squares(rows: int, hidden: int, tuning: ExpertTuning) -> int:
    """How many columns of `squares_out` are filled."""
    return cdiv(hidden, tuning.down.block_n if rows <= LISTED_ROWS else _sum_block(hidden))


def _sum_block(hidden: int) -> int:
    return min(1024, next_power_of_2(hidden))
