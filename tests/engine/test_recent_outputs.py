"""Finished outputs are drafted when their prompt comes again, within one tenant, cache salt and adapter."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paceline.engine import recent_outputs
from paceline.engine.job import Job
from paceline.engine.recent_outputs import RecentOutputs
from paceline.llm import LLM
from paceline.request import FinishReason, Grammar, Request, SamplingParams, as_tokens
from paceline.scheduler.tracked_request import TrackedRequest

PROMPT = list(range(100, 180))


def request(prompt: list[int], output: list[int] | None = None, **fields: Any) -> TrackedRequest:
    return TrackedRequest(Request("r", as_tokens(prompt), **fields), output=array("i", output or []))


def stored(*requests: TrackedRequest, max_tokens: int = 1000) -> RecentOutputs:
    outputs = RecentOutputs(max_tokens)
    for one in requests:
        outputs.add(one)
    return outputs


def found(outputs: RecentOutputs, prompt: list[int], **fields: Any) -> list[int]:
    return outputs.find(request(prompt, **fields).request).tolist()


def test_the_same_prompt_comes_before_the_same_end() -> None:
    outputs = stored(request(PROMPT, [1, 2]), request([5, *PROMPT], [3, 4]))
    assert found(outputs, PROMPT) == [1, 2]
    assert found(outputs, [5, *PROMPT]) == [3, 4]
    assert found(outputs, [6, 7, *PROMPT]) == [3, 4], "the last prompt with this end"
    assert found(outputs, [*PROMPT, 5]) == []
    assert found(outputs, PROMPT[-31:]) == []


NAMESPACES: list[dict[str, Any]] = [
    {},
    {"tenant": "other"},
    {"cache_salt": "other"},
    {"adapter": "other"},
    {"tenant": "other", "cache_salt": "other"},
]


@pytest.mark.parametrize("stores", range(len(NAMESPACES)))
def test_nothing_crosses_tenants_salts_and_adapters(stores: int) -> None:
    outputs = stored(request(PROMPT, [1, 2], **NAMESPACES[stores]))
    for asks, fields in enumerate(NAMESPACES):
        for prompt in (PROMPT, [5, *PROMPT]):
            assert found(outputs, prompt, **fields) == ([1, 2] if asks == stores else [])


def test_the_least_recently_used_outputs_are_dropped() -> None:
    prompts = [[number, *PROMPT] for number in range(5)]
    outputs = stored(*(request(prompt, [number] * 100) for number, prompt in enumerate(prompts[:3])), max_tokens=300)
    assert found(outputs, prompts[0]) == [0] * 100
    outputs.add(request(prompts[3], [3] * 100))
    assert [found(outputs, prompt)[:1] for prompt in prompts[:4]] == [[0], [3], [2], [3]], "1 by the end of its prompt"
    outputs.add(request([9, 9], [9] * 301))
    assert found(outputs, [9, 9]) == [], "more than all may have"
    outputs.add(request([9, 9], [9] * 300))
    assert found(outputs, prompts[0]) == [], "no key is left"
    assert found(outputs, [9, 9]) == [9] * 300


def test_the_number_of_outputs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_outputs, "MAX_OUTPUTS", 3)
    outputs = stored(*(request([number], [number]) for number in range(5)))
    assert [found(outputs, [number]) for number in range(5)] == [[], [], [2], [3], [4]]
    (tenant,) = outputs._tenants.values()
    assert len(tenant.by_prompt) == len(tenant.latest) == tenant.num_tokens == 3


def test_one_tenant_displaces_nothing_of_another() -> None:
    outputs = stored(request(PROMPT, [1, 2]), max_tokens=50)
    for number in range(100):
        outputs.add(request([number], [7] * 10, tenant="busy"))
    assert found(outputs, PROMPT) == [1, 2]


def test_an_output_that_was_cut_off_does_not_replace_the_whole_one() -> None:
    outputs = stored(request(PROMPT, [1, 2, 3, 4]), request(PROMPT, [1, 2]))
    assert found(outputs, PROMPT) == [1, 2, 3, 4]
    outputs.add(request(PROMPT, [1, 5]))
    assert found(outputs, PROMPT) == [1, 5], "the last one otherwise"
    (tenant,) = outputs._tenants.values()
    assert tenant.num_tokens == 2


def test_what_is_not_drafted_is_not_stored() -> None:
    grammar = SamplingParams(grammar=Grammar.regex("a+"))
    failed = request(PROMPT, [1, 2])
    failed.finish_reason = FinishReason.ERROR
    outputs = stored(request(PROMPT, [1, 2], params=grammar), failed, request(PROMPT, []))
    assert found(outputs, PROMPT) == [] == found(stored(request(PROMPT, [1]), max_tokens=0), PROMPT)
    outputs.add(request(PROMPT, [1, 2]))
    assert found(outputs, PROMPT, params=grammar) == []
    assert found(outputs, PROMPT, params=SamplingParams(max_tokens=0)) == []


# ---------------------------------------------------------------------- the engine

PARAMS = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(load="random", shape="tiny-qwen3", threads=1, kv_tokens=4096, speculate="ngram") as llm:
        yield llm


def run(llm: LLM, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    """The output and how many drafts were accepted."""

    async def output() -> tuple[list[int], int]:
        deltas = [delta async for delta in llm.engine.stream(Job(as_tokens(prompt), PARAMS, **fields))]
        assert deltas[-1].usage is not None
        return [token for delta in deltas for token in delta.token_ids], deltas[-1].usage.accepted_tokens

    return asyncio.run(output())


def test_the_second_time_a_prompt_takes_few_passes(llm: LLM) -> None:
    prompt = [11, *PROMPT]
    first, _ = run(llm, prompt)
    steps = llm.engine.scheduler.counters.steps
    again, num_accepted = run(llm, prompt)
    assert again == first and num_accepted >= 30
    assert llm.engine.scheduler.counters.steps - steps < 12, "40 tokens, up to 8 per pass"


def test_drafts_never_come_from_another_tenant_or_salt(llm: LLM) -> None:
    prompt = [12, *PROMPT]
    outputs = [
        run(llm, prompt, **fields) for fields in ({}, {"tenant": "other"}, {"cache_salt": "other"}, {"tenant": "other"})
    ]
    assert len({tuple(tokens) for tokens, _ in outputs}) == 1
    assert [num_accepted >= 30 for _, num_accepted in outputs] == [False, False, False, True]


def test_a_draft_source_of_the_request_wins(llm: LLM) -> None:
    prompt = [13, *PROMPT]
    first, _ = run(llm, prompt)
    wrong = np.random.default_rng(1).integers(3, 400, 40)
    again, num_accepted = run(llm, prompt, draft_source=as_tokens(wrong))
    assert again == first and num_accepted < 10


def test_nothing_is_stored_without_speculation() -> None:
    for options in ({}, {"speculate": "ngram", "recent_output_tokens": 0}):
        with LLM(load="random", shape="tiny-qwen3", threads=1, kv_tokens=4096, **options) as llm:
            run(llm, PROMPT)
            assert not llm.engine._recent_outputs._tenants


def test_tenants_are_bounded() -> None:
    """A client may send a new tenant with every request."""
    tenants = [str(number) for number in range(recent_outputs.MAX_TENANTS + 1)]
    outputs = stored(*(request(PROMPT, [1, 2], tenant=tenant) for tenant in tenants))
    assert [found(outputs, PROMPT, tenant=tenant) for tenant in tenants] == [[], *[[1, 2]] * recent_outputs.MAX_TENANTS]


def test_a_flush_drops_stored_outputs() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(load="random", shape="tiny-qwen3", threads=1, kv_tokens=512, speculate="ngram") as llm:
        first = llm.generate([PROMPT], params, progress=False)[0]
        assert llm.generate([PROMPT], params, progress=False)[0].num_accepted_tokens > first.num_accepted_tokens
        llm.engine.call(llm.engine.flush_cache).result()
        assert llm.generate([PROMPT], params, progress=False)[0].num_accepted_tokens == first.num_accepted_tokens
