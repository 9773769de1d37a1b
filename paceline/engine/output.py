"""What a caller gets: pieces while a request runs, and with the last one what it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.request import FinishReason, PacelineError, Request


class EngineFailed(PacelineError):
    """The engine cannot serve any more: a pass or the loop broke, or it was closed."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a request. Cached ones are part of the prompt's and were not computed again; fetched ones are those of
    them that came from host memory."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    fetched_tokens: int = 0


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


class TokenLogprob(NamedTuple):  # a tuple: there is one for every token, and the engine's thread makes them
    """The logarithm of a token's chance, as the model gave it, and of some alternatives: the likeliest first, then
    those that were asked for by id."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What came since the last piece. The last one has a finish reason, the usage and the timings."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: TokenUsage | None = None
    timings: Timings | None = None
    error: str | None = None  # with reason error: what happened
    vector: bytes | None = None  # of an embedding: float32, in the machine's order
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token id, if they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first piece, from the prompt's second token on
