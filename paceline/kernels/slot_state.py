"""Device state by slot, and the kernel that applies the changes of a forward pass to it.

The host sends one packed diff per forward pass and never reads this state back: lengths follow from the plans, and
tokens are in the results. A diff (`pack_diff` in engine/cuda/packing.py) is int32, column after column:

    header [16]          DiffHeader in layouts.py
    pages                slot[], index[], page[]               page_table[slot, index] = page
    starts               slot[], position[]                    num_computed[slot] = position
    joins                slot[], then SAMPLING_WORDS columns   sampling[slot] = words
    runs                 slot[], first[], offset[], count[]    token_pool[slot, first:first+count] = tokens[offset:...]
    tokens               token[]
    rows                 slot[]                                row_slots[:num_rows] = slots
    shared               unit[6 each], row[], row[2 each]      work units that several rows share (decode_units.py)

A diff must not write the same word twice: programs apply it in any order. Rows and shared units that a diff does not
contain stay as they are.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels._triton import UNSPECIALIZED, launched, tl, triton
from paceline.kernels.decode_units import DecodeUnits
from paceline.kernels.layouts import (
    DIFF_HEADER_WORDS,
    RUN_COLUMNS,
    SAMPLING_WORDS,
    SHARED_ROW_WORDS,
    SHARED_UNIT_WORDS,
    DiffHeader,
    RunColumn,
    constants,
)

(
    _NUM_PAGES,
    _NUM_STARTS,
    _NUM_JOINS,
    _NUM_RUNS,
    _NUM_TOKENS,
    _NUM_ROWS,
    _SHARING,
    _NUM_QUERIES,
    _NUM_SHARED_ROWS,
    _SHARED_CHUNK,
) = constants(DiffHeader)
_RUN_SLOT, _RUN_FIRST, _RUN_OFFSET, _RUN_COUNT = constants(RunColumn)
_HEADER_WORDS, _RUN_COLUMNS = tl.constexpr(DIFF_HEADER_WORDS), tl.constexpr(RUN_COLUMNS)
_SHARED_UNIT_WORDS, _SHARED_ROW_WORDS = tl.constexpr(SHARED_UNIT_WORDS), tl.constexpr(SHARED_ROW_WORDS)


@dataclass(frozen=True, slots=True, eq=False)
class SlotState:
    token_pool: torch.Tensor  # [S, max_length] int32
    page_table: torch.Tensor  # [S, pages per slot] int32
    num_computed: torch.Tensor  # [S] int32: tokens whose KV is in the cache; the next position to feed
    sampling: torch.Tensor  # [S, SAMPLING_WORDS] int32
    row_slots: torch.Tensor  # [R] int32
    num_rows: torch.Tensor  # [1] int32

    @classmethod
    def empty(cls, slots: int, max_length: int, page_size: int, rows: int, device: torch.device | str) -> SlotState:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            token_pool=zeros(slots, max_length),
            page_table=zeros(slots, -(-max_length // page_size)),
            num_computed=zeros(slots),
            sampling=zeros(slots, SAMPLING_WORDS),
            row_slots=zeros(rows),
            num_rows=zeros(1),
        )


def apply_diff_reference(diff: npt.NDArray[np.int32], state: SlotState, units: DecodeUnits | None = None) -> None:
    header = dict(zip(DiffHeader, diff[: len(DiffHeader)].tolist(), strict=True))
    num_pages, num_starts, num_joins, num_runs, num_tokens, num_rows, *_ = header.values()
    rest = torch.from_numpy(diff[DIFF_HEADER_WORDS:].copy()).long()
    slots, indices, pages, rest = rest.split([num_pages] * 3 + [len(rest) - 3 * num_pages])
    state.page_table[slots, indices] = pages.int()
    slots, positions, rest = rest.split([num_starts] * 2 + [len(rest) - 2 * num_starts])
    state.num_computed[slots] = positions.int()
    slots, words, rest = rest.split(
        [num_joins, num_joins * SAMPLING_WORDS, len(rest) - num_joins * (1 + SAMPLING_WORDS)]
    )
    state.sampling[slots] = words.view(SAMPLING_WORDS, num_joins).T.int()
    run_words = RUN_COLUMNS * num_runs
    runs, tokens, rows, rest = rest.split(
        [run_words, num_tokens, num_rows, len(rest) - run_words - num_tokens - num_rows]
    )
    for slot, first, offset, count in runs.view(RUN_COLUMNS, num_runs).T.tolist():
        state.token_pool[slot, first : first + count] = tokens[offset : offset + count].int()
    if num_rows:
        state.row_slots[:num_rows] = rows.int()
        state.num_rows.fill_(num_rows)
    if header[DiffHeader.SHARING]:
        assert units is not None, "the diff has shared units, and no buffers for them were given"
        num_shared = header[DiffHeader.SHARING] - 1
        row_words = SHARED_ROW_WORDS * header[DiffHeader.NUM_SHARED_ROWS]
        sizes = [SHARED_UNIT_WORDS * num_shared, header[DiffHeader.NUM_QUERIES], row_words]
        unit, query_rows, shared_rows = rest[: sum(sizes)].split(sizes)
        units.num_shared.fill_(num_shared)
        units.shared_chunk.fill_(header[DiffHeader.SHARED_CHUNK])
        units.shared_units[:num_shared] = unit.view(-1, SHARED_UNIT_WORDS).int()
        units.query_rows[: len(query_rows)] = query_rows.int()
        units.shared_rows[: header[DiffHeader.NUM_SHARED_ROWS]] = shared_rows.view(-1, SHARED_ROW_WORDS).int()


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _apply_diff_kernel(
    diff,
    token_pool,
    page_table,
    num_computed,
    sampling,
    row_slots,
    num_rows,
    shared_units,
    num_shared,
    shared_chunk,
    query_rows,
    shared_rows,
    pool_stride,
    table_stride,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    stride = tl.num_programs(0) * BLOCK
    first = program * BLOCK
    lane = tl.arange(0, BLOCK)
    pages = tl.load(diff + _NUM_PAGES)
    starts = tl.load(diff + _NUM_STARTS)
    joins = tl.load(diff + _NUM_JOINS)
    runs = tl.load(diff + _NUM_RUNS)
    tokens = tl.load(diff + _NUM_TOKENS)
    rows = tl.load(diff + _NUM_ROWS)
    sharing = tl.load(diff + _SHARING)

    part = diff + _HEADER_WORDS
    for i in range(first, pages, stride):
        item = i + lane
        mine = item < pages
        slot = tl.load(part + item, mask=mine, other=0).to(tl.int64)
        index = tl.load(part + pages + item, mask=mine, other=0)
        tl.store(page_table + slot * table_stride + index, tl.load(part + 2 * pages + item, mask=mine), mask=mine)
    part += 3 * pages
    for i in range(first, starts, stride):
        item = i + lane
        mine = item < starts
        slot = tl.load(part + item, mask=mine, other=0)
        tl.store(num_computed + slot, tl.load(part + starts + item, mask=mine), mask=mine)
    part += 2 * starts
    for i in range(first, joins, stride):
        item = i + lane
        mine = item < joins
        slot = tl.load(part + item, mask=mine, other=0)
        for word in tl.static_range(WORDS):
            tl.store(sampling + slot * WORDS + word, tl.load(part + (1 + word) * joins + item, mask=mine), mask=mine)
    part += (1 + WORDS) * joins
    source = part + runs * _RUN_COLUMNS
    for run in range(program, runs, tl.num_programs(0)):
        slot = tl.load(part + runs * _RUN_SLOT + run).to(tl.int64)
        target = token_pool + slot * pool_stride + tl.load(part + runs * _RUN_FIRST + run)
        offset = tl.load(part + runs * _RUN_OFFSET + run)
        count = tl.load(part + runs * _RUN_COUNT + run)
        for i in range(0, count, BLOCK):
            mine = i + lane < count
            tl.store(target + i + lane, tl.load(source + offset + i + lane, mask=mine), mask=mine)
    part = source + tokens
    for i in range(first, rows, stride):
        item = i + lane
        mine = item < rows
        tl.store(row_slots + item, tl.load(part + item, mask=mine), mask=mine)
        tl.store(num_rows + item * 0, rows + item * 0, mask=mine & (item == 0))
    if sharing > 0:
        part += rows
        words = (sharing - 1) * _SHARED_UNIT_WORDS
        queries = tl.load(diff + _NUM_QUERIES)
        row_words = tl.load(diff + _NUM_SHARED_ROWS) * _SHARED_ROW_WORDS
        if program == 0:
            tl.store(num_shared, sharing - 1)
            tl.store(shared_chunk, tl.load(diff + _SHARED_CHUNK))
        for i in range(first, words, stride):
            mine = i + lane < words
            tl.store(shared_units + i + lane, tl.load(part + i + lane, mask=mine), mask=mine)
        part += words
        for i in range(first, queries, stride):
            mine = i + lane < queries
            tl.store(query_rows + i + lane, tl.load(part + i + lane, mask=mine), mask=mine)
        part += queries
        for i in range(first, row_words, stride):
            mine = i + lane < row_words
            tl.store(shared_rows + i + lane, tl.load(part + i + lane, mask=mine), mask=mine)


def apply_diff(diff: torch.Tensor, state: SlotState, units: DecodeUnits | None = None, num_programs: int = 64) -> None:
    """Applies a packed diff, int32 on the device, to `state`, and its shared units to `units`; without `units` it must
    not contain any. The buffer may be longer than the diff in it."""
    _apply_diff_kernel[(num_programs,)](
        diff,
        state.token_pool,
        state.page_table,
        state.num_computed,
        state.sampling,
        state.row_slots,
        state.num_rows,
        diff if units is None else units.shared_units,
        diff if units is None else units.num_shared,
        diff if units is None else units.shared_chunk,
        diff if units is None else units.query_rows,
        diff if units is None else units.shared_rows,
        state.token_pool.stride(0),
        state.page_table.stride(0),
        WORDS=SAMPLING_WORDS,
        BLOCK=512,
        num_warps=4,
    )
