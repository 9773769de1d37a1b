"""Harmony, the output format of gpt-oss: a turn is one or more messages, each with a header.

    <|channel|>analysis<|message|>Let me see.<|end|>                                            reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>   a call of f
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>                            content

The prompt ends with `<|start|>assistant`. <|return|> and <|call|> are end tokens, which are not part of the text. The
recipient may also come before the channel. Text is parsed incrementally: what may be the beginning of a marker is held
back, and every decision depends on the text alone and never on how it arrives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from paceline.text.call_syntax import ArgumentsDelta, ToolCallStart, find_first, overlap_of_any
from paceline.text.reasoning import PieceParser, ReasoningMarkers, ReasoningPiece

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
FINAL = f"{CHANNEL}final{MESSAGE}"
_ROLE, _ANALYSIS, _FUNCTIONS = "assistant", "analysis", "functions."
_HEADER_BEGINS = ("to=", CHANNEL, CONSTRAIN, MESSAGE)  # after the role
_MESSAGE_ENDS = (END, CALL, RETURN, START, CHANNEL)  # the last two begin the next one
_MAX_HEADER = 1024  # characters
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")

HarmonyEvent = ReasoningPiece | ToolCallStart | ArgumentsDelta


def is_harmony(template: str) -> bool:
    """Whether a chat template has this format."""
    return CHANNEL in template and MESSAGE in template


def call_header(name: str) -> str:
    """What comes before the arguments of a call."""
    return f"{CHANNEL}commentary to={_FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}"


@dataclass(frozen=True, slots=True)
class HarmonyMarkers(ReasoningMarkers):
    """Reasoning is every message of the channel `analysis`."""

    @property
    def texts(self) -> tuple[str, ...]:
        return TOKENS

    @property
    def prefix(self) -> str:
        return FINAL

    def parser(self, prompt: str, *, keep_markers: bool = False) -> PieceParser:
        return _Pieces(HarmonyParser(prompt, keep_markers=keep_markers))

    def before_grammar(self, prompt: str) -> tuple[str, str] | None:
        return None if MESSAGE in _begun(prompt) else (self.opening, f"{END}{START}{_ROLE}")


HARMONY = HarmonyMarkers(f"{CHANNEL}{_ANALYSIS}{MESSAGE}", END)


class _HarmonyState(Enum):
    HEADER = auto()
    BODY = auto()
    BETWEEN = auto()  # after the end of a message


class _MessageKind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class HarmonyParser:
    """The text of one output in, reasoning, content and calls out. Text without a header is content. Texts of several
    messages are separated by an empty line."""

    def __init__(self, prompt: str, *, calls: bool = False, keep_markers: bool = False) -> None:
        """Without `calls` they are content, header included. With `keep_markers` all but calls is emitted as it is."""
        self._calls, self._keep = calls, keep_markers
        self._text = ""  # pushed and not parsed yet
        self._begun = _begun(prompt)  # the header of the first message, as far as the prompt has it
        self._is_first = True
        self._state, self._kind = _HarmonyState.HEADER, _MessageKind.CONTENT
        self._has_text = False  # of this message
        self._written: set[_MessageKind] = set()  # by this and earlier messages
        self.found = False  # there is reasoning, perhaps empty
        self.num_calls = 0
        header, is_complete, _ = self._begun.partition(MESSAGE)
        if is_complete:
            self._begin(header, [])

    def push(self, text: str) -> list[HarmonyEvent]:
        self._text += text
        return self._read(at_end=False)

    def close(self) -> list[HarmonyEvent]:
        """Parses the rest: the text has ended."""
        return self._read(at_end=True)

    def _read(self, *, at_end: bool) -> list[HarmonyEvent]:
        events: list[HarmonyEvent] = []
        steps = {
            _HarmonyState.HEADER: self._read_header,
            _HarmonyState.BODY: self._read_body,
            _HarmonyState.BETWEEN: self._read_between,
        }
        while steps[self._state](at_end, events):
            pass
        return events

    def _read_header(self, at_end: bool, events: list[HarmonyEvent]) -> bool:
        """Returns whether the state has changed, as the others do."""
        end = self._text.find(MESSAGE, 0, _MAX_HEADER + len(MESSAGE))
        is_too_long = end < 0 and len(self._text) >= _MAX_HEADER + len(MESSAGE)
        if is_too_long or not self._may_be_header(at_end):
            self._state, self._kind, self._has_text = _HarmonyState.BODY, _MessageKind.CONTENT, False
            if is_too_long:  # its marker is text, or it would begin the same header again
                size = next((len(marker) for marker in (START, CHANNEL) if self._text.startswith(marker)), 0)
                self._emit(self._text[:size], events)
                self._text = self._text[size:]
            return True
        if end >= 0:
            header, self._text = self._text[:end], self._text[end + len(MESSAGE) :]
            self._begin(header, events)
            return True
        if at_end:  # cut off
            if self._keep:
                self._emit(self._text, events)
            self._text = ""
        return False

    def _may_be_header(self, at_end: bool) -> bool:
        if not self._is_first or CHANNEL in self._begun:
            return True
        rest = self._text.lstrip()
        if at_end and MESSAGE not in rest:
            return not rest or CHANNEL in rest
        return any(rest.startswith(begin) or begin.startswith(rest) for begin in _HEADER_BEGINS)

    def _begin(self, header: str, events: list[HarmonyEvent]) -> None:
        """Begins the message of a header, of which the prompt may have a part."""
        whole = self._begun + header if self._is_first else header
        recipient, channel = _RECIPIENT.search(whole), _CHANNEL.search(whole)
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient and recipient[1].startswith(_FUNCTIONS) else ""
        self._state, self._has_text = _HarmonyState.BODY, False
        if name and self._calls:
            self._kind = _MessageKind.CALL
            self.num_calls += 1
            events.append(ToolCallStart(name))
            return
        # What is for another recipient, such as a tool of the model's own, is not for the user.
        is_reasoning = not name and (recipient is not None or (channel is not None and channel[1] == _ANALYSIS))
        self._kind = _MessageKind.REASONING if is_reasoning else _MessageKind.CONTENT
        self.found = self.found or is_reasoning
        if self._keep:
            self._emit(header + MESSAGE, events)
        elif name:
            self._emit(header.removeprefix(START).removeprefix(_ROLE).lstrip() + MESSAGE, events)

    def _read_body(self, at_end: bool, events: list[HarmonyEvent]) -> bool:
        index, marker = find_first(self._text, _MESSAGE_ENDS)
        if marker is None:
            size = len(self._text) if at_end else len(self._text) - overlap_of_any(self._text, _MESSAGE_ENDS)
            text, self._text = self._text[:size], self._text[size:]
        else:
            text, self._text = self._text[:index], self._text[index:]
        self._emit(text, events)
        if (marker is not None or at_end) and self._kind is _MessageKind.CALL and not self._has_text:
            self._emit("{}", events)
        if marker is None:
            return False
        self._is_first = False
        self._state = _HarmonyState.HEADER
        if marker not in (START, CHANNEL):
            self._state, self._text = _HarmonyState.BETWEEN, self._text[len(marker) :]
            if self._keep and self._kind is not _MessageKind.CALL:
                self._emit(marker, events)
        return True

    def _read_between(self, at_end: bool, events: list[HarmonyEvent]) -> bool:
        rest = self._text.lstrip()
        if not rest or (not at_end and any(one.startswith(rest) and one != rest for one in (START, CHANNEL))):
            return False
        self._text = self._text if self._keep else rest
        is_header = rest.startswith((START, CHANNEL))
        self._state = _HarmonyState.HEADER if is_header else _HarmonyState.BODY
        if not is_header:
            self._kind, self._has_text = _MessageKind.CONTENT, False
        return True

    def _emit(self, text: str, events: list[HarmonyEvent]) -> None:
        """Adds text of this message."""
        if self._kind is _MessageKind.CALL:
            text = text if self._has_text else text.lstrip()
            if text:
                events.append(ArgumentsDelta(text))
        elif text:
            is_next = not self._has_text and self._kind in self._written and not self._keep
            self._written.add(self._kind)
            events.append(ReasoningPiece(f"\n\n{text}" if is_next else text, self._kind is _MessageKind.REASONING))
        self._has_text = self._has_text or bool(text)


class _Pieces:
    """Reasoning and content alone."""

    def __init__(self, parser: HarmonyParser) -> None:
        self._parser = parser

    @property
    def found(self) -> bool:
        return self._parser.found

    def push(self, text: str) -> list[ReasoningPiece]:
        return [piece for piece in self._parser.push(text) if isinstance(piece, ReasoningPiece)]

    def close(self) -> list[ReasoningPiece]:
        return [piece for piece in self._parser.close() if isinstance(piece, ReasoningPiece)]


def _begun(prompt: str) -> str:
    """The end of a prompt that belongs to the output's first message."""
    last = prompt.rpartition(START)[2] if START in prompt else ""
    return "" if END in last else last
