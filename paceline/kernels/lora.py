"""LoRA on a GPU: adds B(A x) to the output of a linear layer, for rows with different adapters, or with none.

    group   once per pass: the rows of each adapter become blocks of rows (route_experts.py sorts them)
    shrink  A x of every block, in parts of K: [parts, rows, slices of the matrix * rank], float32
    expand  the sum of the parts, times B, is added to the output

Which adapter a row uses is read from the state of its slot, so one CUDA graph serves any mix. A fused matrix has slices
with an A and B of their own: q, k and v, or gate and up. Of an adapter with a smaller rank only its own rank is read,
and of a slice that it does not change nothing. Nothing is added by atomics: results are the same in every run.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.kernels._triton import cdiv, launched, next_power_of_2, pdl_launch_dependents, pdl_wait, tl, triton
from paceline.kernels.layouts import SAMPLING_WORDS, SamplingWord
from paceline.kernels.route_experts import LiveRows, max_blocks, sort_pairs

BLOCK_ROWS = 16  # rows of one adapter that a program computes
_TILE = 16  # rows of a program that groups
_MAX_PARTS = 8
_FEW_ROWS = 512  # with more of them, there are enough blocks without parts of K
_ADAPTER, _WORDS = tl.constexpr(SamplingWord.ADAPTER.value), tl.constexpr(SAMPLING_WORDS)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterMatrix:
    """The adapters of one fused matrix, by slot."""

    a: torch.Tensor  # [slots, slices * rank, K]; slots are strided
    b: torch.Tensor  # [slots, rank, N]
    ranks: torch.Tensor  # [slots, slices] int32: of each adapter; 0: it does not change the slice
    widths: tuple[int, ...]  # columns of each slice, N in total

    @property
    def rank(self) -> int:
        """The highest that there is memory for."""
        return self.b.shape[1]


class LoraTuning(NamedTuple):
    """Tiles of the kernels."""

    parts: int  # of K
    block_k: int
    shrink_warps: int
    shrink_stages: int
    span: int  # columns that a program of `expand` computes
    block_n: int
    expand_warps: int


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """Buffers for the rows of a pass by adapter, and for A x. All layers share them."""

    num_slots: int
    ids: torch.Tensor  # [rows] int32: adapter slot; num_slots: none
    counts: torch.Tensor  # [tiles, padded slots] int32
    sorted: torch.Tensor  # [rows] int32: by adapter
    blocks: torch.Tensor  # [3, blocks] int32: adapter slot (-1: unused), first row in `sorted`, end of its rows
    loads: torch.Tensor  # [padded slots] int64: rows that each slot has computed
    between: torch.Tensor  # float32: A x, in parts

    @classmethod
    def empty(cls, rows: int, num_slots: int, width: int, device: torch.device | str) -> AdapterRows:
        """width: slices * rank of the widest matrix."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        padded = _padded(num_slots)
        return cls(
            num_slots,
            ids=ints(rows),
            counts=ints(cdiv(rows, _TILE), padded),
            sorted=ints(rows),
            blocks=ints(3, max_blocks(rows, num_slots, BLOCK_ROWS)),
            loads=torch.zeros(padded, dtype=torch.int64, device=device),
            between=torch.zeros(max(rows, _MAX_PARTS * min(rows, _FEW_ROWS)) * width, device=device),
        )


def lora_reference(x: torch.Tensor, out: torch.Tensor, ids: torch.Tensor, matrix: AdapterMatrix) -> torch.Tensor:
    """out + B(A x), in float64. ids [T]: adapter slots; negative or too large: none."""
    found, rank = out.double().clone(), matrix.rank
    for row, slot in enumerate(ids.tolist()):
        if not 0 <= slot < len(matrix.a):
            continue
        first = 0
        for index, width in enumerate(matrix.widths):
            own = int(matrix.ranks[slot, index])
            between = matrix.a[slot, index * rank : index * rank + own].double() @ x[row].double()
            found[row, first : first + width] += between @ matrix.b[slot, :own, first : first + width].double()
            first += width
    return found


