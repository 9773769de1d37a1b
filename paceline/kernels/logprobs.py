"""How likely tokens were: the log-sum-exp of a row's logits, its largest ones, and those of ids that were asked for.

No sort and no bound that could turn out too low. A program reads its part of a row once, and each lane keeps the
largest logit of its columns. Then the lanes compete: the largest of all is the next in the ranking, and its lane
looks through its few columns again for its next. Whoever finishes a row last ranks the winners of all parts.

What competes is one integer made of a logit and its column, so no two are equal: equal logits rank by lower id,
however a row is cut. Logits that are no numbers, or below any that a model means, count as minus infinity.

Rows ask for as much as they want, in the words of their slot; one that asks nothing costs nothing. What is told of a
row is TOLD_WORDS words, floats as their bits, in a ring by step as the tokens are:

    chosen [1]   top_chances [MOST]   top_ids [MOST]   chances of the ids that were asked for [MOST]
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import cdiv, launched, next_power_of_2, tl, triton
from paceline.kernels.sampling import order_key
from paceline.kernels.slot_state import SAMPLING_WORDS
from paceline.request import MAX_LOGPROBS

TOLD_WORDS = 1 + 3 * MAX_LOGPROBS
TOP_CHANCES, TOP_IDS, ASKED = 1, 1 + MAX_LOGPROBS, 1 + 2 * MAX_LOGPROBS  # where these begin
_PLACES = next_power_of_2(MAX_LOGPROBS)
_MAX_SPLITS = 32
_PROGRAMS = 1024  # about as many as a large GPU runs at once: with more, each ranks less of a row as often


def top_logprobs_reference(
    logits: torch.Tensor, num_top: int, ids: list[int]
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Of one row [V]: the likeliest ids, all log-chances, and those of the ids that were asked for."""
    values = logits.double()
    values = torch.where(values > -1e30, values, -torch.inf)
    order = values.sort(descending=True, stable=True).indices
    chances = values.log_softmax(-1)
    return order[:num_top].tolist(), chances, chances[ids]


@triton.jit
def _logit(line, column, within):
    value = tl.load(line + column, mask=within, other=-float("inf")).to(tl.float32)
    return tl.where(value > -1.0e30, value, -float("inf"))


