"""Reasoning of a chat request: the variables of the chat template that control it, and how it is separated."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from paceline.server.errors import ApiError
from paceline.server.fields import short
from paceline.server.request_types import ChatRequest
from paceline.server.state import RequestContext
from paceline.text.chat import RESERVED_VARIABLES, ChatTemplate
from paceline.text.output_parser import reasoning_markers_of
from paceline.text.reasoning import ReasoningMarkers

_SWITCHES = ("enable_thinking", "thinking")  # Qwen3, GLM and SmolLM3; DeepSeek and Granite
_EFFORT = "reasoning_effort"  # gpt-oss, Seed-OSS


def template_variables(context: RequestContext) -> frozenset[str]:
    """The variables that the chat template reads."""
    chat = context.tokenizer.chat
    return frozenset() if chat is None else chat.variables


@dataclass(frozen=True, slots=True)
class ReasoningSetup:
    """`markers` is None for a model without reasoning."""

    variables: dict[str, object]
    markers: ReasoningMarkers | None
    is_separate: bool

    @classmethod
    def of(cls, context: RequestContext, request: ChatRequest, chat: ChatTemplate | None) -> ReasoningSetup:
        separate = request.separate_reasoning
        markers = None if chat is None else reasoning_markers_of(chat.source)
        known = frozenset() if chat is None else chat.variables
        variables = _effort_variables(request, known, markers) | _template_variables(request, known, markers)
        return cls(variables, markers, context.config.separate_reasoning if separate is None else separate)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that the parser needs to see, even if they are special tokens."""
        return () if self.markers is None else self.markers.texts

    def before_grammar(self, prompt: str) -> tuple[str, str] | None:
        return None if self.markers is None or not self.is_separate else self.markers.before_grammar(prompt)


def _effort_variables(
    request: ChatRequest, known: frozenset[str], markers: ReasoningMarkers | None
) -> dict[str, object]:
    effort = request.reasoning_effort
    if effort is None:
        return {}
    found: dict[str, object] = {name: effort != "none" for name in _SWITCHES if name in known}
    if _EFFORT in known:
        found[_EFFORT] = effort
    if not found and (effort != "none" or markers is not None):
        raise ApiError(
            f"reasoning_effort is {short(effort)}, and the model's chat template has no variable for it: omit it.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return found


def _template_variables(
    request: ChatRequest, known: frozenset[str], markers: ReasoningMarkers | None
) -> dict[str, object]:
    found = {}
    for name, value in (request.chat_template_kwargs or {}).items():
        if name in known:
            found[name] = value
        elif not (name in _SWITCHES and value is False and markers is None):  # a model without reasoning
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "omit it."
            why = (
                "which the server sets"
                if name in RESERVED_VARIABLES
                else "which the model's chat template does not use"
            )
            raise ApiError(
                f"chat_template_kwargs has {short(name)}, {why}: {hint}",
                param="chat_template_kwargs",
                code="unsupported_parameter",
            )
    return found
