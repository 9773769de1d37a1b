"""What the device knows of each slot, and the one kernel that applies a pass's changes to it.

The host sends a fresh packed buffer per pass and never reads this state back: lengths follow from the plans, and
tokens come out of the results. Layout of a packed diff, int32, columns one after the other:

    header [16]          num_pages, num_starts, num_joins, num_runs, num_tokens, num_rows,
                         num_shared + 1, num_queries, num_covered, positions of a shared chunk
    pages                slot[], index[], page[]               page_table[slot, index] = page
    starts               slot[], position[]                    num_computed[slot] = position
    joins                slot[], then SAMPLING_WORDS columns   sampling[slot] = words
    runs                 slot[], first[], offset[], count[]    token_pool[slot, first:first+count] = tokens[offset:...]
    tokens               token[]
    rows                 slot[]                                row_slots[:num_rows] = slots
    shared               unit[4 each], row[], count[]          the units that several rows share (decode_units.py)

Nothing in one diff may be written twice: programs apply it in no order. A pass whose rows did not change keeps them:
num_rows 0 means no change, and so does 0 for num_shared + 1.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels._triton import launched, tl, triton
from paceline.kernels.decode_units import DecodeUnits, SharedUnits
from paceline.request import MAX_LOGPROBS

Column = npt.NDArray[np.int32]

HEADER_WORDS = 16
# temperature, top_k, top_p, min_p, seed low, seed high; floats as their bits. Then what is asked of logprobs: 0, or 1 +
# how many alternatives; how many ids, and these.
SAMPLING_WORDS = 8 + MAX_LOGPROBS
_EMPTY: Column = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class SlotState:
    token_pool: torch.Tensor  # [S, max_length] int32
    page_table: torch.Tensor  # [S, pages per slot] int32
    num_computed: torch.Tensor  # [S] int32: tokens whose KV is in the cache = the next position to feed
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


def sampling_words(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, logprobs: int | None = None,
    logprob_ids: Sequence[int] = (),
) -> Column:  # fmt: skip
    """One slot's sampling parameters. 0 turns temperature, top_k or min_p off; 1.0 turns top_p off."""
    floats = np.array([temperature, top_p, min_p], np.float32).view(np.int32)
    halves = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32).view(np.int32)
    asks = 0 if logprobs is None else 1 + logprobs
    assert asks <= 1 + MAX_LOGPROBS and len(logprob_ids) <= MAX_LOGPROBS, (
        f"{logprobs} alternatives and {len(logprob_ids)} ids do not fit"
    )
    words = np.zeros(SAMPLING_WORDS, np.int32)
    words[: 8 + len(logprob_ids)] = (
        floats[0], top_k, floats[1], floats[2], *halves, asks, len(logprob_ids), *logprob_ids
    )  # fmt: skip
    return words


def pack_diff(
    page_slots: Column = _EMPTY,
    page_indices: Column = _EMPTY,
    page_ids: Column = _EMPTY,
    start_slots: Column = _EMPTY,
    start_positions: Column = _EMPTY,
    join_slots: Column = _EMPTY,
    join_sampling: npt.NDArray[np.int32] | None = None,
    token_runs: Sequence[tuple[int, int, Column]] = (),
    row_slots: Column = _EMPTY,
    shared: SharedUnits | None = None,
) -> Column:
    """The packed buffer; join_sampling is [joins, SAMPLING_WORDS], token_runs are (slot, first position, tokens).
    shared: what is shared from now on; None: what was shared before."""
    counts = np.array([len(tokens) for _, _, tokens in token_runs], np.int32)
    header = np.zeros(HEADER_WORDS, np.int32)
    num_joins = len(join_slots)
    header[:6] = len(page_slots), len(start_slots), num_joins, len(token_runs), counts.sum(), len(row_slots)
    words = np.empty((0, SAMPLING_WORDS), np.int32) if join_sampling is None else join_sampling
    sharing: tuple[Column, ...] = ()
    if shared is not None:
        header[6:10] = len(shared.units) + 1, len(shared.query_rows), len(shared.covered), shared.chunk
        sharing = (shared.units.reshape(-1), shared.query_rows, shared.covered)
    return np.concatenate(
        [
            header,
            page_slots,
            page_indices,
            page_ids,
            start_slots,
            start_positions,
            join_slots,
            words.T.reshape(-1),
            np.array([slot for slot, _, _ in token_runs], np.int32),
            np.array([first for _, first, _ in token_runs], np.int32),
            (np.cumsum(counts) - counts).astype(np.int32),
            counts,
            *[tokens for _, _, tokens in token_runs],
            row_slots,
            *sharing,
        ],
        dtype=np.int32,
    )


