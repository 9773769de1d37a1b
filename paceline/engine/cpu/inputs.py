"""From a plan to what one pass reads: flat tokens, positions, places in the KV memory, rows that sample.

The tables by slot (tokens, page ids) are device state: plans change them, in launch order, and nothing else does.
On the CPU the device's memory is numpy's, whose index arithmetic costs a fifth of torch's on arrays this small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.scheduler.plan import Plan

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """One pass. Rows are the plan's; T tokens lie one after the other, row by row."""

    tokens: Index  # [T]
    positions: Index  # [T]
    places: Index  # [T]: where each token's keys and values are written
    starts: Index  # [rows]
    lengths: Index  # [rows]
    offsets: Index  # [rows]: the first token of each row
    page_rows: npt.NDArray[np.int32]  # [rows, pages]: as many pages as the longest row has
    sampled: Index  # [sampling rows]: the last token of each
    sampled_slots: Index
    sampled_positions: Index  # where the new token will stand
    shares: bool = True  # some rows may begin with the same pages


class SlotTables:
    def __init__(self, max_running: int, max_row_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        # calloc: rows that are never used cost address space, not memory. One more than a row can have, since the
        # last sampled token is stored and never fed.
        self.tokens = np.zeros((max_running, max_row_tokens + 1), np.int32)
        self.pages = np.zeros((max_running, -(-max_row_tokens // page_size)), np.int32)

    def apply(self, plan: Plan) -> None:
        """Joins first, then page changes: the plan's own order."""
        for join in plan.joins:
            self.tokens[join.slot, : len(join.tokens)] = join.tokens
        if len(plan.page_slots):
            self.pages[plan.page_slots, plan.page_indices] = plan.page_ids

    def inputs(self, plan: Plan) -> Inputs:
        slots, starts, lengths = (column.astype(np.int64) for column in (plan.slots, plan.starts, plan.lengths))
        size = self.page_size
        if plan.num_tokens == len(slots):  # one token a row: the steady state
            offsets, token_slots, positions = np.arange(len(slots)), slots, starts
        else:
            ends = np.cumsum(lengths)
            offsets = ends - lengths
            token_slots = np.repeat(slots, lengths)
            positions = np.arange(plan.num_tokens) + np.repeat(starts - offsets, lengths)
        num_pages = (int((starts + lengths).max()) + size - 1) // size
        reach = starts + lengths
        samples = plan.samples
        return Inputs(
            tokens=self.tokens[token_slots, positions].astype(np.int64),
            positions=positions,
            places=self.pages[token_slots, positions // size].astype(np.int64) * size + positions % size,
            starts=starts,
            lengths=lengths,
            offsets=offsets,
            page_rows=self.pages[slots, :num_pages],
            sampled=(offsets + lengths - 1)[samples],
            sampled_slots=slots[samples],
            sampled_positions=reach[samples],
            shares=plan.sharing is not None,
        )

    def store(self, inputs: Inputs, tokens: npt.NDArray[np.int64]) -> None:
        """The tokens a pass sampled, for the next pass to read: the host may not know them yet."""
        self.tokens[inputs.sampled_slots, inputs.sampled_positions] = tokens
