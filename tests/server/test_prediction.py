"""OpenAI's `prediction`: text that the output may have. It never changes the output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.codec import encode
from paceline.engine.engine import Engine
from paceline.server.messages import SubmitJob, decode_to_engine
from tests.server.scripted import ScriptedCaller
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller, make_app, tiny_engine

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


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.8, "seed": 3, "n": 3}], ids=str)
def test_no_prediction_changes_the_output(caller: Caller, drafting: Caller, changes: dict[str, Any]) -> None:
    body = {**BODY, "max_tokens": 24, **changes}
    plain = caller.ok(CHAT, body)
    answer = text_of(plain)[0]
    parts = [{"type": "text", "text": answer[:9]}, {"type": "text", "text": answer[9:]}]
    assert text_of(caller.ok(CHAT, {**body, **predicted(answer)})) == text_of(plain), "without drafts"
    for content in (answer, parts, answer[::-1], "", [], "x" * 1500):
        assert text_of(drafting.ok(CHAT, {**body, **predicted(content)})) == text_of(plain)


def test_a_prediction_is_encoded_for_every_choice(engine: Engine) -> None:
    caller = ScriptedCaller(engine)
    caller.ok(CHAT, {**HELLO, **predicted("once upon a time"), "n": 2})
    expected = engine.tokenizer.encode("once upon a time", add_special=False)
    assert [job.draft_source.tolist() for job in caller.client.jobs] == [expected] * 2
    message = decode_to_engine(encode(SubmitJob("front end", 1, caller.client.jobs[0])))
    assert isinstance(message, SubmitJob) and message.job.draft_source.tolist() == expected
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


def drafted(usage: dict[str, Any], details: str = "completion_tokens_details") -> tuple[int, int]:
    return usage[details]["accepted_prediction_tokens"], usage[details]["rejected_prediction_tokens"]


def test_usage_counts_accepted_and_rejected_tokens(caller: Caller, drafting: Caller) -> None:
    # Letters that are never merged: their text has the same tokens when it is sent back.
    letters = {str(token): 90 for token in caller.app.state.tokenizer.encode("ZYXWVUTSRQ")}
    body = {**BODY, "temperature": 1, "seed": 3, "logit_bias": letters}
    plain = caller.ok(CHAT, {**body, **predicted("anything")})
    assert drafted(plain["usage"]) == (0, 0), "nothing is drafted without speculate"
    wrong = drafting.ok(CHAT, {**body, **predicted("0123456789")})["usage"]
    assert drafted(wrong)[1] > 0, "its beginning was tried"
    body |= predicted(text_of(plain)[0])
    right = drafting.ok(CHAT, body)["usage"]
    assert right["completion_tokens"] == 40 and drafted(right)[0] >= 30 and drafted(right)[1] <= 7
    events = drafting.events(CHAT, body, stream_options={"include_usage": True})
    assert drafted(events[-2]["usage"]) == drafted(right)
    assert drafted(drafting.ok(CHAT, {**body, "n": 2})["usage"])[0] >= drafted(right)[0]


def test_usage_of_other_routes_counts_drafts(drafting: Caller) -> None:
    repeated = {**TEXT, "max_tokens": 40, "ignore_eos": True, "logit_bias": {"7": 100}}
    assert drafted(drafting.ok(COMPLETIONS, repeated)["usage"])[0] > 20
    found = drafting.ok("/v1/responses", {"model": "tiny", "input": "Hello", "max_output_tokens": 20, "temperature": 0})
    accepted, rejected = drafted(found["usage"], "output_tokens_details")
    assert 0 <= accepted <= found["usage"]["output_tokens"] and rejected >= 0


def test_tokens_behind_a_stop_string_are_not_counted_as_accepted(drafting: Caller) -> None:
    body = {**BODY, "logit_bias": {"7": 100}}
    stop = text_of(drafting.ok(CHAT, {**body, "max_tokens": 1}))[0] * 9
    usage = drafting.ok(CHAT, {**body, "stop": [stop], "stream": False})["usage"]
    assert usage["completion_tokens"] == 9 and drafted(usage)[0] <= 9
