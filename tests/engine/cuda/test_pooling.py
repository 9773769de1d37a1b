"""Embeddings on the CUDA executor, in the interpreter: the pooled hidden states of the CPU executor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.cuda.model import CudaModel
from paceline.engine.job import Job
from paceline.kernels.pool_states import pool_states
from paceline.llm import LLM
from paceline.text.synthetic import synthetic_tokenizer
from tests.checks.kernels import assemble_kernels
from tests.engine.cuda.interpreted import (
    BASE,
    GREEDY,
    IN_BOUNDS,
    INTERPRETED,
    PROMPTS,
    RNG,
    decoder,
    expected,
    on_kernels,
    prefill_keys,
    record_packed,
    retract_often,
)
from tests.server.serving import Caller, make_app

pytestmark = [*INTERPRETED, IN_BOUNDS]

LONG = RNG.integers(3, 512, 40).tolist()  # three chunks of up to 16 tokens
TEXTS = [PROMPTS[3], PROMPTS[1], LONG]
KINDS = ("mean", "last")


def on_the_cpu(name: str, texts: list[list[int]], pooling: str) -> list[np.ndarray]:
    reference = decoder(name)
    config = EngineConfig(device="cpu", threads=1, overlap="off")
    with LLM.from_engine(assemble(reference, synthetic_tokenizer(reference.spec.vocab_size), config, BASE)) as llm:
        return llm.embed(texts, pooling)


def assert_same(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    np.testing.assert_allclose(np.stack(found), np.stack(wanted), atol=2e-5)


@pytest.mark.parametrize(("pooling", "overlap"), [("mean", "on"), ("last", "off")])
def test_kernels_give_the_same_embeddings_as_the_cpu(pooling: str, overlap: str) -> None:
    """Several texts in one batch, a text of one token, a text in chunks, and cache hits the second time."""
    wanted = on_the_cpu("tiny-qwen3", TEXTS, pooling)
    llm, device = on_kernels("tiny-qwen3", overlap=overlap)
    packed = record_packed(device)
    with llm:
        assert_same(llm.embed(TEXTS, pooling), wanted)
        assert max(len(one.pooled_rows) for one in packed) > 1 and any(one.pooled_starts.any() for one in packed)
        num_tokens = sum(one.num_tokens for one in packed)
        assert_same(llm.embed(TEXTS, pooling), wanted)
        again = sum(one.num_tokens for one in packed) - num_tokens
    assert again == num_tokens if pooling == "mean" else again < num_tokens, "the sum needs all hidden states"


def test_prefill_graphs_give_the_same_embeddings(prefill_graphs: dict[str, Any]) -> None:
    """Also batches that sample nothing have a graph. It ends with hidden states, that of generation with logits."""
    wanted, once = on_the_cpu("tiny-qwen2", TEXTS, "mean"), replace(GREEDY, max_tokens=1)
    llm, device = on_kernels("tiny-qwen2", overlap="off", **prefill_graphs)
    with llm:
        assert_same(llm.embed(TEXTS), wanted)
        assert device.stats.graphs == device.stats.passes and all(key.all_states for key in prefill_keys(device))
        tokens = [output.token_ids for output in llm.generate(TEXTS, once)]
        assert {key.all_states for key in prefill_keys(device)} == {False, True}
        assert_same(llm.embed(TEXTS[:1]), wanted[:1])
    assert tokens == expected("tiny-qwen2", TEXTS, once)


@pytest.mark.parametrize("by_graph", [False, True])
def test_generation_beside_embeddings_is_unchanged(by_graph: bool, prefill_graphs: dict[str, Any]) -> None:
    """Mixed batches: decode rows, prompts that are sampled from and prompts that are embedded, in the same pass."""
    llm, device = on_kernels("tiny-qwen3", max_running=8, overlap="off", **(prefill_graphs if by_graph else {}))
    packed = record_packed(device)
    with llm:
        generated = [Job(llm.engine.encode(prompt), GREEDY, stream=False) for prompt in PROMPTS[2:]]
        embedded = [Job(llm.engine.encode(LONG), GREEDY, pooling=kind, stream=False) for kind in KINDS]
        sinks = llm._run([*generated, *embedded], progress=False)
    assert [sink.token_ids for sink in sinks[:2]] == expected("tiny-qwen3", PROMPTS[2:], GREEDY)
    vectors = [sink.last.vector or b"" for sink in sinks[2:] if sink.last is not None]
    wanted = [on_the_cpu("tiny-qwen3", [LONG], kind)[0] for kind in KINDS]
    assert_same([np.frombuffer(vector, np.float32) for vector in vectors], wanted)
    assert any(len(one.pooled_rows) and one.num_decodes for one in packed)
    assert any(len(one.pooled_rows) and one.num_sampled > one.num_decodes for one in packed)


@pytest.mark.parametrize("pooling", KINDS)
def test_retracted_requests_have_the_same_embeddings(pooling: str) -> None:
    llm, _ = on_kernels("tiny-qwen3", chunk_tokens=8)
    retract_often(llm)
    with llm:
        assert_same(llm.embed([LONG], pooling), on_the_cpu("tiny-qwen3", [LONG], pooling))
        assert llm.engine.scheduler.counters.retractions == 2


def test_the_next_request_of_a_slot_is_not_embedded() -> None:
    llm, device = on_kernels("tiny-qwen3", max_running=1)
    packed = record_packed(device)
    with llm:
        llm.embed(PROMPTS[1])
        del packed[:]
        assert [llm.generate(PROMPTS[3], GREEDY)[0].token_ids] == expected("tiny-qwen3", PROMPTS[3:], GREEDY)
    assert packed and not any(len(one.pooled_rows) for one in packed)


def test_a_batch_has_one_pooling_launch_and_computes_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    def launching(states: torch.Tensor, ranges: torch.Tensor, out: torch.Tensor) -> None:
        launched.append(len(out))
        pool_states(states, ranges, out)

    def no_logits(self: CudaModel, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no token is sampled")

    monkeypatch.setattr("paceline.engine.cuda.parts.pool_states", launching)
    llm, device = on_kernels("tiny-qwen3", overlap="off")
    with llm:
        monkeypatch.setattr(CudaModel, "logits", no_logits)
        llm.embed(TEXTS[:2])
        assert len(launched) == device.stats.passes and sum(launched) > len(launched)


def test_embeddings_over_http() -> None:
    """On the executor of a GPU, as on the CPU."""
    reference, made = decoder("tiny-qwen3"), decoder("tiny-qwen3")
    tokenizer = synthetic_tokenizer(reference.spec.vocab_size)
    config = EngineConfig(device="cpu", threads=1)
    engines = [assemble(reference, tokenizer, config, BASE), assemble_kernels(made, tokenizer, config, {})]
    replies = []
    for engine in engines:
        try:
            body = {"model": "tiny", "input": [PROMPTS[0], LONG], "pooling": "last"}
            replies.append(Caller(make_app(engine)).ok("/v1/embeddings", body))
        finally:
            engine.close()
    cpu, kernels = ([np.array(item["embedding"]) for item in reply["data"]] for reply in replies)
    assert_same(kernels, cpu)
    assert replies[0]["usage"] == replies[1]["usage"] == {"prompt_tokens": 64, "total_tokens": 64}
