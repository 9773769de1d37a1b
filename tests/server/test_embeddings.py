"""Embeddings are the model's pooled hidden states, whatever the batch, the chunks and the cache."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.cpu.executor import CpuExecutor, CpuModelRunner
from paceline.engine.executor import Capabilities
from paceline.model.shapes import shape
from paceline.model.weights import random_decoder
from tests.model.contiguous_cache import ContiguousCache
from tests.server.serving import COMPLETIONS, TEXT, Caller, make_app, tiny_engine

PATH = "/v1/embeddings"
PAYLOAD: dict[str, Any] = {"model": "tiny", "input": "once upon a time"}
IDS = [9, *range(200, 290)]


def vectors(caller: Caller, **changes: Any) -> np.ndarray:
    reply = caller.ok(PATH, {**PAYLOAD, **changes})
    assert [item["index"] for item in reply["data"]] == list(range(len(reply["data"])))
    return np.array([item["embedding"] for item in reply["data"]])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_is_the_pooled_hidden_state_of_the_model(caller: Caller, pooling: str) -> None:
    decoder = random_decoder(shape("tiny-qwen3"), seed=0, dtype="float32", device="cpu")
    cache = ContiguousCache(decoder)
    states = decoder.forward(torch.tensor(IDS), torch.arange(len(IDS)), cache.attend).numpy()
    wanted = states.mean(axis=0) if pooling == "mean" else states[-1]
    found = vectors(caller, input=IDS, pooling=pooling)[0]
    assert np.allclose(found, wanted / np.linalg.norm(wanted), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_chunked_prefill_cache_hits_and_a_small_pool_do_not_change_embeddings(caller: Caller, pooling: str) -> None:
    plain = vectors(caller, input=IDS, pooling=pooling)
    again = vectors(caller, input=IDS, pooling=pooling)  # with a cached prompt
    engine = tiny_engine(chunk_tokens=13, kv_tokens=256, max_batch_tokens=64)
    try:
        small = Caller(make_app(engine))
        cut = vectors(small, input=[IDS, IDS, IDS[:50], IDS], pooling=pooling)
    finally:
        engine.close()
    assert np.allclose(plain, again, atol=1e-5)
    for index in (0, 1, 3):
        assert np.allclose(cut[index], plain[0], atol=1e-5)


def test_several_texts_return_embeddings_in_order(caller: Caller) -> None:
    texts = ["once", "upon", "a time"]
    together = vectors(caller, input=texts)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    for index, text in enumerate(texts):
        assert np.allclose(together[index], vectors(caller, input=text)[0], atol=1e-5)
    assert np.allclose(vectors(caller, input=[[5, 6], [7]])[1], vectors(caller, input=[7])[0], atol=1e-5)


def test_base64_encodes_the_same_vector(caller: Caller) -> None:
    reply = caller.ok(PATH, PAYLOAD, encoding_format="base64")
    numbers = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), "<f4")
    assert np.allclose(numbers, vectors(caller)[0], atol=1e-6)
    assert reply["object"] == "list" and reply["model"] == "tiny"
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 0


def test_generation_is_unchanged_beside_embeddings(caller: Caller) -> None:
    before = caller.ok(COMPLETIONS, TEXT)["choices"]
    vectors(caller, input=["a"] * 20)
    assert caller.ok(COMPLETIONS, TEXT)["choices"] == before


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"input": ""}, "input"), ({"input": []}, "input"), ({"input": [""]}, "input"), ({"input": [9999]}, "input"),
     ({"input": None}, "input"), ({"input": [5] * 3000}, "input"), ({"input": ["a"] * 129}, "input"),
     ({"encoding_format": "binary"}, "encoding_format"), ({"pooling": "max"}, "pooling"), ({"stream": True}, "stream"),
     ({"dimensions": 0}, "dimensions"), ({"dimensions": 65}, "dimensions"), ({"dimensions": "7"}, "dimensions")],
)  # fmt: skip
def test_an_invalid_embedding_request_names_the_param(caller: Caller, changes: Any, param: str) -> None:
    response = caller.post(PATH, {**PAYLOAD, **changes})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_an_executor_without_pooling_refuses_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    try:
        assert isinstance(engine.executor, CpuExecutor) and isinstance(engine.executor.runner, CpuModelRunner)
        monkeypatch.setattr(CpuExecutor, "capabilities", Capabilities(logits=True))
        response = Caller(make_app(engine)).post(PATH, PAYLOAD)
        assert response.status_code == 400 and "does not compute hidden states" in response.json()["error"]["message"]
    finally:
        engine.close()


def test_dimensions_are_the_first_of_the_vector_with_length_one(caller: Caller) -> None:
    whole, first = vectors(caller)[0], vectors(caller, dimensions=7)[0]
    assert len(whole) == 64 and np.allclose(first, whole[:7] / np.linalg.norm(whole[:7]), atol=1e-5)
    assert np.allclose(vectors(caller, dimensions=64)[0], whole, atol=1e-5)
    ollama = caller.ok("/api/embed", {"input": PAYLOAD["input"], "dimensions": 7})["embeddings"][0]
    assert np.allclose(ollama, first, atol=1e-5)
