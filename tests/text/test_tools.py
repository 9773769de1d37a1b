"""Tool calls are parsed however the text is split, streamed while they are written, and everything else is text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from paceline.request import InvalidRequest
from paceline.sampling.grammar import Grammars
from paceline.text.chat import ChatTemplate
from paceline.text.synthetic import CHATML, synthetic_tokenizer
from paceline.text.tools import HERMES, LLAMA, Content, ToolCallParser, ToolCallStart, call_grammar, describe, style_of

ARGUMENTS = '{"a": "}\\"{", "b": [1, {"c": 2}]}'
CASES = [
    (HERMES, "just <b>text</b>\n", "just <b>text</b>\n", []),
    (
        HERMES,
        f'Sure.\n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "Sure.",
        [("f", ARGUMENTS)],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"arguments": {"x": 1}, "name": "g"}'
        "</tool_call>",
        "",
        [("f", "{}"), ("g", '{"x": 1}')],
    ),
    (HERMES, 'a <tool_call>{"name": "f", "arguments": {}}</tool_call> b', "a b", [("f", "{}")]),
    (HERMES, "no <tool_call> {bad} </tool_call> end <tool", "no <tool_call> {bad} </tool_call> end <tool", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "say \\"hi\\"", "arguments": {}}</tool_call>', "", [('say "hi"', "{}")]),
    (LLAMA, f'{{"name": "f", "parameters": {ARGUMENTS}}}', "", [("f", ARGUMENTS)]),
    (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"z": []}}',
        "",
        [("f", "{}"), ("g", '{"z": []}')],
    ),
    (LLAMA, ' hello {"name": 1}', ' hello {"name": 1}', []),
    (LLAMA, '{"colour": 1} it is', '{"colour": 1} it is', []),
    (LLAMA, '{"colour": 1', '{"colour": 1', []),
]


def parsed(style: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(style)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.close()
    text, calls = "", []
    for event in events:
        if isinstance(event, Content):
            text += event.text
        elif isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
    assert parser.num_calls == len(calls)
    return text, calls


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_calls_are_parsed_however_the_text_is_split(style: str, text: str, content: str, calls: Any) -> None:
    rng = random.Random(1)
    assert parsed(style, [text]) == (content, calls)
    assert parsed(style, list(text)) == (content, calls)
    for _ in range(200):
        cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randint(1, 9))))
        assert parsed(style, [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == (
            content,
            calls,
        )


def test_arguments_are_streamed_while_they_are_written() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert [type(event).__name__ for event in parser.push('{"a": ')] == ["ToolCallStart", "ArgumentsDelta"]
    assert parser.push("12")[0].arguments == "12"  # type: ignore[union-attr]


def test_style_is_recognised_from_the_template() -> None:
    assert style_of(CHATML) == HERMES
    assert style_of("{% if tools %}<tool_call>{% endif %}") == HERMES
    assert style_of('{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}') == LLAMA
    with pytest.raises(InvalidRequest, match="an unknown style"):
        style_of("{% if tools %}[TOOL_CALLS]{% endif %}")


def test_tools_are_described_to_a_template_without_support_for_them() -> None:
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": {"zone": "UTC"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    text = ChatTemplate(CHATML).render(describe(messages, [tool]))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and json.dumps(tool) in text
    assert '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>' in text
    assert "<tool_response>\nnoon\n</tool_response>" in text


@pytest.mark.parametrize("style", [HERMES, LLAMA])
def test_grammar_of_a_forced_call_accepts_what_the_parser_reads(style: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": 'f"1', "parameters": schema}},
        {"type": "function", "function": {"name": "g"}},
    ]
    key = "arguments" if style == HERMES else "parameters"
    bodies = [f'{{"name": "f\\"1", "{key}": {{"a": 5}}}}', f'{{"name": "g", "{key}": {{}}}}']
    texts = [f"<tool_call>\n{body}\n</tool_call>" if style == HERMES else body for body in bodies]
    tokenizer = synthetic_tokenizer(512)
    grammars = Grammars(tokenizer, 512)
    for text, name in zip(texts, ('f"1', "g"), strict=True):
        matcher = grammars.compile(call_grammar(tools, style, several=False)).result().deep_copy()
        assert matcher.consume_tokens(tokenizer.encode(text)) and matcher.is_accepting()
        assert parsed(style, [text])[1][0][0] == name
    wrong = grammars.compile(call_grammar(tools, style, several=False)).result().deep_copy()
    assert not wrong.consume_tokens(tokenizer.encode(texts[0].replace("5", '"5"')))
    grammars.close()
