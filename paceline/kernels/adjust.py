"""Penalties, biases, forbidden tokens and grammar masks: applied to logits in place, on the device.

Each slot has one row of int32 words (`AdjustHeader` and `AdjustList` in layouts.py). The host writes it when a request
joins; the kernel keeps the list of seen tokens up to date: tokens of prompt and output, and how often each is in the
output.

The list of seen tokens makes the cost of penalties proportional to the length of the history, not to the vocabulary:
256 rows of 1,500 tokens touch a hundredth of their logits. Each forward pass adds the token it was fed, if that is new,
while it reads the list. One program handles a row and a token occurs once in each list, so no two threads write one
logit; a barrier separates the lists.

With drafts (speculative decoding) the list has tokens that were accepted only: `count_seen` adds them before the next
pass reads it. The drafts that a token follows count for that token alone.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels._triton import UNSPECIALIZED, cdiv, launched, next_power_of_2, tl, triton
from paceline.kernels.layouts import (
    ADJUST_HEADER_WORDS,
    MAX_BIASES,
    MAX_FORBIDDEN,
    MAX_PREFIX_TOKENS,
    PENALTIES,
    RUN_COLUMNS,
    AdjustHeader,
    AdjustList,
    RunColumn,
    adjust_words,
    constants,
)

FORBIDDEN = -1e30
(
    _FLAGS,
    _REPETITION,
    _FREQUENCY,
    _PRESENCE,
    _NUM_BIASES,
    _NUM_FORBIDDEN,
    _NUM_SEEN,
    _NUM_COUNTED,
) = constants(AdjustHeader)
_SLOT, _FIRST, _OFFSET, _COUNT = constants(RunColumn)
_RUN_COLUMNS = tl.constexpr(RUN_COLUMNS)


@dataclass(frozen=True, slots=True, eq=False)
class AdjustState:
    words: torch.Tensor  # [S, adjust_words(max_length)] int32
    max_length: int

    @classmethod
    def empty(cls, slots: int, max_length: int, device: torch.device | str) -> AdjustState:
        return cls(torch.zeros(slots, adjust_words(max_length), dtype=torch.int32, device=device), max_length)


def write_runs_reference(packed: npt.NDArray[np.int32], state: AdjustState) -> None:
    num_runs = int(packed[0])
    end = 1 + RUN_COLUMNS * num_runs
    words = torch.from_numpy(packed[end:].copy())
    for slot, first, offset, count in packed[1:end].reshape(RUN_COLUMNS, num_runs).T.tolist():
        state.words[slot, first : first + count] = words[offset : offset + count]


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _write_runs_kernel(packed, words, words_stride, BLOCK: tl.constexpr):
    runs = tl.load(packed)
    part = packed + 1
    source = part + runs * _RUN_COLUMNS
    lane = tl.arange(0, BLOCK)
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        slot = tl.load(part + runs * _SLOT + run).to(tl.int64)
        target = words + slot * words_stride + tl.load(part + runs * _FIRST + run)
        offset = tl.load(part + runs * _OFFSET + run)
        count = tl.load(part + runs * _COUNT + run)
        for i in range(0, count, BLOCK):
            mine = i + lane < count
            tl.store(target + i + lane, tl.load(source + offset + i + lane, mask=mine), mask=mine)


def write_runs(packed: torch.Tensor, words: torch.Tensor, num_programs: int = 128) -> None:
    """Copies packed runs (`pack_runs`), int32 on the device, into `words` [S, n] of slots. The buffer may be longer."""
    _write_runs_kernel[(num_programs,)](packed, words, words.stride(0), BLOCK=512, num_warps=4)


def adjust_logits_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    num_rows: int,
    token_pool: torch.Tensor,
    state: AdjustState,
    index: torch.Tensor | None = None,
    drafts: int = 0,
) -> None:
    for row in range(num_rows):
        source = row if index is None else int(index[row])
        slot, position = int(slots[source]), int(positions[source])
        words, line = state.words[slot], logits[row]
        header = words[:ADJUST_HEADER_WORDS].tolist()
        if header[AdjustHeader.FLAGS] & PENALTIES:
            factors = words[AdjustHeader.REPETITION : AdjustHeader.PRESENCE + 1].view(torch.float32)
            repetition, frequency, presence = factors.tolist()
            seen, counts = words[AdjustList.SEEN_IDS :].chunk(2)
            num_seen = header[AdjustHeader.NUM_SEEN]
            if drafts:
                seen, counts = seen.clone(), counts.clone()
                for token in token_pool[slot, header[AdjustHeader.NUM_COUNTED] : position + 1].tolist():
                    place = next((i for i in range(num_seen) if int(seen[i]) == token), num_seen)
                    seen[place], counts[place] = token, (int(counts[place]) if place < num_seen else 0) + 1
                    num_seen = max(num_seen, place + 1)
            elif position >= header[AdjustHeader.NUM_COUNTED]:
                token = int(token_pool[slot, position])
                place = next((i for i in range(num_seen) if int(seen[i]) == token), num_seen)
                seen[place] = token
                counts[place] = int(counts[place]) + 1 if place < num_seen else 1
                num_seen = max(num_seen, place + 1)
                words[AdjustHeader.NUM_SEEN], words[AdjustHeader.NUM_COUNTED] = num_seen, position + 1
            for token, count in zip(seen[:num_seen].tolist(), counts[:num_seen].tolist(), strict=True):
                value = float(line[token])
                value = value / repetition if value > 0 else value * repetition
                line[token] = value - frequency * count - presence * (count > 0)
        for i in range(header[AdjustHeader.NUM_BIASES]):
            token = int(words[AdjustList.BIAS_IDS + i])
            line[token] = float(line[token]) + float(words[AdjustList.BIAS_VALUES + i].view(torch.float32))
        for i in range(header[AdjustHeader.NUM_FORBIDDEN]):
            token, until = int(words[AdjustList.FORBIDDEN_IDS + i]), int(words[AdjustList.FORBIDDEN_UNTIL + i])
            first, count = int(words[AdjustList.PREFIX_FIRST + i]), int(words[AdjustList.PREFIX_COUNT + i])
            prefix = words[AdjustList.PREFIX_TOKENS + first :][:count].tolist()
            before = token_pool[slot, max(position + 1 - count, 0) : position + 1].tolist()
            if position + 1 < until and before == prefix:
                line[token] = FORBIDDEN


def count_seen_reference(
    row_slots: torch.Tensor, num_rows: int, num_computed: torch.Tensor, token_pool: torch.Tensor, state: AdjustState
) -> None:
    for slot in row_slots[:num_rows].tolist():
        words = state.words[slot]
        if not int(words[AdjustHeader.FLAGS]) & PENALTIES:
            continue
        seen, counts = words[AdjustList.SEEN_IDS :].chunk(2)
        for position in range(int(words[AdjustHeader.NUM_COUNTED]), int(num_computed[slot]) + 1):
            token, num_seen = int(token_pool[slot, position]), int(words[AdjustHeader.NUM_SEEN])
            place = next((i for i in range(num_seen) if int(seen[i]) == token), num_seen)
            seen[place] = token
            counts[place] = int(counts[place]) + 1 if place < num_seen else 1
            words[AdjustHeader.NUM_SEEN] = max(num_seen, place + 1)
            words[AdjustHeader.NUM_COUNTED] = position + 1


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _count_seen_kernel(
    row_slots,
    num_rows,
    num_computed,
    token_pool,
    words,
    pool_stride,
    words_stride,
    max_length,
    SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    slot = tl.load(row_slots + row).to(tl.int64)
    mine = words + slot * words_stride
    if tl.load(mine + _FLAGS) % 2 == 0:  # no PENALTIES
        return
    end = tl.load(num_computed + slot) + 1
    num_seen = tl.load(mine + _NUM_SEEN)
    ids = mine + SEEN
    counts = ids + max_length
    lane = tl.arange(0, BLOCK)
    first = tl.load(mine + _NUM_COUNTED)
    for position in range(first, end):
        token = tl.load(token_pool + slot * pool_stride + position)
        found = num_seen * 0
        for i in range(0, num_seen, BLOCK):
            place = i + lane
            again = tl.load(ids + place, mask=place < num_seen, other=-1) == token
            count = tl.load(counts + place, mask=again, other=0)
            tl.store(counts + place, count + 1, mask=again)
            found += tl.sum(again.to(tl.int32), axis=0)
        if found == 0:
            tl.store(ids + num_seen, token)
            tl.store(counts + num_seen, 1)
            num_seen += 1
        tl.debug_barrier()  # the next token reads what other threads wrote
    if end > first:
        tl.store(mine + _NUM_SEEN, num_seen)
        tl.store(mine + _NUM_COUNTED, end)


def count_seen(
    row_slots: torch.Tensor,
    num_rows: torch.Tensor,
    num_computed: torch.Tensor,
    token_pool: torch.Tensor,
    state: AdjustState,
    block: int = 1024,
) -> None:
    """Adds the tokens of each of the first num_rows [1] rows of row_slots [R] up to position num_computed[slot] to the
    row's list of seen tokens, those that it does not have yet."""
    _count_seen_kernel[(len(row_slots),)](
        row_slots,
        num_rows,
        num_computed,
        token_pool,
        state.words,
        token_pool.stride(0),
        state.words.stride(0),
        state.max_length,
        SEEN=AdjustList.SEEN_IDS.value,
        BLOCK=block,
        num_warps=4,
    )


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _adjust_kernel(
    logits,
    index,
    slots,
    positions,
    num_rows,
    token_pool,
    words,
    logits_stride,
    pool_stride,
    words_stride,
    max_length,
    HEADER: tl.constexpr,
    BIASES: tl.constexpr,
    FORBIDS: tl.constexpr,
    PREFIXES: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    source = row
    if HAS_INDEX:
        source = tl.load(index + row)
    slot = tl.load(slots + source).to(tl.int64)
    mine = words + slot * words_stride
    flags = tl.load(mine + _FLAGS)
    if flags == 0:
        return
    position = tl.load(positions + source)
    line = logits + row.to(tl.int64) * logits_stride
    history = token_pool + slot * pool_stride
    lane = tl.arange(0, BLOCK)
    if flags % 2 == 1:  # PENALTIES
        repetition = tl.load(mine + _REPETITION).to(tl.float32, bitcast=True)
        frequency = tl.load(mine + _FREQUENCY).to(tl.float32, bitcast=True)
        presence = tl.load(mine + _PRESENCE).to(tl.float32, bitcast=True)
        num_seen = tl.load(mine + _NUM_SEEN)
        counted = tl.load(mine + _NUM_COUNTED)
        fresh = position >= counted
        if DRAFTS:
            # The tokens that were accepted are in the list. Drafts after them, up to this token, count here alone.
            fresh = position < 0
            draft = tl.arange(0, BLOCK_D)
            is_draft = counted + draft <= position
            drafts = tl.load(history + counted + draft, mask=is_draft, other=-1)
            listed = tl.zeros([BLOCK_D], tl.int32)
        token = tl.load(history + position)
        ids = mine + HEADER + 2 * BIASES + 4 * FORBIDS + PREFIXES
        counts = ids + max_length
        found = position * 0
        # One entry more than the list has: a token that is not in the list yet is appended there.
        for i in range(0, num_seen + 1, BLOCK):
            place = i + lane
            known = place < num_seen
            id = tl.load(ids + place, mask=known, other=-1)
            count = tl.load(counts + place, mask=known, other=0)
            again = (id == token) & known & fresh
            found += tl.sum(again.to(tl.int32), axis=0)
            new = (place == num_seen) & fresh & (found == 0)
            id = tl.where(new, token, id)
            count = tl.where(new, 1, tl.where(again, count + 1, count))
            tl.store(ids + place, id, mask=new)
            tl.store(counts + place, count, mask=new | again)
            if DRAFTS:
                same = (id[:, None] == drafts[None, :]) & known[:, None] & is_draft[None, :]
                count += tl.sum(same.to(tl.int32), axis=1)
                listed += tl.sum(same.to(tl.int32), axis=0)
            touched = known | new
            value = tl.load(line + id, mask=touched, other=0.0).to(tl.float32)
            value = tl.where(value > 0, value / repetition, value * repetition)
            value -= frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
            tl.store(line + id, value.to(logits.dtype.element_ty), mask=touched)
        if DRAFTS:
            # Drafts that the list does not have, each once.
            equal = (drafts[:, None] == drafts[None, :]) & is_draft[:, None] & is_draft[None, :]
            before = equal & (draft[None, :] < draft[:, None])
            first_of = is_draft & (listed == 0) & (tl.sum(before.to(tl.int32), axis=1) == 0)
            times = tl.sum(equal.to(tl.int32), axis=1)
            logit = tl.load(line + drafts, mask=first_of, other=0.0).to(tl.float32)
            logit = tl.where(logit > 0, logit / repetition, logit * repetition)
            logit -= frequency * times.to(tl.float32) + presence
            tl.store(line + drafts, logit.to(logits.dtype.element_ty), mask=first_of)
        tl.debug_barrier()
        if fresh:
            tl.store(mine + _NUM_SEEN, num_seen + tl.where(found == 0, 1, 0))
            tl.store(mine + _NUM_COUNTED, position + 1)
    if flags > 1:  # LISTS
        num_biases = tl.load(mine + _NUM_BIASES)
        part = mine + HEADER
        for i in range(0, num_biases, BLOCK):
            some = i + lane < num_biases
            id = tl.load(part + i + lane, mask=some, other=0)
            bias = tl.load(part + BIASES + i + lane, mask=some, other=0).to(tl.float32, bitcast=True)
            value = tl.load(line + id, mask=some, other=0.0).to(tl.float32) + bias
            tl.store(line + id, value.to(logits.dtype.element_ty), mask=some)
        tl.debug_barrier()
        num_forbidden = tl.load(mine + _NUM_FORBIDDEN)
        part += 2 * BIASES
        for i in range(0, num_forbidden, BLOCK):
            some = i + lane < num_forbidden
            id = tl.load(part + i + lane, mask=some, other=0)
            until = tl.load(part + FORBIDS + i + lane, mask=some, other=0)
            first = tl.load(part + 2 * FORBIDS + i + lane, mask=some, other=0)
            count = tl.load(part + 3 * FORBIDS + i + lane, mask=some, other=0)
            on = some & (position + 1 < until)
            longest = tl.max(count, axis=0)
            for j in range(0, longest):
                within = j < count
                wanted = tl.load(part + 4 * FORBIDS + first + j, mask=some & within, other=0)
                place = position + 1 - count + j
                there = tl.load(history + place, mask=some & within & (place >= 0), other=-1)
                on = on & ((wanted == there) | (j >= count))
            # Lower than any real logit, but finite: if a mask allows nothing else, the token can still be sampled.
            worst = tl.full([BLOCK], -1e30, tl.float32)
            tl.store(line + id, worst.to(logits.dtype.element_ty), mask=on)


def adjust_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    num_rows: torch.Tensor,
    token_pool: torch.Tensor,
    state: AdjustState,
    index: torch.Tensor | None = None,
    drafts: int = 0,
    block: int = 1024,
) -> None:
    """Changes logits [R, V] of the first num_rows [1] rows in place; rows and tokens as in `sample`. drafts: rows may
    follow so many drafts, and `count_seen` has added all other tokens to the lists."""
    _adjust_kernel[(len(logits),)](
        logits,
        slots if index is None else index,
        slots,
        positions,
        num_rows,
        token_pool,
        state.words,
        logits.stride(0),
        token_pool.stride(0),
        state.words.stride(0),
        state.max_length,
        HEADER=ADJUST_HEADER_WORDS,
        BIASES=MAX_BIASES,
        FORBIDS=MAX_FORBIDDEN,
        PREFIXES=MAX_PREFIX_TOKENS,
        HAS_INDEX=index is not None,
        DRAFTS=drafts > 0,
        BLOCK_D=next_power_of_2(drafts),
        BLOCK=block,
        num_warps=4,
    )