def apply_diff_reference(diff: Column, state: SlotState, units: DecodeUnits | None = None) -> None:
    num_pages, num_starts, num_joins, num_runs, num_tokens, num_rows, shared, queries, covered = diff[:9].tolist()
    rest = torch.from_numpy(diff[HEADER_WORDS:].copy()).long()
    slots, indices, pages, rest = rest.split([num_pages] * 3 + [len(rest) - 3 * num_pages])
    state.page_table[slots, indices] = pages.int()
    slots, positions, rest = rest.split([num_starts] * 2 + [len(rest) - 2 * num_starts])
    state.num_computed[slots] = positions.int()
    slots, words, rest = rest.split(
        [num_joins, num_joins * SAMPLING_WORDS, len(rest) - num_joins * (1 + SAMPLING_WORDS)]
    )
    state.sampling[slots] = words.view(SAMPLING_WORDS, num_joins).T.int()
    runs, tokens, rows, rest = rest.split(
        [4 * num_runs, num_tokens, num_rows, len(rest) - 4 * num_runs - num_tokens - num_rows]
    )
    for slot, first, offset, count in runs.view(4, num_runs).T.tolist():
        state.token_pool[slot, first : first + count] = tokens[offset : offset + count].int()
    if num_rows:
        state.row_slots[:num_rows] = rows.int()
        state.num_rows.fill_(num_rows)
    if shared:
        assert units is not None, "somebody shares, and there are no units to note it in"
        unit, query_rows, counts = rest[: 4 * (shared - 1) + queries + covered].split(
            [4 * (shared - 1), queries, covered]
        )
        units.num_shared.fill_(shared - 1)
        units.shared_chunk.fill_(int(diff[9]))
        units.shared_units[: shared - 1] = unit.view(-1, 4).int()
        units.query_rows[:queries] = query_rows.int()
        units.shared_chunks[:covered] = counts.int()


@launched
@triton.jit
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
    shared_chunks,
    pool_stride,
    table_stride,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    stride = tl.num_programs(0) * BLOCK
    first = program * BLOCK
    lane = tl.arange(0, BLOCK)
    pages = tl.load(diff)
    starts = tl.load(diff + 1)
    joins = tl.load(diff + 2)
    runs = tl.load(diff + 3)
    tokens = tl.load(diff + 4)
    rows = tl.load(diff + 5)
    shared = tl.load(diff + 6)

    part = diff + 16
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
    source = part + 4 * runs
    for run in range(program, runs, tl.num_programs(0)):
        slot = tl.load(part + run).to(tl.int64)
        target = token_pool + slot * pool_stride + tl.load(part + runs + run)
        offset = tl.load(part + 2 * runs + run)
        count = tl.load(part + 3 * runs + run)
        for i in range(0, count, BLOCK):
            mine = i + lane < count
            tl.store(target + i + lane, tl.load(source + offset + i + lane, mask=mine), mask=mine)
    part = source + tokens
    for i in range(first, rows, stride):
        item = i + lane
        mine = item < rows
        tl.store(row_slots + item, tl.load(part + item, mask=mine), mask=mine)
        tl.store(num_rows + item * 0, rows + item * 0, mask=mine & (item == 0))
    if shared > 0:
        part += rows
        words = (shared - 1) * 4
        queries = tl.load(diff + 7)
        covered = tl.load(diff + 8)
        if program == 0:
            tl.store(num_shared, shared - 1)
            tl.store(shared_chunk, tl.load(diff + 9))
        for i in range(first, words, stride):
            mine = i + lane < words
            tl.store(shared_units + i + lane, tl.load(part + i + lane, mask=mine), mask=mine)
        part += words
        for i in range(first, queries, stride):
            mine = i + lane < queries
            tl.store(query_rows + i + lane, tl.load(part + i + lane, mask=mine), mask=mine)
        part += queries
        for i in range(first, covered, stride):
            mine = i + lane < covered
            tl.store(shared_chunks + i + lane, tl.load(part + i + lane, mask=mine), mask=mine)


def apply_diff(diff: torch.Tensor, state: SlotState, units: DecodeUnits | None = None, num_programs: int = 64) -> None:
    """Applies a packed diff, int32 on the device, to `state`, and to `units` what is shared: without them the diff
    must not speak of it. The buffer may be longer than the diff in it."""
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
        diff if units is None else units.shared_chunks,
        state.token_pool.stride(0),
        state.page_table.stride(0),
        WORDS=SAMPLING_WORDS,
        BLOCK=512,
        num_warps=4,
    )
