"""The text of one chat output, parsed into reasoning, content and tool calls while it streams.

Reasoning is separated first: a tool call inside it is part of the reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.text.call_syntax import Content, ToolCallEvent
from paceline.text.reasoning import ReasoningParser, ReasoningPiece
from paceline.text.tool_calls import ToolCallParser


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


OutputEvent = Reasoning | ToolCallEvent


class OutputParser:
    """Events are the same however the text is split, up to how texts and arguments are cut into pieces."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolCallParser | None, *, separate_reasoning: bool = True
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