def mask_logits_reference(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    columns = torch.arange(logits.shape[1])
    allowed = (bits[:, columns // 32].long() >> (columns % 32)) & 1
    for row, one in zip(rows.tolist(), allowed, strict=True):
        logits[row, one == 0] = -torch.inf


@launched
@triton.jit
def _mask_kernel(logits, num_masks, rows, bits, logits_stride, bits_stride, vocab, BLOCK: tl.constexpr):
    item = tl.program_id(0)
    if item >= tl.load(num_masks):
        return
    row = tl.load(rows + item).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < vocab
    word = tl.load(bits + item.to(tl.int64) * bits_stride + column // 32, mask=within, other=0)
    out = ((word >> (column % 32)) & 1) == 0
    worst = tl.full([BLOCK], -float("inf"), tl.float32)
    tl.store(logits + row * logits_stride + column, worst.to(logits.dtype.element_ty), mask=within & out)


def mask_logits(
    logits: torch.Tensor, num_masks: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor, block: int = 2048
) -> None:
    """Sets logits[rows[i], t] to minus infinity where bit t % 32 of bits[i, t // 32] [N, ceil(V / 32)] is not set, for
    the first num_masks [1] of N masks; N is at most the number of rows of logits."""
    vocab = logits.shape[1]
    _mask_kernel[(len(logits), cdiv(vocab, block))](
        logits, num_masks, rows, bits, logits.stride(0), bits.stride(0), vocab, BLOCK=block, num_warps=4
    )
