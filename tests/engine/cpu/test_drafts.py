"""Speculative decoding on the CPU: the same tokens as without it, in fewer passes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.config import ConfigError
from paceline.engine.cpu.drafts import NgramDrafts, _longest_match
from paceline.engine.job import Job
from paceline.llm import LLM, RequestOutput, _CallWaiter, _OutputCollector
from paceline.request import InvalidRequest, SamplingParams, as_tokens
from paceline.scheduler.plan import DRAFT_DEPTHS, Join
from tests.helpers import Logprob, RandomDepth

SHAPES = ["tiny-llama", "tiny-mistral", "tiny-smollm", "tiny-smollm3", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe"]
RNG = np.random.default_rng(5)
TEXT = RNG.integers(3, 400, 12).tolist()
# Repeated text: the beginnings of some prompts are in others, and a random model soon repeats itself when greedy.
PROMPTS = [TEXT * 4, TEXT * 2 + [7, 8], [5] * 30, RNG.integers(3, 400, 20).tolist(), TEXT * 3 + TEXT[:5]]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def run(
    params: SamplingParams | list[SamplingParams],
    shape: str = "tiny-qwen3",
    prompts: list[list[int]] = PROMPTS,
    **options: Any,
) -> tuple[LLM, Any]:
    llm = LLM(load="random", shape=shape, threads=1, **{"kv_tokens": 4096, **options})
    if llm.engine.scheduler.draft_depth is not None:
        llm.engine.scheduler.draft_depth = RandomDepth(max(DRAFT_DEPTHS))
    return llm, llm.generate(prompts, params, progress=False)


def facts(outputs: list[RequestOutput]) -> list[Any]:
    """What a client gets: tokens, reasons, and logprobs up to rounding."""

    def rounded(logprobs: Any) -> Any:
        return None if logprobs is None else [None if one is None else Logprob(one.logprob) for one in logprobs]

    return [
        (choice.token_ids, choice.finish_reason, rounded(choice.logprobs), rounded(output.prompt_logprobs))
        for output in outputs
        for choice in output.choices
    ]


def compare(
    params: SamplingParams | list[SamplingParams], shape: str = "tiny-qwen3", **options: Any
) -> tuple[int, int]:
    """Passes without and with drafts; the outputs are equal. Under auto, each pass has a random depth."""
    found = []
    for speculate in ("off", "auto", "ngram"):
        llm, outputs = run(params, shape, speculate=speculate, **options)
        with llm:
            found.append((facts(outputs), llm.engine.scheduler.counters.steps))
    (plain, plain_steps), (automatic, _), (drafted, steps) = found
    assert drafted == plain
    assert automatic == plain
    return plain_steps, steps


@pytest.mark.parametrize(("shape", "overlap"), [*zip(SHAPES, ["on", "off"] * 4, strict=False), ("tiny-qwen3", "on")])
def test_greedy_tokens_are_those_of_plain_decoding(shape: str, overlap: str) -> None:
    before, after = compare(replace(GREEDY, max_tokens=20), shape, overlap=overlap)
    assert after <= before


def test_text_that_repeats_itself_takes_fewer_passes() -> None:
    """A bias makes the model repeat one token."""
    before, after = compare(replace(GREEDY, logit_bias={7: 100.0}))
    assert before == 31 and after < 12, "up to 8 tokens per pass"


def test_a_pass_in_flight_whose_only_row_has_all_its_tokens_computes_nothing() -> None:
    """Drafts complete the output while the next pass is already launched."""
    params = replace(GREEDY, logit_bias={7: 100.0})
    with LLM(load="random", shape="tiny-qwen3", threads=1, kv_tokens=4096, speculate="ngram") as llm:
        for max_tokens in range(1, 24):  # up to five passes
            (output,) = llm.generate([[5, 6]], replace(params, max_tokens=max_tokens), progress=False)
            assert output.token_ids == [7] * max_tokens


def test_drafts_are_counted() -> None:
    llm, outputs = run(replace(GREEDY, logit_bias={7: 100.0}), speculate="ngram")
    with llm:
        counters = llm.engine.scheduler.counters
        assert counters.drafted_tokens >= counters.accepted_tokens > 0
        assert counters.accepted_tokens <= sum(len(choice.token_ids) for one in outputs for choice in one.choices)
        assert counters.accepted_tokens == sum(output.num_accepted_tokens for output in outputs)
        assert counters.drafted_tokens == sum(output.num_drafted_tokens for output in outputs)


CHANGES: list[dict[str, Any]] = [
    {"temperature": 0.7, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"logit_bias": {7: 4.0, 9: -3.0}},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"ignore_eos": False, "min_tokens": 5, "stop_token_ids": (11, 13, 17)},
    {"n": 3, "temperature": 0.8, "seed": 9},
    {"max_tokens": 1},
    {"max_tokens": 2},
]


def test_every_parameter_gives_the_tokens_of_plain_decoding() -> None:
    """Rows with other parameters share their passes: every parameter with a prompt that repeats itself and another."""
    params = [replace(GREEDY, **{"max_tokens": 20, **changes}) for changes in CHANGES]
    prompts = [prompt for prompt in (PROMPTS[0], PROMPTS[3]) for _ in params]
    compare(params * 2, prompts=prompts)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_tokens": 8, "max_batch_tokens": 64},
        {"max_running": 2, "max_batch_tokens": 32},
        {"kv_tokens": 160, "context_tokens": 120},  # retractions
        {"kv_tokens": 160, "host_kv_tokens": 640, "context_tokens": 120},
        {"page_size": 1},
        {"prefix_cache": False},
        {"batching": "prefill-first"},
        {"batching": "static"},
    ],
    ids=str,
)
def test_every_option_of_the_scheduler_gives_the_tokens_of_plain_decoding(options: dict[str, Any]) -> None:
    params = [replace(GREEDY, max_tokens=count) for count in (20, 3, 17, 20, 11)]
    compare(params, **options)


def test_auto_drafts_text_that_repeats_itself_and_nothing_else() -> None:
    with LLM(load="random", shape="tiny-qwen3", threads=1, kv_tokens=4096, speculate="auto") as llm:
        # Sampled with a high temperature, the text is random.
        random_text = SamplingParams(temperature=50.0, seed=1, max_tokens=100, ignore_eos=True)
        llm.generate([[5, 6]], random_text, progress=False)
        counters = llm.engine.scheduler.counters
        assert counters.drafted_tokens == 0
        depth = llm.engine.scheduler.draft_depth
        assert depth is not None
        depth.observe_pass = lambda *_: None  # type: ignore[method-assign]  # the machine may be busy
        (output,) = llm.generate([[5, 6]], replace(GREEDY, max_tokens=100, logit_bias={7: 100.0}), progress=False)
        assert output.token_ids == [7] * 100
        assert counters.accepted_tokens > 60


def test_without_adaption_a_row_proposes_what_the_plan_allows() -> None:
    drafts, row = NgramDrafts(1, adapts=False), np.tile(np.arange(10, dtype=np.int32), 8)
    drafts.join(Join(0, "a", row, len(row), GREEDY))
    for limit in (7, 2, 4):
        assert len(drafts.propose(0, row, limit)) == limit
        drafts.settle(0, len(row), limit, 0)


def outputs_with(
    sources: list[list[int]], params: SamplingParams, speculate: str, **options: Any
) -> tuple[list[list[int]], int]:
    """Output tokens of all prompts, each with its draft source, and the number of passes."""

    async def output(llm: LLM, prompt: list[int], source: list[int]) -> list[int]:
        job = Job(as_tokens(prompt), params, draft_source=as_tokens(source))
        return [token async for delta in llm.engine.stream(job) for token in delta.token_ids]

    async def outputs(llm: LLM) -> list[list[int]]:
        return await asyncio.gather(*(output(llm, *one) for one in zip(PROMPTS, sources, strict=True)))

    options = {"kv_tokens": 4096, "context_tokens": 120, "speculate": speculate, **options}
    with LLM(load="random", shape="tiny-qwen3", threads=1, **options) as llm:
        return asyncio.run(outputs(llm)), llm.engine.scheduler.counters.steps


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"temperature": 0.9, "seed": 4}, {}),
        ({"temperature": 0.9, "seed": 5}, {"overlap": "off"}),
        ({"repetition_penalty": 1.3}, {"kv_tokens": 160}),  # retractions
    ],
    ids=str,
)
def test_no_draft_source_changes_the_output(changes: dict[str, Any], options: dict[str, Any]) -> None:
    params = replace(GREEDY, **changes)
    none: list[list[int]] = [[]] * len(PROMPTS)
    plain, _ = outputs_with(none, params, "off", **options)
    edited = [[*tokens[:7], 399, *tokens[12:20], 3, 3, *tokens[20:]] for tokens in plain]
    huge = [np.random.default_rng(9).integers(3, 9, 120).tolist()] * len(PROMPTS)
    steps = {}
    sources_of = {"edited": edited, "wrong": plain[::-1], "right": plain, "none": none, "huge": huge}
    for name, sources in [*sources_of.items()][: 2 if options else None]:
        found, steps[name] = outputs_with(sources, params, "ngram", **options)
        assert found == plain, name
    if not options:
        # Up to 8 tokens per pass; a few more passes if the requests arrive one after the other.
        assert steps["right"] < 20 < steps["none"], "30 tokens"


def test_a_draft_source_is_checked() -> None:
    """An id that the model does not have would be an index behind the embedding matrix."""
    with LLM(load="random", shape="tiny-qwen3", threads=1, kv_tokens=512, context_tokens=64) as llm:
        vocab_size = llm.engine.vocab_size
        for source, message in (
            ([vocab_size], f"draft_source has token id {vocab_size}: the model's ids are 0 to {vocab_size - 1}"),
            ([5] * 65, "draft_source has 65 tokens: give at most 64, the context length"),
        ):
            job = Job(as_tokens([5]), GREEDY, draft_source=as_tokens(source))
            with pytest.raises(InvalidRequest, match=message):
                llm.engine.submit(job, _OutputCollector(_CallWaiter(1)))
    with pytest.raises(InvalidRequest, match="draft_source has a negative token id, -1"):
        Job(as_tokens([5]), draft_source=np.array([-1], np.int32))


def test_embeddings_beside_drafts_are_unchanged() -> None:
    found = []
    for speculate in ("off", "ngram"):
        with LLM(load="random", shape="tiny-qwen3", threads=1, kv_tokens=4096, speculate=speculate) as llm:
            found.append(np.array(llm.embed(PROMPTS)))
    assert np.allclose(*found, atol=1e-5)


def test_draft_tokens_are_set_by_speculate() -> None:
    with pytest.raises(ConfigError, match="draft_tokens is 3, which is not supported: set speculate instead"):
        LLM(load="random", shape="tiny-qwen3", draft_tokens=3)


@pytest.mark.parametrize(
    ("text", "row", "ends", "size"),
    [
        ([1, 2, 3], [1, 2], [2], 2),
        ([1, 2, 9, 1, 2, 8], [1, 2], [2, 5], 2),
        ([1, 2, 9, 1, 2, 8], [9, 1, 2], [5], 3),  # only the longest
        ([4, 4, 4], [4, 4, 4, 4], [3], 3),
        ([4, 4, 4, 4, 4], [4, 4, 4, 4, 4], [4, 5], 4),
        ([1, 2, 3], [3, 4], [], 0),
        ([1, 3], [2, 3], [], 0),  # one token is not enough
        ([1], [1], [], 0),
        ([], [1, 2], [], 0),
    ],
)
def test_the_longest_match_is_found(text: list[int], row: list[int], ends: list[int], size: int) -> None:
    found = _longest_match(np.array(text, np.int32), np.array(row, np.int32))
    assert (found[0].tolist(), found[1]) == (ends, size)


def proposals(source: list[int], prompt: list[int], *outputs: list[int]) -> list[list[int]]:
    """What is proposed behind each of these outputs, one after the other."""
    drafts = NgramDrafts(1)
    row = np.array(prompt, np.int32)
    drafts.join(Join(0, "a", row, len(row), GREEDY, draft_source=np.array(source, np.int32)))
    return [drafts.propose(0, np.array(prompt + output, np.int32), 3).tolist() for output in outputs]


SOURCE = list(range(10, 30))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([10], [11, 12, 13]),  # the beginning, by its first token
        ([10, 11], [12, 13, 14]),
        ([50], [10, 11, 12]),  # it has not begun
        ([50, 51, 10, 11], [12, 13, 14]),
        ([10, 50, 20, 21], [22, 23, 24]),  # a part was left out
        ([*SOURCE[:-1]], [29]),
        ([*SOURCE], []),  # its end
    ],
)
def test_drafts_follow_the_source(output: list[int], expected: list[int]) -> None:
    assert proposals(SOURCE, [1, 2, 3], output) == [expected]


def test_the_longer_match_wins_and_the_source_if_both_are_equal() -> None:
    assert proposals([7, 8, 60], [7, 8, 70, 1], [9, 7, 8]) == [[60]]
    assert proposals([7, 8, 60], [6, 7, 8, 70, 1], [9, 6, 7, 8]) == [[70, 1, 9]]


def test_of_equal_places_in_the_source_the_one_that_comes_next_is_drafted() -> None:
    source = [1, 2, 3, 4, 5, 20, 1, 2, 3, 4, 5, 21, 1, 2, 3, 4, 5, 22]
    outputs = [source[:count] for count in (5, 11, 17)]
    assert [found[0] for found in proposals(source, [9], *outputs)] == [20, 21, 22]
    inserted = [source[:6], [*source[:6], 50, 1, 2, 3, 4, 5]]
    assert proposals(source, [9], *inserted)[1][0] == 21


def test_a_source_that_was_left_is_not_begun_again() -> None:
    assert proposals(SOURCE, [9], [10, 11], [10, 11, 50]) == [[12, 13, 14], []]


def test_a_new_request_has_no_source_of_the_last_one() -> None:
    drafts, row = NgramDrafts(1), np.array([1, 2, 3], np.int32)
    drafts.join(Join(0, "a", row, len(row), GREEDY, draft_source=np.array(SOURCE, np.int32)))
    drafts.join(Join(0, "b", row, len(row), GREEDY))
    assert not len(drafts.propose(0, np.array([1, 2, 3, 10], np.int32), 3))


def test_depth_follows_acceptance() -> None:
    drafts, row = NgramDrafts(1), np.tile(np.arange(10, dtype=np.int32), 8)
    drafts.join(Join(0, "a", row, len(row), GREEDY))

    def propose() -> int:
        return len(drafts.propose(0, row, 7))

    assert propose() == 3
    drafts.settle(0, len(row), 3, 3)
    assert propose() == 6
    drafts.settle(0, len(row), 6, 2)
    assert propose() == 2
    drafts.settle(0, len(row), 2, 0)
    assert propose() == 0, "it pauses"
    row = np.tile(np.arange(10, dtype=np.int32), 10)
    assert propose() == 1
    drafts.join(Join(0, "b", row, len(row), GREEDY))
    assert propose() == 3, "a new request"
