"""Turns a plan into the inputs of one forward pass: flat tokens, positions, KV indices, rows that sample.

The tables by slot (tokens, page ids) are device state: only plans change them, in launch order. On the CPU they are
numpy arrays, whose index arithmetic costs a fifth of torch's on arrays this small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.scheduler.plan import Column, Plan

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """One forward pass. Rows are those of the plan; the T tokens of all rows follow each other, row by row."""

    tokens: Index  # [T]
    positions: Index  # [T]: where each token is in its row, and so in the KV cache
    rope_positions: Index  # [T]: what each token is rotated by; of text the same array
    kv_indices: Index  # [T]: index in the KV cache that each token's keys and values are written to
    slots: Index  # [rows]
    starts: Index  # [rows]
    lengths: Index  # [rows]
    offsets: Index  # [rows]: the first token of each row
    prompts: Index  # [rows]: how many of its tokens belong to a prompt: the first ones. Others were generated.
    page_rows: npt.NDArray[np.int32]  # [rows, pages of the longest row]
    sampled: Index  # tokens whose logits are sampled from: the last of each sampling row, or all of a verified one
    sampled_slots: Index
    sampled_positions: Index  # position of the new token
    shares: bool = True  # whether rows may begin with the same pages


class SlotTables:
    def __init__(self, max_running: int, max_row_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        # calloc: rows that are never used cost address space, not memory. One more column than a row has tokens, since
        # the last sampled token is stored and never computed.
        self.tokens = np.zeros((max_running, max_row_tokens + 1), np.int32)
        self.pages = np.zeros((max_running, -(-max_row_tokens // page_size)), np.int32)
        self.positions = np.zeros(max_running, np.int64)  # of the next token to feed
        self.prompts = np.zeros(max_running, np.int64)  # tokens of the prompt

    def apply(self, plan: Plan) -> None:
        """Applies joins, then page table changes, which is the order of the plan."""
        for join in plan.joins:
            self.tokens[join.slot, : len(join.tokens)] = join.tokens
            self.prompts[join.slot] = join.num_prompt_tokens
        (changes,) = plan.page_changes
        if len(changes.slots):
            self.pages[changes.slots, changes.indices] = changes.pages

    def store_tokens(self, slots: Column, positions: Column, tokens: Column) -> None:
        self.tokens[slots, positions] = tokens

    def inputs(self, plan: Plan, num_verified: int = 0) -> Inputs:
        """Of a plan with exact positions. The first `num_verified` rows sample after each of their tokens."""
        slots, starts, lengths = (column.astype(np.int64) for column in (plan.slots, plan.starts, plan.lengths))
        return self.row_inputs(slots, starts, lengths, plan.samples, num_verified, shares=plan.sharing is not None)

    def row_inputs(
        self,
        slots: Index,
        starts: Index,
        lengths: Index,
        samples: npt.NDArray[np.bool_] | None = None,
        num_verified: int = 0,
        *,
        shares: bool = False,
    ) -> Inputs:
        """Of rows that feed `lengths` tokens from `starts` on. samples: which sample after their last token; default:
        all."""
        size, num_tokens = self.page_size, int(lengths.sum())
        if num_tokens == len(slots):  # one token per row: a decode batch
            offsets, token_slots, positions = np.arange(len(slots)), slots, starts
        else:
            offsets = np.cumsum(lengths) - lengths
            token_slots = np.repeat(slots, lengths)
            positions = np.arange(num_tokens) + np.repeat(starts - offsets, lengths)
        ends = starts + lengths
        num_pages = (int(ends.max()) + size - 1) // size
        samples = np.ones(len(slots), np.bool_) if samples is None else samples
        if num_verified:
            samples = samples.copy()
            samples[:num_verified] = False
        sampled = (offsets + lengths - 1)[samples]
        if num_verified:
            sampled = np.concatenate([np.arange(lengths[:num_verified].sum()), sampled])
        return Inputs(
            tokens=self.tokens[token_slots, positions].astype(np.int64),
            positions=positions,
            rope_positions=positions,
            kv_indices=self.pages[token_slots, positions // size].astype(np.int64) * size + positions % size,
            slots=slots,
            starts=starts,
            lengths=lengths,
            offsets=offsets,
            prompts=np.minimum(np.maximum(self.prompts[slots] - starts, 0), lengths),
            page_rows=self.pages[slots, :num_pages],
            sampled=sampled,
            sampled_slots=token_slots[sampled],
            sampled_positions=positions[sampled] + 1,
            shares=shares,
        )

    def store(self, inputs: Inputs, tokens: npt.NDArray[np.int64]) -> None:
        """Stores the sampled tokens for the next forward pass, which may run before the host has seen them."""
        self.tokens[inputs.sampled_slots, inputs.sampled_positions] = tokens
