"""Tool calls: how a model is told of tools, how its calls are read, and what it must write when it has to call one.

Two styles are known. Hermes, which most ChatML models were trained on, writes
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere in a text; Llama answers with nothing but
`{"name": ..., "parameters": {...}}`. A template that knows nothing of tools gets them described in the system message,
in the words of Hermes. Text is read as it comes: what could be the beginning of a call is held back, arguments go out
while they are still being written, and what turns out to be no call is text after all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.request import Grammar, InvalidRequest

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
    """The style of a chat template; InvalidRequest for one that has tools in another."""
    if _OPEN in template or "tools" not in template:
        return HERMES
    if '"parameters"' in template or _PYTHON in template:
        return LLAMA
    raise InvalidRequest("tools are given, and this model writes calls in a style that is not known: leave them out.")


def describe(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Messages for a template that knows nothing of tools: as text that every template shows."""
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            found.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
        elif message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            texts = [
                f"{_OPEN}\n{json.dumps({'name': call['name'], 'arguments': call['arguments']})}\n{_CLOSE}"
                for call in calls
            ]
            found.append({"role": "assistant", "content": "\n".join([content, *texts] if content else texts)})
        else:
            found.append(dict(message))
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if found and found[0]["role"] == "system":
            found[0]["content"] = f"{found[0]['content']}\n\n{text}"
        else:
            found.insert(0, {"role": "system", "content": text})
    return found


def call_grammar(tools: Sequence[Tool], style: str, *, several: bool) -> Grammar:
    """What a model must write that has to call one of these tools, or several in turn."""
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
class CallBegins:
    name: str


@dataclass(frozen=True, slots=True)
class CallGoesOn:
    """More of the arguments of the call that began last, as JSON."""

    arguments: str


Event = Content | CallBegins | CallGoesOn


class CallParser:
    """One answer's text in, contents and calls out."""

    def __init__(self, style: str) -> None:
        self._style = style
        self._text = ""  # taken and not told
        self._call: _Call | None = None
        # A Llama answer is a call or it is not: its first character says so.
        self._may_call = True
        self._is_behind = False  # a call: blanks behind it are no text
        self.num_calls = 0

    def push(self, text: str) -> list[Event]:
        self._text += text
        return self._read(is_over=False)

    def close(self) -> list[Event]:
        """What is left, when the text has ended."""
        return self._read(is_over=True)

    def _read(self, *, is_over: bool) -> list[Event]:
        events: list[Event] = []
        while self._text or (is_over and self._call is not None):
            before = len(self._text), self._call is None
            found = self._read_call(is_over) if self._call is not None else self._read_content(is_over)
            events += found
            if not found and before == (len(self._text), self._call is None):
                break
        return events

    def _read_content(self, is_over: bool) -> list[Event]:
        if self._style == LLAMA:
            return self._read_llama(is_over)
        begin = self._text.find(_OPEN)
        if begin < 0:
            end = len(self._text) if is_over else len(self._text) - _overlap(self._text, _OPEN)
            if not is_over:
                end = len(self._text[:end].rstrip("\n"))  # line breaks before a call belong to neither
            text, self._text = self._text[:end], self._text[end:]
        else:
            text, self._text = self._text[:begin], self._text[begin + len(_OPEN) :]
            self._call = _Call(_OPEN, _CLOSE)
        if begin >= 0:
            text = text.rstrip("\n")
        if self._is_behind:
            text = text.lstrip()
            self._is_behind = not text
        return [Content(text)] if text else []

    def _read_llama(self, is_over: bool) -> list[Event]:
        if self._may_call:
            rest = self._text.lstrip()
            if not is_over and (not rest or _PYTHON.startswith(rest)):
                return []
            rest = rest.removeprefix(_PYTHON).lstrip()
            if rest.startswith("{"):
                self._call, self._text = _Call("", ""), rest
                return []
            self._may_call = bool(self.num_calls) and rest[:1] in (";", "")
            if self._may_call:  # between two calls
                self._text = rest[1:]
                return []
        text, self._text = self._text, ""
        return [Content(text)] if text else []

    def _read_call(self, is_over: bool) -> list[Event]:
        assert self._call is not None, "asked only within a call"
        call = self._call
        events, self._text = call.read(self._text, is_over)
        if any(isinstance(event, CallBegins) for event in events):
            self.num_calls += 1
        if call.is_over:
            self._call = None
            self._is_behind = not call.failed
            if self._style == LLAMA and call.failed:
                self._may_call = False
        return events


class _Call:
    """One call, from behind its opening to its end."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._head = ""
        self._began = False
        self._depth, self._in_string, self._escaped = 0, False, False
        self._closed = False  # the arguments; a brace and the closing are to come
        self.is_over = False
        self.failed = False

    def read(self, text: str, is_over: bool) -> tuple[list[Event], str]:
        """Events, and what is left of the text."""
        if not self._began:
            self._head += text
            return self._begin(is_over)
        if not self._closed:
            end = self._scan(text)
            shown, text = text[:end], text[end:]
            events: list[Event] = [CallGoesOn(shown)] if shown else []
            self.is_over = is_over and not text
            return events, text
        return [], self._end(text, is_over)

    def _begin(self, is_over: bool) -> tuple[list[Event], str]:
        match = _HEAD.match(self._head)
        if match:
            self._began = True
            return [CallBegins(json.loads(match[1]))], self._head[match.end() :]
        end = self._head.find(self._closing) if self._closing else -1
        if end >= 0 or is_over or (not self._closing and _is_json(self._head)):
            body, rest = (self._head[:end], self._head[end + len(self._closing) :]) if end >= 0 else (self._head, "")
            self.is_over = True
            return self._whole(body, closed=end >= 0), rest
        return [], ""

    def _whole(self, body: str, *, closed: bool) -> list[Event]:
        """A call that is written in another order than usual; or no call at all."""
        try:
            value = json.loads(body)
            name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.failed = True
            return [Content(self._opening + body + (self._closing if closed else ""))]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return [CallBegins(str(name)), CallGoesOn(text)]

    def _scan(self, text: str) -> int:
        """Up to where the arguments go."""
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

    def _end(self, text: str, is_over: bool) -> str:
        """Behind the arguments: a brace, and the closing."""
        if self._closing:
            end = text.find(self._closing)
            self.is_over = end >= 0 or is_over
            return text[end + len(self._closing) :] if end >= 0 else ("" if is_over else text)
        stripped = text.lstrip()
        self.is_over = is_over or stripped.startswith("}")
        return stripped.removeprefix("}")


def _overlap(text: str, marker: str) -> int:
    """How much of the end of `text` could be the beginning of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
