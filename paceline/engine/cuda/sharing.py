"""Shared KV reads of decode batches: which rows read a common prefix together, and in which work units.

A shared unit reads a segment of KV once for several rows. The host names these units when rows join or leave; the
kernel in kernels/decode_units.py adds the units of single rows at every step.

Rows that begin with the same positions form a run. Runs are nested, as the nodes of the prefix tree are: a run reads
together what its rows have in common beyond the run around it. Lengths are rounded down to SHARED_ALIGN, and long
segments are divided evenly, for parallelism.

        0                640         960                                  (chunk 512)
row 0   [ 0..4  ][ 0..4  ][ 0, 1, 2  ][ own       run of 5 rows: 0..320, 320..640
row 1   [       ][       ][          ][ own       run of 3 rows: 640..960, the third segment of its rows
row 2   [       ][       ][          ][ own
row 3   [       ][       ][ own
row 4   [       ][       ][ own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.kernels.layouts import SHARED_ROW_WORDS, SHARED_UNIT_WORDS, SharedRowWord, SharedUnitWord
from paceline.scheduler.plan import Plan

Words = npt.NDArray[np.int32]

SHARED_CHUNKS = (1024, 512, 256)  # most positions of a work unit where rows share, the longest first
LONG_SHARED_CHUNK = 2048  # where contexts are so long that there would be too many units
SHARED_ALIGN = 64  # positions: the largest tile of keys, so that tiles begin with a page or are within one
BLOCK_SIZES = (16, 32, 64)  # query heads of a shared unit (BLOCK_M of the kernel)
_NO_ROWS: Words = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class SharedUnits:
    """The work units that several rows share. Valid until a row joins or leaves the batch."""

    chunk: int  # most positions of a unit, shared or not
    units: Words  # [n, SHARED_UNIT_WORDS]
    query_rows: Words  # the rows of the units; units with the same rows refer to the same queries
    rows: Words  # [rows, SHARED_ROW_WORDS]

    @property
    def num_saved_tokens(self) -> int:
        """Positions that a row does not read because another row of the same unit reads them."""
        lengths = self.units[:, SharedUnitWord.END] - self.units[:, SharedUnitWord.BEGIN]
        return int(((self.units[:, SharedUnitWord.NUM_QUERIES] - 1) * lengths).sum())

    def max_partials(self, max_lengths: Words) -> int:
        """Most partial results of rows that grow to so many tokens. There are never more units, nor query rows: each
        is of at least one row and one of its partial results."""
        tokens, segments = self.rows.T
        return int((segments + (max_lengths - tokens) // self.chunk + 1).sum())


NOTHING_SHARED = SharedUnits(
    0, np.empty((0, SHARED_UNIT_WORDS), np.int32), _NO_ROWS, np.empty((0, SHARED_ROW_WORDS), np.int32)
)


class SharedRun(NamedTuple):
    """Adjacent rows that begin with the same positions, and what they read together: begin..end."""

    first: int
    size: int
    begin: int
    end: int
    parent: int  # index of the run around it; -1: none


def shared_runs(common: Words, min_tokens: int) -> tuple[list[SharedRun], list[int]]:
    """The runs of rows in depth-first order, of which i and i + 1 begin with the same common[i] positions: each run
    after the one around it; and for each row the innermost run that contains it, or -1.

    A run must save at least `min_tokens`: without it, each of its parts (single rows and the runs within it) reads the
    positions for itself. So a run of many rows that diverge one by one does not become many short segments, each with a
    partial result for all later rows.
    """
    found = []  # first row, end, positions in common, divergences at that position: a run after those within it
    above = [(0, 0, 0)]  # first row, positions in common, divergences so far: of the runs that contain the next row
    for row, depth in enumerate([*common.tolist(), 0]):
        first = row
        while above[-1][1] > depth:
            first, end, count = above.pop()
            found.append((first, row + 1, end, count))
        if above[-1][1] < depth:
            above.append((first, depth, 1))
        else:
            above[-1] = (*above[-1][:2], above[-1][2] + 1)
    runs: list[SharedRun] = []
    run_of_row = [-1] * (len(common) + 1)
    for first, last, end, count in reversed(found):
        parent = run_of_row[first]
        begin = runs[parent].end if parent >= 0 else 0
        if count * (end - begin) >= min_tokens:
            run_of_row[first:last] = [len(runs)] * (last - first)
            runs.append(SharedRun(first, last - first, begin, end, parent))
    return runs, run_of_row


def shared_units(
    rows: Words,
    runs: list[SharedRun],
    run_of_row: list[int],
    num_rows: int,
    chunk: int,
    rows_per_unit: int,
    align: int = SHARED_ALIGN,
) -> SharedUnits:
    """The work units of `runs`, whose rows are indices into `rows`, in a batch of `num_rows` rows. A run is divided
    into segments of at most `chunk` positions and into units of at most `rows_per_unit` rows, all of nearly equal size.
    The longest units come first."""
    first, size, begin, end, _ = np.array(runs, np.int32).T
    segments, tiles = -(-(end - begin) // chunk), -(-size // rows_per_unit)
    words = np.zeros((len(runs) + 1, SHARED_ROW_WORDS), np.int32)  # by run; the last ones are of rows without a run
    words[:-1, SharedRowWord.NUM_TOKENS] = end
    totals = [0] * (len(runs) + 1)
    for at, (run, count) in enumerate(zip(runs, segments.tolist(), strict=True)):
        totals[at] = totals[run.parent] + count
    words[:, SharedRowWord.NUM_SEGMENTS] = totals
    before = words[:-1, SharedRowWord.NUM_SEGMENTS] - segments
    row_words = np.zeros((num_rows, SHARED_ROW_WORDS), np.int32)
    row_words[rows] = words[run_of_row]

    counts = segments * tiles
    of = np.repeat(np.arange(len(runs)), counts)
    segment, tile = np.divmod(_ranges(counts), tiles[of])
    first_query = size[of] * tile // tiles[of]
    blocks, segments = ((end - begin) // align)[of], segments[of]
    units = np.empty((len(of), SHARED_UNIT_WORDS), np.int32)
    units[:, SharedUnitWord.ROW] = rows[first[of] + first_query]
    units[:, SharedUnitWord.FIRST_QUERY] = (np.cumsum(size) - size)[of] + first_query
    units[:, SharedUnitWord.NUM_QUERIES] = size[of] * (tile + 1) // tiles[of] - first_query
    units[:, SharedUnitWord.BEGIN] = begin[of] + blocks * segment // segments * align
    units[:, SharedUnitWord.END] = begin[of] + blocks * (segment + 1) // segments * align
    units[:, SharedUnitWord.INDEX] = before[of] + segment
    order = np.argsort(units[:, SharedUnitWord.BEGIN] - units[:, SharedUnitWord.END], kind="stable")
    return SharedUnits(chunk, units[order], rows[np.repeat(first, size) + _ranges(size)], row_words)


def _ranges(counts: Words) -> Words:
    """0..count - 1 for each count, one after the other."""
    return np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)


@dataclass(frozen=True, slots=True)
class ShareRule:
    """When and how rows of a batch share KV reads; measured in docs/log/shared-prefix-attention.md."""

    group: int  # query heads per KV head
    max_units: int  # capacity of the device buffers, for units and their queries and for partial results
    chunks: tuple[int, ...] = SHARED_CHUNKS  # the last one is also the shortest prefix that is shared
    align: int = SHARED_ALIGN
    min_saving: float = 0.1  # of all positions: a smaller saving does not pay for another launch and more merging
    share_prefill: bool = True  # whether prefill rows may share tiles: only where no layer has a sliding window
    target_units: int = 24  # shared units, times the KV heads: with fewer, multiprocessors are idle
    min_pair_tokens: int = 1024  # in common, if no more than two rows share: fewer are in the L2 cache anyway

    def choose(self, plan: Plan, num_decodes: int) -> tuple[SharedUnits | None, int]:
        """What the first `num_decodes` rows of `plan` share, and the query heads per shared unit (0: no sharing)."""
        rows, common = shared_rows(plan, 0, num_decodes)
        least = self.chunks[-1]
        common = np.where(common < least, 0, common // self.align * self.align)
        saving = int(common.sum())
        if not saving or saving < self.min_saving * int(plan.starts[:num_decodes].sum()):
            return None, 0
        borders = np.flatnonzero(np.concatenate([[0], common, [0]]) == 0)
        heads = int(np.diff(borders).max()) * self.group  # of the largest group of rows that share
        block_m = next((size for size in BLOCK_SIZES if heads <= size), BLOCK_SIZES[-1])
        if block_m < 2 * self.group or (heads == 2 * self.group and int(common.max()) < self.min_pair_tokens):
            return None, 0
        runs, run_of_row = shared_runs(common, least)

        def fitting(chunk: int) -> SharedUnits | None:
            units = shared_units(rows, runs, run_of_row, num_decodes, chunk, block_m // self.group, self.align)
            return units if units.max_partials(plan.max_lengths[:num_decodes]) <= self.max_units else None

        found = None
        for chunk in self.chunks:  # the longest that gives enough units
            if (shared := fitting(chunk)) is None:
                break
            found = shared
            if len(shared.units) >= self.target_units:
                break
        if found is None:
            found = fitting(LONG_SHARED_CHUNK)
        return (found, block_m) if found is not None else (None, 0)


def shared_rows(plan: Plan, first: int, end: int) -> tuple[Words, Words]:
    """The plan's sharing restricted to the rows first:end: rows in depth-first order, and what neighbours share."""
    if plan.sharing is None:
        return _NO_ROWS, _NO_ROWS
    kept = np.flatnonzero((plan.sharing.rows >= first) & (plan.sharing.rows < end))
    if len(kept) < 2:
        return _NO_ROWS, _NO_ROWS
    return plan.sharing.rows[kept], np.minimum.reduceat(plan.sharing.common[: kept[-1]], kept[:-1])
