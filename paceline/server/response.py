"""What chat and completions share: an answer is a set of jobs and the words in which their pieces are told."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from paceline.engine.job import Job
from paceline.engine.output import OutputDelta, TokenLogprob
from paceline.engine.output import TokenUsage as EngineUsage
from paceline.request import FinishReason, SamplingParams
from paceline.server.errors import ApiError, aborted, engine_failed, shutting_down
from paceline.server.types import (
    CachedTokens,
    EmbeddingRequest,
    GenerationRequest,
    TokenLogprobs,
    TopLogprob,
    UsageInfo,
)
from paceline.text.tokenizer import Tokenizer


class ResponseBuilder(Protocol):
    """How one request is answered; bytes are JSON objects, without what HTTP puts around them."""

    @property
    def id(self) -> str: ...

    @property
    def prompt_field(self) -> str:
        """Where in the request the prompt is, for errors."""

    @property
    def request(self) -> GenerationRequest | EmbeddingRequest: ...

    @property
    def jobs(self) -> Sequence[Job]: ...

    def opening(self) -> Iterable[bytes]:
        """The chunks before the first piece."""

    @property
    def jobs_per_prompt(self) -> int:
        """One for each choice; those of a prompt lie together."""

    def chunks(self, index: int, piece: OutputDelta, finish_reason: str | None) -> Iterable[bytes]:
        """What a piece of job `index` adds to a stream; it may be nothing."""

    def usage_chunk(self, usage: UsageInfo) -> bytes: ...

    def whole(self, pieces: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        """All that came, by job."""


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


def finish_reason_of(piece: OutputDelta) -> str | None:
    """OpenAI's word for how it ended, None if it goes on; what OpenAI has no word for is an error."""
    reason = piece.finish_reason
    if reason is None:
        return None
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return reason.value
    if reason is FinishReason.ABORT:  # not by the client itself: it would not be there to be told
        raise aborted() if piece.error is None else shutting_down()
    if reason is FinishReason.DEADLINE:
        raise ApiError("the request's time was up before it was answered: allow it more time.", status=408,
                       code="deadline")  # fmt: skip
    raise engine_failed(f"generation failed ({piece.error}): send the request again.")


def total_usage(usages: Mapping[int, EngineUsage], jobs_per_prompt: int) -> UsageInfo:
    """Of all jobs: a prompt counts once, however many choices it has."""
    firsts = [usage for index, usage in usages.items() if index % jobs_per_prompt == 0]
    prompt, cached = sum(one.prompt_tokens for one in firsts), sum(one.cached_tokens for one in firsts)
    completion = sum(usage.completion_tokens for usage in usages.values())
    return UsageInfo(prompt, completion, prompt + completion, CachedTokens(cached))


class TokenWords:
    """Tokens and their chances as OpenAI shows them, for one choice."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids)

    def text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)

    def shown(self, piece: OutputDelta) -> Sequence[TokenLogprob]:
        """Without the token that ended it, which is no text."""
        told = piece.logprobs
        ended = piece.finish_reason is FinishReason.STOP and told and told[-1].token_id in self._ends
        return told[:-1] if ended else told

    def of(self, told: TokenLogprob) -> TokenLogprobs:
        token, data = self.text(told.token_id), list(self._tokenizer.token_bytes(told.token_id))
        top = [
            TopLogprob(self.text(other), finite(logprob), list(self._tokenizer.token_bytes(other)))
            for other, logprob in told.top
        ]
        return TokenLogprobs(token, finite(told.logprob), data, top)


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's word for it is this."""
    return max(logprob, -9999.0)


def text_of(pieces: Iterable[OutputDelta]) -> str:
    return "".join(piece.text for piece in pieces)


def mean_logprob(pieces: Iterable[OutputDelta]) -> float:
    """By which the best of several choices is found."""
    told = [one.logprob for piece in pieces for one in piece.logprobs]
    return sum(told) / max(len(told), 1)
