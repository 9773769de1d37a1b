"""`/v1/chat/completions`: one conversation in, the next message out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET

from paceline.engine.output import Piece
from paceline.server.answer import finish_reason_of, new_id, now, text_of
from paceline.server.client import Job
from paceline.server.errors import ApiError
from paceline.server.fields import check_message_fields
from paceline.server.types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatRequest,
    Delta,
    Message,
    Usage,
)
from paceline.text.tokenizer import Tokenizer


class ChatAnswer:
    prompt_field = "messages"

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self.id, self._created = new_id("chatcmpl"), now()
        messages = check_message_fields(request.messages)
        params = request.sampling(_max_tokens(request))
        self.jobs: Sequence[Job] = [Job(self.id, tokenizer.encode_chat(messages), params)]

    def opening(self) -> Iterable[bytes]:
        yield self._chunk([ChatChunkChoice(0, Delta(role="assistant", content=""))])

    def chunk(self, index: int, text: str, finish_reason: str | None) -> bytes:
        delta = Delta(content=text) if text else Delta()
        return self._chunk([ChatChunkChoice(index, delta, finish_reason)])

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        choices = [
            ChatChoice(index, Message("assistant", text_of(parts)), finish_reason_of(parts[-1]) or "")
            for index, parts in enumerate(pieces)
        ]
        return msgspec.json.encode(
            ChatCompletion(self.id, "chat.completion", self._created, self.request.model, choices, usage)
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        shown = usage if self.request.include_usage else UNSET
        return msgspec.json.encode(
            ChatChunk(self.id, "chat.completion.chunk", self._created, self.request.model, choices, shown)
        )


def _max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            f"max_completion_tokens is {new} and max_tokens, its older name, is {old}: give one of them.",
            param="max_completion_tokens",
        )
    return old if new is None else new
