"""Tensor parallelism on a CPU: the tokens of any number of ranks are those of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.checks.weights import write_folder
from paceline.config import ConfigError
from paceline.engine.build import executor, resolution
from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.llm import LLM
from paceline.model.layout import Shard
from paceline.model.shapes import SHAPES, shape
from paceline.model.spec import ModelSpec
from paceline.model.weights import load_decoder, random_weights
from paceline.parallel.threads import ThreadGroup
from paceline.request import Grammar, SamplingParams, as_tokens
from tests.engine.test_plan_bytes import Last
from tests.helpers import retract_often
from tests.parallel.ranks import ThreadRanks, cpu_llm, llm_of, make_weights, whole_decoder

FAMILIES = [name for name in SHAPES if name.startswith("tiny-")]
RNG = np.random.default_rng(3)
SHARED = RNG.integers(3, 512, 67).tolist()
PROMPTS = [
    RNG.integers(3, 512, 1).tolist(),
    [*SHARED, 5, 6, 7],
    RNG.integers(3, 512, 33).tolist(),
    [*SHARED, 9, 9],
    [*SHARED[:40], 3],
]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
SAMPLED = [
    SamplingParams(seed=7, max_tokens=5, ignore_eos=True),
    SamplingParams(seed=8, top_k=20, top_p=0.9, max_tokens=5, ignore_eos=True),
    SamplingParams(seed=9, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0, logit_bias={9: 5.0}, frequency_penalty=0.4, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=10, max_tokens=5, ignore_eos=True),
]


@cache
def model(name: str) -> tuple[ModelSpec, dict[str, Tensor]]:
    spec = shape(name)
    return spec, make_weights(spec)


def run(name: str, size: int, params: Any = GREEDY, **options: Any) -> list[list[int]]:
    with cpu_llm(*model(name), size, **options) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, params)]


@cache
def alone(name: str) -> list[list[int]]:
    return run(name, 1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_tokens_of_one_rank(name: str, size: int) -> None:
    assert run(name, size) == alone(name)


@pytest.mark.parametrize("size", [3, 5, 6])
def test_heads_that_do_not_divide_evenly_give_the_same_tokens(size: int) -> None:
    assert run("tiny-qwen2", size) == alone("tiny-qwen2")


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_tokens": 7},
        {"overlap": "off"},
        {"overlap": "sync"},
        {"prefix_cache": False},
        {"page_size": 1, "num_pages": 170},
        {"num_pages": 24, "max_running": 4, "num_host_pages": 100},
    ],
    ids="-".join,
)
def test_every_setting_gives_the_same_tokens(options: dict[str, Any]) -> None:
    assert run("tiny-qwen2", 2, **options) == alone("tiny-qwen2")


def test_prefix_hits_give_the_same_tokens() -> None:
    with cpu_llm(*model("tiny-llama"), 2) as llm:
        llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in again] == alone("tiny-llama")
    assert sum(output.num_cached_tokens for output in again) > 100


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_retracted_requests_give_the_same_tokens(overlap: str) -> None:
    with cpu_llm(*model("tiny-qwen3"), 4, overlap=overlap, chunk_tokens=16) as llm:
        retract_often(llm.engine.scheduler, every=2)
        found = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        assert llm.engine.scheduler.counters.retractions > 3
    assert found == alone("tiny-qwen3")


@pytest.mark.parametrize("size", [2, 4])
def test_sampling_filters_and_penalties_give_the_same_tokens(size: int) -> None:
    assert run("tiny-llama", size, SAMPLED) == run("tiny-llama", 1, SAMPLED)


def test_logprobs_are_those_of_one_rank() -> None:
    params = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, logprob_token_ids=(5, 500), max_tokens=6)
    found = []
    for size in (1, 4):
        with cpu_llm(*model("tiny-qwen3"), size) as llm:
            outputs = llm.generate(PROMPTS, [GREEDY, params, GREEDY, params, params])
            found.append([(one.token_ids, one.logprobs, one.prompt_logprobs) for one in outputs])
    for one, other in zip(*found, strict=True):
        assert one[0] == other[0]
        for mine, theirs in zip((one[1] or []) + (one[2] or []), (other[1] or []) + (other[2] or []), strict=True):
            if mine is not None and theirs is not None:
                assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
                ours, others = ([one.logprob, *dict(one.top).values()] for one in (mine, theirs))
                assert np.allclose(ours, others, atol=1e-4)


def test_grammars_give_the_same_tokens() -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=8, grammar=Grammar("regex", "[0-9]{4}-[a-f]+")),
        SamplingParams(seed=4, max_tokens=8, grammar=Grammar("regex", "(yes|no) [0-9]+")),
        GREEDY,
        SAMPLED[1],
        SamplingParams(temperature=0, max_tokens=8, grammar=Grammar("regex", "[x-z]{3,9}")),
    ]
    wanted = run("tiny-llama", 1, params)
    for options in ({}, {"draft_tokens": 7}):
        assert run("tiny-llama", 2, params, **options) == wanted


def test_ngram_drafts_are_accepted_alike_on_all_ranks() -> None:
    """The draft source is right up to a token, and then wrong."""
    expected = alone("tiny-smollm")[1]
    source = as_tokens([*expected[:3], 7, 7, 7, 7])
    with cpu_llm(*model("tiny-smollm"), 2, draft_tokens=7) as llm:
        sink = Last()
        llm.engine.submit(Job(llm.engine.encode(PROMPTS[1]), GREEDY, stream=False, draft_source=source), sink)
        assert sink.done.wait(60) and sink.delta is not None
        assert list(sink.delta.token_ids) == expected
        assert llm.engine.scheduler.counters.steps < len(expected)


def run_with_drafts(
    name: str, size: int, draft_seeds: Sequence[int | None], params: Any
) -> tuple[list[list[int]], int, int]:
    """Tokens, drafts and accepted drafts of ranks whose draft models are other models; None: the model itself."""
    spec, weights = model(name)
    others = {seed: random_weights(spec, seed=seed, dtype="float32") for seed in draft_seeds if seed is not None}
    drafts = [whole_decoder(spec, weights if seed is None else others[seed]) for seed in draft_seeds]
    options: dict[str, Any] = {"draft_tokens": 4, "model_drafts": True}
    with cpu_llm(spec, weights, size, drafts=drafts, **options) as llm:
        found = [output.token_ids for output in llm.generate(PROMPTS, params)]
        counters = llm.engine.scheduler.counters
    return found, counters.drafted_tokens, counters.accepted_tokens


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_the_whole_draft_model(size: int) -> None:
    found, drafted, accepted = run_with_drafts("tiny-qwen3", size, [None] * size, GREEDY)
    assert found == alone("tiny-qwen3") and accepted == drafted > 10


def test_memory_is_counted_for_a_draft_model_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights = model("tiny-qwen3")
    found: list[int] = []
    monkeypatch.setattr(executor, "num_kv_pages", lambda _, units, *__, **___: found.append(units.page // 4) or 64)
    cpu_llm(spec, weights, 2, drafts=[whole_decoder(spec, weights) for _ in range(2)]).close()
    whole, part = (one.kv_bytes_per_token(4) for one in (spec, Shard(0, 2).spec(spec)))
    assert found == [part + whole] * 2 and part < whole

    def stop(_: object, num_bytes: int, **__: object) -> None:
        found.append(num_bytes)
        raise ConfigError("enough")

    monkeypatch.setattr(resolution, "check_models_fit", stop)
    options: dict[str, Any] = {"speculate": "draft", "draft_model": "tiny-qwen3"}
    with pytest.raises(ConfigError, match="enough"):
        LLM(load="random", shape="tiny-qwen3", tp=3, **options)
    expected = 4 * 4 * spec.num_parameters  # norms of queries and keys are kept once per head
    assert found[-1] == pytest.approx(expected, rel=0.01), "the model, and three times the draft model"


def test_drafts_are_sampled_as_tokens_are() -> None:
    found, drafted, accepted = run_with_drafts("tiny-llama", 2, [None, None], SAMPLED)
    assert found == run("tiny-llama", 1, SAMPLED) and accepted == drafted > 10


def test_ranks_verify_the_same_drafts_even_if_each_has_proposed_others() -> None:
    """Their arithmetic may differ in the last bit; here it differs in all of them."""
    found, drafted, accepted = run_with_drafts("tiny-qwen3", 2, [None, 77], GREEDY)
    assert found == alone("tiny-qwen3") and drafted > accepted


def embedding_of(engine: Engine) -> np.ndarray:
    sink = Last()
    engine.submit(Job(engine.encode(PROMPTS[1]), SamplingParams(max_tokens=1), pooling="mean"), sink)
    assert sink.done.wait(60) and sink.delta is not None and sink.delta.vector is not None
    return np.frombuffer(sink.delta.vector, np.float32)


def test_embeddings_are_those_of_one_rank() -> None:
    vectors = []
    for size in (1, 2):
        with cpu_llm(*model("tiny-llama"), size) as llm:
            vectors.append(embedding_of(llm.engine))
    assert np.abs(vectors[0] - vectors[1]).max() < 1e-5


def test_logits_are_those_of_one_rank() -> None:
    """Not the tokens alone: within 1e-4 for every family, of prompts and of a decode batch."""
    for name in FAMILIES:
        logits = []
        for size in (1, 2, 4):
            with cpu_llm(*model(name), size) as llm:
                runner = _runner(llm)
                seen: list[Tensor] = []
                logits_of = runner.logits
                runner.logits = lambda hidden, seen=seen, f=logits_of: seen.append(f(hidden)) or seen[-1]
                llm.generate(PROMPTS[:3], replace(GREEDY, logprobs=1, max_tokens=2))  # all logits are gathered
                logits.append(torch.cat([one.clone() for one in seen]))
        for other in logits[1:]:
            torch.testing.assert_close(other, logits[0], atol=1e-4, rtol=0)


def _runner(llm: LLM) -> Any:
    executor: Any = llm.engine.executor.local
    return executor.runner


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen2-moe"])
def test_a_folder_of_safetensors_is_read_in_parts(tmp_path: Path, name: str) -> None:
    spec, weights = model(name)
    write_folder(tmp_path, spec, weights)
    with llm_of([load_decoder(tmp_path, group=group) for group in ThreadGroup.of_size(2)]) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == alone(name)


@pytest.mark.cluster
def test_the_default_model_with_nine_query_and_three_kv_heads(smollm2_path: Path) -> None:
    """Two ranks have six and three query heads. Three have as many each: tiny models cover that."""
    groups = ThreadGroup.of_size(2)
    decoders = [load_decoder(smollm2_path, dtype="float32", max_positions=256, group=group) for group in groups]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with llm_of(decoders) as llm:
        found = llm.generate([[504, 3575, 282, 4649, 314]], params)[0].token_ids
    assert found == [7042, 30, 198, 198]


def test_a_pass_is_one_message_and_ranks_end_with_the_engine() -> None:
    llm = cpu_llm(*model("tiny-llama"), 2)
    executor: Any = llm.engine.executor
    ranks: ThreadRanks = executor._ranks
    llm.generate(PROMPTS, GREEDY)
    assert ranks.num_messages == llm.engine.scheduler.counters.steps
    llm.close()
    assert ranks.stopped == [True]
