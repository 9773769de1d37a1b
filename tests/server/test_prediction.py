"""OpenAI's `prediction`: text that the output may have. It never changes the output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.engine.engine import Engine
from tests.server.scripted import ScriptedCaller
from tests.server.serving import CHAT, HELLO, Caller, make_app, tiny_engine

BODY = {**HELLO, "max_tokens": 40, "ignore_eos": True, "skip_special_tokens": False}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Caller]:
    engine = tiny_engine(speculate="ngram")
    yield Caller(make_app(engine))
    engine.close()


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def text_of(reply: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in reply["choices"]]


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 3, "n": 3}], ids=str
)
def test_no_prediction_changes_the_output(caller: Caller, drafting: Caller, changes: dict[str, Any]) -> None:
    body = {**BODY, **changes}
    plain = caller.ok(CHAT, body)
    answer = text_of(plain)[0]
    parts = [{"type": "text", "text": answer[:9]}, {"type": "text", "text": answer[9:]}]
    for content in (answer, parts, answer[::-1], "", [], "x" * 1500):
        for one in (caller, drafting):  # without and with drafts
            assert text_of(one.ok(CHAT, {**body, **predicted(content)})) == text_of(plain)


def test_a_prediction_is_encoded_for_every_choice(engine: Engine) -> None:
    caller = ScriptedCaller(engine)
    caller.ok(CHAT, {**HELLO, **predicted("once upon a time"), "n": 2})
    expected = engine.tokenizer.encode("once upon a time", add_special=False)
    assert [job.draft_source.tolist() for job in caller.client.jobs] == [expected] * 2
    caller.ok(CHAT, {**HELLO, "prediction": None})
    assert not len(caller.client.jobs[-1].draft_source)


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"logprobs": True, "top_logprobs": 2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"stop": ["e"]},
        {"response_format": {"type": "json_object"}, "ignore_eos": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_prediction_goes_with_every_other_parameter(
    caller: Caller, drafting: Caller, changes: dict[str, Any]
) -> None:
    body = {**BODY, **changes}
    plain = caller.ok(CHAT, body)
    found = drafting.ok(CHAT, {**body, **predicted(text_of(plain)[0])})
    assert text_of(found) == text_of(plain)
    assert found["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]
