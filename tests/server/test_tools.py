"""Tool calls of each family over HTTP: streamed and not, with markers that are special tokens or plain text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.request import Grammar
from paceline.text.harmony import TOKENS
from tests.server.scripted import joined, scripted
from tests.server.serving import CHAT

TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL]}
ARGUMENTS = '{"city": "São Paulo", "days": 3}'
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {  # template, output, special tokens
    "qwen": (
        "<tool_call>",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        ("<tool_call>", "</tool_call>"),
    ),
    "qwen3-coder": ("<tool_call><function=", XML, ()),
    "glm": (
        "<tool_call><arg_key>",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São Paulo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "llama": ("<|python_tag|>", f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}', ("<|python_tag|>",)),
    "mistral": (
        "[TOOL_CALLS]",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
        ("[TOOL_CALLS]",),
    ),
    "granite": (
        "<|tool_call|>",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
        ("<|tool_call|>",),
    ),
    "mistral-args": ("[TOOL_CALLS][ARGS]", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", ("[TOOL_CALLS]", "[ARGS]")),
}


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_parsed_streamed_and_not(family: str, is_special: bool) -> None:
    syntax, output, special = FAMILIES[family]
    caller, client = scripted(TURNS + syntax + "{% endif %}", output, special if is_special else ())
    (choice,) = caller.ok(CHAT, BODY)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert (len(call["id"]) == 9) == family.startswith("mistral")
    message = joined(caller.events(CHAT, BODY))
    (streamed,) = message["tool_calls"]
    assert (streamed["name"], streamed["arguments"]) == ("get_weather", ARGUMENTS)
    assert message["finish_reason"] == "tool_calls" and message["content"] == ""
    assert '"get_weather"' in client.prompt


@pytest.mark.parametrize("is_special", [True, False])
def test_channels_of_gpt_oss_are_reasoning_content_and_calls(is_special: bool) -> None:
    analysis, start = "<|channel|>analysis<|message|>Rain?<|end|>", "<|start|>assistant"
    preamble = f"{start}<|channel|>commentary<|message|>I look.<|end|>"
    call = f"{start}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}"
    template = TURNS + "{% endif %}<|start|>assistant{# <|channel|><|message|> #}"
    caller, client = scripted(template, analysis + preamble + call, TOKENS if is_special else ())
    body = caller.ok(CHAT, BODY)
    (choice,) = body["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Rain?", "I look.")
    assert choice["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    num_tokens = len(client.tokenizer.encode(analysis, add_special=False))
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens
    streamed = joined(caller.events(CHAT, BODY))
    assert (streamed["reasoning_content"], streamed["content"]) == ("Rain?", "I look.")
    assert [(one["name"], one["arguments"]) for one in streamed["tool_calls"]] == [("get_weather", ARGUMENTS)]
    client.text = f"{analysis}{start}<|channel|>final<|message|>Yes."
    (choice,) = caller.ok(CHAT, BODY, tools=None)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Yes.", "stop")
    raw = caller.ok(CHAT, BODY, separate_reasoning=False)["choices"][0]["message"]
    assert raw["content"] == client.text and "reasoning_content" not in raw

    caller.ok(CHAT, BODY, tool_choice="required")
    grammar = client.jobs[-1].params.grammar
    assert grammar is not None and grammar.prefix == "" and grammar.reasoning[1] == f"<|end|>{start}"
    caller.ok(CHAT, BODY, tools=None, response_format={"type": "json_object"})
    grammar = client.jobs[-1].params.grammar
    assert grammar is not None and grammar.prefix == "<|channel|>final<|message|>"


@pytest.mark.parametrize("family", FAMILIES)
def test_without_tools_the_output_is_text(family: str) -> None:
    syntax, output, _ = FAMILIES[family]
    caller, _ = scripted(TURNS + syntax + "{% endif %}", output)
    for changes in ({"tools": None}, {"tool_choice": "none"}):
        (choice,) = caller.ok(CHAT, {**BODY, **changes})["choices"]
        assert choice["message"]["content"] == output and choice["finish_reason"] == "stop"


def test_a_forced_call_may_have_reasoning_before_it() -> None:
    caller, client = scripted(
        TURNS + "<tool_call>{% endif %}{# </think> #}", "<think>Hm.</think>" + FAMILIES["qwen"][1]
    )
    body: dict[str, Any] = {**BODY, "tool_choice": "required"}
    message = caller.ok(CHAT, body)["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm." and json.loads(message["tool_calls"][0]["function"]["arguments"])
    grammar = client.jobs[0].params.grammar
    assert isinstance(grammar, Grammar) and grammar.kind == "lark" and grammar.reasoning == ("<think>", "</think>")


def test_a_forced_call_ignores_the_format_of_text_and_refuses_other_constraints() -> None:
    """Instructor sends both: a forced call has no text that `response_format` could apply to."""
    caller, client = scripted(TURNS + "<tool_call>{% endif %}", FAMILIES["qwen"][1])
    body: dict[str, Any] = {**BODY, "tool_choice": "required"}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    (choice,) = caller.ok(CHAT, {**body, "response_format": format})["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    grammar = client.jobs[-1].params.grammar
    assert grammar is not None and grammar.kind == "lark", "that of the call"
    tool = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    choose = {"type": "function", "name": "get_weather"}
    reply = caller.ok(
        "/v1/responses",
        {"model": "tiny", "input": "Hi", "tools": [tool], "tool_choice": choose, "text": text, "store": False},
    )
    assert [item["type"] for item in reply["output"]] == ["function_call"]
    error = caller.post(CHAT, {**body, "guided_regex": "a"}).json()["error"]
    assert error["message"] == "tool_choice forces a call and another constraint is given: give one of them."


def strict_requests(schema: dict[str, Any]) -> list[dict[str, Any]]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    return [{"tools": [tool], "tool_choice": "required"}, {"tools": None, "response_format": format}]


def test_strict_closes_objects() -> None:
    caller, client = scripted(TURNS + "<tool_call>{% endif %}", "hi")
    for changes in strict_requests({"type": "object", "properties": {"a": {"type": "integer"}}}):
        caller.ok(CHAT, {**BODY, **changes})
        grammar = client.jobs[-1].params.grammar
        assert grammar is not None and '"additionalProperties": false' in grammar.source
    for changes in strict_requests({"type": "object"}):
        error = caller.post(CHAT, {**BODY, **changes}).json()["error"]
        assert error["param"] in ("tools", "response_format") and "is an object without properties" in error["message"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_function_that_the_model_cannot_call_is_refused(family: str) -> None:
    """A forced call of it would be written, and then not be parsed as a call."""
    syntax, output, _ = FAMILIES[family]
    caller, _ = scripted(TURNS + syntax + "{% endif %}", output)

    def refused(name: str) -> bool:
        tools = [TOOL, {"type": "function", "function": {"name": name}}]
        reply = caller.post(CHAT, {**BODY, "tools": tools})
        if reply.status_code == 400:
            error = reply.json()["error"]
            assert error["param"] == "tools" and error["message"].startswith(
                f"tools[1].function.name is {name!r}: give"
            )
        return reply.status_code == 400

    assert refused("") and not refused("get-weather_2.now")
    has_json = family in ("qwen", "llama", "mistral", "granite")
    assert [refused(name) for name in ("ns/tool", "a b", 'say "hi"', "<f>")] == [not has_json] * 4


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def test_allowed_tools_are_the_only_ones_that_the_model_may_call() -> None:
    caller, client = scripted(TURNS + FAMILIES["qwen"][0] + "{% endif %}", "Fine.")
    both = {**BODY, "tools": [*BODY["tools"], CLOCK]}
    caller.ok(CHAT, both, tool_choice=allowed("auto", "get_time"))
    assert "get_time" in client.prompt and "get_weather" not in client.prompt
    assert client.jobs[-1].params.grammar is None
    caller.ok(CHAT, both, tool_choice=allowed("required", "get_time"))
    assert "get_time" in client.prompt and "get_weather" in client.prompt, "so that the prompt stays cached"
    source = client.jobs[-1].params.grammar.source
    assert "get_time" in source and "get_weather" not in source
    responses = {
        "input": "Hi",
        "store": False,
        "tools": [{"type": "function", **one["function"]} for one in both["tools"]],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_time"}],
        },
    }
    caller.ok("/v1/responses", responses)
    assert client.jobs[-1].params.grammar.source == source


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (allowed("auto", "other"), "tool_choice is 'other', which is not one of the tools: name one of them."),
        (allowed("auto"), "tool_choice.allowed_tools.tools is empty: name a tool, or set tool_choice to none."),
        ({"type": "allowed_tools"}, "tool_choice has the type allowed_tools: give allowed_tools, and nothing else."),
        ({"type": "function", "function": {"name": "other"}}, "tool_choice is 'other', which is not one of the tools"),
        ({"type": "function"}, "tool_choice has the type function: give function, and nothing else."),
    ],
)
def test_a_tool_choice_that_makes_no_sense_is_refused(choice: Any, message: str) -> None:
    caller, _ = scripted(TURNS + FAMILIES["qwen"][0] + "{% endif %}", "Fine.")
    response = caller.post(CHAT, {**BODY, "tool_choice": choice})
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(message)
