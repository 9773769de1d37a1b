"""Responses to valid requests."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.llm import LLM
from paceline.request import SamplingParams
from paceline.server.fields import UNSUPPORTED_FIELDS
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller, make_app, tiny_engine


def content(events: list[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def test_a_chat_response_has_openais_format(caller: Caller) -> None:
    reply = caller.ok(CHAT, HELLO)
    assert reply["object"] == "chat.completion" and reply["model"] == "tiny" and reply["id"].startswith("chatcmpl-")
    (choice,) = reply["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    usage = reply["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6


def test_a_stream_has_the_same_text_as_the_response_without_streaming(caller: Caller) -> None:
    full = caller.ok(CHAT, HELLO)
    events = caller.events(CHAT, HELLO)
    assert events.pop() == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content(events) == full["choices"][0]["message"]["content"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


def test_include_usage_adds_usage_to_the_last_chunk(caller: Caller) -> None:
    events = caller.events(CHAT, HELLO, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert all(event["usage"] is None for event in events)


def test_usage_counts_cached_prompt_tokens(caller: Caller) -> None:
    body = {**TEXT, "prompt": [7, *range(100, 200)]}
    first, second = (caller.ok(COMPLETIONS, body)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": 96}  # whole pages of 16


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("once", 1), (["once", "upon"], 2), ([11, 12, 13], 1), ([[11, 12], [13], [11, 12]], 3)],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_prompts_are_text_or_token_ids_one_or_several(caller: Caller, prompt: Any, count: int) -> None:
    reply = caller.ok(COMPLETIONS, TEXT, prompt=prompt)
    assert reply["object"] == "text_completion"
    assert [choice["index"] for choice in reply["choices"]] == list(range(count))
    assert reply["usage"]["completion_tokens"] == 6 * count
    alone = [
        caller.ok(COMPLETIONS, TEXT, prompt=one)["choices"][0]["text"] for one in (prompt if count > 1 else [prompt])
    ]
    assert [choice["text"] for choice in reply["choices"]] == alone


def test_several_prompts_stream_concurrently(caller: Caller) -> None:
    prompts = ["once", "upon", "a time"]
    full = caller.ok(COMPLETIONS, TEXT, prompt=prompts)
    events = caller.events(COMPLETIONS, TEXT, prompt=prompts, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"] == {**full["usage"], "prompt_tokens_details": {"cached_tokens": 0}}
    texts, reasons = [""] * 3, [None] * 3
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in full["choices"]]
    assert reasons == ["length"] * 3


def test_completions_default_to_16_tokens(caller: Caller) -> None:
    body = {"model": "tiny", "prompt": "once", "ignore_eos": True}
    assert caller.ok(COMPLETIONS, body)["usage"]["completion_tokens"] == 16


def test_max_completion_tokens_is_an_alias_of_max_tokens(caller: Caller) -> None:
    body = {**HELLO, "max_tokens": None, "max_completion_tokens": 3}
    assert caller.ok(CHAT, body)["usage"]["completion_tokens"] == 3


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(caller: Caller) -> None:
    text = caller.ok(COMPLETIONS, TEXT)["choices"][0]["text"]
    stop = text[3:5]
    for stops in (stop, [stop, "never to be seen"]):
        (choice,) = caller.ok(COMPLETIONS, TEXT, stop=stops)["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == text[: text.index(stop)]


def test_a_seed_makes_sampling_repeatable(caller: Caller) -> None:
    body = {**HELLO, "temperature": 1.5, "max_tokens": 12}

    def output(seed: int) -> str:
        return caller.ok(CHAT, body, seed=seed)["choices"][0]["message"]["content"]

    assert output(1) == output(1)
    assert len({output(seed) for seed in range(4)}) > 1


def test_top_k_of_one_is_greedy(caller: Caller) -> None:
    greedy, chosen = caller.ok(CHAT, HELLO), caller.ok(CHAT, HELLO, temperature=2, top_k=1)
    assert greedy["choices"] == chosen["choices"]


def test_a_stop_token_ends_the_text_but_not_before_min_tokens(caller: Caller) -> None:
    stop = {"stop_token_ids": list(range(512))}  # the whole vocabulary
    assert caller.ok(COMPLETIONS, TEXT, **stop)["usage"]["completion_tokens"] == 1
    assert caller.ok(COMPLETIONS, TEXT, **stop, min_tokens=4)["usage"]["completion_tokens"] == 4


def test_content_may_be_text_parts_and_developer_means_system(caller: Caller) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    full = caller.ok(CHAT, HELLO)
    assert caller.ok(CHAT, HELLO, messages=[{"role": "user", "content": parts}])["choices"] == full["choices"]
    system, developer = (
        caller.ok(CHAT, HELLO, messages=[{"role": role, "content": "Be brief"}, *HELLO["messages"]])["choices"]
        for role in ("system", "developer")
    )
    assert system == developer != full["choices"]


def test_a_response_message_is_accepted_in_the_next_request(caller: Caller) -> None:
    reply = caller.ok(CHAT, HELLO)["choices"][0]["message"]
    caller.ok(CHAT, HELLO, messages=[*HELLO["messages"], reply, {"role": "user", "content": "and then?"}])


def test_ignored_fields_and_neutral_values_are_accepted(caller: Caller) -> None:
    neutral = {name: values[0] for name, values in UNSUPPORTED_FIELDS.items() if values}
    nothing = dict.fromkeys(UNSUPPORTED_FIELDS)
    harmless = {"user": "u-1", "store": True, "metadata": {"a": "b"}}
    plain = caller.ok(CHAT, HELLO)["choices"]
    for fields in (neutral, nothing, harmless):
        assert caller.ok(CHAT, HELLO, **fields)["choices"] == plain


def test_models_are_listed_and_found(caller: Caller) -> None:
    listed = caller.request("GET", "/v1/models").json()
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["tiny"]
    assert caller.request("GET", "/v1/models/tiny").json() == listed["data"][0]


def test_health_reports_engine_statistics(caller: Caller) -> None:
    response = caller.request("GET", "/health")
    assert response.status_code == 200
    health = response.json()
    assert health["status"] == "ok" and health["failure"] is None
    assert health["num_running"] == health["num_waiting"] == 0
    assert health["kv_tokens"] == health["kv_tokens_free"] == 8192


def test_a_long_body_parsed_in_a_thread_gives_the_same_response(caller: Caller) -> None:
    padded = {**HELLO, "metadata": {"padding": "x" * 40_000}}
    assert caller.ok(CHAT, padded)["choices"] == caller.ok(CHAT, HELLO)["choices"]


def test_newlines_in_the_text_do_not_break_server_sent_events(caller: Caller) -> None:
    """The temperature is so high that all tokens are sampled: newlines, control characters, partial characters."""
    body = {**TEXT, "temperature": 1000, "max_tokens": 150, "n": 16, "seed": 0, "ignore_eos": True}
    text = "".join(event["choices"][0]["text"] for event in caller.events(COMPLETIONS, body)[:-1])
    assert "\n" in text and "\r" in text, "use another seed: this one sampled none"


def test_max_tokens_is_clipped_to_what_fits_and_each_choice_says_so() -> None:
    engine = tiny_engine(kv_tokens=64, clip_max_tokens=True)
    caller = Caller(make_app(engine))
    try:
        many = {"max_tokens": 10**9, "ignore_eos": True}
        reply = caller.ok(COMPLETIONS, TEXT, prompt=[[5] * 40, [6] * 60, [7] * 10], **many)
        assert [choice["clipped_max_tokens"] for choice in reply["choices"]] == [24, 4, 54]
        assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
        assert reply["usage"]["completion_tokens"] == 24 + 4 + 54
        *before, last, done = caller.events(COMPLETIONS, TEXT, prompt=[5] * 40, **many)
        assert (last["choices"][0]["clipped_max_tokens"], done) == (24, "[DONE]")
        assert all("clipped_max_tokens" not in event["choices"][0] for event in before)
        chat = caller.ok(CHAT, HELLO, **many)
        clipped = 64 - chat["usage"]["prompt_tokens"]
        assert chat["choices"][0]["clipped_max_tokens"] == clipped == chat["usage"]["completion_tokens"]
        *before, last, done = caller.events(CHAT, HELLO, **many)
        assert last["choices"][0]["clipped_max_tokens"] == clipped
        for fits in ({"max_tokens": 2}, {"max_tokens": None, "ignore_eos": True}):
            assert "clipped_max_tokens" not in caller.ok(CHAT, HELLO, **fits)["choices"][0]
        refused = caller.post(COMPLETIONS, TEXT, prompt=[5] * 64, **many)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        (choice,) = (
            LLM.from_engine(engine).generate([[5] * 40], SamplingParams(max_tokens=100, ignore_eos=True))[0].choices
        )
        assert (choice.clipped_max_tokens, len(choice.token_ids), choice.finish_reason) == (24, 24, "length")
    finally:
        engine.close()
