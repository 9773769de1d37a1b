"""What the generating routes share: a response is a set of jobs, and the JSON that their output becomes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from paceline.engine.job import Job
from paceline.engine.output import OutputDelta, TokenLogprob, TokenUsage
from paceline.request import GRAMMAR_LIMIT, FinishReason, SamplingParams
from paceline.server.errors import ApiError, aborted, engine_failed, shutting_down, timed_out
from paceline.server.request_types import GenerationRequest, PoolingRequest
from paceline.server.response_types import CachedTokens, CompletionDetails, TokenLogprobs, TopLogprob, UsageInfo
from paceline.server.state import ServerState
from paceline.text.tokenizer import Tokenizer

T = TypeVar("T")
_MIN_LOGPROB = -9999.0  # what OpenAI sends for minus infinity, which JSON cannot express


class ResponseBuilder:
    """Builds the response to one request. Its chunks and bodies are JSON, without HTTP or framing.

    It is picklable, and small apart from its jobs: for a long body it is made in another process. `final_body` is
    called in a thread.
    """

    id: str
    prompt_field: str  # the name of the request field with the prompt, for errors
    request: GenerationRequest | PoolingRequest
    jobs: Sequence[Job]  # one for each choice of each prompt; those of a prompt are adjacent
    jobs_per_prompt: int

    def prompt_name(self, index: int) -> str:
        """What an error calls a prompt."""
        return "The prompt" if len(self.jobs) == self.jobs_per_prompt else f"{self.prompt_field}[{index}]"

    async def prepare(self, state: ServerState, tenant: str, charge: Callable[[int], None]) -> ResponseBuilder:
        """The response with what the constructor could not do without waiting; its `jobs` are read then. `charge` is
        given the number of bytes that this adds to the body."""
        return self

    def first_chunks(self) -> Iterable[bytes]:
        """Chunks sent before the first output."""
        return ()

    def chunks(self, index: int, output: OutputDelta, finish_reason: str | None) -> Iterable[bytes]:
        """Chunks, possibly none, for new output of job `index`."""
        raise AssertionError("this response is not streamed")

    def is_slow(self, index: int, output: OutputDelta) -> bool:
        """Whether `chunks` takes long for this output; it is then called in a thread."""
        return False

    def last_chunks(self, usage: UsageInfo) -> Iterable[bytes]:
        """Chunks after the last output of all jobs."""
        return ()

    def error_chunk(self, error: ApiError) -> bytes | None:
        """The last chunk of a stream that fails; None: the error body of the API."""
        return None

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        """The body of a response that is not streamed, from the complete output of every job."""
        raise NotImplementedError

    async def finish(self, state: ServerState) -> None:
        """Called once the response is complete, before its end is sent."""


def make_response_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def unix_time() -> int:
    return int(time.time())


def finish_reason_of(output: OutputDelta) -> str | None:
    """OpenAI's finish reason, None if the job continues. Raises for a reason that OpenAI does not have."""
    reason = output.finish_reason
    if reason is None:
        return None
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return reason.value
    if reason is FinishReason.ABORT:  # not by the client of this request, which would not be connected
        raise aborted() if output.error is None else shutting_down()
    if (error := timed_out(reason)) is not None:
        raise error
    if output.error is not None and output.error.startswith(GRAMMAR_LIMIT):
        raise ApiError(
            f"Generation failed ({output.error}): simplify it.", param="grammar", code="grammar_too_expensive"
        )
    raise engine_failed(f"Generation failed ({output.error}): retry the request.")


def total_usage(usages: Mapping[int, TokenUsage], jobs_per_prompt: int) -> UsageInfo:
    """Usage of all jobs. A prompt counts once, however many choices it has."""
    firsts = [usage for index, usage in usages.items() if index % jobs_per_prompt == 0]
    prompt, cached = sum(one.prompt_tokens for one in firsts), sum(one.cached_tokens for one in firsts)
    every = usages.values()
    completion = sum(one.completion_tokens for one in every)
    drafted, accepted = sum(one.drafted_tokens for one in every), sum(one.accepted_tokens for one in every)
    details = CompletionDetails(0, accepted, drafted - accepted)
    return UsageInfo(prompt, completion, prompt + completion, CachedTokens(cached), details)


class LogprobFormatter:
    """Token ids and logprobs as OpenAI presents them."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids)

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)

    def visible_logprobs(self, output: OutputDelta) -> Sequence[TokenLogprob]:
        """Logprobs of the tokens that are part of the text: all but a stop token."""
        logprobs = output.logprobs
        stopped = output.finish_reason is FinishReason.STOP and logprobs and logprobs[-1].token_id in self._stop_ids
        return logprobs[:-1] if stopped else logprobs

    def format(self, logprob: TokenLogprob) -> TokenLogprobs:
        top = [
            TopLogprob(self.token_text(token), finite(value), list(self.token_bytes(token)))
            for token, value in logprob.top
        ]
        token = logprob.token_id
        return TokenLogprobs(self.token_text(token), finite(logprob.logprob), list(self.token_bytes(token)), top)


def encoded(value: T) -> T:
    """`value` as JSON, for a place inside a larger value. One call that encodes the logprobs of a whole response would
    hold the GIL for long, and delay other streams; many short ones do not."""
    return cast("T", msgspec.Raw(msgspec.json.encode(value)))


def finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


def weight_versions(outputs: Iterable[OutputDelta]) -> list[str]:
    """Versions of the weights that computed these outputs, without repetition."""
    return list(dict.fromkeys(version for output in outputs for version in output.weight_versions))


def clipped_max_tokens(output: OutputDelta) -> int | UnsetType:
    return UNSET if output.clipped_max_tokens is None else output.clipped_max_tokens


def text_of(outputs: Iterable[OutputDelta]) -> str:
    return "".join(output.text for output in outputs)


def mean_logprob(outputs: Iterable[OutputDelta]) -> float:
    """Ranks the choices of `best_of`."""
    logprobs = [one.logprob for output in outputs for one in output.logprobs]
    return sum(logprobs) / max(len(logprobs), 1)
