"""What a caller receives: output deltas while a request runs, usage and timings with the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.request import FinishReason, PacelineError
from paceline.scheduler.tracked_request import TrackedRequest


class EngineFailed(PacelineError):
    """The engine cannot serve any more: a forward pass or the loop failed, or it was closed."""


class Conflict(PacelineError):
    """Another operation of this kind is in progress, or the engine is in a state that forbids it."""


class UnknownAdapter(PacelineError):
    """No LoRA adapter with this name is loaded."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A LoRA adapter that requests can use."""

    name: str
    path: str
    adapter: str  # as requests, plans and the prefix cache call it
    rank: int  # the highest of its matrices
    num_bytes: int  # of one rank's part


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of a request. Cached tokens are part of the prompt and were not computed; fetched tokens are the
    cached ones that were copied from host memory. Drafted tokens were verified by speculative decoding; the accepted
    ones are part of the completion."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    fetched_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request arrived; None for what never happened."""

    admitted_s: float | None
    first_token_s: float | None
    finished_s: float | None
    retractions: int

    @classmethod
    def of(cls, request: TrackedRequest) -> Timings:
        def since(time: float | None) -> float | None:
            return None if time is None else time - request.arrival

        return cls(
            since(request.first_admitted), since(request.first_token), since(request.finished), request.retractions
        )


class TokenLogprob(NamedTuple):  # a tuple: there is one per token, created on the engine's thread
    """The logprob of a token, and of alternatives: the most likely first, then those requested by id."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What a request produced since its last delta. The final one has a finish reason, usage and timings.

    `text` is empty where the engine does not detokenize. With finish reason stop, the last token id may be the stop
    token, which is not part of the text.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: TokenUsage | None = None
    timings: Timings | None = None
    error: str | None = None  # with reason error: what happened
    vector: bytes | None = None  # of an embedding: float32, native byte order
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token id, if requested
    # With the first delta: from the prompt's second token on, or from `prompt_logprobs_start`. Front ends receive those
    # of a long prompt in several deltas.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    clipped_max_tokens: int | None = None  # with the final delta: max_tokens, if it was lowered to what fits
    matched_stop: str | None = None  # with the final delta: the stop string that ended the text
    weight_versions: tuple[str, ...] = ()  # with the final delta: several if the weights were replaced in between


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A completed weight update."""

    version: str
    load_s: float  # while the engine served
    pause_s: float  # until the engine was at rest
    copy_s: float
    dropped_kv_tokens: int
