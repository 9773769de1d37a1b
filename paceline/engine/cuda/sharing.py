"""Shared KV reads of decode batches: which rows read a common prefix together, and in which work units.

A shared unit reads a chunk of KV once for several rows. The host names these units when rows join or leave; the kernel
in kernels/decode_units.py adds the units of single rows at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.kernels.layouts import SHARED_UNIT_WORDS, SharedUnitWord
from paceline.scheduler.plan import Plan

Words = npt.NDArray[np.int32]

SHARED_CHUNKS = (2048, 1024, 512, 256)  # positions that rows share as a whole or not at all
BLOCK_SIZES = (16, 32, 64)  # query heads of a shared unit (BLOCK_M of the kernel)
_NO_ROWS: Words = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class SharedUnits:
    """The work units that several rows share. Valid until a row joins or leaves the batch."""

    chunk: int  # positions; the KV of all rows of the batch is split at its multiples
    units: Words  # [n, SHARED_UNIT_WORDS]
    query_rows: Words  # the rows of the units; units with the same rows refer to the same queries
    covered: Words  # [rows]: how many leading chunks of each row are in shared units

    @property
    def num_saved_tokens(self) -> int:
        """Positions that a row does not read because another row of the same unit reads them."""
        return (int(self.units[:, SharedUnitWord.NUM_QUERIES].sum()) - len(self.units)) * self.chunk


NOTHING_SHARED = SharedUnits(
    0, np.empty((0, SHARED_UNIT_WORDS), np.int32), np.empty(0, np.int32), np.empty(0, np.int32)
)


def shared_units(rows: Words, common: Words, num_rows: int, chunk: int, rows_per_unit: int) -> SharedUnits | None:
    """The shared units of rows in depth-first order: rows[i] and rows[i + 1] begin with the same common[i] positions.
    None if no whole chunk is shared.

    For each chunk, rows that have it in common form a run, and a run is divided into units of nearly equal size. The
    runs change only at depths where rows diverge, so all chunks between two such depths are computed at once.
    """
    depth = common // chunk
    if not depth.any():
        return None
    padded = np.concatenate([[0], depth, [0]])
    covered = np.zeros(num_rows, np.int32)
    covered[rows] = np.maximum(padded[:-1], padded[1:])
    units, queries, num_queries, above = [], [], 0, 0
    for below in np.unique(depth[depth > 0]).tolist():
        ends = np.flatnonzero(padded < below)  # rows end - 1 and end have less in common than this depth
        firsts, sizes = ends[:-1], np.diff(ends)
        runs = sizes > 1
        firsts, sizes = firsts[runs], sizes[runs]
        tiles = -(-sizes // rows_per_unit)
        run = np.repeat(np.arange(len(sizes)), tiles)
        index = np.arange(len(run)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        begins = sizes[run] * index // tiles[run]
        counts = sizes[run] * (index + 1) // tiles[run] - begins
        first_query = num_queries + np.cumsum(counts) - counts
        members = (
            np.repeat(firsts[run] + begins, counts)
            + np.arange(counts.sum())
            - np.repeat(np.cumsum(counts) - counts, counts)
        )
        queries.append(rows[members])
        num_queries += len(members)
        chunks = np.arange(above, below)
        # The columns of `SharedUnitWord`; that of the chunk is filled in below.
        unit = np.stack([rows[firsts[run] + begins], run, first_query, counts], axis=1)
        unit = np.tile(unit, (len(chunks), 1))
        unit[:, SharedUnitWord.CHUNK] = np.repeat(chunks, len(run))
        units.append(unit)
        above = below
    return SharedUnits(chunk, np.concatenate(units).astype(np.int32), np.concatenate(queries).astype(np.int32), covered)


@dataclass(frozen=True, slots=True)
class ShareRule:
    """When and how rows of a batch share KV reads; measured in docs/log/shared-prefix-attention.md."""

    group: int  # query heads per KV head
    max_units: int  # capacity of the device buffers, for units and their queries and for partial results
    chunks: tuple[int, ...] = SHARED_CHUNKS
    min_saving: float = 0.1  # of all positions: a smaller saving does not pay for splitting everything at chunks
    share_prefill: bool = True  # whether prefill rows may share tiles: only where no layer has a sliding window
    target_units: int = 24  # shared units, times the KV heads: with fewer, multiprocessors are idle
    min_pair_tokens: int = 1024  # in common, if no more than two rows share: fewer are in the L2 cache anyway

    def choose(self, plan: Plan, num_decodes: int) -> tuple[SharedUnits | None, int]:
        """What the first `num_decodes` rows of `plan` share, and the query heads per shared unit (0: no sharing)."""
        rows, common = shared_rows(plan, 0, num_decodes)
        least = self.chunks[-1]
        worth = int((common // least).sum()) * least
        if not worth or worth < self.min_saving * int(plan.starts[:num_decodes].sum()):
            return None, 0
        borders = np.flatnonzero(np.concatenate([[0], common // least, [0]]) == 0)
        heads = int(np.diff(borders).max()) * self.group  # of the largest group of rows that share a chunk
        block_m = next((size for size in BLOCK_SIZES if heads <= size), BLOCK_SIZES[-1])
        if block_m < 2 * self.group or (heads == 2 * self.group and int(common.max()) < self.min_pair_tokens):
            return None, 0
        ends = plan.max_lengths[:num_decodes]
        found = None
        for chunk in self.chunks:  # the longest that loses little and leaves enough units
            if int((common // chunk).sum()) * chunk < 0.85 * worth:
                continue
            if int((ends // chunk + 1).sum()) > self.max_units:
                break
            shared = shared_units(rows, common, num_decodes, chunk, block_m // self.group)
            if shared is None or max(len(shared.units), len(shared.query_rows)) > self.max_units:
                break
            found = shared
            if len(shared.units) >= self.target_units:
                break
        return (found, block_m) if found is not None else (None, 0)


def shared_rows(plan: Plan, first: int, end: int) -> tuple[Words, Words]:
    """The plan's sharing restricted to the rows first:end: rows in depth-first order, and what neighbours share."""
    if plan.sharing is None:
        return _NO_ROWS, _NO_ROWS
    kept = np.flatnonzero((plan.sharing.rows >= first) & (plan.sharing.rows < end))
    if len(kept) < 2:
        return _NO_ROWS, _NO_ROWS
    return plan.sharing.rows[kept], np.minimum.reduceat(plan.sharing.common[: kept[-1]], kept[:-1])
