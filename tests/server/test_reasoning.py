"""Thinking models over HTTP: reasoning apart from the answer, and the fields that control it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.request import Grammar
from tests.server.scripted import joined, scripted
from tests.server.serving import CHAT, Caller

USER = {"role": "user", "content": "What is <think>?"}
BODY = {"model": "tiny", "messages": [USER]}
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
# As Qwen3 and SmolLM3 turn thinking off; as DeepSeek-R1 opens it in the prompt; as gpt-oss names the effort.
SWITCH = TURNS + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPENED = TURNS + "<think>\n"
EFFORT = TURNS + "{{ reasoning_effort }}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
OUTPUT = "<think>\nTwo and two.\n</think>\n\nFour."


@pytest.mark.parametrize(
    ("template", "text", "special"),
    [
        (SWITCH, OUTPUT, ()),
        (OPENED, "Two and two.\n</think>\n\nFour.", ()),
        (TURNS.replace("<think>", "[THINK]"), "[THINK]Two and two.[/THINK]Four.", ("[THINK]", "[/THINK]")),
    ],
    ids=["qwen3", "deepseek-r1", "mistral"],
)
def test_reasoning_is_returned_apart_from_the_answer(template: str, text: str, special: tuple[str, ...]) -> None:
    caller, client = scripted(template.replace("</think>", "[/THINK]") if special else template, text, special)
    body = caller.ok(CHAT, BODY, n=2)
    for choice in body["choices"]:
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("Two and two.", "Four.")
    end = text.index("Four.")
    num_tokens = len(client.tokenizer.encode(text[:end].rstrip(), add_special=False))
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * num_tokens
    events = caller.events(CHAT, BODY, stream_options={"include_usage": True})
    message = joined(events)
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "Four.")
    assert events[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens


def test_reasoning_can_stay_in_the_content() -> None:
    caller, _ = scripted(SWITCH, OUTPUT)
    for made, changes in (
        (caller, {"separate_reasoning": False}),
        (scripted(SWITCH, OUTPUT, separate_reasoning=False)[0], {}),
    ):
        message = made.ok(CHAT, BODY, **changes)["choices"][0]["message"]
        assert message["content"] == OUTPUT and "reasoning_content" not in message
        assert joined(made.events(CHAT, BODY, **changes))["content"] == OUTPUT
    made, _ = scripted(SWITCH, OUTPUT, separate_reasoning=False)
    assert made.ok(CHAT, BODY, separate_reasoning=True)["choices"][0]["message"]["content"] == "Four."


def test_a_model_without_reasoning_is_unchanged() -> None:
    caller, _ = scripted(PLAIN, OUTPUT)
    body = caller.ok(CHAT, BODY, reasoning_effort="none", chat_template_kwargs={"enable_thinking": False})
    assert body["choices"][0]["message"]["content"] == OUTPUT
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize(
    ("template", "fields", "end"),
    [
        (SWITCH, {}, "assistant\n"),
        (SWITCH, {"chat_template_kwargs": {"enable_thinking": False}}, "</think>\n\n"),
        (SWITCH, {"reasoning_effort": "none"}, "</think>\n\n"),
        (SWITCH, {"reasoning_effort": "high"}, "assistant\n"),
        (SWITCH, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "assistant\n"),
        (EFFORT, {"reasoning_effort": "low"}, "assistant\nlow"),
    ],
)
def test_fields_become_variables_of_the_template(template: str, fields: dict[str, Any], end: str) -> None:
    caller, client = scripted(template, "hi")
    caller.ok(CHAT, BODY, **fields)
    assert client.prompt.endswith(end)


@pytest.mark.parametrize(
    ("template", "fields", "message"),
    [
        (SWITCH, {"chat_template_kwargs": {"messages": []}}, "'messages', which the server sets: omit it."),
        (SWITCH, {"chat_template_kwargs": {"tools": []}}, "'tools', which the server sets"),
        (SWITCH, {"chat_template_kwargs": {"add_generation_prompt": False}}, "which the server sets"),
        (SWITCH, {"chat_template_kwargs": {"_step": 1}}, "which the server sets"),
        ("{{ raise_exception('no') }}", {"chat_template_kwargs": {"raise_exception": 1}}, "does not use: omit it."),
        ("{% for %}", {}, "chat_template cannot be compiled"),
        (SWITCH, {"chat_template_kwargs": {"enable_thinkin": False}}, "did you mean enable_thinking?"),
        (PLAIN, {"chat_template_kwargs": {"enable_thinking": True}}, "does not use: omit it."),
        (SWITCH, {"chat_template_kwargs": 1}, "chat_template_kwargs"),
        (PLAIN, {"reasoning_effort": "high"}, "reasoning_effort is 'high', and the model's chat template has no"),
        (OPENED, {"reasoning_effort": "none"}, "reasoning_effort is 'none', and the model's chat template has no"),
        (SWITCH, {"reasoning_effort": "much"}, "reasoning_effort"),
        (SWITCH, {"separate_reasoning": "yes"}, "separate_reasoning"),
        (SWITCH, {"messages": [{**USER, "reasoning_content": "x"}]}, "messages[0].reasoning_content is 'x'"),
        (SWITCH, {"messages": [{"role": "assistant", "content": "", "reasoning": 1}]}, "messages[0].reasoning is 1"),
    ],
)
def test_what_the_template_cannot_honour_is_refused(template: str, fields: dict[str, Any], message: str) -> None:
    caller, _ = scripted(template, "hi")
    response = caller.post(CHAT, {**BODY, **fields})
    assert response.status_code == 400 and message in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_earlier_turns_is_given_to_the_template(name: str) -> None:
    caller, client = scripted(SWITCH, "hi")
    for content in ("Four.", None):
        turn = {"role": "assistant", "content": content, name: "Two and two."}
        caller.ok(CHAT, BODY, messages=[USER, turn, USER])
        assert f"<think>Two and two.</think>{content or ''}<|im_end|>" in client.prompt


def test_a_grammar_constrains_the_answer_after_the_reasoning() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    expected: list[tuple[str, dict[str, Any], Any]] = [
        (SWITCH, {}, ("<think>", "</think>")),
        (OPENED, {}, ("", "</think>")),
        (SWITCH, {"reasoning_effort": "none"}, None),
        (OPENED, {"separate_reasoning": False}, None),
        (PLAIN, {}, None),
    ]
    for template, fields, reasoning in expected:
        caller, client = scripted(template, "hi")
        caller.ok(CHAT, BODY, response_format=format, **fields)
        assert client.jobs[0].params.grammar == Grammar("json_schema", '{"type": "integer"}', reasoning)


# ---------------------------------------------------------------------- other APIs


def test_messages_have_thinking_blocks() -> None:
    caller, client = scripted(SWITCH, OUTPUT)
    thinking = {"type": "thinking", "thinking": "Two and two.", "signature": ""}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "One more.", "signature": ""},
                                          {"type": "text", "text": "Three."}]},
        {"role": "user", "content": "b"},
    ]  # fmt: skip
    body = {"model": "tiny", "max_tokens": 200, "messages": turns}
    assert caller.ok("/v1/messages", body)["content"] == [thinking, {"type": "text", "text": "Four."}]
    assert "<think>One more.</think>Three." in client.prompt
    events = named_events(caller, "/v1/messages", body)
    assert [event["content_block"] for event in events if event["type"] == "content_block_start"] == [
        {**thinking, "thinking": ""},
        {"type": "text", "text": ""},
    ]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Two and two."
    assert "".join(delta.get("text", "") for delta in deltas) == "Four."
    caller.ok("/v1/messages", body, thinking={"type": "enabled", "budget_tokens": 1024})
    assert not client.prompt.endswith("</think>\n\n")
    caller.ok("/v1/messages", body, thinking={"type": "disabled"})
    assert client.prompt.endswith("<think>\n\n</think>\n\n")


def test_responses_have_reasoning_items() -> None:
    caller, client = scripted(SWITCH, OUTPUT, stored_responses=0)
    items = [
        {"role": "user", "content": "a"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "One more."}],
        },
        {"type": "message", "role": "assistant", "content": "Three."},
        {"role": "user", "content": "b"},
    ]
    body = {"model": "tiny", "input": items, "reasoning": {"effort": "high", "summary": "auto"}}
    found = caller.ok("/v1/responses", body)
    assert [item["type"] for item in found["output"]] == ["reasoning", "message"]
    assert found["output"][0]["content"] == [{"type": "reasoning_text", "text": "Two and two."}]
    assert found["output"][1]["content"][0]["text"] == "Four."
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 5
    assert found["reasoning"] == {"effort": "high", "summary": "auto", "generate_summary": None}
    assert "<think>One more.</think>Three." in client.prompt
    events = named_events(caller, "/v1/responses", body)
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Two and two."
    assert events[-1]["response"]["output"][0]["content"] == found["output"][0]["content"]
    caller.ok("/v1/responses", body, reasoning={"effort": "none"})
    assert client.prompt.endswith("<think>\n\n</think>\n\n")
    alone = caller.post("/v1/responses", body, input=items[:2])
    assert alone.status_code == 400 and "a reasoning item without the message" in alone.text


def test_anthropics_effort_is_used_where_the_template_has_a_variable_for_it() -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": [USER], "output_config": {"effort": "max"}}
    caller, client = scripted(EFFORT, OUTPUT)
    caller.ok("/v1/messages", body)
    assert client.prompt.endswith("assistant\nxhigh")
    caller, client = scripted(SWITCH, OUTPUT)
    caller.ok("/v1/messages", body)
    assert client.prompt.endswith("assistant\n")
    error = caller.post("/v1/messages", {**body, "output_config": {"effort": "most"}}).json()["error"]
    assert error["message"].startswith("output_config.effort is 'most'")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama_has_thinking(path: str) -> None:
    caller, client = scripted(SWITCH, OUTPUT)
    body: dict[str, Any] = {"model": "tiny", "prompt": "a"}
    if path == "/api/chat":
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    lines = [json.loads(line) for line in caller.post(path, body).text.splitlines()]
    shown = [line["message"] if path == "/api/chat" else line for line in [caller.ok(path, body, stream=False), *lines]]
    for parts in (shown[:1], shown[1:]):
        assert "".join(part.get("thinking", "") for part in parts) == "Two and two."
        assert "".join(part.get("content", part.get("response", "")) for part in parts) == "Four."
    caller.ok(path, body, stream=False, think=False)
    assert client.prompt.endswith("<think>\n\n</think>\n\n")
    caller.ok(path, body, stream=False, think="low")
    assert not client.prompt.endswith("</think>\n\n")


def named_events(caller: Caller, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream whose events have names."""
    text = caller.post(path, body, stream=True).text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