@launched
@triton.jit(do_not_specialize=["M"])
def _adapter_ids_kernel(
    slots,
    sampling,
    live,
    ids,
    counts,
    M,
    E: tl.constexpr,
    LIVE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tile * TILE + tl.arange(0, TILE)
    inside = row < M
    is_live = inside
    if LIVE == 1:
        is_live = is_live & (row < tl.load(live))
    if LIVE == 2:
        is_live = is_live & (tl.load(live + row, mask=inside, other=-1) >= 0)
    slot = tl.load(slots + row, mask=is_live, other=0)
    word = tl.load(sampling + slot * _WORDS + _ADAPTER, mask=is_live, other=0)  # 0: none, else 1 + the adapter's slot
    id = tl.where(is_live & (word > 0), word - 1, E)
    tl.store(ids + row, id, mask=inside)
    column = tl.arange(0, BLOCK_L)
    count = tl.sum(((id[:, None] == column[None, :]) & inside[:, None] & (id < E)[:, None]).to(tl.int32), axis=0)
    tl.store(counts + tile * BLOCK_L + column, count)


def group_rows(slots: torch.Tensor, sampling: torch.Tensor, rows: AdapterRows, live: LiveRows | None = None) -> None:
    """Sorts the rows of a pass, whose requests are in `slots` [T] int32, by their adapter. sampling: of `SlotState`.
    live: the other rows are padding."""
    count, padded = len(slots), rows.counts.shape[1]
    num_tiles = cdiv(count, _TILE)
    _adapter_ids_kernel[(num_tiles,)](
        slots,
        sampling,
        slots if live is None else live.values,
        rows.ids,
        rows.counts,
        count,
        E=rows.num_slots,
        LIVE=0 if live is None else 2 if live.by_row else 1,
        TILE=_TILE,
        BLOCK_L=padded,
        num_warps=1,
    )
    sort_pairs(
        rows.ids[:count, None],
        rows.counts,
        rows.sorted,
        rows.blocks,
        rows.loads,
        num_experts=rows.num_slots,
        tile=_TILE,
        block_m=BLOCK_ROWS,
    )


@launched
@triton.jit(do_not_specialize=["M", "max_blocks"])
def _lora_shrink_kernel(
    x,
    a,
    ranks,
    between,
    sorted,
    blocks,
    M,
    max_blocks,
    slot_stride,
    ranks_stride,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    PART_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0) % PARTS
    index = tl.program_id(0) // PARTS
    block = tl.program_id(1)
    adapter = tl.load(blocks + block).to(tl.int64)
    rank = tl.load(ranks + tl.maximum(adapter, 0) * ranks_stride + index)
    if PDL:
        # Also where there is nothing to do: the end of this kernel tells the next that the GEMM before it has ended.
        pdl_wait()
        pdl_launch_dependents()
    if (adapter < 0) | (rank == 0):
        return
    place = tl.load(blocks + max_blocks + block) + tl.arange(0, BLOCK_M)
    inside = place < tl.load(blocks + 2 * max_blocks + block)
    row = tl.load(sorted + place, mask=inside, other=0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, RANK)
    is_rank = (r < rank)[:, None]
    first = part * PART_K
    inputs = x + row[:, None] * K + k[None, :]
    weights = a + adapter * slot_stride + (index * RANK + r)[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_M, RANK], tl.float32)
    for start in tl.range(0, PART_K, BLOCK_K, num_stages=STAGES):
        if K % PART_K:
            is_inside = (first + start + k < K)[None, :]
            v = tl.load(inputs + first + start, mask=inside[:, None] & is_inside, other=0.0)
            w = tl.load(weights + first + start, mask=is_rank & is_inside, other=0.0)
        else:
            v = tl.load(inputs + first + start, mask=inside[:, None], other=0.0)
            w = tl.load(weights + first + start, mask=is_rank, other=0.0)
        acc = tl.dot(v.to(w.dtype), tl.trans(w), acc)  # inputs of packed matrices are float16
    target = between + ((part * M + row[:, None]) * SLICES + index) * RANK + r[None, :]
    tl.store(target, acc, mask=inside[:, None])


