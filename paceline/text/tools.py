"""Tools: the style in which a model calls them, how they are described to it, and the grammar of a forced call.

| style | a call |
|---|---|
| Hermes, Qwen | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| Qwen3-Coder | `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` |
| GLM-4.5 | `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, in lines |
| Llama 3 | nothing but `{"name": ..., "parameters": {...}}` |
| Mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, newer ones `[TOOL_CALLS]name[ARGS]{...}` |
| Granite 3 | `<|tool_call|>[{"name": ..., "arguments": {...}}]` |
| gpt-oss | `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}` |

For a template without support for tools, they are described in the system message, in the words of Hermes. Calls are
parsed by `tool_calls.py`, those of gpt-oss by `harmony.py`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.request import Grammar, InvalidRequest
from paceline.text.call_syntax import CLOSE, FUNCTION, KEY, KEY_END, NAME, VALUE, VALUE_END, Tool, kinds_of
from paceline.text.chat import Message, text_of
from paceline.text.harmony import TOKENS, call_header, is_harmony
from paceline.text.json_schema import closed, with_options
from paceline.text.tool_calls import (
    ARGS,
    CALLS,
    GLM,
    GRANITE,
    GRANITE_CALLS,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    OPEN,
    PYTHON,
    QWEN_XML,
)

_INTRODUCTION = """# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each call, answer with a JSON object of its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""

_NO_SYSTEM = "System role not supported"  # what the templates of Gemma 1 and 2 say

_LLAMA_CALL = '"parameters": dictionary'  # as its templates explain a call


def style_of(template: str) -> str:
    """The style of a chat template. Raises InvalidRequest if it supports tools in an unknown style."""
    if "tools" not in template:
        return HERMES
    if is_harmony(template):
        return HARMONY
    if OPEN in template and GRANITE_CALLS not in template:
        if KEY in template:
            return GLM
        return QWEN_XML if FUNCTION in template else HERMES
    if GRANITE_CALLS in template:
        return GRANITE
    if CALLS in template:
        return MISTRAL_ARGS if ARGS in template else MISTRAL
    is_functionary = FUNCTION in template or ">>>" in template  # for a part of the calls it also has <|python_tag|>
    if OPEN not in template and not is_functionary and (_LLAMA_CALL in template or PYTHON in template):
        return LLAMA
    raise InvalidRequest("tools are given, but this model writes tool calls in an unknown style: leave `tools` out.")


def describe(messages: Sequence[Message], tools: Sequence[Tool] | None, template: str = "") -> list[Message]:
    """Messages for a template without support for tools: tools, calls and their results become ordinary text."""
    described: list[Message] = []
    for index, message in enumerate(messages):
        content = text_of(message.get("content") or "")
        if message["role"] == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            if index and messages[index - 1]["role"] == "tool":  # one turn: some templates insist on alternating roles
                described[-1]["content"] += f"\n{text}"
            else:
                described.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            texts = [
                f"{OPEN}\n{json.dumps({'name': call['name'], 'arguments': call['arguments']})}\n{CLOSE}"
                for call in calls
            ]
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            described.append({**kept, "content": "\n".join([content, *texts] if content else texts)})
        else:
            described.append(dict(message))
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if described and described[0]["role"] == "system":
            described[0]["content"] = f"{text_of(described[0]['content'])}\n\n{text}"
        elif described and described[0]["role"] == "user" and _NO_SYSTEM in template:
            described[0]["content"] = f"{text}\n\n{text_of(described[0]['content'])}"
        else:
            described.insert(0, {"role": "system", "content": text})
    return described


def markers(style: str) -> tuple[str, ...]:
    """Texts that the parser of a style needs to see, even if they are special tokens."""
    if style in (MISTRAL, MISTRAL_ARGS):
        return CALLS, ARGS, "[CALL_ID]"
    if style == GLM:
        return OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END
    if style == GRANITE:
        return GRANITE_CALLS, OPEN
    if style == HARMONY:
        return TOKENS
    return () if style == LLAMA else (OPEN, CLOSE)


def can_call(style: str, name: str) -> bool:
    """Whether a call of a function of this name can be written and parsed: JSON has any name, other formats do not."""
    return bool(name) and (style in (HERMES, LLAMA, MISTRAL, GRANITE) or NAME.fullmatch(name) is not None)


def make_call_id(style: str) -> str:
    """An id for a call. The templates of Mistral accept ids of nine characters only."""
    return uuid.uuid4().hex[:9] if style in (MISTRAL, MISTRAL_ARGS) else f"call_{uuid.uuid4().hex[:24]}"


