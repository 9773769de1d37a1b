"""Parses the tool calls of an output while it streams.

What may be the beginning of a call is held back, arguments are streamed while the model still writes them, and what
turns out not to be a call is emitted as text. Every decision depends on the text alone and never on how it arrives, so
a stream and a whole text give the same result. Only whitespace next to calls and the syntax of calls is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.text.call_syntax import (
    CLOSE,
    FUNCTION,
    Calls,
    Content,
    GlmCall,
    JsonCalls,
    NamedCall,
    NoCall,
    Tool,
    ToolCallEvent,
    ToolCallStart,
    XmlCall,
    find_first,
    overlap_of_any,
)

HERMES, QWEN_XML, GLM, LLAMA = "hermes", "qwen_xml", "glm", "llama"
MISTRAL, MISTRAL_ARGS, GRANITE = "mistral", "mistral_args", "granite"
HARMONY = "harmony"  # parsed by harmony.py, with everything else
OPEN, PYTHON, CALLS, ARGS = "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
GRANITE_CALLS = "<|tool_call|>"
_MAX_LINE_BREAKS = 8
_OPENINGS = {
    HERMES: (OPEN,),
    QWEN_XML: (OPEN, FUNCTION),  # <tool_call> is at times missing
    GLM: (OPEN,),
    LLAMA: (),
    MISTRAL: (CALLS,),
    MISTRAL_ARGS: (CALLS,),
    GRANITE: (GRANITE_CALLS, OPEN),  # some models write the second
}


class ToolCallParser:
    """The text of one output in, content and tool calls out."""

    def __init__(self, style: str, tools: Sequence[Tool] = ()) -> None:
        """`tools` are those that the model may call: with them, Llama's calls are told from other JSON, and the
        arguments of Qwen and GLM get their types."""
        self._style, self._tools = style, {tool["function"]["name"]: tool["function"] for tool in tools}
        self._openings = _OPENINGS[style]
        self._text = ""  # pushed and not parsed yet
        self._dropped = ""  # syntax that was skipped: emitted if it turns out to be no call
        self._is_open = style == LLAMA  # calls are being parsed; a Llama output begins with them or has none
        self._calls: Calls | None = None  # None: which kind is not known yet
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
        while True:
            if not self._is_open:
                self._read_content(at_end, events)
            if not self._is_open or not self._read_calls(at_end, events):
                return events

    def _read_content(self, at_end: bool, events: list[ToolCallEvent]) -> None:
        """Emits text up to the next opening of a call."""
        if self._is_after_call:
            self._text = self._text.lstrip()
            self._is_after_call = not self._text
        begin, opening = find_first(self._text, self._openings)
        if opening is None:
            end = len(self._text)
            if not at_end and self._openings:
                end -= overlap_of_any(self._text, self._openings)
                end = _before_line_breaks(self._text, end)
            text, self._text = self._text[:end], self._text[end:]
        else:
            self._is_open = True
            text, after = self._text[: _before_line_breaks(self._text, begin)], begin + len(opening)
            if opening == FUNCTION:
                self._calls = XmlCall(self._tools)
            self._dropped, self._text = self._text[len(text) : after], self._text[after:]
        if text:
            events.append(Content(text))

    def _read_calls(self, at_end: bool, events: list[ToolCallEvent]) -> bool:
        """Returns whether anything was read."""
        if self._calls is None:
            self._calls = _calls_of(self._style, self._tools, self._text.lstrip(), at_end)
        if self._calls is None:
            return False
        found, size = self._calls.read(self._text, at_end)
        self.num_calls += sum(isinstance(event, ToolCallStart) for event in found)
        self._dropped = "" if found else self._dropped + self._text[:size]
        self._text = self._text[size:]
        events += found
        is_ended = self._calls.is_done or self._calls.failed
        if is_ended:
            if self._calls.failed and self._dropped:
                events.append(Content(self._dropped))
            self._is_after_call = not self._calls.failed
            self._dropped, self._calls, self._is_open = "", None, False
        return is_ended or size > 0 or bool(found)


def _before_line_breaks(text: str, end: int) -> int:
    """Where the line breaks before `end` begin, which are dropped before a call. Few are held back: a model may write
    nothing else."""
    first = max(0, end - _MAX_LINE_BREAKS)
    while end > first and text[end - 1] == "\n":
        end -= 1
    return end


def _calls_of(style: str, tools: Mapping[str, Tool], text: str, at_end: bool) -> Calls | None:
    """The parser of the calls that begin with `text`; None if more of it is needed to tell."""
    if style == LLAMA:
        return JsonCalls(PYTHON, ";", "", frozenset(tools))
    if not text:
        return NoCall() if at_end else None
    if style == GLM:
        return GlmCall(tools)
    if style in (HERMES, QWEN_XML):
        if text[0] == "{":
            return JsonCalls("", "", CLOSE)
        if text.startswith(FUNCTION):
            return XmlCall(tools, FUNCTION)
        return None if not at_end and FUNCTION.startswith(text) else NoCall()
    if style == GRANITE:
        return JsonCalls("[", ",", "]") if text[0] in "[{" else NoCall()
    return JsonCalls("[", ",", "]") if text[0] in "[{" else NamedCall()
