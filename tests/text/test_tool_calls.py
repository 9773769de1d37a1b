"""Tool calls are parsed however the text is split, streamed while they are written, and everything else is text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text.call_syntax import Content, ToolCallStart
from paceline.text.tool_calls import GLM, GRANITE, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_XML, ToolCallParser

ARGUMENTS = '{"a": "}\\"{<", "b": [1, {"c": 2}]}'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "tags": {"type": "array"},
                    "exact": {"type": "boolean"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    }
    for name in ("get_weather", "f", "g")
]
WEATHER = '{"city": "Paris", "days": 3}'


def xml(*parameters: tuple[str, str], name: str = "get_weather") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def arg_keys(*parameters: tuple[str, str]) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in parameters)
    return f"<tool_call>get_weather\n{inner}</tool_call>"


CITY = xml(("city", "Paris"), ("days", "3"))
ARG_CITY = arg_keys(("city", "Paris"), ("days", "3"))

# style, output, content, calls
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # Hermes, Qwen2.5 and Qwen3
    (HERMES, "just <b>text</b>\n", "just <b>text</b>\n", []),
    (HERMES, f'Sure.\n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>', "Sure.",
     [("f", ARGUMENTS)]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"arguments": {"x": 1}, "name": "g"}'
     "</tool_call>", "", [("f", "{}"), ("g", '{"x": 1}')]),
    (HERMES, 'a <tool_call>{"name": "f", "arguments": {}}</tool_call> b', "a b", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "say \\"hi\\"", "arguments": {}}</tool_call>', "", [('say "hi"', "{}")]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>!', "!",
     [("f", '{"s": "</tool_call>"}')]),
    # ... malformed: a brace or a tag is missing, or the arguments do not end
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> ok', "ok", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}\nIt is sunny.', "It is sunny.", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> ok', "ok", [("f", '{"a": 1')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}<tool_call>{"name": "g", "arguments": {}}</tool_call>',
     "", [("f", '{"a": 1}'), ("g", "{}")]),
    # ... strings that are not JSON: line breaks as they are, backslashes that escape nothing
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x\n\ty", "b": "\\d+\\\\\\"\\u00e4\\\n"}}</tool_call>', "",
     [("f", '{"a": "x\\n\\ty", "b": "\\\\d+\\\\\\"\\u00e4\\\\\\n"}')]),
    (HERMES, '<tool_call>{"arguments": {"a": "x\ny"}, "name": "f"}</tool_call>', "", [("f", '{"a": "x\\ny"}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call> ok', "ok", [("f", '{"a": 1}')]),
    # ... cut off
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
    (HERMES, 'x\n<tool_call>\n{"name": "f", "argu', 'x\n<tool_call>\n{"name": "f", "argu', []),
    (HERMES, "a" + "\n" * 10 + '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "a\n\n", [("f", "{}")]),
    # ... resembles a call
    (HERMES, "no\n\n<tool_call> {bad} </tool_call> end <tool", "no\n\n<tool_call> {bad} </tool_call> end <tool", []),
    (HERMES, "Write <tool_call> and </tool_call> around it.\n", "Write <tool_call> and </tool_call> around it.\n", []),
    (HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
     '<tool_call>{"name": 1, "arguments": {}}</tool_call>', []),
    (HERMES, '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>", [("f", "{}")]),
    (HERMES, "<tool_call>\n", "<tool_call>\n", []),
    # Qwen3-Coder
    (QWEN_XML, f"I'll look.\n\n{CITY}", "I'll look.", [("get_weather", WEATHER)]),
    (QWEN_XML, CITY + "\n" + CITY, "", [("get_weather", WEATHER)] * 2),
    (QWEN_XML, CITY.removeprefix("<tool_call>\n"), "", [("get_weather", WEATHER)]),
    (QWEN_XML, xml(("city", 'if a < b:\n\treturn "x\\n"  # </param>')), "",
     [("get_weather", json.dumps({"city": 'if a < b:\n\treturn "x\\n"  # </param>'}))]),
    (QWEN_XML, xml(("days", "x"), ("tags", '["a", {"b": 1}]'), ("exact", "True"), ("note", "5"), ("city", "3")), "",
     [("get_weather", '{"days": "x", "tags": ["a", {"b": 1}], "exact": true, "note": "5", "city": "3"}')]),
    (QWEN_XML, xml(("note", "None"), ("unknown", "ü"), ("days", "NaN")), "",
     [("get_weather", '{"note": null, "unknown": "ü", "days": "NaN"}')]),
    (QWEN_XML, xml(name="g"), "", [("g", "{}")]),
    (QWEN_XML, "<tool_call><function=f><parameter=city>Rome</parameter></function></tool_call>.", ".",
     [("f", '{"city": "Rome"}')]),
    (QWEN_XML, xml(("city", ""), ("city", "\n x \n")), "", [("get_weather", '{"city": "", "city": "\\n x \\n"}')]),
    (QWEN_XML, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "", [("f", "{}")]),
    # ... malformed and cut off
    (QWEN_XML, CITY.replace("\n</parameter>", ""), "", [("get_weather", WEATHER)]),
    (QWEN_XML, CITY.replace("</function>\n", "") + " ok", "ok", [("get_weather", WEATHER)]),
    (QWEN_XML, CITY.replace("</function>\n</tool_call>", "Hm."), "Hm.", [("get_weather", WEATHER)]),
    (QWEN_XML, CITY[: CITY.index("is")], "", [("get_weather", '{"city": "Par')]),
    (QWEN_XML, CITY[: CITY.index("3") + 1], "", [("get_weather", '{"city": "Paris", "days": 3')]),
    (QWEN_XML, CITY[: CITY.index("<parameter=days") + 9], "", [("get_weather", '{"city": "Paris"')]),
    (QWEN_XML, '<tool_call>\n<function=f>\n<param name="city" />\n</function>\n</tool_call>',
     '<tool_call>\n<function=f>\n<param name="city" />\n</function>\n</tool_call>', []),
    (QWEN_XML, f"<function=f>\n{CITY}", "<function=f>", [("get_weather", WEATHER)]),
    (QWEN_XML, "<tool_call>\n<function=f>\n", "<tool_call>\n<function=f>\n", []),
    (QWEN_XML, "<tool_call>\n<function=get_we", "<tool_call>\n<function=get_we", []),
    (QWEN_XML, "Call <function=name here> or\n<tool_call>\n<func>.",
     "Call <function=name here> or\n<tool_call>\n<func>.", []),
    # GLM
    (GLM, f"I'll look.\n{ARG_CITY}", "I'll look.", [("get_weather", WEATHER)]),
    (GLM, ARG_CITY.replace("\n", "") + ARG_CITY, "", [("get_weather", WEATHER)] * 2),
    (GLM, "<tool_call>g\n</tool_call>\n<tool_call>g</tool_call> ok", "ok", [("g", "{}")] * 2),
    (GLM, arg_keys(("city", 'if a < b:\n\treturn "x\\n"  # </arg>'), ("days", "x"), ("exact", "true")), "",
     [("get_weather", json.dumps({"city": 'if a < b:\n\treturn "x\\n"  # </arg>', "days": "x", "exact": True}))]),
    (GLM, arg_keys(("city", ""), ("tags", '["a", {"b": 1}]'), ("unknown", "ü 5")), "",
     [("get_weather", '{"city": "", "tags": ["a", {"b": 1}], "unknown": "ü 5"}')]),
    # ... malformed or cut off
    (GLM, ARG_CITY.replace("</arg_value>", ""), "", [("get_weather", WEATHER)]),
    (GLM, ARG_CITY.replace("</tool_call>", "Hm."), "Hm.", [("get_weather", WEATHER)]),
    (GLM, ARG_CITY[: ARG_CITY.index("is")], "", [("get_weather", '{"city": "Par')]),
    (GLM, ARG_CITY[: ARG_CITY.index("days") + 7], "", [("get_weather", '{"city": "Paris"')]),
    (GLM, "<tool_call>get_we", "<tool_call>get_we", []),
    (GLM, "Write <tool_call> and </tool_call> or\n<tool_call>a b</tool_call>",
     "Write <tool_call> and </tool_call> or\n<tool_call>a b</tool_call>", []),
    # Llama 3
    (LLAMA, f'{{"name": "f", "parameters": {ARGUMENTS}}}', "", [("f", ARGUMENTS)]),
    (LLAMA, '\n\n{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [("get_weather", '{"city": "Paris"}')]),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"z": []}}', "",
     [("f", "{}"), ("g", '{"z": []}')]),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA, '{"name": "f", "arguments": {"a": 1}}\nDone.', "Done.", [("f", '{"a": 1}')]),
    (LLAMA, '{"name": "f", "parameters": {"a": "x', "", [("f", '{"a": "x')]),
    (LLAMA, '{"name": "f", "parameters": {}}}; {"name": "g", "parameters": {}}}}', "", [("f", "{}"), ("g", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {}}; and', "; and", [("f", "{}")]),
    # ... text, and JSON that is the answer
    (LLAMA, ' hello {"name": 1}', ' hello {"name": 1}', []),
    (LLAMA, '{"colour": 1} it is', '{"colour": 1} it is', []),
    (LLAMA, '{"colour": 1', '{"colour": 1', []),
    (LLAMA, '{"name": "Bob", "parameters": {"age": 3}}', '{"name": "Bob", "parameters": {"age": 3}}', []),
    (LLAMA, '{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
    (LLAMA, '<|python_tag|>print("hi")', '<|python_tag|>print("hi")', []),
    (LLAMA, "<|python", "<|python", []),
    (LLAMA, " \n", " \n", []),
    # Mistral, before and since [ARGS]
    (GRANITE, f'<|tool_call|>[{{"name": "f", "arguments": {ARGUMENTS}}}]', "", [("f", ARGUMENTS)]),
    (GRANITE, 'Hm.\n<tool_call> [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}] ok', "Hm.ok",
     [("f", "{}"), ("g", '{"x": 1}')]),
    (GRANITE, "a <|tool_call|> b <|tool", "a <|tool_call|> b <|tool", []),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}]', "", [("f", ARGUMENTS)]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "D681PevKs"}, {"arguments": {"a": 1}, "name": "g"}]',
     "", [("f", "{}"), ("g", '{"a": 1}')]),
    (MISTRAL, 'Let me see.[TOOL_CALLS]{"name": "f", "arguments": {}} ok', "Let me see.ok", [("f", "{}")]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1', "", [("f", '{"a": [1')]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}}, {"name": "g", "arguments": {}}}] ok', "ok",
     [("f", "{}"), ("g", "{}")]),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": "\\s\n"} then', "then", [("f", '{"a": "\\\\s\\n"}')]),
    (MISTRAL, "[TOOL_CALLS] [1, 2] is a list", "[TOOL_CALLS] [1, 2] is a list", []),
    (MISTRAL, "a [TOOL_CALLS] b [TOOL", "a [TOOL_CALLS] b [TOOL", []),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "argu', '[TOOL_CALLS][{"name": "f", "argu', []),
    (MISTRAL_ARGS, f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}", "", [("f", ARGUMENTS)]),
    (MISTRAL_ARGS, 'On it.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get-weather_2[ARGS] {}', "On it.",
     [("f", '{"a": 1}'), ("get-weather_2", "{}")]),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{}", "", [("f", "{}")]),
    (MISTRAL_ARGS, '[TOOL_CALLS]f{"a": 3.5} then', "then", [("f", '{"a": 3.5}')]),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": "x', "", [("f", '{"a": "x')]),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[ARG", "[TOOL_CALLS]f[ARG", []),
    (MISTRAL_ARGS, "[TOOL_CALLS]f is called\n", "[TOOL_CALLS]f is called\n", []),
    (MISTRAL_ARGS, "[TOOL_CALLS]", "[TOOL_CALLS]", []),
]  # fmt: skip


def parsed(style: str, pieces: Sequence[str], tools: Any = TOOLS) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(style, tools)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.close()
    text, calls = "", []
    for event in events:
        if isinstance(event, Content):
            assert event.text
            text += event.text
        elif isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        else:
            assert event.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
    assert parser.num_calls == len(calls)
    return text, calls


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_calls_are_parsed_at_every_split(style: str, text: str, content: str, calls: Any) -> None:
    rng, expected = random.Random(1), (content, calls)
    assert parsed(style, [text]) == expected
    assert parsed(style, list(text)) == expected
    for cut in range(len(text) + 1):
        assert parsed(style, [text[:cut], text[cut:]]) == expected, cut
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 9)))
        assert parsed(style, [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]) == expected, cuts


PIECES = [
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<tool_call>", "</tool_call>", "<function=f>", "<parameter=city>", "</parameter>", "</function>", "[TOOL_CALLS]",
    "[ARGS]", "[", "]", '{"name": "f", ', '"arguments": ', '"parameters": ', "{", "}", '"', "\\", ",", ";", "\n", " ",
    "x", "<", "<|python_tag|>", '{"name": "f", "arguments": {}}',
]  # fmt: skip


@given(
    style=st.sampled_from([HERMES, QWEN_XML, GLM, LLAMA, MISTRAL, MISTRAL_ARGS]),
    parts=st.lists(st.sampled_from(PIECES), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_any_text_is_parsed_as_when_it_arrives_whole(style: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = parsed(style, [text])
    assert parsed(style, list(text)) == whole
    assert parsed(style, [text[i:j] for i, j in pairwise([0, *sorted(cuts), len(text)])]) == whole
    if not whole[1]:
        assert whole[0] == text, "what is no call is text"


def test_arguments_are_streamed_while_they_are_written() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert [type(event).__name__ for event in parser.push('{"a": ')] == ["ToolCallStart", "ArgumentsDelta"]
    assert parser.push("12")[0].arguments == "12"  # type: ignore[union-attr]
    parser = ToolCallParser(QWEN_XML, TOOLS)
    parser.push("<tool_call>\n<function=f>\n<parameter=city>\n")
    assert parser.push("Par")[0].arguments == "Par"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("style", "begin", "more"),
    [
        (HERMES, "", "\n"),
        (QWEN_XML, "<tool_call><function=", "abc"),
        (QWEN_XML, "<tool_call><function=f><parameter=", "abc"),
        (QWEN_XML, "<tool_call><function=f>", " "),
        (QWEN_XML, "<tool_call><function=f><parameter=city>\nRome\n</parameter>", " "),
        (GLM, "<tool_call>", "abc"),
        (GLM, "<tool_call>f", " "),
        (GLM, "<tool_call>f\n<arg_key>", "abc"),
        (GLM, "<tool_call>f\n<arg_key>a</arg_key>", " "),
        (MISTRAL_ARGS, "[TOOL_CALLS]", "abc"),
        (MISTRAL_ARGS, "[TOOL_CALLS]abc", " "),
    ],
)
def test_an_endless_name_is_not_held_back(style: str, begin: str, more: str) -> None:
    """What is held back is matched again with every token, so it is bounded."""
    text = begin + more * 2000
    whole = parsed(style, [text])
    assert parsed(style, [begin, *[more] * 2000]) == whole
    assert whole[0] == text or whole[1]
    parser = ToolCallParser(style, TOOLS)
    for piece in (begin, *[more] * 2000):
        parser.push(piece)
    assert len(parser._text) < 1024


def test_a_text_that_is_clearly_no_call_is_not_held_back() -> None:
    for style, text in ((HERMES, "<tool_call> is"), (LLAMA, "Hello"), (MISTRAL_ARGS, "[TOOL_CALLS]a b")):
        assert "".join(event.text for event in ToolCallParser(style).push(text)) == text  # type: ignore[union-attr]
