"""`/v1/completions`: prompts in, their continuations out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from paceline.engine.output import Piece
from paceline.request import InvalidRequest
from paceline.server.answer import finish_reason_of, new_id, now, text_of
from paceline.server.client import Job
from paceline.server.errors import ApiError
from paceline.server.fields import short
from paceline.server.types import CompletionRequest, TextChoice, TextCompletion, Usage
from paceline.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this route alone


class CompletionAnswer:
    prompt_field = "prompt"

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, max_prompts: int) -> None:
        self.request = request
        self.id, self._created = new_id("cmpl"), now()
        prompts = encode_prompts(request.prompt, tokenizer, max_prompts)
        open_ended = max(DEFAULT_MAX_TOKENS, request.min_tokens or 0)
        params = request.sampling(open_ended if request.max_tokens is None else request.max_tokens)
        self.jobs: Sequence[Job] = [Job(f"{self.id}-{index}", prompt, params) for index, prompt in enumerate(prompts)]

    def opening(self) -> Iterable[bytes]:
        return ()

    def chunk(self, index: int, text: str, finish_reason: str | None) -> bytes:
        return self._encode([TextChoice(index, text, finish_reason)], None if self.request.include_usage else UNSET)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._encode([], usage)

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        choices = [TextChoice(index, text_of(parts), finish_reason_of(parts[-1])) for index, parts in enumerate(pieces)]
        return self._encode(choices, usage)

    def _encode(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> bytes:
        return msgspec.json.encode(
            TextCompletion(self.id, "text_completion", self._created, self.request.model, choices, usage)
        )


def encode_prompts(value: Any, tokenizer: Tokenizer, max_prompts: int, field: str = "prompt") -> list[list[int]]:
    """The prompts of a request as token ids; `field` is where they stand."""
    try:
        prompts = _prompts(value)
        if len(prompts) > max_prompts:
            raise ApiError(f"prompt has {len(prompts)} entries: give at most {max_prompts}.", param="prompt")
        return [_encode(prompt, index, len(prompts), tokenizer) for index, prompt in enumerate(prompts)]
    except ApiError as error:
        if field != "prompt":
            raise ApiError(error.message.replace("prompt", field, 1), param=field, code=error.code) from None
        raise


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or many, as text or as token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(_are_ids(item) for item in value):
            return value
    raise ApiError(
        f"prompt is {short(value)}: give a string, a list of token ids, or a list of either.",
        param="prompt", code="invalid_type",
    )  # fmt: skip


def _are_ids(value: Any) -> bool:
    # An empty list is a prompt of no tokens, which is refused as such and not as a wrong type.
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _encode(prompt: str | list[int], index: int, count: int, tokenizer: Tokenizer) -> list[int]:
    where = "prompt" if count == 1 else f"prompt[{index}]"
    if isinstance(prompt, str):
        try:
            ids = tokenizer.encode(prompt)
        except InvalidRequest as error:
            raise ApiError(f"{where}: {error}", param="prompt") from None
    else:
        ids = prompt
        if any(not 0 <= token < tokenizer.vocab_size for token in ids):
            wrong = next(token for token in ids if not 0 <= token < tokenizer.vocab_size)
            raise ApiError(
                f"{where} has token id {wrong}: give ids from 0 to {tokenizer.vocab_size - 1}.", param="prompt"
            )
    if not ids:
        raise ApiError(f"{where} is empty: give at least one token.", param="prompt", code="invalid_value")
    return ids
