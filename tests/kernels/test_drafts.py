"""Kernels of speculative decoding: what they propose, how tokens are packed, and what is accepted."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.engine.cuda.packing import sampling_words
from paceline.kernels.drafts import DraftBuffers, accept_drafts, propose_drafts, propose_drafts_reference
from paceline.kernels.layouts import DraftWord
from paceline.kernels.slot_state import SlotState

MAX_LENGTH, SLOTS, DEPTH = 96, 6, 2


def rows_of(histories: list[list[int]], max_lengths: list[int]) -> SlotState:
    """A batch whose row r is in slot SLOTS - 1 - r. Its last token is the next one to feed."""
    state = SlotState.empty(SLOTS, MAX_LENGTH, 16, SLOTS, "cpu")
    state.token_pool.random_(0, 3)  # what was there before may look like a match
    for row, (tokens, max_length) in enumerate(zip(histories, max_lengths, strict=True)):
        slot = SLOTS - 1 - row
        state.row_slots[row] = slot
        state.token_pool[slot, : len(tokens)] = torch.tensor(tokens)
        state.num_computed[slot] = len(tokens) - 1
        state.sampling[slot] = torch.from_numpy(sampling_words(0, 0, 1, 0, 0, max_length=max_length))
    state.num_rows.fill_(len(histories))
    return state


def buffers(rows: int, drafts: int) -> DraftBuffers:
    return DraftBuffers.empty(rows, rows * (1 + drafts), DEPTH, MAX_LENGTH, SLOTS, "cpu")


@pytest.mark.parametrize("drafts", [2, 4, 7])
@pytest.mark.parametrize("seed", range(8))
def test_drafts_are_what_followed_the_last_tokens_before(drafts: int, seed: int) -> None:
    """In the row, or in its source: none, any, or one that the output has followed from its beginning."""
    rng = random.Random(seed)
    histories = [[rng.randrange(3) for _ in range(rng.choice([1, 2, 3, 5, 30, 70]))] for _ in range(4)]
    max_lengths = [len(tokens) + rng.choice([0, 1, 2, 3, 20]) for tokens in histories]
    state = rows_of(histories, max_lengths)
    before = state.token_pool.clone()
    found = buffers(5, drafts)  # one row of padding
    found.sources.random_(0, 3)
    sources, prompts = [], []
    for row, tokens in enumerate(histories):
        prompts.append(rng.randint(0, len(tokens)))
        random_text = [rng.randrange(3) for _ in range(rng.choice([1, 2, 5, 60]))]
        sources.append(rng.choice([[], random_text, [*tokens[prompts[-1] :], *random_text]])[:MAX_LENGTH])
        words = torch.tensor([len(sources[-1]), prompts[-1], *sources[-1]])
        found.sources[SLOTS - 1 - row, : len(words)] = words
    propose_drafts(state, found, 5, drafts, block=16)
    limits = [max(0, min(drafts, end - 1 - len(tokens))) for tokens, end in zip(histories, max_lengths, strict=True)]
    wanted = [propose_drafts_reference(*one) for one in zip(histories, limits, sources, prompts, strict=True)]
    fed = [1 + len(tokens) for tokens in wanted]
    assert found.num_fed.tolist() == [*fed, 0]
    assert found.query_starts.tolist() == [0, *torch.tensor(fed).cumsum(0).tolist(), sum(fed)]
    assert found.num_tokens.item() == sum(fed) and found.arrived.item() == 0
    rows = [row for row, count in enumerate(fed) for _ in range(count)]
    assert found.token_rows.tolist() == rows + [-1] * (5 * (1 + drafts) - len(rows))
    for row, (tokens, draft) in enumerate(zip(histories, wanted, strict=True)):
        proposed = found.proposed[row].tolist()
        assert proposed[DraftWord.NUM_FED] == fed[row]
        assert proposed[DraftWord.TOKENS : DraftWord.TOKENS + len(draft)] == draft
        before[SLOTS - 1 - row, len(tokens) : len(tokens) + len(draft)] = torch.tensor(draft, dtype=torch.int32)
    assert torch.equal(state.token_pool, before), "nothing else is written"


def test_drafts_of_a_model_are_used_where_no_source_matches() -> None:
    histories = [[1, 2, 1, 2], [5, 6, 7], [3, 4]]
    state = rows_of(histories, [50, 50, 5])
    before, found = state.token_pool.clone(), buffers(3, 4)
    found.sources[SLOTS - 2, :7] = torch.tensor([5, 0, 5, 6, 7, 8, 9])
    model_drafts = torch.tensor([[11, 21, 31], [12, 22, 32], [-1, 23, 33], [14, 24, 34]], dtype=torch.int32)
    propose_drafts(state, found, 3, 4, model_drafts=model_drafts)
    wanted = [[11, 12, 0, 14], [8, 9], [31, 32]]  # -1: no token; the last row ends with its fifth
    for row, (tokens, drafts) in enumerate(zip(histories, wanted, strict=True)):
        assert found.proposed[row, DraftWord.TOKENS : DraftWord.TOKENS + len(drafts)].tolist() == drafts
        before[SLOTS - 1 - row, len(tokens) : len(tokens) + len(drafts)] = torch.tensor(drafts)
    assert torch.equal(state.token_pool, before), "nothing else is written"
    assert found.num_fed.tolist() == [5, 3, 3]


@pytest.mark.parametrize(
    ("sampled", "count"),
    [
        ([1, 2, 1, 2, 9], 5),  # all four drafts, and the token after them
        ([1, 2, 1, 8, 9], 4),
        ([5, 2, 1, 2, 9], 1),  # only plain decoding's token
        ([-1, 2, 1, 2, 9], 1),  # NaN: the host sees -1, and the row continues with a valid token
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_differs(sampled: list[int], count: int) -> None:
    state = rows_of([[3, 3], [1, 2, 1, 2]], [50, 50])
    found = buffers(2, 4)
    propose_drafts(state, found, 2, 4)
    assert found.num_fed.tolist() == [1, 5]
    tokens = torch.full((DEPTH, 12), 77, dtype=torch.int32)
    tokens[1, :6] = torch.tensor([4, *sampled])
    step = torch.tensor([3], dtype=torch.int32)
    accept_drafts(state, found, tokens, step, 2, 4)
    first, second = found.results[1].tolist()
    assert first[: DraftWord.TOKENS + 1] == [1, 1, 4]
    assert second[: DraftWord.TOKENS + count] == [5, count, *sampled[:count]]
    assert not found.results[0].any()
    slot = SLOTS - 2
    assert state.num_computed[slot] == 3 + count and state.num_computed[SLOTS - 1] == 2
    kept = [max(token, 0) for token in sampled[:count]]
    assert state.token_pool[slot, : 4 + count].tolist() == [1, 2, 1, 2, *kept]
