"""Penalties, biases and forbidden tokens on the device: lists by slot, applied to a row's logits in place.

What a slot's owner asks lies in one row of words, int32, written when it joins and kept up by the kernel itself:

    header [8]     flags, repetition, frequency, presence (floats as their bits), num_biases, num_forbidden, num_seen,
                   num_counted: tokens of the row that are in the list of those seen
    biases         id[MAX_BIASES], value[MAX_BIASES]
    forbidden      id[], until[], first[], count[], MAX_FORBIDDEN each: not at positions below `until` behind the
                   `count` tokens from `first` on of
    prefixes       token[MAX_PREFIX_TOKENS]
    seen           id[max_length], count[max_length]: tokens of prompt and output, and how often each is in the output

The list of seen tokens makes penalties cost what the history is long, not what the vocabulary is large: 256 rows of
1,500 tokens touch a hundredth of their logits. Each pass adds the token it was fed, if that is new, while it goes
through the list. One program does a row, so nothing is written twice at a time: tokens stand once in each list, and a
barrier lies between lists.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels._triton import cdiv, launched, tl, triton

Column = npt.NDArray[np.int32]

ADJUST_HEADER = 8
MAX_BIASES = 1024
MAX_FORBIDDEN = 2048
MAX_PREFIX_TOKENS = 4096
FORBIDDEN = -1e30
PENALISED, LISTED = 1, 2  # flags: what a slot asks
_SEEN = ADJUST_HEADER + 2 * MAX_BIASES + 4 * MAX_FORBIDDEN + MAX_PREFIX_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class AdjustState:
    words: torch.Tensor  # [S, words of a slot] int32
    max_length: int

    @classmethod
    def empty(cls, slots: int, max_length: int, device: torch.device | str) -> AdjustState:
        return cls(torch.zeros(slots, _SEEN + 2 * max_length, dtype=torch.int32, device=device), max_length)


def adjust_bytes(slots: int, max_length: int) -> int:
    return 4 * slots * (_SEEN + 2 * max_length)


def adjust_runs(
    slot: int,
    max_length: int,
    penalties: tuple[float, float, float],
    bias: tuple[Column, npt.NDArray[np.float32]],
    forbidden: tuple[Column, Column, tuple[tuple[int, ...], ...]],
    seen: tuple[Column, Column],
    num_counted: int,
) -> list[tuple[int, int, Column]]:
    """What to write for a slot's new owner: (slot, first word, words).

    penalties are repetition, frequency, presence; forbidden are ids, until, prefixes; seen are ids and counts.
    """
    ids, until, prefixes = forbidden
    counts = np.array([len(prefix) for prefix in prefixes], np.int32)
    assert len(bias[0]) <= MAX_BIASES and len(ids) <= MAX_FORBIDDEN and counts.sum() <= MAX_PREFIX_TOKENS, (
        f"{len(bias[0])} biases, {len(ids)} forbidden tokens and {counts.sum()} before them do not fit"
    )
    flags = (PENALISED if penalties != (1.0, 0.0, 0.0) else 0) | (LISTED if len(ids) or len(bias[0]) else 0)
    floats = np.array(penalties, np.float32).view(np.int32)
    header = np.array([flags, *floats, len(bias[0]), len(ids), len(seen[0]), num_counted], np.int32)
    at = ADJUST_HEADER
    runs = [(slot, 0, header), (slot, at, bias[0]), (slot, at + MAX_BIASES, bias[1].view(np.int32))]
    at += 2 * MAX_BIASES
    for column in (ids, until, (np.cumsum(counts) - counts).astype(np.int32), counts):
        runs.append((slot, at, column))
        at += MAX_FORBIDDEN
    runs.append((slot, at, np.array([token for prefix in prefixes for token in prefix], np.int32)))
    if flags & PENALISED:
        runs += [(slot, _SEEN, seen[0]), (slot, _SEEN + max_length, seen[1])]
    return [run for run in runs if len(run[2])]


def pack_runs(runs: list[tuple[int, int, Column]]) -> Column:
    """num_runs, then columns slot[], first[], offset[], count[], then all words."""
    counts = np.array([len(words) for _, _, words in runs], np.int32)
    return np.concatenate(
        [
            np.array([len(runs)], np.int32),
            np.array([slot for slot, _, _ in runs], np.int32),
            np.array([first for _, first, _ in runs], np.int32),
            (np.cumsum(counts) - counts).astype(np.int32),
            counts,
            *[words for _, _, words in runs],
        ],
        dtype=np.int32,
    )


def write_runs_reference(packed: Column, state: AdjustState) -> None:
    num_runs = int(packed[0])
    words = torch.from_numpy(packed[1 + 4 * num_runs :].copy())
    for slot, first, offset, count in packed[1 : 1 + 4 * num_runs].reshape(4, num_runs).T.tolist():
        state.words[slot, first : first + count] = words[offset : offset + count]


@launched
@triton.jit
def _write_runs_kernel(packed, words, stride, BLOCK: tl.constexpr):
    runs = tl.load(packed)
    part = packed + 1
    source = part + 4 * runs
    lane = tl.arange(0, BLOCK)
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        target = words + tl.load(part + run).to(tl.int64) * stride + tl.load(part + runs + run)
        offset = tl.load(part + 2 * runs + run)
        count = tl.load(part + 3 * runs + run)
        for i in range(0, count, BLOCK):
            mine = i + lane < count
            tl.store(target + i + lane, tl.load(source + offset + i + lane, mask=mine), mask=mine)


def write_runs(packed: torch.Tensor, state: AdjustState, num_programs: int = 128) -> None:
    """Applies packed runs, int32 on the device. The buffer may be longer."""
    _write_runs_kernel[(num_programs,)](packed, state.words, state.words.stride(0), BLOCK=512, num_warps=4)


def adjust_logits_reference(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, num_rows: int, token_pool: torch.Tensor,
    state: AdjustState, index: torch.Tensor | None = None,
) -> None:  # fmt: skip
    for row in range(num_rows):
        source = row if index is None else int(index[row])
        slot, position = int(slots[source]), int(positions[source])
        words, line = state.words[slot], logits[row]
        flags, _, _, _, num_biases, num_forbidden, num_seen, num_counted = words[:ADJUST_HEADER].tolist()
        if flags & PENALISED:
            repetition, frequency, presence = words[1:4].view(torch.float32).tolist()
            seen, counts = words[_SEEN : _SEEN + state.max_length], words[_SEEN + state.max_length :]
            if position >= num_counted:
                token = int(token_pool[slot, position])
                place = next((i for i in range(num_seen) if int(seen[i]) == token), num_seen)
                seen[place] = token
                counts[place] = int(counts[place]) + 1 if place < num_seen else 1
                num_seen = max(num_seen, place + 1)
                words[6], words[7] = num_seen, position + 1
            for token, count in zip(seen[:num_seen].tolist(), counts[:num_seen].tolist(), strict=True):
                value = float(line[token])
                value = value / repetition if value > 0 else value * repetition
                line[token] = value - frequency * count - presence * (count > 0)
        at = ADJUST_HEADER
        for i in range(num_biases):
            token = int(words[at + i])
            line[token] = float(line[token]) + float(words[at + MAX_BIASES + i].view(torch.float32))
        at += 2 * MAX_BIASES
        for i in range(num_forbidden):
            token, until, first, count = (int(words[at + column * MAX_FORBIDDEN + i]) for column in range(4))
            prefix = words[at + 4 * MAX_FORBIDDEN + first :][:count].tolist()
            before = token_pool[slot, max(position + 1 - count, 0) : position + 1].tolist()
            if position + 1 < until and before == prefix:
                line[token] = FORBIDDEN


@launched
@triton.jit
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
    flags = tl.load(mine)
    if flags == 0:
        return
    position = tl.load(positions + source)
    line = logits + row.to(tl.int64) * logits_stride
    history = token_pool + slot * pool_stride
    lane = tl.arange(0, BLOCK)
    if flags % 2 == 1:
        repetition = tl.load(mine + 1).to(tl.float32, bitcast=True)
        frequency = tl.load(mine + 2).to(tl.float32, bitcast=True)
        presence = tl.load(mine + 3).to(tl.float32, bitcast=True)
        num_seen = tl.load(mine + 6)
        fresh = position >= tl.load(mine + 7)
        token = tl.load(history + position)
        ids = mine + HEADER + 2 * BIASES + 4 * FORBIDS + PREFIXES
        counts = ids + max_length
        found = position * 0
        # One place more than there are: the last of them takes a token that is not in the list yet.
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
            touched = known | new
            value = tl.load(line + id, mask=touched, other=0.0).to(tl.float32)
            value = tl.where(value > 0, value / repetition, value * repetition)
            value -= frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
            tl.store(line + id, value.to(logits.dtype.element_ty), mask=touched)
        tl.debug_barrier()
        if fresh:
            tl.store(mine + 6, num_seen + tl.where(found == 0, 1, 0))
            tl.store(mine + 7, position + 1)
    if flags > 1:
        num_biases = tl.load(mine + 4)
        part = mine + HEADER
        for i in range(0, num_biases, BLOCK):
            some = i + lane < num_biases
            id = tl.load(part + i + lane, mask=some, other=0)
            bias = tl.load(part + BIASES + i + lane, mask=some, other=0).to(tl.float32, bitcast=True)
            value = tl.load(line + id, mask=some, other=0.0).to(tl.float32) + bias
            tl.store(line + id, value.to(logits.dtype.element_ty), mask=some)
        tl.debug_barrier()
        num_forbidden = tl.load(mine + 5)
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
            # A logit that loses against every other, yet a number: where a mask leaves nothing else, it may come.
            worst = tl.full([BLOCK], -1e30, tl.float32)
            tl.store(line + id, worst.to(logits.dtype.element_ty), mask=on)


def adjust_logits(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, num_rows: torch.Tensor,
    token_pool: torch.Tensor, state: AdjustState, index: torch.Tensor | None = None, block: int = 1024,
) -> None:  # fmt: skip
    """Changes logits [R, V] of the first num_rows [1] rows, in place; rows and tokens as in `sample`."""
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
        HEADER=ADJUST_HEADER,
        BIASES=MAX_BIASES,
        FORBIDS=MAX_FORBIDDEN,
        PREFIXES=MAX_PREFIX_TOKENS,
        HAS_INDEX=index is not None,
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
    """logits[rows[i], t] becomes minus infinity where bit t % 32 of bits[i, t // 32] [N, ceil(V / 32)] is not set, for
    the first num_masks [1] of N; as many as logits has rows at most."""
    vocab = logits.shape[1]
    _mask_kernel[(len(logits), cdiv(vocab, block))](
        logits, num_masks, rows, bits, logits.stride(0), bits.stride(0), vocab, BLOCK=block, num_warps=4
    )
