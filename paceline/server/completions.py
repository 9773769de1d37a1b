"""`/v1/completions`: one or several prompts, one or several completions of each."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
from msgspec import UNSET, UnsetType

from paceline.engine.job import Job
from paceline.engine.output import OutputDelta, TokenLogprob
from paceline.request import as_tokens
from paceline.server.errors import ApiError
from paceline.server.limits import DEFAULT_COMPLETION_TOKENS
from paceline.server.prompts import check_num_prompts, encode_prompts, split_prompts
from paceline.server.request_types import CompletionRequest
from paceline.server.response import (
    LogprobFormatter,
    ResponseBuilder,
    clipped_max_tokens,
    encoded,
    finish_reason_of,
    finite,
    make_response_id,
    mean_logprob,
    text_of,
    unix_time,
    weight_versions,
)
from paceline.server.response_types import TextChoice, TextCompletion, TextLogprobs, UsageInfo
from paceline.server.state import RequestContext


class CompletionResponse(ResponseBuilder):
    request: CompletionRequest
    prompt_field = "prompt"

    def __init__(self, context: RequestContext, request: CompletionRequest) -> None:
        self.request = request
        self.id, self._created = make_response_id("cmpl-"), unix_time()
        prompts = split_prompts(request.prompt, "prompt")
        params = request.sampling_params(
            self._max_tokens(),
            best_of=request.best_of,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
            prompt_logprobs_start=self._prompt_logprobs_start(),
        )
        if request.stream and params.best_of is not None and params.best_of > params.n:
            raise ApiError(
                f"best_of is {params.best_of} and stream is true: the best completions are known only at the end; "
                "omit one of them.",
                param="best_of",
            )
        each = params.each_choice()
        self.jobs_per_prompt = len(each)
        check_num_prompts(len(prompts), len(each), context.config.max_prompts, "prompt")
        encoded = encode_prompts(prompts, context, "prompt")
        request.prompt = None  # the jobs have it
        self.jobs: Sequence[Job] = [
            Job(as_tokens(ids), choice, id=f"{self.id}-{index * len(each) + number}")
            for index, ids in enumerate(encoded)
            for number, choice in enumerate(each)
        ]
        self._num_choices = params.n
        self._formatter = LogprobFormatter(context.tokenizer, params)
        self._echoes = [
            _Echo(
                prompt if isinstance(prompt, str) else context.tokenizer.decode(ids, skip_special=False),
                ids[: max(params.prompt_logprobs_start, 1)],
                has_logprobs=params.prompt_logprobs is None,
            )
            for prompt, ids in zip(prompts, encoded, strict=True)
        ]
        self._offsets: dict[int, _Offsets] = {}

    def is_slow(self, index: int, output: OutputDelta) -> bool:
        return bool(self.request.echo) and (bool(output.prompt_logprobs) or index not in self._offsets)

    def chunks(self, index: int, output: OutputDelta, finish_reason: str | None) -> Iterator[bytes]:
        echo = self._echoes[index // self.jobs_per_prompt]
        is_first_job = index % self.jobs_per_prompt == 0
        if not is_first_job and not echo.has_logprobs:
            echo.held.append((index, output, finish_reason))
            return
        yield from self._chunk(echo, index, output, finish_reason)
        # Prompt logprobs come before or with the first token.
        if is_first_job and not echo.has_logprobs and (output.token_ids or finish_reason is not None):
            echo.has_logprobs = True
            for one in echo.held:
                yield from self._chunk(echo, *one)
            echo.held = []

    def _chunk(self, echo: _Echo, index: int, output: OutputDelta, finish_reason: str | None) -> Iterator[bytes]:
        is_first = index not in self._offsets
        echo.logprobs += output.prompt_logprobs
        if output.text or finish_reason is not None or output.logprobs or output.prompt_logprobs or is_first:
            prompt_logprobs = echo.logprobs if is_first else output.prompt_logprobs
            choice = self._choice(index, [output], prompt_logprobs, echo if is_first else None)
            if choice.text or choice.logprobs or finish_reason is not None:
                versions = UNSET if finish_reason is None else weight_versions([output])
                yield self._encode([choice], None if self.request.include_usage else UNSET, versions)

    def last_chunks(self, usage: UsageInfo) -> Iterable[bytes]:
        return [self._encode([], usage)] if self.request.include_usage else []

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        choices: list[TextChoice] = []
        for first, echo in zip(range(0, len(outputs), self.jobs_per_prompt), self._echoes, strict=True):
            # Only the first choice of a prompt computes the prompt's logprobs.
            echo.logprobs = [one for output in outputs[first] for one in output.prompt_logprobs]
            jobs = list(range(first, first + self.jobs_per_prompt))
            if self._num_choices < self.jobs_per_prompt:
                jobs.sort(key=lambda job: -mean_logprob(outputs[job]))
            for job in jobs[: self._num_choices]:
                choice = self._choice(job, outputs[job], echo.logprobs, echo)
                choice.index = len(choices)
                choices.append(choice)
        return self._encode(choices, usage, weight_versions(chain.from_iterable(outputs)))

    def _choice(
        self, job: int, outputs: Sequence[OutputDelta], prompt_logprobs: Sequence[TokenLogprob], echo: _Echo | None
    ) -> TextChoice:
        """Further output of a job, after the prompt if `echo` is given."""
        echo = echo if self.request.echo else None
        text = (echo.text if echo else "") + text_of(outputs)
        reason, logprobs = finish_reason_of(outputs[-1]), self._logprobs(job, outputs, prompt_logprobs, echo)
        return TextChoice(job, text, reason, logprobs, clipped_max_tokens(outputs[-1]))

    def _logprobs(
        self, job: int, outputs: Sequence[OutputDelta], prompt_logprobs: Sequence[TokenLogprob], echo: _Echo | None
    ) -> TextLogprobs | None:
        offsets = self._offsets.setdefault(job, _Offsets())
        if self.request.logprobs is None:
            return None
        formatter = self._formatter
        found = TextLogprobs([], [], [], [])
        logprobs = [*prompt_logprobs, *(one for output in outputs for one in formatter.visible_logprobs(output))]
        for token in () if echo is None else echo.unscored:
            found.tokens.append(formatter.token_text(token))
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            found.text_offset.append(offsets.advance(formatter.token_bytes(token)))
        for one in logprobs:
            found.tokens.append(formatter.token_text(one.token_id))
            found.token_logprobs.append(finite(one.logprob))
            # The token itself is always among the alternatives.
            top = {formatter.token_text(token): finite(logprob) for token, logprob in one.top}
            top |= {found.tokens[-1]: finite(one.logprob)} if one.top else {}
            found.top_logprobs.append(encoded(top))
            found.text_offset.append(offsets.advance(formatter.token_bytes(one.token_id)))
        return found

    def _prompt_logprobs_start(self) -> int:
        request = self.request
        start = request.prompt_logprobs_start
        if start is not None and not (request.echo and request.logprobs is not None):
            raise ApiError(
                f"prompt_logprobs_start is {start}, and there are no prompt logprobs: set echo and logprobs too.",
                param="prompt_logprobs_start",
                code="invalid_value",
            )
        return start or 0

    def _max_tokens(self) -> int:
        request = self.request
        if request.max_tokens is None:
            return max(DEFAULT_COMPLETION_TOKENS, request.min_tokens or 0)
        if request.max_tokens < (0 if request.echo else 1):
            raise ApiError(
                f"max_tokens is {request.max_tokens}: give at least 1, or 0 with echo to get the prompt's logprobs.",
                param="max_tokens",
                code="invalid_value",
            )
        return request.max_tokens

    def _encode(
        self,
        choices: list[TextChoice],
        usage: UsageInfo | UnsetType | None,
        versions: list[str] | UnsetType = UNSET,
    ) -> bytes:
        return msgspec.json.encode(
            TextCompletion(self.id, "text_completion", self._created, self.request.model, choices, usage, versions)
        )


@dataclass(slots=True, eq=False)
class _Echo:
    """A prompt that is part of its completion."""

    text: str
    unscored: Sequence[int]  # tokens without logprobs: the first, which has no context, and those before the start
    has_logprobs: bool  # all of them, or none were requested
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # Streamed output of other choices than the first, which alone computes the logprobs, until it has them: index,
    # output, finish reason.
    held: list[tuple[int, OutputDelta, str | None]] = field(default_factory=list)


class _Offsets:
    """The character offset in a choice's text at which each token begins.

    A token that begins inside a character has the offset of that character.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def advance(self, token: bytes) -> int:
        """Appends a token and returns its offset."""
        offset = self._length
        self._length += len(self._utf8.decode(token))
        return offset
