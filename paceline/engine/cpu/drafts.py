"""Speculative decoding on the CPU: drafts from the row's own tokens or its draft source, verified in one forward pass.

A decode row with d drafts feeds 1 + d tokens. The logits of each give the token that plain decoding would sample there
if all drafts before it are right, since filters, penalties and noise depend on the position and on the tokens before it
alone. A draft is accepted exactly if it equals that token, so the output is that of plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.engine.cpu.inputs import Index, SlotTables
from paceline.request import Tokens
from paceline.sampling.types import Drafts, Masks
from paceline.scheduler.plan import Column, Join, Plan

_LONGEST, _SHORTEST = 4, 2  # last tokens of a row that are looked for
_FIRST_DEPTH = 3  # drafts of a new request
_FIRST_PAUSE, _LONGEST_PAUSE = 2, 32  # tokens after which a row whose drafts were wrong tries again


class _Source:
    """The draft source of a row: a text that its output may follow, and where in it the output is."""

    def __init__(self, tokens: Tokens, num_prompt_tokens: int) -> None:
        self._tokens = tokens
        self._at, self._length = 0, num_prompt_tokens  # so far in the text when the row had that length

    def follow(self, row: Tokens) -> tuple[int, Tokens]:
        """The rest of the text behind the last tokens of the row, and how many of these it has before the rest."""
        text, at = self._tokens, self._at + len(row) - self._length
        size = min(at, _LONGEST)
        if 0 < at <= len(text) and np.array_equal(text[at - size : at], row[-size:]):
            # The output has followed the text, or is its beginning: then one token is as good as four.
            size = _LONGEST
        else:
            ends, size = _longest_match(text, row)
            if size:
                at = int(ends[np.abs(ends - at).argmin()])  # nearest to where it would be without insertions
            elif self._at:
                return 0, text[:0]
            else:  # nothing of the text has been output: it may begin here
                at = 0
        self._at, self._length = at, len(row)
        return size, text[at:]


class DraftProposer(Protocol):
    def join(self, join: Join) -> None: ...

    def propose_all(self, tables: SlotTables, slots: Index, positions: Index, limits: Index) -> Index:
        """Stores up to limits[i] drafts behind position positions[i] of slot slots[i]; returns how many."""

    def settle(self, slot: int, position: int, num_drafts: int, num_accepted: int) -> None:
        """Of so many drafts, so many were accepted."""


class NgramDrafts:
    """Proposes what followed the last tokens of a row when they occurred before: in its draft source, or in the row
    itself (prompt lookup). The longer match is used, the source if both are equally long.

    With `adapts`, a row proposes more after its drafts were right and fewer after they were wrong; if none was, it
    pauses, each time twice as long. Without, it proposes as many as the plan allows.
    """

    def __init__(self, max_running: int, *, adapts: bool = True) -> None:
        self._adapts = adapts
        self._sources: dict[int, _Source] = {}
        self._depth = np.zeros(max_running, np.int32)
        self._pause = np.zeros(max_running, np.int32)  # the next one, in tokens
        self._resume = np.zeros(max_running, np.int64)  # the position from which on a paused row tries again

    def join(self, join: Join) -> None:
        slot = join.slot
        self._depth[slot], self._pause[slot], self._resume[slot] = _FIRST_DEPTH, _FIRST_PAUSE, 0
        self._sources.pop(slot, None)
        if len(join.draft_source):
            self._sources[slot] = _Source(join.draft_source, join.num_prompt_tokens)

    def propose_all(self, tables: SlotTables, slots: Index, positions: Index, limits: Index) -> Index:
        nums = np.zeros(len(slots), np.int64)
        rows = zip(slots.tolist(), positions.tolist(), limits.tolist(), strict=True)
        for row, (slot, position, limit) in enumerate(rows):
            found = self.propose(slot, tables.tokens[slot, : position + 1], limit)
            tables.tokens[slot, position + 1 : position + 1 + len(found)] = found
            nums[row] = len(found)
        return nums

    def from_source(self, slot: int, tokens: Tokens, limit: int) -> Column:
        """Up to `limit` tokens that may follow `tokens` by the draft source of the slot, if it has one."""
        source = self._sources.get(slot)
        size, rest = (0, tokens[:0]) if source is None else source.follow(tokens)
        return rest[: limit if size else 0]

    def propose(self, slot: int, tokens: Tokens, limit: int) -> Column:
        """Up to `limit` tokens that may follow `tokens`."""
        depth = min(int(self._depth[slot]), limit) if self._adapts else limit
        if depth <= 0 or len(tokens) < self._resume[slot]:
            return tokens[:0]
        source = self._sources.get(slot)
        size, rest = (0, tokens[:0]) if source is None else source.follow(tokens)
        if size < _LONGEST or not len(rest):
            ends, own_size = _longest_match(tokens[:-1], tokens)
            if own_size > size or (own_size and not len(rest)):
                return np.resize(tokens[ends[-1] :], depth)  # once it has reached the end of the row, it begins again
        return rest[:depth]

    def settle(self, slot: int, position: int, num_drafts: int, num_accepted: int) -> None:
        if not num_drafts or not self._adapts:
            return
        if not num_accepted:
            self._depth[slot], self._resume[slot] = 1, position + self._pause[slot]
            self._pause[slot] = min(2 * self._pause[slot], _LONGEST_PAUSE)
            return
        self._pause[slot] = _FIRST_PAUSE
        self._depth[slot] = 2 * num_drafts if num_accepted == num_drafts else num_accepted


def _longest_match(text: Tokens, row: Tokens) -> tuple[Index, int]:
    """Where the last tokens of `row` end in `text`, ascending, and how many they are: as many as occur there, up to
    _LONGEST; 0 if these are fewer than _SHORTEST."""
    ends = np.flatnonzero(text == row[-1]) + 1
    size = min(len(ends), 1)
    while size and size < min(_LONGEST, len(row)):
        longer = ends[ends > size]
        longer = longer[text[longer - size - 1] == row[-size - 1]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    return (ends, size) if size >= _SHORTEST else (ends[:0], 0)


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """A plan with drafts as it is executed: `plan` has exact positions, and its decode rows feed their drafts."""

    plan: Plan
    num_drafts: Index  # by decode row of `plan`
    num_dropped: int  # decode rows of the original plan that have all their tokens; they are not in `plan`
    sampling_rows: Index  # of the original plan, by sampling row of `plan`
    num_rows: int  # sampling rows of the original plan
    drafts: Drafts  # by sampling row of the original plan

    def masks(self, masks: Masks) -> Masks:
        """Masks for the tokens that `plan` samples, from those of the original plan, without its dropped rows."""
        is_run = np.zeros(self.num_rows, np.bool_)
        is_run[self.sampling_rows] = True
        is_run = np.repeat(is_run, 1 + self.drafts_by_sampling_row())
        places = np.cumsum(is_run) - 1
        is_used = is_run[masks.rows]
        return Masks(places[masks.rows[is_used]], masks.bits[is_used])

    def drafts_by_sampling_row(self) -> Column:
        """How many drafts were fed, by sampling row of the original plan."""
        fed = np.zeros(self.num_rows, np.int32)
        fed[self.sampling_rows[: len(self.num_drafts)]] = self.num_drafts
        return fed

    def accept(self, tokens: Index, drafts: Index) -> tuple[Index, Column]:
        """The tokens that count, as indices into the sampled `tokens`, and how many each original sampling row has.
        `drafts` are the tokens that were fed behind each decode row's first, one after the other."""
        counts = np.zeros(self.num_rows, np.int32)
        chosen: list[npt.NDArray[np.int64]] = []
        at = used = 0
        for row, num in enumerate(self.num_drafts.tolist()):
            wrong = np.flatnonzero(tokens[at : at + num] != drafts[used : used + num])
            count = 1 + (int(wrong[0]) if len(wrong) else num)
            chosen.append(np.arange(at, at + count))
            counts[self.sampling_rows[row]] = count
            at, used = at + 1 + num, used + num
        chosen.append(np.arange(at, len(tokens)))  # prefill rows: one token each
        counts[self.sampling_rows[len(self.num_drafts) :]] = 1
        return np.concatenate(chosen), counts


