"""Reasoning: what a thinking model writes before its answer, separated from the answer.

The markers around it are recognised from the chat template. Some templates open the reasoning in the prompt, so that
the output has only the closing marker. Text is parsed incrementally: what may be the beginning of a marker is held
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, Protocol

from paceline.request import SamplingParams


class Vocabulary(Protocol):
    """What is asked of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_id(self, token: str) -> int | None: ...


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    opening: str
    closing: str

    def opened_by(self, prompt: str) -> bool:
        """Whether an output that continues `prompt` begins within reasoning."""
        return prompt.rstrip().endswith(self.opening)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt already has an empty reasoning: thinking is turned off."""
        return prompt.rstrip().endswith(self.closing)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that the parser needs to see, even if they are special tokens."""
        return self.opening, self.closing

    @property
    def prefix(self) -> str:
        """What the model writes between the reasoning and the text that a grammar constrains."""
        return ""

    def parser(self, prompt: str, *, keep_markers: bool = False) -> PieceParser:
        """A parser of an output that continues `prompt`."""
        return ReasoningParser(self, is_opened=self.opened_by(prompt), keep_markers=keep_markers)

    def before_grammar(self, prompt: str) -> tuple[str, str] | None:
        """The markers of reasoning that a grammar must allow before the text that it constrains."""
        if self.closed_by(prompt):
            return None
        return "" if self.opened_by(prompt) else self.opening, self.closing

    def sampling_params(self, params: SamplingParams, prompt: str, tokenizer: Vocabulary) -> SamplingParams:
        """`params` for an output that continues `prompt` and is parsed: markers are part of its text, and a grammar
        constrains the answer alone."""
        if any(tokenizer.token_id(marker) in tokenizer.special_ids for marker in self.texts):
            params = replace(params, skip_special_tokens=False)
        if params.grammar is not None:
            grammar = replace(params.grammar, reasoning=self.before_grammar(prompt), prefix=self.prefix)
            params = replace(params, grammar=grammar)
        return params

    def split(self, prompt: str, text: str) -> tuple[str, str]:
        """The reasoning and the answer of an output that continues `prompt`."""
        parser = self.parser(prompt)
        pieces = parser.push(text) + parser.close()
        return (
            "".join(piece.text for piece in pieces if piece.is_reasoning),
            "".join(piece.text for piece in pieces if not piece.is_reasoning),
        )


MARKERS = (
    ReasoningMarkers("<think>", "</think>"),  # Qwen3, DeepSeek-R1, SmolLM3, GLM
    ReasoningMarkers("[THINK]", "[/THINK]"),  # Mistral
    ReasoningMarkers("<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningMarkers("◁think▷", "◁/think▷"),  # Kimi
)


class ReasoningPiece(NamedTuple):  # a tuple: there is one per token
    """A part of the reasoning, or of the answer."""

    text: str
    is_reasoning: bool


class PieceParser(Protocol):
    """Separates the reasoning and the answer of one output."""

    @property
    def found(self) -> bool:
        """Whether there is reasoning, perhaps empty."""

    def push(self, text: str) -> list[ReasoningPiece]: ...

    def close(self) -> list[ReasoningPiece]:
        """Parses the rest: the text has ended."""


class _State(Enum):
    START = auto()  # nothing but whitespace so far, or the beginning of the opening marker
    REASONING = auto()
    CLOSED = auto()  # nothing but whitespace after the closing marker
    ANSWER = auto()


class ReasoningParser:
    """The text of one output in, reasoning and answer out.

    Reasoning is at the start of an output only: a marker in the answer is text. With `keep_markers` the pieces add up
    to the text; otherwise markers and the whitespace next to them are dropped.
    """

    def __init__(self, markers: ReasoningMarkers, *, is_opened: bool, keep_markers: bool = False) -> None:
        """`is_opened`: the prompt has the opening marker."""
        self._markers, self._is_opened, self._keep = markers, is_opened, keep_markers
        self._state = _State.START
        self._text = ""  # pushed and not emitted yet
        self._has_begun = False  # some reasoning was emitted
        self.found = False  # there is reasoning, perhaps empty

    def push(self, text: str) -> list[ReasoningPiece]:
        if not self._text and self._state is _State.ANSWER:
            return [ReasoningPiece(text, False)] if text else []
        self._text += text
        return self._read(at_end=False)

    def close(self) -> list[ReasoningPiece]:
        """Parses the rest: the text has ended."""
        return self._read(at_end=True)

    def _read(self, *, at_end: bool) -> list[ReasoningPiece]:
        pieces: list[ReasoningPiece] = []
        if self._state is _State.START:
            self._read_start(at_end, pieces)
        if self._state is _State.REASONING:
            self._read_reasoning(at_end, pieces)
        if self._state is _State.CLOSED:
            self._text = self._text if self._keep else self._text.lstrip()
            self._state = _State.ANSWER if self._text else _State.CLOSED
        if self._state is _State.ANSWER and self._text:
            pieces.append(ReasoningPiece(self._text, is_reasoning=False))
            self._text = ""
        return pieces

    def _read_start(self, at_end: bool, pieces: list[ReasoningPiece]) -> None:
        rest, opening = self._text.lstrip(), self._markers.opening
        if not at_end and len(rest) < len(opening) and opening.startswith(rest):
            return
        # A model may repeat the marker that the prompt has.
        self.found = self._is_opened or rest.startswith(opening)
        self._state = _State.REASONING if self.found else _State.ANSWER
        if rest.startswith(opening):
            self._emit(len(self._text) - len(rest) + len(opening), pieces, is_marker=True)

    def _read_reasoning(self, at_end: bool, pieces: list[ReasoningPiece]) -> None:
        closing = self._markers.closing
        end = self._text.find(closing)
        if end >= 0:
            size = end
        else:
            size = len(self._text) if at_end else len(self._text) - overlap(self._text, closing)
        if not self._keep and not self._has_begun:
            num_blanks = size - len(self._text[:size].lstrip())
            self._text, size, end = self._text[num_blanks:], size - num_blanks, end - num_blanks
        if not self._keep and (end >= 0 or not at_end):  # whitespace before the closing marker is dropped
            size = len(self._text[:size].rstrip())
        self._has_begun = self._has_begun or size > 0
        self._emit(size, pieces)
        if end >= 0:
            self._emit(end - size + len(closing), pieces, is_marker=True)
            self._state = _State.CLOSED

    def _emit(self, size: int, pieces: list[ReasoningPiece], *, is_marker: bool = False) -> None:
        """Takes `size` characters off the text. A marker is emitted only if markers are kept."""
        text, self._text = self._text[:size], self._text[size:]
        if text and (self._keep or not is_marker):
            pieces.append(ReasoningPiece(text, is_reasoning=True))


class ReasoningCounter:
    """Counts output tokens up to the one that completes the closing marker."""

    def __init__(self, markers: ReasoningMarkers, token_bytes: Callable[[int], bytes]) -> None:
        self._closing, self._token_bytes = markers.closing.encode(), token_bytes
        self._end = b""  # the last bytes
        self._is_closed = False
        self.num_tokens = 0

    def push(self, ids: Iterable[int]) -> None:
        if self._is_closed:
            return
        for index in ids:
            self.num_tokens += 1
            end = self._end + self._token_bytes(index)
            if self._closing in end:
                self._is_closed = True
                return
            self._end = end[-len(self._closing) :]


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `marker`."""
    if marker[0] not in text[1 - len(marker) :]:  # nearly always
        return 0
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
