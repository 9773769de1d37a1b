"""A seed gives the same tokens alone, batched, overlapped and retracted, with every page and chunk size."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import NUM_TOKENS, PROMPTS, make_llm, pair

from paceline.request import SamplingParams
from tests.helpers import retract_often

PARAMS = [
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, **options)
    for seed, options in enumerate(
        [
            {},
            {"top_k": 5},
            {"top_p": 0.8},
            {"temperature": 0.4},
            {"temperature": 0},
            {"top_k": 9, "top_p": 0.5, "min_p": 0.02},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {9: 2.0}, "min_p": 0.05},
        ]
    )
]


def alone() -> list[list[int]]:
    with make_llm(pair("qwen2").ours, overlap="off", prefix_cache=False) as llm:
        return [llm.generate([p], each)[0].token_ids for p, each in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": "off"},
        {"overlap": "sync"},
        {"retract_every": 1},
        {"retract_every": 2, "overlap": "off"},
        {"page_size": 3, "chunk_tokens": 5},
        {"max_running": 2, "policy": "lof"},
    ],
    ids=str,
)
def test_a_seed_gives_the_same_tokens_in_every_setting(options: dict[str, Any]) -> None:
    every = options.pop("retract_every", None)
    with make_llm(pair("qwen2").ours, **options) as llm:
        if every is not None:
            retract_often(llm.engine.scheduler, every)
        found = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    assert found == alone()


def test_different_seeds_and_no_seed_give_different_tokens() -> None:
    with make_llm(pair("qwen2").ours) as llm:
        hot = {"temperature": 2.0, "max_tokens": 20, "ignore_eos": True}
        seeded = llm.generate([PROMPTS[1]] * 20, [SamplingParams(seed=seed, **hot) for seed in range(20)])
        assert len({tuple(output.token_ids) for output in seeded}) == 20
        unseeded = llm.generate([PROMPTS[1]] * 20, SamplingParams(**hot))
        assert len({tuple(output.token_ids) for output in unseeded}) == 20
