"""Packs changes of device state into int32 words. The layouts are in kernels/layouts.py, the kernels that apply them in
kernels/slot_state.py and kernels/adjust.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.engine.cuda.sharing import SharedUnits
from paceline.kernels.layouts import (
    ADJUST_HEADER_WORDS,
    DIFF_HEADER_WORDS,
    LISTS,
    MAX_BIASES,
    MAX_FORBIDDEN,
    MAX_PREFIX_TOKENS,
    PENALTIES,
    SAMPLING_WORDS,
    AdjustHeader,
    AdjustList,
    DiffHeader,
    SamplingWord,
)
from paceline.request import MAX_LOGPROBS

Column = npt.NDArray[np.int32]
Run = tuple[int, int, Column]  # slot, first word or position, words: written one after the other

NO_WORDS: Column = np.empty(0, np.int32)


def sampling_words(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    logprobs: int | None = None,
    logprob_ids: Sequence[int] = (),
    max_length: int = 0,
    adapter_slot: int | None = None,
) -> Column:
    """The sampling parameters of one slot. 0 turns temperature, top_k or min_p off; 1.0 turns top_p off. max_length: of
    prompt and output. adapter_slot: where the request's LoRA adapter is."""
    assert (logprobs or 0) <= MAX_LOGPROBS and len(logprob_ids) <= MAX_LOGPROBS, (
        f"{logprobs} alternatives and {len(logprob_ids)} ids do not fit"
    )
    floats = np.array([temperature, top_p, min_p], np.float32).view(np.int32)
    halves = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32).view(np.int32)
    words = np.zeros(SAMPLING_WORDS, np.int32)
    words[SamplingWord.TEMPERATURE], words[SamplingWord.TOP_P], words[SamplingWord.MIN_P] = floats
    words[SamplingWord.TOP_K] = top_k
    words[SamplingWord.SEED_LOW], words[SamplingWord.SEED_HIGH] = halves
    words[SamplingWord.MAX_LENGTH] = max_length
    words[SamplingWord.ADAPTER] = 0 if adapter_slot is None else 1 + adapter_slot
    words[SamplingWord.LOGPROBS] = 0 if logprobs is None else 1 + logprobs
    words[SamplingWord.NUM_LOGPROB_IDS] = len(logprob_ids)
    words[SamplingWord.LOGPROB_IDS : SamplingWord.LOGPROB_IDS + len(logprob_ids)] = logprob_ids
    return words


def pack_diff(
    page_slots: Column = NO_WORDS,
    page_indices: Column = NO_WORDS,
    page_ids: Column = NO_WORDS,
    start_slots: Column = NO_WORDS,
    start_positions: Column = NO_WORDS,
    join_slots: Column = NO_WORDS,
    join_sampling: npt.NDArray[np.int32] | None = None,
    token_runs: Sequence[Run] = (),
    row_slots: Column = NO_WORDS,
    shared: SharedUnits | None = None,
) -> Column:
    """The diff of one forward pass (kernels/slot_state.py). join_sampling is [joins, SAMPLING_WORDS], token_runs are
    (slot, first position, tokens). shared: the shared units from now on; None: they did not change."""
    counts = np.array([len(tokens) for _, _, tokens in token_runs], np.int32)
    header = np.zeros(DIFF_HEADER_WORDS, np.int32)
    # One assignment, in the order of the fields: every pass packs a diff, and item by item it takes longer.
    header[: DiffHeader.SHARING] = (
        len(page_slots),
        len(start_slots),
        len(join_slots),
        len(token_runs),
        counts.sum(),
        len(row_slots),
    )
    words = np.empty((0, SAMPLING_WORDS), np.int32) if join_sampling is None else join_sampling
    sharing: tuple[Column, ...] = ()
    if shared is not None:
        header[DiffHeader.SHARING : DiffHeader.SHARED_CHUNK + 1] = (
            1 + len(shared.units),
            len(shared.query_rows),
            len(shared.rows),
            shared.chunk,
        )
        sharing = (shared.units.reshape(-1), shared.query_rows, shared.rows.reshape(-1))
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
            *_run_columns(token_runs, counts),
            row_slots,
            *sharing,
        ],
        dtype=np.int32,
    )


def adjust_runs(
    slot: int,
    max_length: int,
    penalties: tuple[float, float, float],
    bias: tuple[Column, npt.NDArray[np.float32]],
    forbidden: tuple[Column, Column, tuple[tuple[int, ...], ...]],
    seen: tuple[Column, Column],
    num_counted: int,
) -> list[Run]:
    """The words of a slot's penalties, biases and forbidden tokens when a request joins.

    penalties are repetition, frequency, presence; forbidden are ids, until, prefixes; seen are ids and counts.
    """
    ids, until, prefixes = forbidden
    counts = np.array([len(prefix) for prefix in prefixes], np.int32)
    assert len(bias[0]) <= MAX_BIASES and len(ids) <= MAX_FORBIDDEN and counts.sum() <= MAX_PREFIX_TOKENS, (
        f"{len(bias[0])} biases, {len(ids)} forbidden tokens and {counts.sum()} before them do not fit"
    )
    flags = (PENALTIES if penalties != (1.0, 0.0, 0.0) else 0) | (LISTS if len(ids) or len(bias[0]) else 0)
    header = np.zeros(ADJUST_HEADER_WORDS, np.int32)
    header[AdjustHeader.FLAGS] = flags
    header[AdjustHeader.REPETITION : AdjustHeader.PRESENCE + 1] = np.array(penalties, np.float32).view(np.int32)
    header[AdjustHeader.NUM_BIASES] = len(bias[0])
    header[AdjustHeader.NUM_FORBIDDEN] = len(ids)
    header[AdjustHeader.NUM_SEEN] = len(seen[0])
    header[AdjustHeader.NUM_COUNTED] = num_counted
    runs: list[Run] = [
        (slot, 0, header),
        (slot, AdjustList.BIAS_IDS, bias[0]),
        (slot, AdjustList.BIAS_VALUES, bias[1].view(np.int32)),
        (slot, AdjustList.FORBIDDEN_IDS, ids),
        (slot, AdjustList.FORBIDDEN_UNTIL, until),
        (slot, AdjustList.PREFIX_FIRST, (np.cumsum(counts) - counts).astype(np.int32)),
        (slot, AdjustList.PREFIX_COUNT, counts),
        (slot, AdjustList.PREFIX_TOKENS, np.array([token for prefix in prefixes for token in prefix], np.int32)),
    ]
    if flags & PENALTIES:
        runs += [(slot, AdjustList.SEEN_IDS, seen[0]), (slot, AdjustList.SEEN_IDS + max_length, seen[1])]
    return [run for run in runs if len(run[2])]


def no_adjustments(slot: int) -> Run:
    """Clears the flags of a slot: the kernel then reads nothing else of it."""
    return slot, AdjustHeader.FLAGS, np.zeros(1, np.int32)


def pack_runs(runs: list[Run]) -> Column:
    """num_runs, the columns of `RunColumn`, then all words."""
    counts = np.array([len(words) for _, _, words in runs], np.int32)
    return np.concatenate([np.array([len(runs)], np.int32), *_run_columns(runs, counts)], dtype=np.int32)


def _run_columns(runs: Sequence[Run], counts: Column) -> list[Column]:
    """The columns of `RunColumn`, and then the words of all runs."""
    return [
        np.array([slot for slot, _, _ in runs], np.int32),
        np.array([first for _, first, _ in runs], np.int32),
        (np.cumsum(counts) - counts).astype(np.int32),
        counts,
        *[words for _, _, words in runs],
    ]
