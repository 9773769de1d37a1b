"""Scores are the cosines of embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.server.serving import Caller

RERANK, SCORE = "/v1/rerank", "/score"
TEXTS = ["once upon a time", "the end", "a time", "zebra crossing"]
BODY: dict[str, Any] = {"model": "tiny", "query": "once upon", "documents": TEXTS}


def cosines(caller: Caller, query: str, texts: list[str], **fields: Any) -> np.ndarray:
    data = caller.ok("/v1/embeddings", {"model": "tiny", "input": [query, *texts], **fields})["data"]
    vectors = np.array([item["embedding"] for item in data])
    return vectors[1:] @ vectors[0]


@pytest.mark.parametrize("fields", [{}, {"pooling": "last"}], ids=str)
def test_documents_are_ordered_by_their_similarity_to_the_query(caller: Caller, fields: Any) -> None:
    wanted = cosines(caller, "once upon", TEXTS, **fields)
    reply = caller.ok(RERANK, BODY, **fields)
    assert [item["index"] for item in reply["results"]] == np.argsort(-wanted, kind="stable").tolist()
    for item in reply["results"]:
        assert item["relevance_score"] == pytest.approx(wanted[item["index"]], abs=1e-5)
        assert item["document"] == {"text": TEXTS[item["index"]]}
    assert reply["model"] == "tiny" and reply["usage"]["total_tokens"] > 0


def test_top_n_and_return_documents(caller: Caller) -> None:
    full = caller.ok(RERANK, BODY)["results"]
    documents = [{"text": text} for text in TEXTS]
    reply = caller.ok(RERANK, BODY, documents=documents, top_n=2, return_documents=False)["results"]
    assert [item["index"] for item in reply] == [item["index"] for item in full[:2]]
    assert all("document" not in item for item in reply)
    assert len(caller.ok(RERANK, BODY, top_n=99)["results"]) == 4


def test_scores_of_one_text_with_many_and_of_pairs(caller: Caller) -> None:
    wanted = cosines(caller, "once upon", TEXTS)
    reply = caller.ok(SCORE, {"model": "tiny", "text_1": "once upon", "text_2": TEXTS})
    assert reply["object"] == "list" and [item["index"] for item in reply["data"]] == [0, 1, 2, 3]
    assert [item["score"] for item in reply["data"]] == pytest.approx(wanted.tolist(), abs=1e-5)
    pairs = caller.ok(SCORE, {"model": "tiny", "text_1": TEXTS, "text_2": TEXTS})["data"]
    assert [item["score"] for item in pairs] == pytest.approx([1.0] * 4, abs=1e-5)
    (one,) = caller.ok(SCORE, {"model": "tiny", "text_1": "once upon", "text_2": TEXTS[0]})["data"]
    assert one["score"] == pytest.approx(wanted[0], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (RERANK, {"documents": []}, "documents", "documents is []: give at least one document."),
        (RERANK, {"documents": ["a"] * 129}, "documents", "documents has 129 entries: give at most 128."),
        (RERANK, {"documents": ["a", ""]}, "documents", "documents[1] is empty: give at least one token."),
        (RERANK, {"documents": [{"image": "x"}]}, "documents", "Unknown parameter: documents[0].image."),
        (RERANK, {"documents": ["a", "b " * 3000]}, "documents", "documents[1] has"),
        (RERANK, {"query": "b " * 3000}, "documents", "query has"),
        (RERANK, {"top_n": 0}, "top_n", "top_n is 0: give at least 1."),
        (RERANK, {"max_chunks_per_doc": 3}, "max_chunks_per_doc", "Unknown parameter: max_chunks_per_doc."),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "text_1 has 2 texts and text_2 has 1: give one"),
        (SCORE, {"text_1": "a", "text_2": []}, "text_1", "text_1 has 1 texts and text_2 has 0: give one"),
        (SCORE, {"text_1": "a"}, "text_2", "`text_2` is required."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_request_names_the_param(caller: Caller, path: str, fields: Any, param: str, message: str) -> None:
    body = {**BODY, **fields} if path == RERANK else {"model": "tiny", **fields}
    response = caller.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["message"].startswith(message)
