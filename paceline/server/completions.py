"""`/v1/completions`: prompts in, their continuations out."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from paceline.engine.job import Job
from paceline.engine.output import OutputDelta, TokenLogprob
from paceline.request import InvalidRequest, as_tokens
from paceline.server.errors import ApiError
from paceline.server.fields import short
from paceline.server.response import TokenWords, finish_reason_of, finite, mean_logprob, new_id, now, text_of
from paceline.server.types import CompletionRequest, TextChoice, TextCompletion, TextLogprobs, UsageInfo
from paceline.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this route alone


class CompletionResponse:
    prompt_field = "prompt"

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, max_prompts: int) -> None:
        self.request = request
        self.id, self._created = new_id("cmpl"), now()
        prompts = _prompts(request.prompt)
        params = request.sampling(self._max_tokens(), best_of=request.best_of, logprobs=request.logprobs,
                                  prompt_logprobs=request.logprobs if request.echo else None)  # fmt: skip
        if request.stream and params.best_of is not None and params.best_of > params.n:
            raise ApiError(f"best_of is {params.best_of} and the answer is to be streamed: the best is known only at "
                           "the end; leave out one of them.", param="best_of")  # fmt: skip
        each = params.each_choice()
        self.jobs_per_prompt = len(each)
        if len(prompts) * len(each) > max_prompts:
            many = "" if len(each) == 1 else f", {len(each)} times each"
            raise ApiError(f"prompt has {len(prompts)} entries{many}: give at most {max_prompts}.", param="prompt")
        encoded = [_encode(prompt, index, len(prompts), tokenizer) for index, prompt in enumerate(prompts)]
        self.jobs: Sequence[Job] = [
            Job(as_tokens(ids), one, id=f"{self.id}-{index * len(each) + number}")
            for index, ids in enumerate(encoded)
            for number, one in enumerate(each)
        ]
        self._num_choices = params.n
        self._words = TokenWords(tokenizer, params)
        self._texts = [
            _Text(prompt if isinstance(prompt, str) else tokenizer.decode(ids, skip_special=False), ids[0])
            for prompt, ids in zip(prompts, encoded, strict=True)
        ]
        self._offsets: dict[int, _Offsets] = {}

    def opening(self) -> Iterable[bytes]:
        return ()

    def chunks(self, index: int, piece: OutputDelta, finish_reason: str | None) -> Iterable[bytes]:
        if piece.text or finish_reason is not None or piece.logprobs or index not in self._offsets:
            choice = self._choice(index, index, [piece], is_first=index not in self._offsets)
            if choice.text or choice.logprobs or finish_reason is not None:
                yield self._encode([choice], None if self.request.include_usage else UNSET)

    def usage_chunk(self, usage: UsageInfo) -> bytes:
        return self._encode([], usage)

    def whole(self, pieces: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        choices: list[TextChoice] = []
        for first in range(0, len(pieces), self.jobs_per_prompt):
            jobs = list(range(first, first + self.jobs_per_prompt))
            if self._num_choices < self.jobs_per_prompt:
                jobs.sort(key=lambda job: -mean_logprob(pieces[job]))
            choices += [
                self._choice(len(choices) + number, job, pieces[job], is_first=True)
                for number, job in enumerate(jobs[: self._num_choices])
            ]
        return self._encode(choices, usage)

    def _choice(self, index: int, job: int, parts: Sequence[OutputDelta], *, is_first: bool) -> TextChoice:
        prompt = self._texts[job // self.jobs_per_prompt] if self.request.echo and is_first else None
        text = (prompt.text if prompt else "") + text_of(parts)
        return TextChoice(index, text, finish_reason_of(parts[-1]), self._logprobs(job, parts, prompt))

    def _logprobs(self, job: int, parts: Sequence[OutputDelta], prompt: _Text | None) -> TextLogprobs | None:
        offsets = self._offsets.setdefault(job, _Offsets())
        if self.request.logprobs is None:
            return None
        found = TextLogprobs([], [], [], [])
        told: list[TokenLogprob] = [one for piece in parts for one in self._words.shown(piece)]
        if prompt is not None:
            found.tokens.append(self._words.text(prompt.first_token))
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            found.text_offset.append(offsets.after(self._words.bytes(prompt.first_token)))
            # Of the choices of one prompt, the first alone was asked for the prompt's chances.
            prompt.logprobs = prompt.logprobs or [one for piece in parts for one in piece.prompt_logprobs]
            told = [*prompt.logprobs, *told]
        for one in told:
            found.tokens.append(self._words.text(one.token_id))
            found.token_logprobs.append(finite(one.logprob))
            # The token itself is always among the alternatives.
            top = {self._words.text(token): finite(logprob) for token, logprob in one.top}
            found.top_logprobs.append({**top, found.tokens[-1]: found.token_logprobs[-1] or 0.0} if one.top else {})
            found.text_offset.append(offsets.after(self._words.bytes(one.token_id)))
        return found

    def _max_tokens(self) -> int:
        request = self.request
        if request.max_tokens is None:
            return max(DEFAULT_MAX_TOKENS, request.min_tokens or 0)
        if request.max_tokens == 0 and not request.echo:
            raise ApiError("max_tokens is 0 and echo is not true: ask for at least 1 token, or for the prompt.",
                           param="max_tokens", code="invalid_value")  # fmt: skip
        return request.max_tokens

    def _encode(self, choices: list[TextChoice], usage: UsageInfo | UnsetType | None) -> bytes:
        return msgspec.json.encode(
            TextCompletion(self.id, "text_completion", self._created, self.request.model, choices, usage)
        )


@dataclass(slots=True, eq=False)
class _Text:
    """One prompt, to be echoed."""

    text: str
    first_token: int
    logprobs: list[TokenLogprob] = field(default_factory=list)


class _Offsets:
    """Where in a choice's text each token begins, in characters; within one, where that character begins."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def after(self, token: bytes) -> int:
        """Where this token begins; it is taken."""
        begin = self._length
        self._length += len(self._utf8.decode(token))
        return begin


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
