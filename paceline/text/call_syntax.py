"""The syntax of single tool calls: JSON, XML, and a name with arguments.

Each parser gets text that was not consumed before and returns events and how much it consumed. Before a call begins it
consumes nothing but its own opening, so that text which turns out to be no call is not lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from paceline.text.reasoning import overlap

CLOSE, FUNCTION = "</tool_call>", "<function="
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD = 1024  # characters; patterns are bounded, since they are matched again with every token
_MAX_BLANKS = 64
NAME = re.compile(r"[\w.-]{1,256}")
# `name[ARGS]{`, and a pattern that all beginnings of it match.
_NAMED_PREFIX = re.compile(r"\s{0,64}([\w.-]{1,256}(\[[A-Z_]{0,9}(\]([\w.-]{1,256}(\[[A-Z]{0,9}\]?)?)?)?)?\s{0,64})?")
_NAMED = re.compile(r"\s{0,64}([\w.-]{1,256})(?:\[CALL_ID\][\w.-]{1,256})?(?:\[ARGS\])?\s{0,64}(?=\{)")
_PARAMETER_PREFIX = re.compile(r"<parameter=[^\s<>]{0,256}>?")
_PARAMETER = re.compile(r"\s*<parameter=([^\s<>]{1,256})>\n?")
# What ends the value of a parameter; models at times forget its own end.
_VALUE_ENDS = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _beginnings(text: str) -> str:
    """A pattern of every beginning of `text`, the empty one included."""
    return f"(?:{'|'.join(re.escape(text[:size]) for size in range(len(text), -1, -1))})"


_GLM_NAME = re.compile(r"\s{0,64}([\w.-]{1,256})\s{0,64}")
_GLM_PARAMETER = re.compile(rf"\s*{KEY}([^<>]{{1,256}}){KEY_END}\s{{0,64}}{VALUE}")
_GLM_PREFIX = re.compile(
    rf"{_beginnings(KEY)}|{KEY}[^<>]{{1,256}}{_beginnings(KEY_END)}|"
    rf"{KEY}[^<>]{{1,256}}{KEY_END}\s{{0,64}}{_beginnings(VALUE)}"
)
_ESCAPABLE = frozenset('"\\/bfnrtu')  # after a backslash, in JSON
_LITERALS = {"True": "true", "False": "false", "None": "null"}  # models at times write Python

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


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


class Calls(Protocol):
    """Parses one or more calls. Before a call begins, it may turn out to be text."""

    is_done: bool
    failed: bool

    def read(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        """Events of the text that was not consumed before, and how many of its characters are consumed."""


class NoCall:
    is_done, failed = False, True

    def read(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        return [], 0


class _JsonScanner:
    """Finds the end of a JSON object or list, in text that grows, and makes its strings valid: models write line breaks
    and tabs as they are, and backslashes that escape nothing, as in a regular expression."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._in_string, self._escaped = depth, False, False
        self.is_closed = False
        self.is_broken = False  # at a character that no JSON has there: a tag

    def read(self, text: str) -> tuple[str, int]:
        """The part of `text` that belongs to it, with valid strings, and the length of that part in `text`."""
        repairs: list[tuple[int, str]] = []
        end = self.scan(text, repairs)
        shown, start = [], 0
        for index, valid in repairs:
            shown += [text[start:index], valid]
            start = index + 1
        return "".join([*shown, text[start:end]]), end

    def scan(self, text: str, repairs: list[tuple[int, str]] | None = None) -> int:
        """Index after the last character that is part of it. Adds characters to replace to `repairs`."""
        for index, character in enumerate(text):
            if self._in_string:
                if character < " " and repairs is not None:
                    # A backslash before it was a character of its own.
                    repairs.append((index, ("\\" if self._escaped else "") + _escaped(character)))
                if self._escaped:
                    self._escaped = False
                    if character not in _ESCAPABLE and character >= " " and repairs is not None:
                        repairs.append((index, "\\" + character))
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
                if self._depth <= 0:
                    self.is_closed = True
                    return index + 1
            elif character == "<":
                self.is_broken = True
                return index
        return len(text)


