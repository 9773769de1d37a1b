"""Tool calls: how tools are described to a model, how its calls are parsed, and the grammar of a forced call.

Two styles are supported. Hermes, which most ChatML models were trained on, writes
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere in a text; Llama writes nothing but
`{"name": ..., "parameters": {...}}`. For a template without support for tools, they are described in the system
message, in the words of Hermes. Text is parsed incrementally: what may be the beginning of a call is held back,
arguments are streamed while the model still writes them, and what turns out not to be a call is emitted as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.request import Grammar, InvalidRequest
from paceline.text.reasoning import overlap

HERMES, LLAMA = "hermes", "llama"
_OPEN, _CLOSE, _PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_INTRODUCTION = """# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each call, answer with a JSON object of its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


def style_of(template: str) -> str:
    """The style of a chat template. Raises InvalidRequest if it supports tools in an unknown style."""
    if _OPEN in template or "tools" not in template:
        return HERMES
    if '"parameters"' in template or _PYTHON in template:
        return LLAMA
    raise InvalidRequest("tools are given, but this model writes tool calls in an unknown style: leave `tools` out.")


def describe(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Messages for a template without support for tools: tools, calls and their results become ordinary text."""
    described: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            described.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
        elif message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            texts = [
                f"{_OPEN}\n{json.dumps({'name': call['name'], 'arguments': call['arguments']})}\n{_CLOSE}"
                for call in calls
            ]
            described.append({"role": "assistant", "content": "\n".join([content, *texts] if content else texts)})
        else:
            described.append(dict(message))
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if described and described[0]["role"] == "system":
            described[0]["content"] = f"{described[0]['content']}\n\n{text}"
        else:
            described.insert(0, {"role": "system", "content": text})
    return described


def call_grammar(tools: Sequence[Tool], style: str, *, several: bool) -> Grammar:
    """The grammar of an output that must call one of these tools, or `several` one after the other."""
    key = "arguments" if style == HERMES else "parameters"
    rules, names = [], []
    for index, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{key}": ')
        rules += [f'body_{index}: {head} args_{index} "}}"', f"args_{index}: %json {json.dumps(schema)}"]
        names.append(f"body_{index}")
    body = " | ".join(names)
    if style == LLAMA:
        start = ["start: body"]
    else:
        more = ' ("\\n" call)*' if several else ""
        start = [f"start: call{more}", f'call: "{_OPEN}\\n" body "\\n{_CLOSE}"']
    return Grammar.lark("\n".join([*start, f"body: {body}", *rules]))


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments of the last call, as JSON text."""

    arguments: str


ToolCallEvent = Content | ToolCallStart | ArgumentsDelta


class ToolCallParser:
    """The text of one output in, content and tool calls out."""

    def __init__(self, style: str) -> None:
        self._style = style
        self._text = ""  # pushed and not emitted yet
        self._call: _CallParser | None = None
        # A Llama output is either a call or text: its first character decides.
        self._may_call = True
        self._is_after_call = False  # whitespace after a call is dropped
        self.num_calls = 0

    def push(self, text: str) -> list[ToolCallEvent]:
        self._text += text
        return self._read(at_end=False)

    def close(self) -> list[ToolCallEvent]:
        """Parses the rest: the text has ended."""
        return self._read(at_end=True)

    def _read(self, *, at_end: bool) -> list[ToolCallEvent]:
        events: list[ToolCallEvent] = []
        while self._text or (at_end and self._call is not None):
            before = len(self._text), self._call is None
            found = self._read_call(at_end) if self._call is not None else self._read_content(at_end)
            events += found
            if not found and before == (len(self._text), self._call is None):
                break
        return events

    def _read_content(self, at_end: bool) -> list[ToolCallEvent]:
        if self._style == LLAMA:
            return self._read_llama(at_end)
        begin = self._text.find(_OPEN)
        if begin < 0:
            end = len(self._text) if at_end else len(self._text) - overlap(self._text, _OPEN)
            if not at_end:
                end = len(self._text[:end].rstrip("\n"))  # line breaks before a call are dropped
            text, self._text = self._text[:end], self._text[end:]
        else:
            text, self._text = self._text[:begin], self._text[begin + len(_OPEN) :]
            self._call = _CallParser(_OPEN, _CLOSE)
        if begin >= 0:
            text = text.rstrip("\n")
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        return [Content(text)] if text else []

    def _read_llama(self, at_end: bool) -> list[ToolCallEvent]:
        if self._may_call:
            rest = self._text.lstrip()
            if not at_end and (not rest or _PYTHON.startswith(rest)):
                return []
            rest = rest.removeprefix(_PYTHON).lstrip()
            if rest.startswith("{"):
                self._call, self._text = _CallParser("", ""), rest
                return []
            self._may_call = bool(self.num_calls) and rest[:1] in (";", "")
            if self._may_call:  # between two calls
                self._text = rest[1:]
                return []
        text, self._text = self._text, ""
        return [Content(text)] if text else []

    def _read_call(self, at_end: bool) -> list[ToolCallEvent]:
        assert self._call is not None, "no call has begun"
        call = self._call
        events, self._text = call.read(self._text, at_end)
        if any(isinstance(event, ToolCallStart) for event in events):
            self.num_calls += 1
        if call.is_done:
            self._call = None
            self._is_after_call = not call.failed
            if self._style == LLAMA and call.failed:
                self._may_call = False
        return events


class _CallParser:
    """Parses one call, from after its opening tag to its end."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._head = ""
        self._began = False
        self._depth, self._in_string, self._escaped = 0, False, False
        self._closed = False  # the arguments are complete; a brace and the closing tag follow
        self.is_done = False
        self.failed = False

    def read(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], str]:
        """Events, and the rest of the text."""
        if not self._began:
            self._head += text
            return self._begin(at_end)
        if not self._closed:
            end = self._scan(text)
            arguments, text = text[:end], text[end:]
            events: list[ToolCallEvent] = [ArgumentsDelta(arguments)] if arguments else []
            self.is_done = at_end and not text
            return events, text
        return [], self._end(text, at_end)

    def _begin(self, at_end: bool) -> tuple[list[ToolCallEvent], str]:
        match = _HEAD.match(self._head)
        if match:
            self._began = True
            return [ToolCallStart(json.loads(match[1]))], self._head[match.end() :]
        end = self._head.find(self._closing) if self._closing else -1
        if end >= 0 or at_end or (not self._closing and _is_json(self._head)):
            body, rest = (self._head[:end], self._head[end + len(self._closing) :]) if end >= 0 else (self._head, "")
            self.is_done = True
            return self._whole(body, closed=end >= 0), rest
        return [], ""

    def _whole(self, body: str, *, closed: bool) -> list[ToolCallEvent]:
        """A call with its keys in another order than usual, or text that is not a call."""
        try:
            value = json.loads(body)
            name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.failed = True
            return [Content(self._opening + body + (self._closing if closed else ""))]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return [ToolCallStart(str(name)), ArgumentsDelta(text)]

    def _scan(self, text: str) -> int:
        """Index after the last character of the arguments in `text`."""
        for index, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._closed = True
                    return index + 1
        return len(text)

    def _end(self, text: str, at_end: bool) -> str:
        """Skips the brace and the closing tag after the arguments; returns the rest."""
        if self._closing:
            end = text.find(self._closing)
            self.is_done = end >= 0 or at_end
            return text[end + len(self._closing) :] if end >= 0 else ("" if at_end else text)
        stripped = text.lstrip()
        self.is_done = at_end or stripped.startswith("}")
        return stripped.removeprefix("}")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
