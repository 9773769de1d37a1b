"""Samples have the exact distribution, and depend only on seed and position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.request import InvalidRequest, Request, SamplingParams
from paceline.sampling.noise import gumbel
from paceline.sampling.sampler import Sampler
from paceline.sampling.types import NO_TOKEN
from paceline.scheduler.plan import Join
from paceline.scheduler.tracked_request import TrackedRequest

VOCAB, DRAWS = 40, 60_000
NO_HISTORY = np.zeros((0, 0), np.int32)
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def exact(params: SamplingParams) -> np.ndarray:
    """The distribution by its definition: temperature, then top-k, then top-p, then min-p."""
    scores = LOGITS.double().numpy() / params.temperature
    order = np.argsort(-scores)[: params.top_k]
    probs = np.exp(scores[order] - scores.max())
    probs /= probs.sum()
    keep = int(np.searchsorted(probs.cumsum(), params.top_p - 1e-12)) + 1
    probs[keep:] = 0
    probs[probs < params.min_p * probs.max()] = 0
    result = np.zeros(VOCAB)
    result[order] = probs / probs.sum()
    return result


def draw(params: SamplingParams, seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    sampler = Sampler(VOCAB, 1)
    sampler.join(Join.of(TrackedRequest(Request("a", np.array([1]), params)), 0))
    sampler._seed = seeds  # a slot for each draw would be the same, slower
    for name in ("_temperature", "_top_k", "_top_p", "_min_p", "_adjusted"):
        setattr(sampler, name, np.repeat(getattr(sampler, name), len(seeds)))
    return sampler.sample(LOGITS.repeat(len(seeds), 1), np.arange(len(seeds)), positions, NO_HISTORY)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_k": 12, "top_p": 0.8},
        {"top_k": 1000},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
        {"min_p": 0.1},
        {"min_p": 0.05, "top_k": 10, "temperature": 1.5},
        {"min_p": 0.2, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_draws_follow_the_exact_distribution(options: dict[str, Any], along: str) -> None:
    params, many, one = SamplingParams(**options), np.arange(DRAWS), np.full(DRAWS, 7)
    seeds, positions = (many, one) if along == "seeds" else (one, many)
    counts = np.bincount(draw(params, seeds, positions), minlength=VOCAB)
    expected = exact(params) * DRAWS
    assert not counts[expected == 0].any()
    likely = expected >= 5
    rare = ~likely
    observed, hoped = [*counts[likely], counts[rare].sum()], [*expected[likely], expected[rare].sum()]
    chi2 = sum((o - e) ** 2 / e for o, e in zip(observed, hoped, strict=True) if e)
    freedom = int(likely.sum()) - 1 + bool(expected[rare].sum())
    assert chi2 < freedom + 4 * math.sqrt(2 * max(freedom, 1))


def test_a_row_is_sampled_the_same_in_any_batch() -> None:
    sampler = Sampler(VOCAB, 8)
    kinds = [
        SamplingParams(seed=5),
        SamplingParams(temperature=0),
        SamplingParams(top_k=3, seed=1),
        SamplingParams(top_p=0.5, seed=2),
        SamplingParams(temperature=0),
        SamplingParams(top_k=9, top_p=0.9, seed=5),
        SamplingParams(temperature=2, seed=3),
        SamplingParams(seed=5),
    ]
    for slot, params in enumerate(kinds):
        sampler.join(Join.of(TrackedRequest(Request(str(slot), np.array([1]), params)), slot))
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(2))
    slots, positions = np.arange(8), np.arange(8) % 7 + 10
    together = sampler.sample(logits.clone(), slots, positions, NO_HISTORY)
    alone = [int(sampler.sample(logits[[i]].clone(), slots[[i]], positions[[i]], NO_HISTORY)[0]) for i in range(8)]
    backwards = sampler.sample(logits.flip(0), slots[::-1].copy(), positions[::-1].copy(), NO_HISTORY)[::-1]
    assert together.tolist() == alone == backwards.tolist()
    assert together[1] == logits[1].argmax()
    assert together[4] == logits[4].argmax()


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf])
def test_rows_without_finite_logits_get_no_token_and_change_no_other_row(nothing: float) -> None:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}]
    sampler = Sampler(VOCAB, 2 * len(kinds))
    for slot in range(2 * len(kinds)):
        params = SamplingParams(**kinds[slot // 2], seed=slot)
        sampler.join(Join.of(TrackedRequest(Request(str(slot), np.array([1]), params)), slot))
    slots = np.arange(2 * len(kinds))
    logits = LOGITS.repeat(len(slots), 1)
    alone = [int(sampler.sample(logits[[row]].clone(), slots[[row]], slots[[row]], NO_HISTORY)[0]) for row in slots]
    logits[1::2] = nothing
    found = sampler.sample(logits, slots, slots, NO_HISTORY)
    assert found[1::2].tolist() == [NO_TOKEN] * len(kinds)
    assert found[::2].tolist() == alone[::2]


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    """Equal samples are as frequent as by coincidence, so no request repeats another's noise."""
    params, same = SamplingParams(), float((exact(SamplingParams()) ** 2).sum())
    base = draw(params, np.full(DRAWS, 3), np.arange(DRAWS))
    for other in (
        draw(params, np.full(DRAWS, 4), np.arange(DRAWS)),
        draw(params, np.full(DRAWS, 3), np.arange(DRAWS) + 1),
    ):
        assert abs(float((base == other).mean()) - same) < 5 * math.sqrt(same * (1 - same) / DRAWS)


