"""Drafts change no distribution: chi-square tests of sampled tokens against exact probabilities."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.shapes import shape
from paceline.model.weights import random_weights
from paceline.request import SamplingParams
from paceline.text.synthetic import synthetic_tokenizer

TOKENS = (7, 11, 30, 41)  # all others are biased away
PROMPT = [7, 11, 30, 41, 11, 7, 41, 30, 7, 30, 11, 41, 7, 7, 11, 11, 30, 30, 41, 41, 7]  # all pairs occur
BIAS = 100.0
NUM_OUTPUTS = 600
# With numbers of drafts: each at least once.
PARAMS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"temperature": 2.0}, (0, 1, 4)),
    ({"temperature": 3.0, "top_p": 0.9}, (2,)),
    ({"temperature": 2.5, "repetition_penalty": 1.02, "frequency_penalty": 0.5, "presence_penalty": 0.3}, (3,)),
]


def model() -> Decoder:
    return Decoder(shape("tiny-qwen3"), random_weights(shape("tiny-qwen3"), dtype="float32"), max_positions=64)


def next_probabilities(decoder: Decoder, output: tuple[int, ...], params: dict[str, Any]) -> dict[int, float]:
    """Of the token after PROMPT and `output`, computed from the definition of each parameter."""
    tokens = [*PROMPT, *output]
    positions = torch.arange(len(tokens))

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: None) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(group, dim=1).transpose(0, 1) for one in (k, v))
        seen = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)
        return seen.transpose(0, 1).flatten(1)

    with torch.inference_mode():
        logits = decoder.logits(decoder.forward(torch.tensor(tokens), positions, attend)[-1:])[0].double()
    scores = {}
    for token in TOKENS:
        value, count = float(logits[token]), output.count(token)
        if token in tokens:
            repetition = params.get("repetition_penalty", 1.0)
            value = value / repetition if value > 0 else value * repetition
        value -= params.get("frequency_penalty", 0.0) * count + params.get("presence_penalty", 0.0) * (count > 0)
        scores[token] = value / params["temperature"]
    top = max(scores.values())
    weights = {token: math.exp(score - top) for token, score in scores.items()}
    total, kept, mass = sum(weights.values()), {}, 0.0
    for token, weight in sorted(weights.items(), key=lambda item: -item[1]):
        if mass < params.get("top_p", 1.0) * total:
            kept[token] = weight
        mass += weight
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


def last_two(decoder: Decoder, params: dict[str, Any]) -> dict[tuple[int, int], float]:
    """The exact distribution of the second and third token of the output."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    for one, first in next_probabilities(decoder, (), params).items():
        for two, second in next_probabilities(decoder, (one,), params).items():
            for three, third in next_probabilities(decoder, (one, two), params).items():
                found[two, three] += first * second * third
    return found


@pytest.mark.parametrize(("params", "numbers"), PARAMS, ids=["temperature", "top-p", "penalties"])
def test_sampled_tokens_have_the_distribution_of_plain_decoding(
    params: dict[str, Any], numbers: tuple[int, ...]
) -> None:
    exact = last_two(model(), params)
    bias = dict.fromkeys(TOKENS, BIAS)
    wanted = [
        SamplingParams(max_tokens=3, ignore_eos=True, seed=seed, logit_bias=bias, **params)
        for seed in range(NUM_OUTPUTS)
    ]
    for drafts in numbers:
        options = {"max_running": 64, "draft_tokens": drafts, "num_pages": 512, "context_tokens": 64}
        config = EngineConfig(device="cpu", threads=1)
        engine = assemble(model(), synthetic_tokenizer(model().spec.vocab_size), config, options)
        with LLM.from_engine(engine) as llm:
            outputs = llm.generate([PROMPT] * NUM_OUTPUTS, wanted, progress=False)
            accepted = llm.engine.scheduler.counters.accepted_tokens
        assert (accepted > 25) == (drafts > 0)
        counts = Counter((output.token_ids[1], output.token_ids[2]) for output in outputs)
        assert counts.keys() <= exact.keys()
        cells = [cell for cell in itertools.product(TOKENS, TOKENS) if NUM_OUTPUTS * exact.get(cell, 0) >= 5]
        expected = np.array([NUM_OUTPUTS * exact[cell] for cell in cells])
        observed = np.array([counts[cell] for cell in cells])
        statistic, freedom = float(((observed - expected) ** 2 / expected).sum()), len(cells) - 1
        assert freedom >= 5, "too little is random"
        assert statistic < freedom + 4 * math.sqrt(2 * freedom), (drafts, cells, observed, expected)
