"""A model with a state group: whatever the engine does with a request, its tokens are those of a recomputation."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from paceline.config import EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.llm import LLM
from paceline.request import SamplingParams
from paceline.text.synthetic import synthetic_tokenizer
from tests.helpers import retract_often
from tests.moving_average import HybridDecoder, hybrid_spec

RNG = np.random.default_rng(4)
BEGINNING = RNG.integers(3, 500, 24).tolist()
PROMPTS = [[*BEGINNING[: 8 * (number % 4)], *RNG.integers(3, 500, 3 + 5 * number).tolist()] for number in range(7)]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
MIXERS = ("sass", "wsa", "sss")


@cache
def expected(mixers: str) -> list[list[int]]:
    decoder = HybridDecoder(hybrid_spec(mixers))
    return [decoder.recomputed(prompt, GREEDY.max_tokens) for prompt in PROMPTS]


def make_llm(mixers: str, *, overlap: str = "on", **options: Any) -> LLM:
    decoder: Any = HybridDecoder(hybrid_spec(mixers))
    config, options = EngineConfig(overlap=overlap, threads=1), {"page_size": 4, "num_pages": 300, **options}
    return LLM.from_engine(assemble(decoder, synthetic_tokenizer(512), config, options))


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("mixers", MIXERS)
def test_each_prompt_alone_and_all_at_once_give_the_tokens_of_a_recomputation(mixers: str) -> None:
    with make_llm(mixers, max_running=3) as llm:
        for prompt, output in zip(PROMPTS, expected(mixers), strict=True):
            assert tokens(llm, [prompt]) == [output]
        assert tokens(llm, PROMPTS * 3) == expected(mixers) * 3
        assert llm.engine.scheduler.counters.hit_tokens == 0, "no prefix of a state can be shared"


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 5, 16])
def test_chunks_of_every_size_give_the_same_tokens(chunk_tokens: int, overlap: str) -> None:
    with make_llm("sass", chunk_tokens=chunk_tokens, overlap=overlap) as llm:
        assert tokens(llm, PROMPTS) == expected("sass")


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("mixers", MIXERS)
def test_a_retracted_request_is_recomputed_from_the_start(mixers: str, overlap: str) -> None:
    for every in (1, 2, 5):
        with make_llm(mixers, chunk_tokens=6, overlap=overlap, max_running=4) as llm:
            retract_often(llm.engine.scheduler, every)
            assert tokens(llm, PROMPTS) == expected(mixers)
            assert llm.engine.scheduler.counters.retractions > 3


def test_too_few_pages_retract_and_give_the_same_tokens() -> None:
    with make_llm("wsa", num_pages=15, max_running=4) as llm:
        assert tokens(llm, PROMPTS * 2) == expected("wsa") * 2
