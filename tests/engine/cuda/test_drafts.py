"""Speculative decoding on the GPU's kernels, in Triton's interpreter: the tokens of plain decoding, in fewer passes."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed
from paceline.llm import LLM, RequestOutput
from paceline.request import SamplingParams, as_tokens
from tests.engine.cuda.interpreted import (
    GREEDY,
    IN_BOUNDS,
    INTERPRETED,
    RNG,
    decoder,
    expected,
    on_kernels,
    retract_often,
)
from tests.helpers import Logprob

pytestmark = [*INTERPRETED, IN_BOUNDS]

TEXT = RNG.integers(3, 512, 7).tolist()
PROMPTS = [TEXT * 2, [5] * 10, RNG.integers(3, 512, 6).tolist(), TEXT + TEXT[:4]]
BIASED = replace(GREEDY, max_tokens=8, logit_bias={7: 14.0, 9: 14.0})
REPEATING = replace(GREEDY, max_tokens=10, logit_bias={7: 100.0})  # one token again and again


def run(
    params: SamplingParams | list[SamplingParams],
    name: str = "tiny-qwen3",
    *,
    prompts: list[list[int]] = PROMPTS,
    disturb: bool = False,
    **options: Any,
) -> tuple[list[RequestOutput], CudaExecutor, LLM]:
    llm, device = on_kernels(name, **options)
    if disturb:
        retract_often(llm)
    with llm:
        return llm.generate(prompts, params), device, llm


def facts(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (choice.token_ids, choice.finish_reason, [Logprob(one.logprob) for one in choice.logprobs or ()])
        for output in outputs
        for choice in output.choices
    ]


@cache
def plain_biased() -> list[Any]:
    """What `BIASED` gives without drafts."""
    return facts(run(BIASED, draft_tokens=0)[0])


@pytest.mark.parametrize(
    "name", ["tiny-qwen3", "tiny-qwen2", "tiny-smollm3", "tiny-mistral", "tiny-mixtral", "tiny-gemma2", "tiny-phi3"]
)
def test_greedy_tokens_are_those_of_the_cpu(name: str) -> None:
    """Biases, sliding windows, layers without RoPE; fused GEMMs and others; experts."""
    params, prompts = replace(GREEDY, max_tokens=6), PROMPTS[:2]
    outputs, device, _ = run(params, name, prompts=prompts, draft_tokens=7)
    assert [output.token_ids for output in outputs] == expected(name, prompts, params)
    assert any(key.drafts for _, key in device.graphs._graphs), "no pass had drafts"


@pytest.mark.parametrize(("drafts", "overlap"), [(2, "on"), (4, "off"), (7, "on")])
def test_text_that_repeats_itself_takes_fewer_passes(drafts: int, overlap: str) -> None:
    outputs, _, llm = run(REPEATING, prompts=PROMPTS[1:3], draft_tokens=drafts, overlap=overlap)
    assert [output.token_ids for output in outputs] == [[7] * 10] * 2
    counters = llm.engine.scheduler.counters
    assert counters.accepted_tokens > 6 and counters.steps < 10


CHANGES: list[dict[str, Any]] = [
    {"temperature": 0.7, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "logit_bias": {7: 9.0, 8: 9.0}},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4},
    {"presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {7: 14.0, 9: 14.0}},
    {"logit_bias": {7: 14.0, 9: 14.0}, "logprobs": 2},
    {"ignore_eos": False, "min_tokens": 5, "stop_token_ids": (7, 13, 17), "logit_bias": {7: 14.0, 9: 14.0}},
    {"n": 2, "temperature": 0.8, "seed": 9},
    {"max_tokens": 2},
]


@pytest.mark.parametrize("half", [0, 1])
def test_parameters_give_the_tokens_of_plain_decoding(half: int) -> None:
    """Rows with other parameters share their passes: every parameter with a prompt that repeats itself and another."""
    params = [replace(GREEDY, **{"max_tokens": 6, **changes}) for changes in CHANGES[half::2]]
    prompts = [PROMPTS[(number + half) % 2 + 2 * again] for again in range(2) for number in range(len(params))]
    plain, _, before = run(params * 2, prompts=prompts, draft_tokens=0)
    drafted, _, after = run(params * 2, prompts=prompts, draft_tokens=7)
    assert facts(drafted) == facts(plain)
    assert after.engine.scheduler.counters.steps <= before.engine.scheduler.counters.steps + 1
    assert after.engine.scheduler.counters.accepted_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_tokens": 5, "page_size": 1, "num_pages": 256, "overlap": "off"},
        {"num_pages": 32, "disturb": True},
        {"max_running": 1},
        {"max_running": 2, "num_host_pages": 16, "num_pages": 24},
    ],
    ids="-".join,
)
def test_scheduling_changes_no_token(options: dict[str, Any]) -> None:
    assert facts(run(BIASED, draft_tokens=7, **options)[0]) == plain_biased()


def test_a_draft_source_gives_the_same_tokens_in_fewer_passes() -> None:
    """The outputs of a first run are the sources of a second; a slot's next request does not inherit its source."""
    params, prompts = replace(GREEDY, max_tokens=10, temperature=0.8, seed=3), PROMPTS[1:3]

    async def outputs(llm: LLM, sources: list[list[int]]) -> list[list[int]]:
        async def one(prompt: list[int], source: list[int]) -> list[int]:
            job = Job(as_tokens(prompt), params, draft_source=as_tokens(source))
            return [token async for delta in llm.engine.stream(job) for token in delta.token_ids]

        # One after the other: how many passes two share depends on when they arrive.
        return [await one(*request) for request in zip(prompts, sources, strict=True)]

    llm, _ = on_kernels("tiny-qwen3", draft_tokens=7, max_running=2)
    with llm:
        counters, none = llm.engine.scheduler.counters, [[]] * len(prompts)
        plain = asyncio.run(outputs(llm, none))
        edited = [[*tokens[:4], 500, *tokens[5:]] for tokens in plain]
        steps = [counters.steps]
        joined = [list(itertools.chain(*plain))] * len(plain)
        for sources in (edited, plain, joined, none):
            before = counters.steps
            assert asyncio.run(outputs(llm, sources)) == plain
            steps.append(counters.steps - before)
        assert steps[2] < steps[0] / 2 and steps[3] < steps[0] == steps[4]


def test_a_draft_source_longer_than_the_kv_cache_stays_in_its_slot() -> None:
    """A source may be as long as the context; a row on the device has places for what fits into the KV cache."""
    llm, _ = on_kernels("tiny-qwen3", draft_tokens=7, num_pages=16, max_running=1)

    async def output(source: list[int]) -> list[int]:
        job = Job(as_tokens([5, 6, 7]), replace(GREEDY, max_tokens=10), draft_source=as_tokens(source))
        return [token async for delta in llm.engine.stream(job) for token in delta.token_ids]

    with llm:
        assert asyncio.run(output([7] * 150)) == asyncio.run(output([]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_ends_its_request_and_leaves_nothing_to_others() -> None:
    """The first token is sampled by the prefill pass, and makes the logits of every later pass NaN."""
    model = decoder("tiny-qwen3")
    model.embedding = model.embedding.clone()
    model.embedding[9] = torch.nan
    llm, _ = on_kernels("tiny-qwen3", model=model, draft_tokens=7, num_pages=32)
    with llm:
        for prompt in PROMPTS[1:3]:
            with pytest.raises(EngineFailed, match="logits contain NaN"):
                llm.generate([[8] * 10], replace(REPEATING, logit_bias={9: 100.0}))
            assert llm.generate([prompt], REPEATING)[0].token_ids == [7] * 10