class _Stage(Enum):
    HEAD = auto()
    ARGUMENTS = auto()
    REST = auto()  # after the arguments
    END = auto()  # after the call


class _JsonCall:
    """`{"name": ..., "arguments": {...}}`, with other keys or another order too; Llama says `parameters`."""

    def __init__(self, names: frozenset[str] | None = None) -> None:
        """With `names`, the name must be one of them and arguments must be given: anything else is text."""
        self._names = names
        self._stage = _Stage.HEAD
        self._scanner = _JsonScanner()
        self._num_scanned = 0  # of the head
        self.is_done = self.failed = False

    def read(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        if self._stage is _Stage.HEAD:
            return self._read_head(text, at_end)
        if self._stage is _Stage.ARGUMENTS:
            shown, end = self._scanner.read(text)
            if self._scanner.is_closed:
                self._stage = _Stage.REST
            self.is_done = self._scanner.is_broken or (at_end and not self._scanner.is_closed)
            return [ArgumentsDelta(shown)] if shown else [], end
        stripped = text.lstrip()
        if self._stage is _Stage.REST and stripped:
            if stripped[0] not in ",}":  # the brace of the object is missing
                self.is_done = True
                return [], 0
            self._stage, self._scanner = _Stage.END, _JsonScanner(depth=1)
        if self._stage is _Stage.REST:
            self.is_done = at_end
            return [], 0
        end = self._scanner.scan(text)
        self.is_done = self._scanner.is_closed or self._scanner.is_broken or at_end
        return [], end

    def _read_head(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        match = _HEAD.match(text, 0, _MAX_HEAD) if self._num_scanned < _MAX_HEAD else None
        if match:
            name = _parsed(match[1])
            self.failed = not self._is_name(name)
            self._stage, self._scanner = _Stage.ARGUMENTS, _JsonScanner()
            return ([], 0) if self.failed else ([ToolCallStart(name)], match.end())
        stripped = text.lstrip()
        if stripped and stripped[0] != "{":
            self.failed = True
            return [], 0
        self._num_scanned += self._scanner.scan(text[self._num_scanned :])
        if self._scanner.is_closed:
            return self._read_whole(text[: self._num_scanned])
        self.failed = at_end or self._scanner.is_broken
        return [], 0

    def _read_whole(self, text: str) -> tuple[list[ToolCallEvent], int]:
        """A call with its keys in another order than usual, or text that is not a call."""
        value = _parsed(text, strict=False)
        call = value if isinstance(value, dict) else {}
        key = next((key for key in ("arguments", "parameters") if key in call), None)
        name: Any = call.get("name")
        arguments = call.get(key, {}) if key else {}
        self.failed = not self._is_name(name) or (self._names is not None and key is None)
        if self.failed:
            return [], 0
        self.is_done = True
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        return [ToolCallStart(name), ArgumentsDelta(shown)], len(text)

    def _is_name(self, name: object) -> bool:
        return isinstance(name, str) and bool(name) and (self._names is None or name in self._names)


class JsonCalls:
    """One call, or several with a separator; `opening` and `closing` may be missing."""

    def __init__(self, opening: str, separator: str, closing: str, names: frozenset[str] | None = None) -> None:
        self._opening, self._separator, self._closing, self._names = opening, separator, closing, names
        self._call = _JsonCall(names)
        self._next: _JsonCall | None = None
        self.is_done = self.failed = False

    def read(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        if self._opening:
            size = _skipped(text, self._opening, at_end)
            if size is None:
                return [], 0
            self._opening = ""
            if size:
                return [], size
        if not self._call.is_done:
            events, size = self._call.read(text, at_end)
            self.failed = self._call.failed
            return events, size
        stripped = text.lstrip()
        if stripped.startswith("}"):  # one too many
            return [], len(text) - len(stripped) + 1
        if self._separator and stripped.startswith(self._separator):
            return self._read_next(text, len(text) - len(stripped) + len(self._separator), at_end)
        if not stripped and not at_end:
            return [], 0
        size = _skipped(text, self._closing, at_end)
        self.is_done = size is not None
        return [], size or 0

    def _read_next(self, text: str, start: int, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        """The call after a separator. The separator is consumed with the call's beginning: without one, it is text."""
        self._next = self._next or _JsonCall(self._names)
        events, size = self._next.read(text[start:], at_end)
        self.is_done = self._next.failed
        if events:
            self._call, self._next = self._next, None
        return events, start + size if events else 0


class XmlCall:
    """`<function=name><parameter=key>value</parameter></function>`: values are text, typed by the tool's schema.

    The call begins with its first parameter or its end: a name alone may be followed by anything.
    """

    _parameter = _PARAMETER
    _value_ends: Sequence[str] = _VALUE_ENDS
    _value_end, _closing = "</parameter>", "</function>"

    def __init__(self, tools: Mapping[str, Tool], opening: str = "") -> None:
        self._tools, self._opening = tools, opening
        self._properties: Mapping[str, object] = {}
        self._name = ""
        self._num_values = 0
        self._in_value = self._is_string = False
        self._kinds: frozenset[str] = frozenset()  # of the value, by its schema
        self._num_searched = 0  # characters of the value in which no end begins
        self._is_closed = False
        self.is_done = self.failed = False

    def read(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        if not self._name:
            return self._begin(text, at_end)
        if self._is_closed:
            size = _skipped(text, CLOSE, at_end)
            self.is_done = size is not None
            return [], size or 0
        return self._read_value(text, at_end) if self._in_value else self._read_tag(text, at_end)

    def _begin(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        if self._opening:
            self._opening = ""
            return [], _skipped(text, FUNCTION, at_end) or 0
        end = text.find(">")
        name = text[: end if end >= 0 else len(text)]
        if end >= 0 and NAME.fullmatch(name):
            self._start(name)
            return [], end + 1
        self.failed = at_end or end >= 0 or bool(name and not NAME.fullmatch(name))
        return [], 0

    def _start(self, name: str) -> None:
        parameters = self._tools.get(name, {}).get("parameters") or {}
        found = parameters.get("properties")
        self._name, self._properties = name, found if isinstance(found, dict) else {}

    def _may_be_parameter(self, text: str) -> bool:
        """Whether `text` is the beginning of a parameter's tag, or all of it."""
        return "<parameter=".startswith(text) or bool(_PARAMETER_PREFIX.fullmatch(text))

    def _read_tag(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        stripped = text.lstrip()
        blanks = len(text) - len(stripped)
        match = self._parameter.match(text)
        # A line break after the tag is not part of the value: wait for the character after it.
        if match and (match.end() < len(text) or text.endswith("\n") or at_end):
            self._in_value = True
            self._kinds, self._num_searched = kinds_of(self._properties.get(match[1])), 0
            self._is_string = self._kinds <= {"string"}
            start = ("{" if self._num_values == 0 else ", ") + json.dumps(match[1], ensure_ascii=False) + ": "
            begin = [] if self._num_values else [ToolCallStart(self._name)]
            self._num_values += 1
            return [*begin, ArgumentsDelta(start + ('"' if self._is_string else ""))], match.end()
        if stripped.startswith(self._closing):
            self._is_closed, self.is_done = True, self._closing == CLOSE
            size = blanks + len(self._closing)
            return [ArgumentsDelta("}")] if self._num_values else self._empty(), size
        may_continue = self._closing.startswith(stripped) or self._may_be_parameter(stripped)
        if self._num_values == 0:
            self.failed = at_end or not may_continue or blanks > _MAX_BLANKS
            return [], 0
        if may_continue:
            self.is_done = at_end  # cut off: the arguments stay incomplete
            return [], len(text) if at_end or not stripped else 0
        self._is_closed = True  # the tag is missing
        return [ArgumentsDelta("}")], 0

    def _empty(self) -> list[ToolCallEvent]:
        return [ToolCallStart(self._name), ArgumentsDelta("{}")]

    def _read_value(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        begin, ending = find_first(text, self._value_ends, self._num_searched)
        if ending is not None:
            self._in_value = False
            shown = _escaped(text[:begin]) + '"' if self._is_string else _typed(text[:begin], self._kinds)
            return [ArgumentsDelta(shown)], begin + (len(ending) if ending.endswith(self._value_end) else 0)
        if at_end:
            self.is_done = True
            return [ArgumentsDelta(_escaped(text) if self._is_string else text)] if text else [], len(text)
        if not self._is_string:
            self._num_searched = max(0, len(text) - max(map(len, self._value_ends)))
            return [], 0
        end = len(text) - overlap_of_any(text, self._value_ends)
        return [ArgumentsDelta(_escaped(text[:end]))] if end else [], end


class GlmCall(XmlCall):
    """`name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with line breaks in between or without."""

    _parameter = _GLM_PARAMETER
    _value_ends = (VALUE_END, f"\n{KEY}", f"\n{CLOSE}")
    _value_end, _closing = VALUE_END, CLOSE

    def _begin(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        match = _GLM_NAME.match(text)
        rest = text[match.end() :] if match else text.lstrip()
        # Without arguments, any word within the tags would be a call.
        if match and (rest.startswith(KEY) or (rest.startswith(CLOSE) and match[1] in self._tools)):
            self._start(match[1])
            return [], match.end()
        is_begun = not rest or (bool(match) and (KEY.startswith(rest) or (CLOSE.startswith(rest) and rest != CLOSE)))
        self.failed = at_end or not is_begun
        return [], 0

    def _may_be_parameter(self, text: str) -> bool:
        return bool(_GLM_PREFIX.fullmatch(text))


class NamedCall:
    """`name[ARGS]{...}`, with `[CALL_ID]id` before the arguments or without `[ARGS]` (Mistral)."""

    def __init__(self) -> None:
        self._arguments: _JsonScanner | None = None
        self.is_done = self.failed = False

    def read(self, text: str, at_end: bool) -> tuple[list[ToolCallEvent], int]:
        if self._arguments is not None:
            shown, end = self._arguments.read(text)
            self.is_done = self._arguments.is_closed or self._arguments.is_broken or at_end
            return [ArgumentsDelta(shown)] if shown else [], end
        match = _NAMED.match(text)
        if match:
            self._arguments = _JsonScanner()
            return [ToolCallStart(match[1])], match.end()
        self.failed = at_end or not _NAMED_PREFIX.fullmatch(text)
        return [], 0


def _skipped(text: str, marker: str, at_end: bool) -> int | None:
    """How many characters whitespace and `marker` have at the start of `text`, 0 if there is another text; None if more
    of it is needed to tell."""
    stripped = text.lstrip()
    if stripped.startswith(marker):
        return len(text) - len(stripped) + len(marker)
    return None if not at_end and marker.startswith(stripped) else 0


def find_first(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str | None]:
    """The first occurrence of one of `markers` from `start` on, and which."""
    found = [(index, -len(marker), marker) for marker in markers if (index := text.find(marker, start)) >= 0]
    index, _, marker = min(found, default=(-1, 0, None))
    return index, marker


def overlap_of_any(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    return max(overlap(text, marker) for marker in markers)


def _parsed(text: str, *, strict: bool = True) -> Any:
    """The value of a JSON text; None if it is not JSON. Unless `strict`, strings may have line breaks and tabs."""
    try:
        return json.loads(text, parse_constant=_refuse, strict=strict)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def kinds_of(schema: object) -> frozenset[str]:
    """The types that a schema allows; none if it does not say. A value is written as text if it may be a string or
    there is no type, else as JSON."""
    if not isinstance(schema, dict):
        return frozenset()
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    for name in ("anyOf", "oneOf"):
        for option in schema.get(name) or ():
            found |= kinds_of(option)
    if not found and "enum" in schema and not any(isinstance(value, str) for value in schema["enum"]):
        found.add("enum")  # numbers, true, false or null
    return frozenset(found)


def _escaped(text: str) -> str:
    """`text` inside a JSON string. Character by character, so pieces add up."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _typed(text: str, kinds: frozenset[str]) -> str:
    """The JSON of a value that need not be a string by its schema. What is not JSON is a string."""
    stripped = _LITERALS.get(text.strip(), text.strip())
    if stripped == "null" or ("string" not in kinds and _parsed(stripped) is not None):
        return stripped
    return json.dumps(text, ensure_ascii=False)
