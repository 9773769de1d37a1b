"""Outputs of a real model with tools, most of them malformed: the same calls at every split, and nothing is lost.

`recorded_calls.jsonl` has a header (model, tools, prompts, how the outputs were recorded), then one output a line, and
the content and calls that a client sees of it; `content` is null where all of the output is content. To record another
model, append its outputs with the same fields.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.text.tool_calls import GLM, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_XML
from tests.server.scripted import joined, scripted
from tests.server.serving import CHAT
from tests.text.test_tool_calls import parsed

HEADER, *RECORDS = map(json.loads, Path(__file__).with_name("recorded_calls.jsonl").read_text("utf-8").splitlines())
TEMPLATES = {
    HERMES: "<tool_call>",
    QWEN_XML: "<tool_call><function=",
    GLM: "<tool_call><arg_key>",
    LLAMA: "<|python_tag|>",
    MISTRAL: "[TOOL_CALLS]",
    MISTRAL_ARGS: "[TOOL_CALLS][ARGS]",
}


def expected(record: Any) -> tuple[str, list[tuple[str, str]]]:
    content = record["output"] if record["content"] is None else record["content"]
    return content, [(name, arguments) for name, arguments in record["calls"]]


def test_every_format_was_recorded_with_and_without_faults() -> None:
    assert {record["style"] for record in RECORDS} == set(TEMPLATES)
    for style in TEMPLATES:
        calls = [call for record in RECORDS if record["style"] == style for call in record["calls"]]
        assert {is_object(arguments) for _, arguments in calls} == {True, False}, style


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("number", range(len(RECORDS)))
def test_a_recorded_output_is_parsed_at_every_split(number: int) -> None:
    record = RECORDS[number]
    style, text, tools = record["style"], record["output"], HEADER["tools"]
    assert parsed(style, [text], tools) == expected(record)
    assert parsed(style, list(text), tools) == expected(record)
    for cut in range(1, len(text)):
        assert parsed(style, [text[:cut], text[cut:]], tools) == expected(record), cut


@pytest.mark.parametrize("style", TEMPLATES)
def test_a_client_sees_the_recorded_calls_streamed_and_not(style: str) -> None:
    """Also where the arguments are not JSON: the text is the client's to judge, and the stream goes on."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}" + TEMPLATES[style] + "{% endif %}"
    caller, client = scripted(template, "")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": HEADER["tools"]}
    for record in RECORDS:
        if record["style"] != style:
            continue
        client.text = record["output"]
        content, calls = expected(record)
        (choice,) = caller.ok(CHAT, body)["choices"]
        found = [call["function"] for call in choice["message"].get("tool_calls", [])]
        assert [(call["name"], call["arguments"]) for call in found] == calls
        assert (choice["message"]["content"] or "") == content
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        streamed = joined(caller.events(CHAT, body))
        assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == calls
        assert streamed["content"] == content
        if not all(is_object(arguments) for _, arguments in calls):
            reply = caller.ok("/v1/messages", {**body, "max_tokens": 9, "tools": anthropic_tools()})
            inputs = [block["input"] for block in reply["content"] if block["type"] == "tool_use"]
            assert inputs == [
                json.loads(arguments) if is_object(arguments) else {"invalid_json": arguments} for _, arguments in calls
            ]


def anthropic_tools() -> list[dict[str, Any]]:
    functions = [tool["function"] for tool in HEADER["tools"]]
    return [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
