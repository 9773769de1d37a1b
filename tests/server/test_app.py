"""What a client gets when it asks properly."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.server.fields import NOT_YET
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller


def content(events: list[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def test_a_chat_answer_has_the_shape_of_openais(caller: Caller) -> None:
    answer = caller.ok(CHAT, HELLO)
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6


def test_a_stream_says_what_the_whole_answer_says(caller: Caller) -> None:
    whole = caller.ok(CHAT, HELLO)
    events = caller.events(CHAT, HELLO)
    assert events.pop() == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content(events) == whole["choices"][0]["message"]["content"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


def test_usage_comes_last_in_a_stream_that_asks_for_it(caller: Caller) -> None:
    events = caller.events(CHAT, HELLO, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert all(event["usage"] is None for event in events)


def test_usage_counts_the_prompt_tokens_that_were_cached(caller: Caller) -> None:
    body = {**TEXT, "prompt": [7, *range(100, 200)]}
    first, second = (caller.ok(COMPLETIONS, body)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": 96}  # whole pages of 16


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("once", 1), (["once", "upon"], 2), ([11, 12, 13], 1), ([[11, 12], [13], [11, 12]], 3)],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_a_prompt_may_be_text_or_ids_one_or_many(caller: Caller, prompt: Any, count: int) -> None:
    answer = caller.ok(COMPLETIONS, TEXT, prompt=prompt)
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    assert answer["usage"]["completion_tokens"] == 6 * count
    alone = [caller.ok(COMPLETIONS, TEXT, prompt=one)["choices"][0]["text"] for one in
             (prompt if count > 1 else [prompt])]  # fmt: skip
    assert [choice["text"] for choice in answer["choices"]] == alone


def test_many_prompts_stream_side_by_side(caller: Caller) -> None:
    prompts = ["once", "upon", "a time"]
    whole = caller.ok(COMPLETIONS, TEXT, prompt=prompts)
    events = caller.events(COMPLETIONS, TEXT, prompt=prompts, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"] == {**whole["usage"], "prompt_tokens_details": {"cached_tokens": 0}}
    texts, reasons = [""] * 3, [None] * 3
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == ["length"] * 3


def test_completions_have_16_tokens_if_nothing_is_said(caller: Caller) -> None:
    body = {"model": "tiny", "prompt": "once", "ignore_eos": True}
    assert caller.ok(COMPLETIONS, body)["usage"]["completion_tokens"] == 16


def test_max_completion_tokens_is_max_tokens(caller: Caller) -> None:
    body = {**HELLO, "max_tokens": None, "max_completion_tokens": 3}
    assert caller.ok(CHAT, body)["usage"]["completion_tokens"] == 3


def test_a_stop_string_ends_the_answer_before_itself(caller: Caller) -> None:
    text = caller.ok(COMPLETIONS, TEXT)["choices"][0]["text"]
    stop = text[3:5]
    for asked in (stop, [stop, "never to be seen"]):
        (choice,) = caller.ok(COMPLETIONS, TEXT, stop=asked)["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == text[: text.index(stop)]


def test_a_seed_makes_chance_repeatable(caller: Caller) -> None:
    body = {**HELLO, "temperature": 1.5, "max_tokens": 12}

    def said(seed: int) -> str:
        return caller.ok(CHAT, body, seed=seed)["choices"][0]["message"]["content"]

    assert said(1) == said(1)
    assert len({said(seed) for seed in range(4)}) > 1


def test_top_k_of_one_is_greedy(caller: Caller) -> None:
    greedy, chosen = caller.ok(CHAT, HELLO), caller.ok(CHAT, HELLO, temperature=2, top_k=1)
    assert greedy["choices"] == chosen["choices"]


def test_a_stop_token_ends_the_answer_but_not_before_min_tokens(caller: Caller) -> None:
    stop = {"stop_token_ids": list(range(512))}  # every token there is
    assert caller.ok(COMPLETIONS, TEXT, **stop)["usage"]["completion_tokens"] == 1
    assert caller.ok(COMPLETIONS, TEXT, **stop, min_tokens=4)["usage"]["completion_tokens"] == 4


def test_content_may_come_in_parts_and_developer_means_system(caller: Caller) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    whole = caller.ok(CHAT, HELLO)
    assert caller.ok(CHAT, HELLO, messages=[{"role": "user", "content": parts}])["choices"] == whole["choices"]
    system, developer = (
        caller.ok(CHAT, HELLO, messages=[{"role": role, "content": "Be brief"}, *HELLO["messages"]])["choices"]
        for role in ("system", "developer")
    )
    assert system == developer != whole["choices"]


def test_a_message_of_ours_can_be_sent_back(caller: Caller) -> None:
    said = caller.ok(CHAT, HELLO)["choices"][0]["message"]
    caller.ok(CHAT, HELLO, messages=[*HELLO["messages"], said, {"role": "user", "content": "and then?"}])


def test_fields_that_change_nothing_are_accepted(caller: Caller) -> None:
    neutral = {name: values[0] for name, values in NOT_YET.items() if values}
    nothing = dict.fromkeys(NOT_YET)
    harmless = {"user": "u-1", "store": True, "metadata": {"a": "b"}}
    plain = caller.ok(CHAT, HELLO)["choices"]
    for fields in (neutral, nothing, harmless):
        assert caller.ok(CHAT, HELLO, **fields)["choices"] == plain


def test_models_are_listed_and_found(caller: Caller) -> None:
    listed = caller.request("GET", "/v1/models").json()
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["tiny"]
    assert caller.request("GET", "/v1/models/tiny").json() == listed["data"][0]


def test_health_tells_what_the_engine_does(caller: Caller) -> None:
    response = caller.request("GET", "/health")
    assert response.status_code == 200
    health = response.json()
    assert health["status"] == "ok" and health["failure"] is None
    assert health["num_running"] == health["num_waiting"] == 0
    assert health["kv_tokens"] == health["kv_tokens_free"] == 8192


def test_a_long_body_is_read_aside_and_answered_the_same(caller: Caller) -> None:
    padded = {**HELLO, "metadata": {"padding": "x" * 40_000}}
    assert caller.ok(CHAT, padded)["choices"] == caller.ok(CHAT, HELLO)["choices"]


def test_a_newline_cannot_break_an_event(caller: Caller) -> None:
    """Hot enough to draw every token there is: newlines, control characters, halves of characters."""
    text = ""
    for seed in range(3):
        body = {**TEXT, "temperature": 1000, "max_tokens": 800, "seed": seed, "ignore_eos": True}
        text += "".join(event["choices"][0]["text"] for event in caller.events(COMPLETIONS, body)[:-1])
    assert "\n" in text and "\r" in text, "another seed is needed: this one drew none"