def verification(plan: Plan, tables: SlotTables, proposer: DraftProposer) -> Verification:
    """The plan as it is executed now that all passes before it have been: proposes drafts and stores them behind the
    tokens of their rows."""
    assert plan.drafts is not None, "a plan without drafts is executed as it is"
    count = plan.num_decodes
    positions = tables.positions[plan.slots[:count]]
    room = plan.max_lengths[:count] - 2 - positions  # drafts behind which another token fits
    decodes = np.flatnonzero(room >= 0)
    num_rows = int(np.count_nonzero(plan.samples))
    drafts: list[list[int]] = [[] for _ in range(num_rows)]  # decode rows come first, and all of them sample
    limits = np.minimum(plan.drafts, room)[decodes].astype(np.int64)
    nums = proposer.propose_all(tables, plan.slots[decodes].astype(np.int64), positions[decodes], limits)
    for row, num in zip(decodes.tolist(), nums.tolist(), strict=True):
        first = int(positions[row]) + 1
        drafts[row] = tables.tokens[plan.slots[row], first : first + num].tolist()
    rows = np.concatenate([decodes, np.arange(count, plan.num_rows)])
    starts, lengths = plan.starts[rows], plan.lengths[rows]
    starts[: len(decodes)] = positions[decodes]
    lengths[: len(decodes)] += nums
    exact = replace(
        plan,
        slots=plan.slots[rows],
        starts=starts,
        lengths=lengths,
        max_lengths=plan.max_lengths[rows],
        samples=plan.samples[rows],
        num_decodes=len(decodes),
        num_tokens=int(lengths.sum()),
        drafts=None,
    )
    sampling = np.concatenate([decodes, np.arange(count, num_rows)])
    return Verification(exact, nums, count - len(decodes), sampling, num_rows, drafts)