def call_grammar(
    tools: Sequence[Tool], style: str, *, several: bool, literal: Callable[[str], str] = json.dumps
) -> Grammar:
    """The grammar of an output that must call one of these tools, or `several` one after the other. `literal` writes a
    marker of the style in Lark: some are tokens of their own."""
    rules = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        if function.get("strict"):
            schema = closed(schema, f"tools.{function['name']}.parameters")
        if style == QWEN_XML:
            rules += _xml_rules(index, function["name"], schema)
            continue
        if style == GLM:
            rules += _glm_rules(index, function["name"], schema, literal)
            continue
        if style == HARMONY:
            body = f"{literal(call_header(function['name']))} args_{index}"
        elif style == MISTRAL_ARGS:
            body = f"{json.dumps(function['name'])} {literal(ARGS)} args_{index}"
        else:
            key = "parameters" if style == LLAMA else "arguments"
            head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
            body = f'{json.dumps(head)} args_{index} "}}"'
        rules += [f"body_{index}: {body}", f"args_{index}: %json {json.dumps(with_options(schema))}"]
    if style in (LLAMA, HARMONY):  # one call ends a turn of gpt-oss
        start = ["start: body"]
    elif style in (MISTRAL, GRANITE):
        more = ' (", " body)*' if several else ""
        start = [f'start: {literal(CALLS if style == MISTRAL else GRANITE_CALLS)} "[" body{more} "]"']
    elif style == MISTRAL_ARGS:
        start = [f"start: call{'+' if several else ''}", f"call: {literal(CALLS)} body"]
    elif style == GLM:
        more = ' ("\\n" call)*' if several else ""
        start = [f"start: call{more}", f"call: {literal(OPEN)} body {literal(CLOSE)}"]
    else:
        more = ' ("\\n" call)*' if several else ""
        start = [f"start: call{more}", f'call: {literal(OPEN)} "\\n" body "\\n" {literal(CLOSE)}']
    names = " | ".join(f"body_{index}" for index in range(len(tools)))
    return Grammar.lark("\n".join([*start, f"body: {names}", *rules]))


def _xml_rules(index: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """A call of Qwen3-Coder."""
    parts, rules = _parameters(index, schema, lambda key: json.dumps(f"<parameter={key}>\n"), "", "\n</parameter>\n")
    head = json.dumps(f"<function={name}>\n")
    return [f'body_{index}: {" ".join([head, *parts])} "</function>"', *rules]


def _glm_rules(index: int, name: str, schema: Mapping[str, Any], literal: Callable[[str], str]) -> list[str]:
    """A call of GLM."""

    def begin(key: str) -> str:
        return f'{literal(KEY)} {json.dumps(key)} {literal(KEY_END)} "\\n" {literal(VALUE)}'

    end = literal(VALUE_END)
    is_text = end.startswith('"')  # not a token of its own
    token, text = ("", f"{VALUE_END}\n") if is_text else (end, "\n")
    parts, rules = _parameters(index, schema, begin, token, text)
    head = json.dumps(f"{name}\n")
    return [f"body_{index}: {' '.join([head, *parts])}", *rules]


def _parameters(
    index: int, schema: Mapping[str, Any], begin: Callable[[str], str], end_token: str, end: str
) -> tuple[list[str], list[str]]:
    """The rules of the parameters in the order of the schema, and their names: strings as they are and other values as
    JSON. A value ends with a token, if there is one, and the text `end`."""
    rules, parts = [], []
    required = schema.get("required") or ()
    ending = f"{end_token} {json.dumps(end)}"
    for number, (key, value) in enumerate((schema.get("properties") or {}).items()):
        rule, value_rule = f"p_{index}_{number}", f"v_{index}_{number}"
        parts.append(rule if key in required else f"{rule}?")
        kinds = kinds_of(value)
        if kinds and "string" not in kinds:
            rules += [
                f"{rule}: {begin(key)} {value_rule} {ending}",
                f"{value_rule}: %json {json.dumps(with_options(value))}",
            ]
        elif isinstance(value, dict) and "enum" in value:
            options = " | ".join(json.dumps("null" if one is None else str(one)) for one in value["enum"])
            rules.append(f"{rule}: {begin(key)} ({options}) {ending}")
        elif end_token:
            rules += [f"{rule}: {begin(key)} {value_rule} {ending}", f"{value_rule}: /(.|\\n)*/"]
        else:
            rules += [
                f"{rule}: {begin(key)} {value_rule}",
                f"{value_rule}[suffix={json.dumps(end)}]: /(.|\\n)*/",
            ]
    return parts, rules
