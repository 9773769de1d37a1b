"""LoRA on a GPU: adds B(A x) to the output of a linear layer, for rows with different adapters, or with none.

    group   once per pass: the rows of each adapter become blocks of rows (route_experts.py sorts them)
    shrink  A x of every block, in parts of K: [parts, rows, slices of the matrix * rank], float32
    expand  the sum of the parts, times B, is added to the output

Which adapter a row uses is read from the state of its slot, so one CUDA graph serves any mix. A fused matrix has slices
with an A and B of their own: q, k and v, or gate and up. Matrices of a smaller rank, or of slices that an adapter does
not change, are padded with zeros. Nothing is added by atomics: results are the same in every run.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import cdiv, launched, next_power_of_2, tl, triton
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
    b: torch.Tensor  # [slots, N, rank]
    widths: tuple[int, ...]  # columns of each slice, N in total

    @property
    def rank(self) -> int:
        return self.b.shape[2]


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
            between = matrix.a[slot, index * rank : (index + 1) * rank].double() @ x[row].double()
            found[row, first : first + width] += matrix.b[slot, first : first + width].double() @ between
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
    between,
    sorted,
    blocks,
    M,
    max_blocks,
    slot_stride,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    PART_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    part = tl.program_id(0) % PARTS
    index = tl.program_id(0) // PARTS
    block = tl.program_id(1)
    adapter = tl.load(blocks + block)
    if adapter < 0:
        return
    place = tl.load(blocks + max_blocks + block) + tl.arange(0, BLOCK_M)
    inside = place < tl.load(blocks + 2 * max_blocks + block)
    row = tl.load(sorted + place, mask=inside, other=0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, RANK)
    first = part * PART_K
    inputs = x + row[:, None] * K + k[None, :]
    weights = a + adapter.to(tl.int64) * slot_stride + (index * RANK + r)[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_M, RANK], tl.float32)
    for start in tl.range(0, PART_K, BLOCK_K, num_stages=STAGES):
        if K % PART_K:
            is_inside = (first + start + k < K)[None, :]
            v = tl.load(inputs + first + start, mask=inside[:, None] & is_inside, other=0.0)
            w = tl.load(weights + first + start, mask=is_inside, other=0.0)
        else:
            v = tl.load(inputs + first + start, mask=inside[:, None], other=0.0)
            w = tl.load(weights + first + start)
        acc = tl.dot(v, tl.trans(w), acc)
    target = between + ((part * M + row[:, None]) * SLICES + index) * RANK + r[None, :]
    tl.store(target, acc, mask=inside[:, None])


@launched
@triton.jit(do_not_specialize=["M", "max_blocks"])
def _lora_expand_kernel(
    between,
    b,
    out,
    sorted,
    blocks,
    M,
    max_blocks,
    slot_stride,
    out_stride,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    adapter = tl.load(blocks + block)
    if adapter < 0:
        return
    # Tiles do not cross slices, whose columns have other values of A x.
    tiles_0 = (WIDTH_0 + BLOCK_N - 1) // BLOCK_N
    tiles_1 = (WIDTH_1 + BLOCK_N - 1) // BLOCK_N
    is_second = tile >= tiles_0
    is_third = tile >= tiles_0 + tiles_1
    index = is_second.to(tl.int32) + is_third.to(tl.int32)
    first = tl.where(is_third, WIDTH_0 + WIDTH_1, tl.where(is_second, WIDTH_0, 0))
    width = tl.where(is_third, WIDTH_2, tl.where(is_second, WIDTH_1, WIDTH_0))
    tile -= tl.where(is_third, tiles_0 + tiles_1, tl.where(is_second, tiles_0, 0))
    place = tl.load(blocks + max_blocks + block) + tl.arange(0, BLOCK_M)
    inside = place < tl.load(blocks + 2 * max_blocks + block)
    row = tl.load(sorted + place, mask=inside, other=0).to(tl.int64)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK)
    is_column = n < width
    source = between + (row[:, None] * SLICES + index) * RANK + r[None, :]
    value = tl.zeros([BLOCK_M, RANK], tl.float32)
    for part in range(PARTS):
        value += tl.load(source + part * M * (SLICES * RANK), mask=inside[:, None], other=0.0)
    weights = b + adapter.to(tl.int64) * slot_stride + (first + n).to(tl.int64)[:, None] * RANK + r[None, :]
    w = tl.load(weights, mask=is_column[:, None], other=0.0)
    added = tl.dot(value.to(w.dtype), tl.trans(w))
    target = out + row[:, None] * out_stride + (first + n)[None, :]
    mask = inside[:, None] & is_column[None, :]
    before = tl.load(target, mask=mask, other=0.0)
    tl.store(target, (before.to(tl.float32) + added).to(before.dtype), mask=mask)


def add_lora(x: torch.Tensor, out: torch.Tensor, matrix: AdapterMatrix, rows: AdapterRows) -> None:
    """out [T, N] += B(A x) for x [T, K], contiguous, by the adapters of `group_rows`."""
    count, width = x.shape
    slices, rank = len(matrix.widths), matrix.rank
    num_blocks = max_blocks(count, rows.num_slots, BLOCK_ROWS)
    parts, block_k = lora_parts(count, width)
    part_k = cdiv(cdiv(width, parts), block_k) * block_k
    _lora_shrink_kernel[(parts * slices, num_blocks)](
        x,
        matrix.a,
        rows.between,
        rows.sorted,
        rows.blocks,
        count,
        rows.blocks.shape[1],
        matrix.a.stride(0),
        K=width,
        SLICES=slices,
        RANK=rank,
        PARTS=parts,
        PART_K=part_k,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_K=block_k,
        STAGES=4 if rank <= 32 else 3,
        num_warps=4,
    )
    block_n = 64 if rank > 64 else 256 if rank <= 32 and min(matrix.widths) >= 4096 else 128
    widths = (*matrix.widths, 0, 0)
    _lora_expand_kernel[(sum(cdiv(one, block_n) for one in matrix.widths), num_blocks)](
        rows.between,
        matrix.b,
        out,
        rows.sorted,
        rows.blocks,
        count,
        rows.blocks.shape[1],
        matrix.b.stride(0),
        out.stride(0),
        WIDTH_0=widths[0],
        WIDTH_1=widths[1],
        WIDTH_2=widths[2],
        SLICES=slices,
        RANK=rank,
        PARTS=parts,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=block_n,
        num_warps=4,
    )


def lora_parts(rows: int, width: int) -> tuple[int, int]:
    """Into how many parts K is divided, and the columns that a program loads at once."""
    block_k = min(128, max(16, next_power_of_2(width)))
    if rows > _FEW_ROWS:
        return 1, block_k
    # Every program of `expand` reads all parts, so there are no more of them than keep the device busy.
    most = _MAX_PARTS if rows <= _FEW_ROWS // 8 else _MAX_PARTS // 2
    return min(most, max(1, width // (4 * block_k))), block_k


def lora_row_counts(most: int) -> list[int]:
    """Numbers of rows, up to `most`, with which every variant is launched."""
    return sorted({min(rows, most) for rows in (1, _FEW_ROWS // 8, _FEW_ROWS // 8 + 1, _FEW_ROWS, most)})


def lora_rank(rank: int) -> int:
    """The rank that kernels compute with: a power of two, as `tl.dot` needs."""
    return max(16, next_power_of_2(rank))


def _padded(num_slots: int) -> int:
    return max(16, next_power_of_2(num_slots))
