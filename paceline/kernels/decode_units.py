"""Splits the KV of a decode batch into work units, on the device, once per forward pass and not per layer.

A work unit is a segment of KV that several rows share, or a chunk of one row. The host names only the shared units,
which change when rows join or leave: where each begins and ends, and of each row how many positions they cover. The
rest of a row is split every `chunk` positions; it follows from the lengths, which change at every step. Each unit gives
each of its rows one partial result; those of shared units come first.

        0         320       832                 partial results
row 0   [ shared by 0, 1 ][ tail                0: 0..320  1: 320..
row 1   [ shared by 0, 1 ][   own   ][ tail     0: 0..320  1: 320..832  2: 832..
row 2   [   own   ][ tail                       0: 0..512  1: 512..                   (chunk: 512)

The order is: shared units, whole chunks, tails by falling length. Programs take units in this order, and the last ones
should be short: otherwise one multiprocessor is busy while all others wait.

The token being decoded is not in the cache yet. The row's last unit, its tail, adds it from the QKV projection, and a
tail may hold nothing else. Hence a shared unit must end at or before the position being decoded.

Layers with a sliding window share nothing. Their chunks begin at multiples of the chunk size, where the window begins
anywhere.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from paceline.kernels._triton import UNSPECIALIZED, cdiv, launched, next_power_of_2, tl, triton
from paceline.kernels.layouts import (
    ROW_WORDS,
    SHARED_ROW_WORDS,
    SHARED_UNIT_WORDS,
    UNIT_WORDS,
    RowWord,
    SharedRowWord,
    SharedUnitWord,
    UnitWord,
    constants,
)

(
    _UNIT_ROW,
    _UNIT_SLOT,
    _UNIT_FIRST_QUERY,
    _UNIT_NUM_QUERIES,
    _UNIT_BEGIN,
    _UNIT_END,
    _UNIT_INDEX,
    _UNIT_IS_TAIL,
    _UNIT_POSITION,
    _UNIT_NUM_CHUNKS,
    _UNIT_FIRST_PARTIAL,
) = constants(UnitWord)
_ROW_POSITION, _ROW_NUM_CHUNKS, _ROW_FIRST_PARTIAL, _ROW_SLOT = constants(RowWord)
_SHARED_ROW, _SHARED_FIRST_QUERY, _, _, _, _SHARED_INDEX = constants(SharedUnitWord)
_SHARED_TOKENS, _SHARED_SEGMENTS = constants(SharedRowWord)
_UNIT_WORDS, _ROW_WORDS = tl.constexpr(UNIT_WORDS), tl.constexpr(ROW_WORDS)
_OWN_ROWS = 16  # of a program
_SHARED_UNIT_WORDS, _SHARED_ROW_WORDS = tl.constexpr(SHARED_UNIT_WORDS), tl.constexpr(SHARED_ROW_WORDS)


@dataclass(frozen=True, slots=True)
class Chunks:
    """How the chunk size is chosen: the largest power of two in min..max that still gives `target_units` units.

    With min == max the result of a row does not depend on the other rows of the batch. Where rows share KV, the host
    chooses the size, and checks that all units fit.
    """

    min_tokens: int = 64
    max_tokens: int = 1024
    target_units: int = 16  # times the KV heads: about one work item per multiprocessor; more only adds merging

    def capacity(self, rows: int, max_length: int) -> int:
        """Most units, and most partial results, that a batch of `rows` rows of up to `max_length` tokens can have."""
        return max(rows * cdiv(max_length, self.max_tokens), 2 * self.target_units) + rows


@dataclass(frozen=True, slots=True, eq=False)
class DecodeUnits:
    """Device buffers for the units of one forward pass. Each pass overwrites them, so one set per stream is enough."""

    units: torch.Tensor  # [capacity, UNIT_WORDS] int32
    num_units: torch.Tensor  # [1] int32
    rows: torch.Tensor  # [R, ROW_WORDS] int32
    shared_units: torch.Tensor  # [max_shared, SHARED_UNIT_WORDS] int32
    num_shared: torch.Tensor  # [1] int32
    shared_chunk: torch.Tensor  # [1] int32: positions of a chunk where rows share KV
    shared_rows: torch.Tensor  # [R, SHARED_ROW_WORDS] int32: how much of each row is in shared units
    query_rows: torch.Tensor  # [max_queries] int32: the rows of the shared units, one after the other

    @classmethod
    def empty(cls, rows: int, capacity: int, max_shared: int, device: torch.device | str) -> DecodeUnits:
        """For `rows` rows and up to `capacity` units, of which `max_shared` are shared, with as many queries."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            units=zeros(capacity, UNIT_WORDS),
            num_units=zeros(1),
            rows=zeros(rows, ROW_WORDS),
            shared_units=zeros(max(max_shared, 1), SHARED_UNIT_WORDS),
            num_shared=zeros(1),
            shared_chunk=zeros(1),
            shared_rows=zeros(rows, SHARED_ROW_WORDS),
            query_rows=zeros(max(max_shared, 1)),
        )


