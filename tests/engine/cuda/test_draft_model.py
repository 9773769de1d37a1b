"""A draft model on the GPU's kernels, in Triton's interpreter: its drafts are right if it is the target model
itself; whatever it drafts, the output is that of plain decoding."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import ConfigError
from paceline.engine.job import Job
from paceline.llm import LLM, RequestOutput
from paceline.model.decoder import Decoder
from paceline.model.shapes import vary
from paceline.model.weights import random_weights
from paceline.request import Grammar, SamplingParams, as_tokens
from tests.engine.cuda.interpreted import (
    CONTEXT,
    GREEDY,
    IN_BOUNDS,
    INTERPRETED,
    PROMPTS,
    decoder,
    expected,
    on_kernels,
    retract_often,
)

pytestmark = [*INTERPRETED, IN_BOUNDS]


def run(
    params: SamplingParams, name: str = "tiny-qwen3", draft: str | None = None, **options: Any
) -> tuple[list[RequestOutput], LLM]:
    llm, _ = on_kernels(name, draft=decoder(draft or name), **{"draft_tokens": 4, **options})
    with llm:
        return llm.generate(PROMPTS, params), llm


async def tokens_of(llm: LLM, job: Job) -> list[int]:
    return [token async for delta in llm.engine.stream(job) for token in delta.token_ids]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_all_drafts_of_the_same_model_are_accepted(overlap: str) -> None:
    params = replace(GREEDY, max_tokens=12)  # three passes: after each, the last draft was not fed yet
    outputs, llm = run(params, overlap=overlap)
    assert [output.token_ids for output in outputs] == expected("tiny-qwen3", PROMPTS, params)
    counters = llm.engine.scheduler.counters
    assert counters.drafted_tokens > 24 and counters.accepted_tokens == counters.drafted_tokens


def test_drafts_are_sampled_with_the_noise_and_filters_of_the_target_model() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=11, max_tokens=6, ignore_eos=True)
    plain, _ = on_kernels("tiny-qwen3")
    with plain:
        wanted = [output.token_ids for output in plain.generate(PROMPTS, params)]
    outputs, llm = run(params)
    assert [output.token_ids for output in outputs] == wanted
    counters = llm.engine.scheduler.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 10


@pytest.mark.parametrize("draft", ["tiny-llama", "tiny-mistral"])
def test_another_model_drafts_and_the_output_stays_the_same(draft: str) -> None:
    """Other heads, a sliding window, no QK-norm; some drafts are wrong."""
    params = replace(GREEDY, max_tokens=4)
    outputs, llm = run(params, draft=draft)
    assert [output.token_ids for output in outputs] == expected("tiny-qwen3", PROMPTS, params)
    counters = llm.engine.scheduler.counters
    assert counters.drafted_tokens > counters.accepted_tokens


def test_prefix_hits_chunks_retractions_and_graphs_keep_the_kv_of_the_draft_model() -> None:
    llm, device = on_kernels(
        "tiny-qwen3", draft=decoder("tiny-qwen3"), draft_tokens=4, chunk_tokens=5, prefill_sizes=(16, 32)
    )
    retract_often(llm)
    params = replace(GREEDY, max_tokens=7)
    with llm:
        for _ in range(2):  # the second time all prompts are in the prefix cache
            outputs = llm.generate(PROMPTS, params)
            assert [output.token_ids for output in outputs] == expected("tiny-qwen3", PROMPTS, params)
    counters = llm.engine.scheduler.counters
    assert counters.retractions and counters.hit_tokens
    # The last draft of a pass is not fed to the draft model: if its page is cached then, its KV is missing.
    assert 12 < 0.9 * counters.drafted_tokens < counters.accepted_tokens
    assert any(key.prefill is not None for _, key in device.graphs._graphs), "no prompt ran as a graph"


def test_a_draft_source_comes_before_the_draft_model() -> None:
    """The target model repeats one token, which the draft model knows nothing of: biases are left to verification."""
    params = replace(GREEDY, max_tokens=6, logit_bias={7: 100.0})
    accepted = []
    for source in ([], [7] * 6):
        llm, _ = on_kernels("tiny-qwen3", draft=decoder("tiny-llama"), draft_tokens=4)
        with llm:
            job = Job(as_tokens(PROMPTS[3]), params, draft_source=as_tokens(source))
            assert asyncio.run(tokens_of(llm, job)) == [7] * 6
        accepted.append(llm.engine.scheduler.counters.accepted_tokens)
    assert accepted[1] > accepted[0] + 3


def test_a_draft_model_with_more_heads_per_kv_head_is_refused() -> None:
    """Its tiles of prompts would have more query heads than the kernel takes."""
    draft = decoder("tiny-llama")
    spec = vary(draft.spec, num_kv_heads=draft.spec.layers[0].mixer.num_heads)
    target = Decoder(spec, random_weights(spec, dtype="float32"), max_positions=CONTEXT)
    with pytest.raises(ConfigError, match="the draft model has 3 query heads per KV head"):
        on_kernels("tiny-llama", model=target, draft=draft, draft_tokens=4)


def test_a_row_at_the_end_of_its_context_drafts_no_further() -> None:
    options: dict[str, Any] = {"draft_tokens": 7, "max_running": 1, "context_tokens": 32}
    llm, _ = on_kernels("tiny-qwen3", draft=decoder("tiny-qwen3"), **options)
    prompt, params = PROMPTS[0][: 32 - 10], replace(GREEDY, max_tokens=10)
    with llm:
        assert [output.token_ids for output in llm.generate([prompt], params)] == expected(
            "tiny-qwen3", [prompt], params
        )


def test_a_draft_model_drafts_rows_with_a_grammar() -> None:
    """Drafts are sampled without masks, and verified with them."""
    params = replace(GREEDY, max_tokens=5, ignore_eos=False, grammar=Grammar.regex("[ab]{40}"))
    found = []
    for options in ({}, {"draft": decoder("tiny-qwen3"), "draft_tokens": 4}):
        llm, _ = on_kernels("tiny-qwen3", **options)
        with llm:
            found.append([output.token_ids for output in llm.generate(PROMPTS[1:3], [params, GREEDY])])
    assert found[0] == found[1]
    assert llm.engine.scheduler.counters.drafted_tokens