@launched
@triton.jit(do_not_specialize=["M", "max_blocks"])
def _lora_expand_kernel(
    between,
    b,
    ranks,
    out,
    sorted,
    blocks,
    M,
    max_blocks,
    slot_stride,
    ranks_stride,
    out_stride,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    span = tl.program_id(0)
    block = tl.program_id(1)
    adapter = tl.load(blocks + block).to(tl.int64)
    # Spans do not cross slices, whose columns have other values of A x.
    spans_0 = (WIDTH_0 + SPAN - 1) // SPAN
    spans_1 = (WIDTH_1 + SPAN - 1) // SPAN
    is_second = span >= spans_0
    is_third = span >= spans_0 + spans_1
    index = is_second.to(tl.int32) + is_third.to(tl.int32)
    rank = tl.load(ranks + tl.maximum(adapter, 0) * ranks_stride + index)
    if (adapter < 0) | (rank == 0):
        if PDL:
            pdl_wait()
        return
    begin = tl.where(is_third, WIDTH_0 + WIDTH_1, tl.where(is_second, WIDTH_0, 0))
    width = tl.where(is_third, WIDTH_2, tl.where(is_second, WIDTH_1, WIDTH_0))
    first = (span - tl.where(is_third, spans_0 + spans_1, tl.where(is_second, spans_0, 0))) * SPAN
    # Without the mask of columns, several are loaded and stored at once.
    EVEN: tl.constexpr = WIDTH_0 % SPAN == 0 and WIDTH_1 % SPAN == 0 and WIDTH_2 % SPAN == 0
    if EVEN:
        begin = tl.multiple_of(begin, SPAN)
    place = tl.load(blocks + max_blocks + block) + tl.arange(0, BLOCK_M)
    end = tl.load(blocks + 2 * max_blocks + block)
    row = tl.load(sorted + place, mask=place < end, other=0).to(tl.int64)[:, None]
    inside = (place < end)[:, None]
    r = tl.arange(0, RANK)
    is_rank = (r < rank)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    weights = b + adapter * slot_stride + r.to(tl.int64)[:, None] * (WIDTH_0 + WIDTH_1 + WIDTH_2) + begin + first
    w = tl.load(weights + column, mask=is_rank if EVEN else is_rank & (first + column < width), other=0.0)
    if PDL:
        pdl_wait()  # above is nothing that kernels of this pass write, except for its first ones
    source = between + (row * SLICES + index) * RANK + r[None, :]
    value = tl.zeros([BLOCK_M, RANK], tl.float32)
    for part in range(PARTS):
        value += tl.load(source + part * M * (SLICES * RANK), mask=inside, other=0.0)
    value = value.to(b.dtype.element_ty)
    target = out + row * out_stride + begin + first
    for start in tl.static_range(0, SPAN, BLOCK_N):
        mask = inside if EVEN else inside & (first + start + column < width)
        before = tl.load(target + start + column, mask=mask, other=0.0)
        total = (before.to(tl.float32) + tl.dot(value, w)).to(before.dtype)
        if start + BLOCK_N < SPAN:
            next = start + BLOCK_N + column
            w = tl.load(weights + next, mask=is_rank if EVEN else is_rank & (first + next < width), other=0.0)
        tl.store(target + start + column, total, mask=mask)


def add_lora(
    x: torch.Tensor,
    out: torch.Tensor,
    matrix: AdapterMatrix,
    rows: AdapterRows,
    tuning: LoraTuning | None = None,
    *,
    pdl: bool = False,
) -> None:
    """out [T, N] += B(A x) for x [T, K], contiguous, by the adapters of `group_rows`.

    pdl: programmatic dependent launch, behind a kernel that was launched after `group_rows` and without it.
    """
    tuning = tuning or lora_tuning(len(x), matrix)
    lora_shrink(x, matrix, rows, tuning, pdl)
    lora_expand(out, matrix, rows, tuning, pdl)


def lora_shrink(x: torch.Tensor, matrix: AdapterMatrix, rows: AdapterRows, tuning: LoraTuning, pdl: bool) -> None:
    count, width = x.shape
    slices = len(matrix.widths)
    _lora_shrink_kernel[(tuning.parts * slices, max_blocks(count, rows.num_slots, BLOCK_ROWS))](
        x,
        matrix.a,
        matrix.ranks,
        rows.between,
        rows.sorted,
        rows.blocks,
        count,
        rows.blocks.shape[1],
        matrix.a.stride(0),
        matrix.ranks.stride(0),
        K=width,
        SLICES=slices,
        RANK=matrix.rank,
        PARTS=tuning.parts,
        PART_K=cdiv(cdiv(width, tuning.parts), tuning.block_k) * tuning.block_k,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_K=tuning.block_k,
        STAGES=tuning.shrink_stages,
        PDL=pdl,
        num_warps=tuning.shrink_warps,
        launch_pdl=pdl,
    )


def lora_expand(out: torch.Tensor, matrix: AdapterMatrix, rows: AdapterRows, tuning: LoraTuning, pdl: bool) -> None:
    count = len(out)
    widths = (*matrix.widths, 0, 0)
    grid = (sum(cdiv(one, tuning.span) for one in matrix.widths), max_blocks(count, rows.num_slots, BLOCK_ROWS))
    _lora_expand_kernel[grid](
        rows.between,
        matrix.b,
        matrix.ranks,
        out,
        rows.sorted,
        rows.blocks,
        count,
        rows.blocks.shape[1],
        matrix.b.stride(0),
        matrix.ranks.stride(0),
        out.stride(0),
        WIDTH_0=widths[0],
        WIDTH_1=widths[1],
        WIDTH_2=widths[2],
        SLICES=len(matrix.widths),
        RANK=matrix.rank,
        PARTS=tuning.parts,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=tuning.block_n,
        SPAN=tuning.span,
        PDL=pdl,
        num_warps=tuning.expand_warps,
        launch_pdl=pdl,
    )


def lora_tuning(rows: int, matrix: AdapterMatrix) -> LoraTuning:
    """Tiles as measured on an H200 (docs/log/lora.md)."""
    width, rank, slices = matrix.a.shape[2], matrix.rank, len(matrix.widths)
    block_k = min(256 if rows > _FEW_ROWS and rank <= 32 else 128, max(16, next_power_of_2(width)))
    parts = 1
    if rows <= _FEW_ROWS:
        # Every program of `expand` reads all parts, so there are no more of them than keep the device busy.
        most = _MAX_PARTS if slices == 1 or rows <= _FEW_ROWS // 8 else _MAX_PARTS // 2
        parts = min(most, max(1, width // (4 * block_k)))
    block_n = 64 if rank > 64 else 128
    span = max(block_n, math.gcd(512 if min(matrix.widths) >= 4096 else 256, *matrix.widths))
    return LoraTuning(parts, block_k, 2, 4 if rank <= 32 and rows <= _FEW_ROWS else 3, span, block_n, 4)


def lora_row_counts(most: int) -> list[int]:
    """Numbers of rows, up to `most`, with which every variant is launched."""
    return sorted({min(rows, most) for rows in (1, _FEW_ROWS // 8, _FEW_ROWS // 8 + 1, _FEW_ROWS, most)})


def lora_rank(rank: int) -> int:
    """The rank that kernels compute with: a power of two, as `tl.dot` needs."""
    return max(16, next_power_of_2(rank))


def _padded(num_slots: int) -> int:
    return max(16, next_power_of_2(num_slots))
