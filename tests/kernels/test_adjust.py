"""Penalties, biases, forbidden tokens and masks: kernels against their references, and these against the CPU's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.cuda.packing import adjust_runs, no_adjustments, pack_runs
from paceline.kernels.adjust import (
    AdjustState,
    adjust_logits,
    adjust_logits_reference,
    count_seen,
    count_seen_reference,
    mask_logits,
    mask_logits_reference,
    write_runs,
    write_runs_reference,
)
from paceline.request import Request, SamplingParams
from paceline.sampling.adjust import LogitAdjustments, adjust_row, logit_adjustments, token_counts
from paceline.scheduler.plan import Join
from paceline.scheduler.tracked_request import TrackedRequest

VOCAB, LENGTH, SLOTS = 90, 40, 6
RNG = np.random.default_rng(6)
OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4, "logit_bias": {3: 5.0, 7: -2.5}},
    {},
    {"logit_bias": {token: token / 10 for token in range(40)}, "min_tokens": 6},
    {"repetition_penalty": 0.6, "presence_penalty": 1.5, "min_tokens": 30},
    {"frequency_penalty": 2.0},
]


def requests() -> list[tuple[TrackedRequest, np.ndarray]]:
    """Requests with the tokens they join with: some join again after a retraction."""
    found = []
    for number, options in enumerate(OPTIONS):
        prompt = RNG.integers(0, 30, 5 + number).astype(np.int32)
        output = RNG.integers(0, 30, 3 * (number % 2)).astype(np.int32)
        words = ((4,), (5, 6), (int(prompt[-1]), 8)) if number == 3 else ()
        params = SamplingParams(**options)
        request = Request(str(number), prompt, params, bad_word_ids=words, eos_token_ids=(1, 2, 500))
        found.append((TrackedRequest(request), np.concatenate([prompt, output])))
    return found


def runs_of(slot: int, by: LogitAdjustments | None, tokens: np.ndarray) -> list[Any]:
    if by is None:
        return [no_adjustments(slot)]
    penalties, seen = (by.repetition, by.frequency, by.presence), token_counts(tokens, by.num_prompt_tokens)
    forbidden = (by.banned_ids, by.banned_until, by.banned_prefixes)
    return adjust_runs(slot, LENGTH, penalties, (by.bias_ids, by.bias), forbidden, seen, len(tokens))


@pytest.mark.parametrize("indexed", [False, True])
def test_rows_are_adjusted_as_on_the_cpu_pass_after_pass(indexed: bool) -> None:
    given = requests()
    reference, ours = (AdjustState.empty(SLOTS, LENGTH, "cpu") for _ in range(2))
    reference.words.fill_(77)  # left by the slot's last request
    ours.words.fill_(77)
    slots = RNG.permutation(SLOTS)
    adjustments = [logit_adjustments(Join.of(request, 0), VOCAB) for request, _ in given]
    runs = []
    for (_, tokens), by, slot in zip(given, adjustments, slots.tolist(), strict=True):
        runs += runs_of(slot, by, tokens)
    packed = pack_runs(runs)
    write_runs_reference(packed, reference)
    write_runs(torch.from_numpy(np.concatenate([packed, packed[:5]])), ours.words, num_programs=2)
    assert torch.equal(reference.words, ours.words)

    pool = torch.zeros(SLOTS, LENGTH, dtype=torch.int32)
    history = [tokens for _, tokens in given]
    index = torch.arange(SLOTS, dtype=torch.int32).flip(0) if indexed else None
    for step in range(5):
        for slot, tokens in zip(slots.tolist(), history, strict=True):
            pool[slot, : len(tokens)] = torch.from_numpy(tokens)
        order = np.arange(SLOTS) if index is None else index.numpy()
        places = torch.tensor([len(tokens) - 1 for tokens in history], dtype=torch.int32)
        logits = torch.from_numpy(RNG.normal(0, 3, (SLOTS, VOCAB + 6)).astype(np.float32))[:, :VOCAB]
        expected, theirs = logits.numpy().copy(), logits.clone()
        for row, item in enumerate(order):
            by = adjustments[item]
            if row < SLOTS - 1 and by is not None:
                adjust_row(expected[row], history[item], by)
        rows = torch.tensor([SLOTS - 1], dtype=torch.int32)  # the last row is padding
        where = torch.from_numpy(slots.astype(np.int32))
        adjust_logits_reference(theirs, where, places, SLOTS - 1, pool, reference, index)
        adjust_logits(logits, where, places, rows, pool, ours, index, block=16)
        np.testing.assert_allclose(theirs.numpy(), expected, atol=1e-4)
        np.testing.assert_allclose(logits.numpy(), expected, atol=1e-4)
        if step != 2:  # running the same pass again counts no token twice
            history = [np.append(tokens, np.int32(RNG.integers(0, 30))) for tokens in history]
    assert torch.equal(reference.words, ours.words)


def test_drafts_count_for_the_tokens_that_follow_them_only() -> None:
    """Passes with drafts, some of which are accepted, and passes without."""
    given = requests()
    reference, ours = (AdjustState.empty(SLOTS, LENGTH, "cpu") for _ in range(2))
    slots = RNG.permutation(SLOTS).astype(np.int32)
    adjustments = [logit_adjustments(Join.of(request, 0), VOCAB) for request, _ in given]
    runs = []
    for (_, tokens), by, slot in zip(given, adjustments, slots.tolist(), strict=True):
        runs += runs_of(slot, by, tokens)
    for state in (reference, ours):
        write_runs_reference(pack_runs(runs), state)
    pool = torch.zeros(SLOTS, LENGTH, dtype=torch.int32)
    history = [tokens for _, tokens in given]
    for step in range(6):
        most = (3, 0, 7, 2, 0, 3)[step]
        drafts = [RNG.integers(0, 30, RNG.integers(0, most + 1)).astype(np.int32) for _ in history]
        drafts = [np.where(RNG.random(len(one)) < 0.3, 12, one).astype(np.int32) for one in drafts]  # some repeat
        num_computed = torch.zeros(SLOTS, dtype=torch.int32)
        expected, where, places = [], [], []
        logits = torch.from_numpy(RNG.normal(0, 3, (SLOTS + sum(map(len, drafts)), VOCAB)).astype(np.float32))
        for slot, tokens, one, by in zip(slots.tolist(), history, drafts, adjustments, strict=True):
            whole = np.concatenate([tokens, one])
            pool[slot, : len(whole)] = torch.from_numpy(whole)
            num_computed[slot] = len(tokens) - 1
            for end in range(len(tokens), len(whole) + 1):
                expected.append(logits[len(expected)].numpy().copy())
                where.append(slot)
                places.append(end - 1)
                if by is not None:
                    adjust_row(expected[-1], whole[:end], by)
        rows, row_slots = torch.tensor([SLOTS], dtype=torch.int32), torch.from_numpy(slots)
        count_seen_reference(row_slots, SLOTS, num_computed, pool, reference)
        count_seen(row_slots, rows, num_computed, pool, ours, block=16)
        assert torch.equal(reference.words, ours.words)
        theirs = logits.clone()
        tensors = torch.tensor(where, dtype=torch.int32), torch.tensor(places, dtype=torch.int32)
        adjust_logits_reference(theirs, *tensors, len(where), pool, reference, drafts=most)
        live = torch.tensor([len(where)], dtype=torch.int32)
        adjust_logits(logits, *tensors, live, pool, ours, drafts=most, block=16)
        np.testing.assert_allclose(theirs.numpy(), np.stack(expected), atol=1e-4)
        np.testing.assert_allclose(logits.numpy(), np.stack(expected), atol=1e-4)
        kept = [one[: RNG.integers(0, len(one) + 1)] for one in drafts]
        history = [np.append(np.concatenate(pair), np.int32(3)) for pair in zip(history, kept, strict=True)]


def test_masked_tokens_get_minus_infinity() -> None:
    logits = torch.randn(5, VOCAB)
    theirs = logits.clone()
    rows = torch.tensor([3, 0, 1], dtype=torch.int32)
    bits = torch.from_numpy(RNG.integers(-(2**31), 2**31, (3, 3)).astype(np.int32))
    bits[1, 2] = -1
    mask_logits_reference(theirs, rows[:2], bits[:2])
    mask_logits(logits, torch.tensor([2], dtype=torch.int32), rows, bits, block=32)  # two of three masks
    assert torch.equal(logits, theirs)
    assert logits[3].isinf().any() and not logits[1].isinf().any() and not logits[0, 64:].isinf().any()