def decode_units_reference(
    row_slots: list[int],
    num_computed: list[int],
    chunks: Chunks,
    window: int = 0,
    shared_units: Sequence[Sequence[int]] = (),
    shared_rows: Sequence[Sequence[int]] = (),
    shared_chunk: int = 0,
) -> tuple[list[list[int]], list[list[int]]]:
    """(units, rows) as the kernel writes them. shared_units and shared_rows: words of `SharedUnitWord` and of
    `SharedRowWord`."""
    covered = shared_rows or [(0, 0)] * len(row_slots)
    positions = [num_computed[slot] for slot in row_slots]
    firsts = [max(position + 1 - window, 0) if window else 0 for position in positions]

    def counts(size: int) -> list[int]:
        return [p // size - f // size + 1 for p, f in zip(positions, firsts, strict=True)]

    size = shared_chunk or chunks.max_tokens
    if not shared_units:
        while size > chunks.min_tokens and sum(counts(size)) < chunks.target_units:
            size //= 2
    # The columns of `UnitWord`; those of the row are added at the end.
    units = [[row, row_slots[row], *words, 0] for row, *words in shared_units]
    rows: list[list[int]] = []
    partial = 0
    whole: list[list[int]] = []
    tails: list[list[int]] = []
    for row, (slot, position, first) in enumerate(zip(row_slots, positions, firsts, strict=True)):
        num_tokens, num_segments = covered[row]
        borders = [*range(first // size * size if window else num_tokens, position + 1, size), position]
        rows.append([position, num_segments + len(borders) - 1, partial, slot])
        partial += num_segments + len(borders) - 1
        for index, (begin, end) in enumerate(pairwise(borders), num_segments):
            is_tail = index == num_segments + len(borders) - 2
            unit = [row, slot, 0, 1, max(begin, first), end, index, int(is_tail)]
            (tails if is_tail else whole).append(unit)
    units += whole + sorted(tails, key=lambda unit: (unit[UnitWord.BEGIN] - unit[UnitWord.END], unit[UnitWord.ROW]))
    return [[*unit, *rows[unit[UnitWord.ROW]][: RowWord.SLOT]] for unit in units], rows


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _decode_units_kernel(
    row_slots,
    num_rows,
    num_computed,
    shared_units,
    num_shared,
    shared_chunk,
    shared_rows,
    units,
    num_units,
    rows,
    step,
    target_units,
    num_steps,
    WINDOW: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    num_live = tl.load(num_rows)
    shared_count = tl.load(num_shared)
    slot, position, first, covered, segments = _rows_from(
        row_slots, num_computed, shared_rows, num_live, shared_count, 0, WINDOW, BLOCK_R
    )
    live = tl.arange(0, BLOCK_R) < num_live
    size = MIN_TOKENS
    for doubling in tl.static_range(1, DOUBLINGS + 1):
        larger = MIN_TOKENS << doubling
        total = tl.sum(tl.where(live, position // larger - first // larger + 1, 0), axis=0)
        size = tl.where(total >= target_units, larger, size)
    size = tl.where(shared_count > 0, tl.load(shared_chunk), size)
    # No name is used both here and in the loop below: there it would have to keep its shape.
    _begins, whole, _tails = _own_chunks(position, first, covered, size, WINDOW)
    num_whole = shared_count + tl.sum(tl.where(live, whole, 0), axis=0)

    # The units of this program's rows. Their places depend on all other rows, so those are read once more.
    begin = tl.program_id(0) * OWN
    own_slot, own_position, own_first, own_covered, own_segments = _rows_from(
        row_slots, num_computed, shared_rows, num_live, shared_count, begin, WINDOW, OWN
    )
    row = begin + tl.arange(0, OWN)
    mine = row < num_live
    own_begin, own_whole, own_tail = _own_chunks(own_position, own_first, own_covered, size, WINDOW)
    unit = tl.zeros([OWN], tl.int32) + shared_count
    partial = tl.zeros([OWN], tl.int32)
    rank = tl.zeros([OWN], tl.int32) + num_whole
    for start in range(0, BLOCK_R, BLOCK_C):
        other = start + tl.arange(0, BLOCK_C)
        alive = (other < num_live)[None, :]
        _its_slot, its, its_first, its_covered, its_segments = _rows_from(
            row_slots, num_computed, shared_rows, num_live, shared_count, start, WINDOW, BLOCK_C
        )
        _its_begin, its_whole, its_tail = _own_chunks(its, its_first, its_covered, size, WINDOW)
        longer = its_tail[None, :] - own_tail[:, None]
        above = other[None, :] < row[:, None]
        partial += tl.sum(tl.where(above & alive, (its_segments + its_whole + 1)[None, :], 0), axis=1)
        unit += tl.sum(tl.where(above & alive, its_whole[None, :], 0), axis=1)
        rank += tl.sum((alive & ((longer > 0) | ((longer == 0) & above))).to(tl.int32), axis=1)
    for i in range(0, tl.max(own_whole, axis=0) + 1):
        is_tail = i == own_whole
        chunk = own_begin + i * size
        here = mine & (i <= own_whole)
        record = units + tl.where(is_tail, rank, unit + i) * _UNIT_WORDS
        tl.store(record + _UNIT_ROW, row, mask=here)
        tl.store(record + _UNIT_SLOT, own_slot, mask=here)
        tl.store(record + _UNIT_FIRST_QUERY, row * 0, mask=here)
        tl.store(record + _UNIT_NUM_QUERIES, row * 0 + 1, mask=here)
        tl.store(record + _UNIT_BEGIN, tl.maximum(chunk, own_first), mask=here)
        tl.store(record + _UNIT_END, tl.minimum(chunk + size, own_position), mask=here)
        tl.store(record + _UNIT_INDEX, own_segments + i, mask=here)
        tl.store(record + _UNIT_IS_TAIL, is_tail.to(tl.int32), mask=here)
        tl.store(record + _UNIT_POSITION, own_position, mask=here)
        tl.store(record + _UNIT_NUM_CHUNKS, own_segments + own_whole + 1, mask=here)
        tl.store(record + _UNIT_FIRST_PARTIAL, partial, mask=here)

    if tl.program_id(0) == 0:
        # What is written once per batch: the number of units, the rows, and the units that rows share.
        tl.store(num_units, num_whole + num_live)
        if num_steps > 0:
            tl.store(step, tl.load(step) + num_steps)
        count = tl.where(live, segments + whole + 1, 0)
        info = rows + tl.arange(0, BLOCK_R) * _ROW_WORDS
        tl.store(info + _ROW_POSITION, position, mask=live)
        tl.store(info + _ROW_NUM_CHUNKS, count, mask=live)
        tl.store(info + _ROW_FIRST_PARTIAL, tl.cumsum(count, axis=0) - count, mask=live)
        tl.store(info + _ROW_SLOT, slot, mask=live)
        tl.debug_barrier()  # `rows`, written above by other threads, is read below
        for start in range(0, shared_count, BLOCK_U):
            u = start + tl.arange(0, BLOCK_U)
            inside = u < shared_count
            source = shared_units + u * _SHARED_UNIT_WORDS
            sharer = tl.load(source + _SHARED_ROW, mask=inside, other=0)
            record = units + u * _UNIT_WORDS
            tl.store(record + _UNIT_ROW, sharer, mask=inside)
            tl.store(record + _UNIT_SLOT, tl.load(row_slots + sharer, mask=inside, other=0), mask=inside)
            # First query to index, which are in the same order in both records.
            for word in tl.static_range(_SHARED_INDEX - _SHARED_FIRST_QUERY + 1):
                tl.store(
                    record + _UNIT_FIRST_QUERY + word,
                    tl.load(source + _SHARED_FIRST_QUERY + word, mask=inside, other=0),
                    mask=inside,
                )
            tl.store(record + _UNIT_IS_TAIL, u * 0, mask=inside)
            # Position, number of chunks and first partial: likewise.
            for word in tl.static_range(3):
                tl.store(
                    record + _UNIT_POSITION + word,
                    tl.load(rows + sharer * _ROW_WORDS + word, mask=inside, other=0),
                    mask=inside,
                )


@triton.jit
def _rows_from(
    row_slots, num_computed, shared_rows, num_live, shared_count, begin, WINDOW: tl.constexpr, COUNT: tl.constexpr
):
    """Of COUNT rows: slot, position, first visible position, positions in shared units, and the number of these."""
    row = begin + tl.arange(0, COUNT)
    live = row < num_live
    slot = tl.load(row_slots + row, mask=live, other=0)
    shares = live & (shared_count > 0)
    covered = tl.load(shared_rows + row * _SHARED_ROW_WORDS + _SHARED_TOKENS, mask=shares, other=0)
    segments = tl.load(shared_rows + row * _SHARED_ROW_WORDS + _SHARED_SEGMENTS, mask=shares, other=0)
    position = tl.load(num_computed + slot, mask=live, other=0)
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW else position * 0
    return slot, position, first, covered, segments


@triton.jit
def _own_chunks(position, first, covered, size, WINDOW: tl.constexpr):
    """Where the chunks of rows begin, how many come before the tail, and the cached positions of the tail."""
    begin = first // size * size if WINDOW else covered
    whole = (position - begin) // size
    return begin, whole, position - tl.maximum(begin + whole * size, first)


def decode_units(
    buffers: DecodeUnits,
    row_slots: torch.Tensor,
    num_rows: torch.Tensor,
    num_computed: torch.Tensor,
    chunks: Chunks,
    window: int = 0,
    step: torch.Tensor | None = None,
) -> None:
    """Fills `buffers` for the rows row_slots[:num_rows]: slot s decodes the token at position num_computed[s].

    row_slots [R], num_rows [1], num_computed [S] and step [1] are int32 on the device. `step`, if given, is incremented
    by one. Layers with a sliding window need buffers of their own and share no KV reads.
    """
    capacity = row_slots.shape[0]
    doublings = (chunks.max_tokens // chunks.min_tokens).bit_length() - 1
    assert chunks.min_tokens << doublings == chunks.max_tokens, f"chunk sizes must be powers of two apart: {chunks}"
    padded = max(next_power_of_2(capacity), _OWN_ROWS)
    _decode_units_kernel[(cdiv(capacity, _OWN_ROWS),)](
        row_slots,
        num_rows,
        num_computed,
        buffers.shared_units,
        buffers.num_shared,
        buffers.shared_chunk,
        buffers.shared_rows,
        buffers.units,
        buffers.num_units,
        buffers.rows,
        num_rows if step is None else step,
        chunks.target_units,
        0 if step is None else 1,
        WINDOW=window,
        MIN_TOKENS=chunks.min_tokens,
        DOUBLINGS=doublings,
        BLOCK_R=padded,
        OWN=_OWN_ROWS,
        BLOCK_C=min(padded, 256),
        BLOCK_U=256,
        num_warps=8,
    )
