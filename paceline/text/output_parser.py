"""The text of one chat output, parsed into reasoning, content and tool calls while it streams.

Reasoning is separated first: a tool call inside it is part of the reasoning. Harmony (gpt-oss) has one parser for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.text.call_syntax import Content, Tool, ToolCallEvent
from paceline.text.harmony import HARMONY, HarmonyEvent, HarmonyParser, is_harmony
from paceline.text.reasoning import MARKERS, PieceParser, ReasoningMarkers, ReasoningPiece
from paceline.text.tool_calls import ToolCallParser


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


OutputEvent = Reasoning | ToolCallEvent


def reasoning_markers_of(template: str) -> ReasoningMarkers | None:
    """The markers that a chat template mentions; None for a model without reasoning."""
    if is_harmony(template):
        return HARMONY
    return next((one for one in MARKERS if one.opening in template or one.closing in template), None)


def output_parser(
    markers: ReasoningMarkers | None, prompt: str, style: str, tools: Sequence[Tool], *, separate_reasoning: bool
) -> OutputParser | HarmonyOutputParser:
    """The parser of an output that continues `prompt`. style: of the calls, if there are tools."""
    if markers is HARMONY:
        parser = HarmonyParser(prompt, calls=bool(tools), keep_markers=not separate_reasoning)
        return HarmonyOutputParser(parser, separate_reasoning=separate_reasoning)
    return OutputParser(
        None if markers is None else markers.parser(prompt, keep_markers=not separate_reasoning),
        ToolCallParser(style, tools) if tools else None,
        separate_reasoning=separate_reasoning,
    )


class OutputParser:
    """Events are the same however the text is split, up to how texts and arguments are cut into pieces."""

    def __init__(
        self, reasoning: PieceParser | None, tools: ToolCallParser | None, *, separate_reasoning: bool = True
    ) -> None:
        """Without `separate_reasoning` the reasoning is content."""
        self._reasoning, self._tools = reasoning, tools
        self._text_type = Reasoning if separate_reasoning else Content

    @property
    def is_trivial(self) -> bool:
        """Whether all text is content."""
        return self._reasoning is None and self._tools is None

    @property
    def has_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.found

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, text: str) -> list[OutputEvent]:
        if self._reasoning is None:
            return self._answer(text)
        return self._events(self._reasoning.push(text))

    def close(self) -> list[OutputEvent]:
        """Parses the rest: the text has ended."""
        events = [] if self._reasoning is None else self._events(self._reasoning.close())
        return events + ([] if self._tools is None else self._tools.close())

    def _events(self, pieces: list[ReasoningPiece]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for piece in pieces:
            events += [self._text_type(piece.text)] if piece.is_reasoning else self._answer(piece.text)
        return events

    def _answer(self, text: str) -> list[OutputEvent]:
        if self._tools is None:
            return [Content(text)] if text else []
        return list(self._tools.push(text))


class HarmonyOutputParser:
    """The same for the output of gpt-oss."""

    is_trivial = False

    def __init__(self, parser: HarmonyParser, *, separate_reasoning: bool = True) -> None:
        self._parser = parser
        self._text_type = Reasoning if separate_reasoning else Content

    @property
    def has_reasoning(self) -> bool:
        return self._parser.found

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    def push(self, text: str) -> list[OutputEvent]:
        return [self._event(event) for event in self._parser.push(text)]

    def close(self) -> list[OutputEvent]:
        return [self._event(event) for event in self._parser.close()]

    def _event(self, event: HarmonyEvent) -> OutputEvent:
        if isinstance(event, ReasoningPiece):
            return self._text_type(event.text) if event.is_reasoning else Content(event.text)
        return event