def test_stop_ids_are_banned_before_min_tokens() -> None:
    best = int(LOGITS.argmax())
    sampler = Sampler(VOCAB, 1)
    params = SamplingParams(temperature=0, min_tokens=3)
    request = Request("a", np.zeros(10, np.int32), params, eos_token_ids=(best, 10_000))
    sampler.join(Join.of(TrackedRequest(request), 0))
    history = np.zeros((1, 20), np.int32)
    found = [
        int(sampler.sample(LOGITS[None].clone(), np.array([0]), np.array([at]), history)[0]) for at in (10, 11, 12, 13)
    ]
    # The first output token is at position 10; the third can be the end.
    assert [token == best for token in found] == [False, False, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1: give 0 (always the likeliest token) to 10000."),
        ({"temperature": math.nan}, "temperature is nan: give 0 (always the likeliest token) to 10000."),
        ({"temperature": "hot"}, "temperature is 'hot': give 0 (always the likeliest token) to 10000."),
        ({"top_p": 0}, "top_p is 0: give a number above 0 and up to 1 (all tokens)."),
        ({"top_p": 1.5}, "top_p is 1.5: give a number above 0 and up to 1 (all tokens)."),
        ({"top_k": 0}, "top_k is 0: give 1 or more, or leave it out to keep all tokens."),
        ({"seed": 1.5}, "seed is 1.5: give a whole number of 64 bits."),
        ({"max_tokens": -3}, "max_tokens is -3: give 0 (compute the prompt alone) or more."),
        ({"max_tokens": 2.0}, "max_tokens is 2.0: give 0 (compute the prompt alone) or more."),
        ({"min_tokens": -1}, "min_tokens is -1: give 0 or more."),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, more than max_tokens 4: lower it."),
        ({"stop": ["a", ""]}, "stop has '': give strings of at least one character."),
        ({"stop_token_ids": (-1,)}, "stop_token_ids is -1: give token ids, from 0 up."),
    ],
)
def test_invalid_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**options)
    assert str(raised.value) == message


def test_stop_can_be_one_string() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_noise_is_finite_at_both_ends() -> None:
    for bits in (0, -1):  # all zeros and all ones before the last step of the mixing
        rows = torch.tensor([[bits]])
        noise = gumbel(rows, torch.arange(-(2**20), 2**20))
        assert noise.isfinite().all()
        assert noise.min() < -2.6
        assert noise.max() > 13
