"""Logprobs: the log-sum-exp of a row's logits, its largest logprobs, and those of requested ids.

There is no sort, and no bound that could turn out too low. A program reads its split of a row once, and each lane keeps
the largest logit of its columns. Then the lanes compete: the largest of all is next in the ranking, and its lane
searches its few columns again for its next candidate. The program that finishes a row last ranks the winners of all
splits.

The candidates are integers made of a logit and its column, so no two are equal: equal logits rank by lower id, however
a row is split. NaN logits, and logits lower than any a model produces, count as minus infinity.

Each row states in the sampling words of its slot what it needs; a row without logprobs costs nothing. The result of a
row is LOGPROB_WORDS words (`LogprobWord` in layouts.py), in a ring indexed by step, as the sampled tokens are.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import UNSPECIALIZED, cdiv, launched, next_power_of_2, tl, triton
from paceline.kernels.layouts import LOGPROB_WORDS, SAMPLING_WORDS, LogprobWord, SamplingWord, constants
from paceline.kernels.sampling import order_key
from paceline.request import MAX_LOGPROBS

_CHOSEN, _TOP_LOGPROBS, _TOP_IDS, _REQUESTED = constants(LogprobWord)
_LOGPROBS, _NUM_LOGPROB_IDS, _LOGPROB_IDS = constants(SamplingWord)[SamplingWord.LOGPROBS :]
_PLACES = next_power_of_2(MAX_LOGPROBS)
_MAX_SPLITS = 32
_PROGRAMS = 1024  # about as many as a large GPU runs at once: with more, each ranks a shorter split just as often


def top_logprobs_reference(
    logits: torch.Tensor, num_top: int, ids: list[int]
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """For one row [V]: the most likely ids, all logprobs, and those of the requested ids."""
    values = logits.double()
    values = torch.where(values > -1e30, values, -torch.inf)
    order = values.sort(descending=True, stable=True).indices
    logprobs = values.log_softmax(-1)
    return order[:num_top].tolist(), logprobs, logprobs[ids]


@triton.jit
def _logit(line, column, within):
    value = tl.load(line + column, mask=within, other=-float("inf")).to(tl.float32)
    return tl.where(value > -1.0e30, value, -float("inf"))


@triton.jit
def _rank_key(value, column):
    """Integers that order by logit and, among equals, by falling column."""
    return (order_key(value).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def _logit_of(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _column_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
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
    ring,
    step,
    logits_stride,
    max_rows,
    depth,
    vocab,
    has_index,
    WORDS: tl.constexpr,
    LINE: tl.constexpr,
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
    if has_index > 0:
        source = tl.load(index + row)
    params = sampling + tl.load(slots + source).to(tl.int64) * WORDS
    requested = tl.load(params + _LOGPROBS)
    if requested == 0:
        return
    num_top = tl.minimum(requested - 1, vocab)
    line = logits + row.to(tl.int64) * logits_stride
    lane = tl.arange(0, BLOCK)
    first = split * PER_SPLIT
    end = tl.minimum(first + PER_SPLIT, vocab)

    # Columns are read in ascending order: the first of equal logits stays. A lane with only NaN keeps its first column.
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
        out = ring + ((tl.load(step) % depth).to(tl.int64) * max_rows + row) * LINE
        item = tl.arange(0, SPLITS * PLACES)
        at = (row * SPLITS).to(tl.int64) * PLACES + item
        rest = tl.load(parts + at, mask=item % PLACES < num_top, other=-0x7FFFFFFFFFFFFFFF, cache_modifier=".cg")
        for rank in range(0, num_top):
            winner = tl.max(rest, axis=0)
            rest = tl.where(rest == winner, nothing, rest)
            tl.store(out + _TOP_LOGPROBS + rank, (_logit_of(winner) - total).to(tl.int32, bitcast=True))
            tl.store(out + _TOP_IDS + rank, _column_of(winner))
        each = tl.arange(0, PLACES)
        named = each < tl.load(params + _NUM_LOGPROB_IDS)
        value = _logit(line, tl.load(params + _LOGPROB_IDS + each, mask=named, other=0), named)
        tl.store(out + _REQUESTED + each, (value - total).to(tl.int32, bitcast=True), mask=named)


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _chosen_kernel(
    logits,
    index,
    slots,
    num_rows,
    sampling,
    totals,
    results,
    ring,
    step,
    logits_stride,
    max_rows,
    depth,
    has_index,
    WORDS: tl.constexpr,
    LINE: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    source = row
    if has_index > 0:
        source = tl.load(index + row)
    slot = tl.load(slots + source).to(tl.int64)
    if tl.load(sampling + slot * WORDS + _LOGPROBS) == 0:
        return
    line = (tl.load(step) % depth).to(tl.int64) * max_rows + row
    token = tl.maximum(tl.load(results + line), 0)  # a row without a token (-1): its logprob is not read
    logprob = tl.load(logits + row.to(tl.int64) * logits_stride + token).to(tl.float32) - tl.load(totals + row)
    tl.store(ring + line * LINE + _CHOSEN, logprob.to(tl.int32, bitcast=True))


@dataclass(frozen=True, slots=True, eq=False)
class LogprobWorkspace:
    """Counts are zero between launches."""

    parts: torch.Tensor  # [programs, places] int64: the ranking of each split
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


def split_rows(rows: int, vocab: int, block: int, max_splits: int = _MAX_SPLITS) -> tuple[int, int]:
    """How many programs share a row of logits, and how many columns each of them has."""
    splits = 1
    while splits < max_splits and rows * splits < _PROGRAMS and vocab > block * splits:
        splits *= 2
    return splits, cdiv(cdiv(vocab, splits), block) * block


def top_logprobs(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_rows: torch.Tensor,
    sampling: torch.Tensor,
    ring: torch.Tensor,
    step: torch.Tensor,
    workspace: LogprobWorkspace,
    index: torch.Tensor | None = None,
    block: int = 1024,
    max_splits: int = _MAX_SPLITS,
) -> None:
    """Writes the logprobs that the first num_rows [1] rows request in sampling [S, SAMPLING_WORDS] into
    ring[step % depth] [depth, max_rows, LOGPROB_WORDS]. `chosen_logprobs` adds that of the sampled token later.

    logits [R, V] are those of the model, before penalties and masks; rows and tokens as in `sample`.
    """
    rows, vocab = logits.shape
    splits, per_split = split_rows(rows, vocab, block, max_splits)
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
        ring,
        step,
        logits.stride(0),
        ring.shape[1],
        ring.shape[0],
        vocab,
        0 if index is None else 1,
        WORDS=SAMPLING_WORDS,
        LINE=LOGPROB_WORDS,
        PLACES=_PLACES,
        SPLITS=splits,
        PER_SPLIT=per_split,
        STEPS=next_power_of_2(per_split // block),
        BLOCK=block,
        num_warps=4,
    )


def chosen_logprobs(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_rows: torch.Tensor,
    sampling: torch.Tensor,
    results: torch.Tensor,
    ring: torch.Tensor,
    step: torch.Tensor,
    workspace: LogprobWorkspace,
    index: torch.Tensor | None = None,
) -> None:
    """Adds the logprobs of the sampled tokens in results[step % depth]. `top_logprobs` was launched before, and the
    logits of the sampled tokens have not changed since."""
    _chosen_kernel[(len(logits),)](
        logits,
        slots if index is None else index,
        slots,
        num_rows,
        sampling,
        workspace.totals,
        results,
        ring,
        step,
        logits.stride(0),
        ring.shape[1],
        ring.shape[0],
        0 if index is None else 1,
        WORDS=SAMPLING_WORDS,
        LINE=LOGPROB_WORDS,
        num_warps=1,
    )
