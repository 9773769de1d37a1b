"""Styles of tool calls are recognised, tools are described, and a forced call is one that the parser reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from test_tool_calls import parsed

from paceline.request import InvalidRequest
from paceline.sampling.grammar import Grammars
from paceline.text.chat import ChatTemplate
from paceline.text.synthetic import CHATML, synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer
from paceline.text.tool_calls import GLM, GRANITE, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_XML
from paceline.text.tools import call_grammar, describe, make_call_id, markers, style_of


def test_style_is_recognised_from_the_template() -> None:
    assert style_of(CHATML) == HERMES
    assert style_of("{% if tools %}<tool_call>{% endif %}") == HERMES
    assert style_of('{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}') == LLAMA
    assert style_of("{% if tools %}<tool_call>\n<function=example>{% endif %}") == QWEN_XML
    assert style_of('{% if tools %}[TOOL_CALLS][{"name", "parameters"}]{% endif %}') == MISTRAL
    assert style_of("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}{% endif %}") == MISTRAL_ARGS
    assert style_of("{% if tools %}<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>{% endif %}") == GLM
    assert style_of("{% if tools %}Answer with <|tool_call|> and a JSON list{% endif %}") == GRANITE


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools %}<|tool_calls_begin|>{% endif %}",
        # Functionary 3.1 and 3.2: they mention <|python_tag|> or parameters as Llama does
        "{% for t in tools %}{{ '<|python_tag|>' }}{{ '<function=' + t.name + '>' }}{% endfor %}",
        "{% for t in tools %}{{ '<|python_tag|>' }}{{ '>>>' + t.name }}{% endfor %}",
        '{% for t in tools %}functools[{{ t.name }}, "parameters"]{% endfor %}',  # Firefunction
        "{% for t in tools %}<|START_ACTION|>{{ t['parameters'] }}, \"parameters\"]{% endfor %}",  # Command R7B
    ],
)
def test_tools_for_a_model_with_another_style_are_refused(template: str) -> None:
    with pytest.raises(InvalidRequest, match="an unknown style"):
        style_of(template)


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


def test_tools_are_described_to_a_template_that_refuses_a_system_message() -> None:
    refusal = "{{ raise_exception('System role not supported') }}"
    gemma = (
        "{% if messages[0].role == 'system' %}" + refusal + "{% endif %}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "1", "content": "12:00"},
    ]
    text = ChatTemplate(gemma).render(describe(messages, [{"type": "function", "function": {"name": "now"}}], gemma))
    assert text.startswith("<start_of_turn>user\n# Tools") and "Time?<end_of_turn>" in text
    assert "noon\n</tool_response>\n<tool_response>\n12:00" in text


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "size": {"enum": [1, 2]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
VALUE = {"city": 'Sao "Paulo"', "days": 5, "unit": "F", "size": 2, "note": None}
XML = """<tool_call>
<function=get_weather>
<parameter=city>
Sao "Paulo"
</parameter>
<parameter=days>
5
</parameter>
<parameter=unit>
F
</parameter>
<parameter=size>
2
</parameter>
<parameter=note>
null
</parameter>
</function>
</tool_call>"""
ARG_KEYS = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Sao "Paulo"</arg_value>
<arg_key>days</arg_key>
<arg_value>5</arg_value>
<arg_key>unit</arg_key>
<arg_value>F</arg_value>
<arg_key>size</arg_key>
<arg_value>2</arg_value>
<arg_key>note</arg_key>
<arg_value>null</arg_value>
</tool_call>"""
FORCED = {
    HERMES: '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
    LLAMA: '{"name": "get_weather", "parameters": %s}',
    MISTRAL: '[TOOL_CALLS][{"name": "get_weather", "arguments": %s}]',
    MISTRAL_ARGS: "[TOOL_CALLS]get_weather[ARGS]%s",
    QWEN_XML: XML,
    GLM: ARG_KEYS,
    GRANITE: '<|tool_call|>[{"name": "get_weather", "arguments": %s}]',
}
NO_ARGUMENTS = {
    HERMES: '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    LLAMA: '{"name": "now", "parameters": {}}',
    MISTRAL: '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    MISTRAL_ARGS: "[TOOL_CALLS]now[ARGS]{}",
    QWEN_XML: "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    GLM: "<tool_call>now\n</tool_call>",
    GRANITE: '<|tool_call|>[{"name": "now", "arguments": {}}]',
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("style", FORCED)
def test_grammar_of_a_forced_call_accepts_what_the_parser_reads(style: str, special: bool) -> None:
    core = synthetic_tokenizer(600)._core
    core.add_tokens([tokenizers.AddedToken(one, special=special, normalized=False) for one in markers(style)])
    tokenizer = Tokenizer(core, eos_ids=(2,))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammar = call_grammar(TOOLS, style, several=False, literal=tokenizer.lark_literal)

    def accepts(text: str) -> bool:
        ids = tokenizer.encode(text, add_special=False)
        matcher = grammars.compile(grammar).result().matcher.deep_copy()
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    whole = FORCED[style] if style in (QWEN_XML, GLM) else FORCED[style] % json.dumps(VALUE)
    assert accepts(whole) and accepts(NO_ARGUMENTS[style])
    content, calls = parsed(style, [whole], TOOLS)
    assert content == "" and [(name, json.loads(text)) for name, text in calls] == [("get_weather", VALUE)]
    assert parsed(style, [NO_ARGUMENTS[style]], TOOLS) == ("", [("now", "{}")])
    for wrong in (whole.replace("5", '"5"'), whole.replace("F", "K"), whole.replace("get_weather", "get"), whole[:-1]):
        assert not accepts(wrong), wrong
    more = NO_ARGUMENTS[style].replace("{}", '{"a": 1}').replace("now>", "now>\n<parameter=a>")
    assert not accepts(more.replace("now\n", "now\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"))
    grammars.close()


@pytest.mark.parametrize("style", [HERMES, QWEN_XML, GLM, MISTRAL, MISTRAL_ARGS])
def test_grammar_allows_several_calls(style: str) -> None:
    tokenizer: Any = synthetic_tokenizer(600)
    grammars = Grammars(tokenizer, 600)
    one = NO_ARGUMENTS[style]
    both = f"{one[:-1]}, {one[len('[TOOL_CALLS][') :]}" if style == MISTRAL else one + one
    both = one + "\n" + one if style in (HERMES, QWEN_XML, GLM) else both
    for several in (True, False):
        matcher = grammars.compile(call_grammar(TOOLS, style, several=several)).result().matcher.deep_copy()
        ids = tokenizer.encode(both, add_special=False)
        assert (matcher.try_consume_tokens(ids) == len(ids)) is several
    assert parsed(style, [both], TOOLS) == ("", [("now", "{}")] * 2)
    grammars.close()


def test_ids_of_calls_are_those_that_templates_accept() -> None:
    assert make_call_id(HERMES).startswith("call_") and make_call_id(HERMES) != make_call_id(HERMES)
    assert all(len(make_call_id(style)) == 9 and make_call_id(style).isalnum() for style in (MISTRAL, MISTRAL_ARGS))
