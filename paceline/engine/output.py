"""What a caller gets: pieces while a request runs, and how its tokens become text.

Text is made on the engine's thread, one request at a time: an error here ends its own request and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.request import FinishReason, Request
from paceline.text.detokenize import Detokenizer
from paceline.text.stop import StopScanner
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. Cached ones are part of the prompt's and were not computed again."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request arrived; what never happened is None."""

    admitted_s: float | None
    first_token_s: float | None
    finished_s: float | None
    retractions: int

    @classmethod
    def of(cls, request: Request) -> Timings:
        def since(time: float | None) -> float | None:
            return None if time is None else time - request.arrival

        return cls(
            since(request.first_admitted), since(request.first_token), since(request.finished), request.retractions
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """What came since the last piece. The last one has a finish reason, the usage and the timings."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: str | None = None  # with reason error: what happened


class OutputText:
    """One request's text: incomplete characters and possible beginnings of stop strings are held back."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stop) if stop else None
        self._unscanned = max(0, min_tokens - 1)  # tokens that no stop string may end at

    @property
    def stopped(self) -> bool:
        return self._scanner is not None and self._scanner.matched is not None

    def push(self, token: int) -> str:
        text = self._detokenizer.push((token,))
        if self._scanner is None:
            return text
        if self._unscanned:
            self._unscanned -= 1
            return text
        return self._scanner.push(text)

    def close(self) -> str:
        """What was held back, when the request has ended."""
        rest = self._detokenizer.flush()
        if self._scanner is None:
            return rest
        if self._scanner.matched is not None:
            return ""
        return self._scanner.push(rest) + self._scanner.flush()
