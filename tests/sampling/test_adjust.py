"""Penalties, biases and banned tokens equal those of the logits processors of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.request import InvalidRequest, Request, SamplingParams
from paceline.sampling.adjust import BANNED_LOGIT, adjust_row, logit_adjustments
from paceline.scheduler.plan import Join
from paceline.scheduler.tracked_request import TrackedRequest
from tests.lazy import Lazy

processors = Lazy("transformers.generation.logits_process")

VOCAB = 50
PROMPT, OUTPUT = [3, 4, 3, 9, 40], [7, 7, 3, 11, 7, 49]
HISTORY = torch.tensor([PROMPT + OUTPUT])
LOGITS = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 4


def adjusted(bad_words: tuple[tuple[int, ...], ...] = (), **params: Any) -> np.ndarray:
    request = Request("a", np.array(PROMPT), SamplingParams(**params), bad_word_ids=bad_words)
    by = logit_adjustments(Join.of(TrackedRequest(request), 0), VOCAB)
    assert by is not None
    logits = LOGITS[0].numpy().copy()
    adjust_row(logits, np.array(PROMPT + OUTPUT, np.int32), by)
    return logits


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    expected = processors.RepetitionPenaltyLogitsProcessor(penalty)(HISTORY, LOGITS.clone())[0]
    np.testing.assert_allclose(adjusted(repetition_penalty=penalty), expected, atol=1e-5)


def test_frequency_and_presence_penalties_count_only_the_output() -> None:
    counts = torch.bincount(torch.tensor(OUTPUT), minlength=VOCAB)
    expected = LOGITS[0] - 0.7 * counts - 1.1 * (counts > 0)
    np.testing.assert_allclose(adjusted(frequency_penalty=0.7, presence_penalty=1.1), expected, atol=1e-5)


def test_bias_is_added_and_all_adjustments_apply_in_order() -> None:
    bias = {7: 3.5, 9: -20.0, 12: 100.0}
    processor = processors.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    np.testing.assert_allclose(adjusted(logit_bias=bias), processor(HISTORY, LOGITS.clone())[0], atol=1e-5)
    counts = torch.bincount(torch.tensor(OUTPUT), minlength=VOCAB)
    expected = processors.RepetitionPenaltyLogitsProcessor(1.4)(HISTORY, LOGITS.clone())[0]
    expected = processor(HISTORY, (expected - 0.5 * counts - 0.25 * (counts > 0))[None])[0]
    found = adjusted(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.25, logit_bias=bias)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_bad_words_equal_transformers() -> None:
    words = (
        (5,),
        (49, 8),
        (7, 49, 6),
        (8, 49, 10),
        (11, 7, 49, 13),
        (*PROMPT, *OUTPUT, 14),
        (99, *PROMPT, *OUTPUT, 15),
    )
    known = [list(word) for word in words if all(token < VOCAB for token in word)]
    expected = processors.NoBadWordsLogitsProcessor(known, eos_token_id=0)(HISTORY, LOGITS.clone())[0]
    found = adjusted(bad_words=words)
    assert (found == np.float32(BANNED_LOGIT)).tolist() == expected.isneginf().tolist()
    assert np.flatnonzero(found == np.float32(BANNED_LOGIT)).tolist() == [5, 6, 8, 13, 14]


def test_a_request_without_adjustments_has_none() -> None:
    request = Request("a", np.array(PROMPT), SamplingParams(logit_bias={1000: 5}))
    assert logit_adjustments(Join.of(TrackedRequest(request), 0), VOCAB) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0: give 0.01 to 100; 1 changes nothing."),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5: give -2 to 2; 0 changes nothing."),
        ({"frequency_penalty": "x"}, "frequency_penalty is 'x': give -2 to 2; 0 changes nothing."),
        ({"min_p": 1.5}, "min_p is 1.5: give 0 (all tokens) to 1."),
        ({"logit_bias": {1: 200}}, "logit_bias is 200: give numbers from -100 (never) to 100 (always)."),
        ({"logit_bias": {-1: 2}}, "logit_bias is -1: give token ids, from 0 up."),
        ({"bad_words": ["a", ""]}, "bad_words has '': give strings of at least one character."),
        ({"n": 0}, "n is 0: give 1 to 128."),
        ({"n": 3, "best_of": 2}, "best_of is 2, fewer than n = 3: raise it or leave it out."),
        ({"logprobs": 21}, "logprobs is 21: give 0 to 20."),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1: give 0 to 20."),
        (
            {"prompt_logprobs": 1, "prompt_logprobs_start": -1},
            "prompt_logprobs_start is -1: give a position of the prompt, from 0 up.",
        ),
        (
            {"prompt_logprobs_start": 4},
            "prompt_logprobs_start is 4 and prompt_logprobs is not given: give both.",
        ),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids is -1: give token ids, from 0 up."),
    ],
)
def test_invalid_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**options)
    assert str(raised.value) == message