@triton.jit
def _rank_key(value, column):
    """Integers in the order of the logits and, among equals, against that of their columns."""
    return (order_key(value).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def _logit_of(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _column_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@launched
@triton.jit
def _top_kernel(
    logits,
    index,
    slots,
    num_rows,
    sampling,
    parts,
    part_top,
    part_sum,
    arrived,
    totals,
    told,
    step,
    logits_stride,
    max_rows,
    depth,
    vocab,
    HAS_INDEX: tl.constexpr,
    WORDS: tl.constexpr,
    MOST: tl.constexpr,
    PLACES: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    if row >= tl.load(num_rows):
        return
    source = row
    if HAS_INDEX:
        source = tl.load(index + row)
    params = sampling + tl.load(slots + source).to(tl.int64) * WORDS
    asked = tl.load(params + 6)
    if asked == 0:
        return
    num_top = tl.minimum(asked - 1, vocab)
    line = logits + row.to(tl.int64) * logits_stride
    lane = tl.arange(0, BLOCK)
    first = split * PER_SPLIT
    end = tl.minimum(first + PER_SPLIT, vocab)

    # Columns come in ascending order, so the first of a lane's equals stays: of a lane without a number, its first.
    best = tl.full([BLOCK], -1.0e30, tl.float32)
    best_at = first + lane
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, BLOCK):
        column = start + lane
        value = _logit(line, column, column < end)
        better = value > best
        share = tl.exp(-tl.abs(value - best))
        mass = tl.where(better, mass * share + 1.0, mass + share)
        best = tl.where(better, value, best)
        best_at = tl.where(better, column, best_at)
    highest = tl.max(best, axis=0)
    place = row * SPLITS + split
    tl.store(part_top + place, highest)
    tl.store(part_sum + place, tl.sum(mass * tl.exp(best - highest), axis=0))

    nothing = tl.full([1], -0x7FFFFFFFFFFFFFFF, tl.int64)
    best = tl.where(best > -1.0e30, best, -float("inf"))
    keys = tl.where(first + lane < end, _rank_key(best, best_at), nothing)
    for rank in range(0, num_top):
        winner = tl.max(keys, axis=0)
        tl.store(parts + place.to(tl.int64) * PLACES + rank, winner)
        its_lane = (_column_of(winner) - first) % BLOCK
        column = first + its_lane + tl.arange(0, STEPS) * BLOCK
        within = column < end
        key = _rank_key(_logit(line, column, within), column)
        left = tl.max(tl.where(within & (key < winner), key, nothing), axis=0)
        keys = tl.where(lane == its_lane, left, keys)

    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(arrived + row, 0)
        part = row * SPLITS + tl.arange(0, SPLITS)
        tops = tl.load(part_top + part, cache_modifier=".cg")
        top = tl.max(tops, axis=0)
        total = top + tl.log(tl.sum(tl.load(part_sum + part, cache_modifier=".cg") * tl.exp(tops - top), axis=0))
        tl.store(totals + row, total)
        out = told + ((tl.load(step) % depth).to(tl.int64) * max_rows + row) * (1 + 3 * MOST)
        item = tl.arange(0, SPLITS * PLACES)
        at = (row * SPLITS).to(tl.int64) * PLACES + item
        rest = tl.load(parts + at, mask=item % PLACES < num_top, other=-0x7FFFFFFFFFFFFFFF, cache_modifier=".cg")
        for rank in range(0, num_top):
            winner = tl.max(rest, axis=0)
            rest = tl.where(rest == winner, nothing, rest)
            tl.store(out + 1 + rank, (_logit_of(winner) - total).to(tl.int32, bitcast=True))
            tl.store(out + 1 + MOST + rank, _column_of(winner))
        each = tl.arange(0, PLACES)
        named = each < tl.load(params + 7)
        value = _logit(line, tl.load(params + 8 + each, mask=named, other=0), named)
        tl.store(out + 1 + 2 * MOST + each, (value - total).to(tl.int32, bitcast=True), mask=named)


@launched
@triton.jit
def _chosen_kernel(
    logits,
    index,
    slots,
    num_rows,
    sampling,
    totals,
    results,
    told,
    step,
    logits_stride,
    max_rows,
    depth,
    HAS_INDEX: tl.constexpr,
    WORDS: tl.constexpr,
    TOLD: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    source = row
    if HAS_INDEX:
        source = tl.load(index + row)
    slot = tl.load(slots + source).to(tl.int64)
    if tl.load(sampling + slot * WORDS + 6) == 0:
        return
    line = (tl.load(step) % depth).to(tl.int64) * max_rows + row
    token = tl.maximum(tl.load(results + line), 0)  # of a row without any nobody will look at it
    chance = tl.load(logits + row.to(tl.int64) * logits_stride + token).to(tl.float32) - tl.load(totals + row)
    tl.store(told + line * TOLD, chance.to(tl.int32, bitcast=True))


@dataclass(frozen=True, slots=True, eq=False)
class LogprobWorkspace:
    """Counts are zero between launches."""

    parts: torch.Tensor  # [programs, places] int64: the ranking of each part
    part_top: torch.Tensor  # [programs] float32, likewise part_sum
    part_sum: torch.Tensor
    arrived: torch.Tensor  # [R] int32
    totals: torch.Tensor  # [R] float32: log-sum-exp

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> LogprobWorkspace:
        programs = max(rows, 2 * _PROGRAMS)
        return cls(
            parts=torch.empty(programs, _PLACES, dtype=torch.int64, device=device),
            part_top=torch.empty(programs, device=device),
            part_sum=torch.empty(programs, device=device),
            arrived=torch.zeros(rows, dtype=torch.int32, device=device),
            totals=torch.empty(rows, device=device),
        )


def cut_rows(rows: int, vocab: int, block: int, max_splits: int = _MAX_SPLITS) -> tuple[int, int]:
    """How many programs share a row of logits, and how many columns each of them has."""
    splits = 1
    while splits < max_splits and rows * splits < _PROGRAMS and vocab > block * splits:
        splits *= 2
    return splits, cdiv(cdiv(vocab, splits), block) * block


def top_logprobs(
    logits: torch.Tensor, slots: torch.Tensor, num_rows: torch.Tensor, sampling: torch.Tensor, told: torch.Tensor,
    step: torch.Tensor, workspace: LogprobWorkspace, index: torch.Tensor | None = None, block: int = 1024,
    max_splits: int = _MAX_SPLITS,
) -> None:  # fmt: skip
    """Of logits [R, V], as the model gave them, what the first num_rows [1] rows ask for in sampling [S, words], all
    but the chance of the token that is yet to be chosen: into told[step % depth] [depth, max_rows, TOLD_WORDS]; rows
    and tokens as in `sample`."""
    rows, vocab = logits.shape
    splits, per_split = cut_rows(rows, vocab, block, max_splits)
    _top_kernel[(rows, splits)](
        logits,
        slots if index is None else index,
        slots,
        num_rows,
        sampling,
        workspace.parts,
        workspace.part_top,
        workspace.part_sum,
        workspace.arrived,
        workspace.totals,
        told,
        step,
        logits.stride(0),
        told.shape[1],
        told.shape[0],
        vocab,
        HAS_INDEX=index is not None,
        WORDS=SAMPLING_WORDS,
        MOST=MAX_LOGPROBS,
        PLACES=_PLACES,
        SPLITS=splits,
        PER_SPLIT=per_split,
        STEPS=next_power_of_2(per_split // block),
        BLOCK=block,
        num_warps=4,
    )


def chosen_logprobs(
    logits: torch.Tensor, slots: torch.Tensor, num_rows: torch.Tensor, sampling: torch.Tensor, results: torch.Tensor,
    told: torch.Tensor, step: torch.Tensor, workspace: LogprobWorkspace, index: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The rest: the chances of the tokens in results[step % depth]. `top_logprobs` has gone before, and in logits the
    chosen tokens' are as they were."""
    _chosen_kernel[(len(logits),)](
        logits,
        slots if index is None else index,
        slots,
        num_rows,
        sampling,
        workspace.totals,
        results,
        told,
        step,
        logits.stride(0),
        told.shape[1],
        told.shape[0],
        HAS_INDEX=index is not None,
        WORDS=SAMPLING_WORDS,
        TOLD=TOLD_WORDS,
        num_warps=1,
    )
