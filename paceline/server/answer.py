"""What chat and completions share: an answer is a set of jobs and the words in which their pieces are told."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Protocol

from paceline.engine.output import Piece
from paceline.engine.output import Usage as EngineUsage
from paceline.request import FinishReason
from paceline.server.client import Job
from paceline.server.errors import ApiError, aborted, engine_failed, shutting_down
from paceline.server.types import CachedTokens, EmbeddingRequest, GenerationRequest, Usage


class Answer(Protocol):
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

    def chunk(self, index: int, text: str, finish_reason: str | None) -> bytes: ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """All that came, by job."""


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


def finish_reason_of(piece: Piece) -> str | None:
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


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def total_usage(usages: Iterable[EngineUsage]) -> Usage:
    prompt = cached = completion = 0
    for usage in usages:
        prompt += usage.prompt_tokens
        cached += usage.cached_tokens
        completion += usage.completion_tokens
    return Usage(prompt, completion, prompt + completion, CachedTokens(cached))
