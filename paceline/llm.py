"""`LLM`: offline generation from Python, for one prompt or many at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from paceline.engine.adapter_loading import load_adapter, unload_adapter
from paceline.engine.engine import Engine, Prompt
from paceline.engine.garbage import no_garbage_collection
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed, OutputDelta, Timings, TokenLogprob, TokenUsage, WeightUpdate
from paceline.engine.start import start_engine
from paceline.engine.weight_update import update_weights
from paceline.progress import CallProgress, ProgressLine
from paceline.request import (
    DEFAULT_MAX_TOKENS,
    FinishReason,
    InvalidRequest,
    PacelineError,
    SamplingParams,
    Tokens,
    check_pooling,
    short,
)
from paceline.scheduler import Scheduler
from paceline.text.output_parser import reasoning_markers_of
from paceline.text.reasoning import ReasoningMarkers
from paceline.text.tokenizer import Tokenizer

Message = Mapping[str, object]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of a prompt. `logprobs` has one entry per output token, if requested.

    `chat` separates the reasoning of a thinking model from `text`, the answer; `token_ids` and `logprobs` are those of
    both.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    timings: Timings
    logprobs: list[TokenLogprob] | None = None
    clipped_max_tokens: int | None = None  # max_tokens, if it was lowered to what fits (`clip_max_tokens`)
    reasoning_content: str = ""
    num_drafted_tokens: int = 0  # verified by speculative decoding (`speculate`)
    num_accepted_tokens: int = 0  # of these, in the output

    @property
    def mean_logprob(self) -> float:
        """The score by which `best_of` ranks choices."""
        assert self.logprobs is not None, "ranked choices have logprobs"
        return sum(one.logprob for one in self.logprobs) / max(len(self.logprobs), 1)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output for one prompt: `n` choices. `text`, `token_ids`, ... are those of the first choice.

    `prompt_logprobs` has one entry per prompt token: None for the first, which has no context, and for those before
    `prompt_logprobs_start`.
    """

    prompt_token_ids: list[int]
    choices: list[Choice]
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_fetched_tokens: int = 0  # of the cached tokens, those fetched from host memory
    weight_versions: tuple[str, ...] = ()  # that computed it; several if the weights were replaced in between

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def reasoning_content(self) -> str:
        return self.choices[0].reasoning_content

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def timings(self) -> Timings:
        return self.choices[0].timings

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs

    @property
    def num_drafted_tokens(self) -> int:
        return self.choices[0].num_drafted_tokens

    @property
    def num_accepted_tokens(self) -> int:
        return self.choices[0].num_accepted_tokens


class LLM:
    """A loaded model with its engine. Use it as a context manager, or call `close`.

    `model` is a folder, a .gguf file or a Hugging Face id; None is the default model, SmolLM2-135M-Instruct, which is
    downloaded on first use. `load="random", shape=NAME` uses random weights instead (`paceline models` lists shapes).
    Further options are the fields of `EngineConfig` and `SchedulerConfig`, such as `kv_tokens` or `max_running`.
    `max_wait` and `itl_target` default to infinity, since the latency of a request does not matter offline.

        with LLM() as llm:
            print(llm.chat([{"role": "user", "content": "Hello!"}])[0].text)
    """

    def __init__(self, model: str | Path | None = None, **options: object) -> None:
        self.engine = start_engine(model, **{"max_wait": math.inf, "itl_target": math.inf, **options})
        self._is_owner = True

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """An LLM on an existing engine. Deleting it does not close the engine; `close` does."""
        llm = cls.__new__(cls)
        llm.engine, llm._is_owner = engine, False
        return llm

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @no_garbage_collection()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        lora: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Generates from one prompt or many and returns one output per prompt, in order.

        A prompt is a string or a list of token ids; the chat template is not applied (see `chat`). `params` applies to
        all prompts, or is a sequence with one entry per prompt; None is `SamplingParams()`. Without `max_tokens` an
        output has up to 256 tokens, or what context and memory leave. `progress` shows a line on stderr if that is a
        terminal and the call takes longer than half a second. If a prompt is invalid or refused, the call raises its
        error and the others are aborted. `lora` names a loaded adapter for all prompts, or one per prompt; "" is the
        base model.
        """
        listed, encoded = self._encode(prompts)
        each = list(map(self._with_limit, encoded, _each_params(params, len(listed))))
        # Each choice is a request of its own; those of one prompt share its KV through the prefix cache.
        variants = [one.each_choice() for one in each]
        adapters = _each_adapter(lora, len(listed))
        jobs = [
            Job(prompt, one, stream=False, adapter=adapter)
            for prompt, ones, adapter in zip(encoded, variants, adapters, strict=True)
            for one in ones
        ]
        left = iter(self._run(jobs, progress))
        return [
            _output(given if isinstance(given, list) else prompt.tolist(), one, [next(left) for _ in ones])
            for given, prompt, one, ones in zip(listed, encoded, each, variants, strict=True)
        ]

    @no_garbage_collection()
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "mean",
        progress: bool = True,
        lora: str | Sequence[str] = "",
    ) -> list[npt.NDArray[np.float32]]:
        """The embedding of each prompt, in order: its hidden states, pooled (`mean` or `last`) and scaled to length 1.

        Prompts and `lora` are as in `generate`; nothing is generated.
        """
        check_pooling(pooling)
        _, encoded = self._encode(prompts)
        params = SamplingParams(max_tokens=0)
        jobs = [
            Job(prompt, params, pooling=pooling, stream=False, adapter=adapter)
            for prompt, adapter in zip(encoded, _each_adapter(lora, len(encoded)), strict=True)
        ]
        sinks = self._run(jobs, progress)
        found = []
        for delta in map(_last, sinks):
            if delta.vector is None:
                raise EngineFailed(f"a prompt ended with reason {delta.finish_reason} before it was embedded.")
            found.append(np.frombuffer(delta.vector, np.float32))
        return found

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        separate_reasoning: bool = True,
        lora: str | Sequence[str] = "",
        allow_control_tokens: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generates the next assistant message of one conversation or of many; returns one output per conversation.

        The reasoning of a thinking model is in `reasoning_content`, and a grammar applies to the answer alone; with
        `separate_reasoning=False` it stays in `text`. `template_options` are passed to the chat template of the model,
        such as `enable_thinking=False`. A control token that a message spells is text, unless `allow_control_tokens`.
        """
        tokenizer = self.engine.tokenizer
        listed = _as_list("messages", messages, "a list of messages, or a list of such lists")
        many = bool(listed) and isinstance(listed[0], Sequence) and not isinstance(listed[0], str | bytes)
        texts, prompts = [], []
        for index, one in enumerate(listed if many else [listed]):
            try:
                rendered = tokenizer.render_chat(one, allow_control_tokens=allow_control_tokens, **template_options)
                texts.append(rendered.text)
                prompts.append(tokenizer.encode_rendered(rendered))
            except InvalidRequest as error:
                raise InvalidRequest(f"conversation {index}: {error}" if many else str(error)) from None
        chat = tokenizer.chat_for(template_options.get("tools"))
        markers = reasoning_markers_of(chat.source) if separate_reasoning and chat else None
        if markers is None:
            return self.generate(prompts, params, progress, lora)
        each = _each_params(params, len(prompts))
        outputs = self.generate(
            prompts,
            [markers.sampling_params(one, text, tokenizer) for one, text in zip(each, texts, strict=True)],
            progress,
            lora,
        )
        return [_separated(output, markers, text) for output, text in zip(outputs, texts, strict=True)]

    def update_weights(self, path: str | Path, *, mode: str = "wait", version: str | None = None) -> WeightUpdate:
        """Replaces the weights by those of a folder or .gguf file of the same shape, and drops the prefix cache.

        `mode` is about requests that other threads are running: they finish first (`wait`), are aborted (`abort`), or
        continue with the new weights (`continue`). Outputs name the version they were computed with.
        """
        return update_weights(self.engine, path, mode=mode, version=version)

    def load_lora_adapter(self, name: str, path: str | Path, *, load_inplace: bool = False) -> None:
        """Loads a PEFT folder, so that requests can use it by `name` (`lora=name`). load_inplace: replaces a loaded
        adapter of this name for new requests."""
        load_adapter(self.engine, name, path, replace=load_inplace)

    def unload_lora_adapter(self, name: str) -> None:
        """Raises `Conflict` while requests use it."""
        unload_adapter(self.engine, name)

    def close(self) -> None:
        self.engine.close()

    def __del__(self) -> None:
        # The thread of the engine keeps the engine and the model alive, so deleting the LLM must close it.
        if getattr(self, "_is_owner", False):
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> tuple[Sequence[Any], list[Tokens]]:
        """The prompts as a list, and their token ids."""
        self.engine.expect_requests()
        listed: Sequence[Any] = [prompts] if isinstance(prompts, str) else _as_list("prompts", prompts, _PROMPT)
        if len(listed) and isinstance(listed[0], Integral) and not isinstance(listed[0], bool):
            listed = [prompts]
        encoded = []
        for index, prompt in enumerate(listed):
            try:
                encoded.append(self.engine.encode(prompt))
            except InvalidRequest as error:
                raise InvalidRequest(f"prompts[{index}]: {error}") from None
        return listed, encoded

    def _run(self, jobs: Sequence[Job], progress: bool) -> list[_OutputCollector]:
        """Runs all jobs and returns what each produced. Raises if one is refused."""
        waiter = _CallWaiter(len(jobs))
        sinks = [_OutputCollector(waiter) for _ in jobs]
        # Longest output first: a long request that starts last would run alone after all others have finished.
        longest = [math.inf if job.params.max_tokens is None else job.params.max_tokens for job in jobs]
        order = sorted(range(len(jobs)), key=lambda index: -longest[index])
        request_ids = self.engine.submit_all([jobs[index] for index in order], [sinks[index] for index in order])
        sampler = _ProgressSampler(self.engine, waiter, frozenset(request_ids))
        try:
            with ProgressLine(len(jobs), sampler.latest, wanted=progress) as line:
                waiter.wait(line)
        finally:
            if waiter.num_left:  # a request was refused, or the user interrupted: abort the others
                for request_id in request_ids:
                    self.engine.abort(request_id)
        return sinks

    def _with_limit(self, prompt: Tokens, params: SamplingParams) -> SamplingParams:
        """`params` with the default `max_tokens`, if they have none."""
        room = self.engine.scheduler.config.max_request_tokens - len(prompt)
        if params.max_tokens is not None or room < 1:  # the scheduler refuses a prompt that leaves no room
            return params
        return params.with_max_tokens(min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room))


def _each_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    return _each("params", SamplingParams() if params is None else params, SamplingParams, count, "SamplingParams")


def _each_adapter(lora: str | Sequence[str], count: int) -> Sequence[str]:
    return _each("lora", lora, str, count, "the name of an adapter (an empty string: none)")


def _each(name: str, value: T | Sequence[T], kind: type[T], count: int, item: str) -> Sequence[T]:
    """One value for each of `count` prompts. item: what to give, in words."""
    if isinstance(value, kind):
        return [value] * count
    listed = _as_list(name, value, f"{item}, or a list with one for each prompt")
    for index, one in enumerate(listed):
        if not isinstance(one, kind):
            raise InvalidRequest(f"{name}[{index}] is {short(one)}: give {item}.")
    if len(listed) != count:
        raise InvalidRequest(f"{name} has {len(listed)} entries for {count} prompts: give one, or one per prompt.")
    return listed


_PROMPT = "a string, a list of token ids, or a list of either"


def _as_list(name: str, value: object, expected: str) -> Sequence[Any]:
    """`value`, if it is a list, a tuple or an array of numpy."""
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes | bytearray):
        raise InvalidRequest(f"{name} is {short(value)}: give {expected}.")
    return cast(Sequence[Any], value)  # numpy does not declare that arrays are


class _CallWaiter:
    """Waits until all requests of one call have finished."""

    def __init__(self, count: int) -> None:
        self.num_left = count
        self.progress = CallProgress(0, 0, 0)  # of finished requests; the engine's thread writes it
        self._changed = threading.Condition()
        self._refusal: PacelineError | None = None

    def one_finished(self, usage: TokenUsage | None) -> None:
        now = self.progress
        prompt, output = (usage.prompt_tokens, usage.completion_tokens) if usage is not None else (0, 0)
        self.progress = CallProgress(now.num_finished + 1, now.prompt_tokens + prompt, now.output_tokens + output)
        with self._changed:
            self.num_left -= 1
            self._changed.notify()

    def one_refused(self, error: PacelineError) -> None:
        with self._changed:
            self.num_left -= 1
            self._refusal = self._refusal or error
            self._changed.notify()

    def wait(self, line: ProgressLine) -> None:
        while True:
            with self._changed:
                if self._refusal is not None:
                    raise self._refusal
                if not self.num_left:
                    return
                self._changed.wait(line.interval_s)
            line.update()  # outside the lock: the engine's thread does not wait for a terminal


class _ProgressSampler:
    """Counts the tokens of a call on the engine's thread, the only one that may read the scheduler."""

    def __init__(self, engine: Engine, waiter: _CallWaiter, request_ids: frozenset[str]) -> None:
        self._engine, self._waiter, self._request_ids = engine, waiter, request_ids
        self._sampled: Future[CallProgress] | None = None

    def latest(self) -> CallProgress | None:
        """The last sample that is ready. Never waits: a forward pass may take seconds."""
        if not self._waiter.num_left:
            return self._waiter.progress
        ready = None
        if self._sampled is not None and self._sampled.done():
            ready, self._sampled = self._sampled.result(), None
        if self._sampled is None:
            with suppress(EngineFailed):  # the outputs of the requests say so
                self._sampled = self._engine.call(self._sample)
        return ready

    def _sample(self, scheduler: Scheduler) -> CallProgress:
        ended = self._waiter.progress
        started = [request for request in scheduler.started if request.id in self._request_ids]
        return CallProgress(
            ended.num_finished,
            ended.prompt_tokens + sum(len(request.prompt) for request in started),
            ended.output_tokens + sum(len(request.output) for request in started),
        )


@dataclass(slots=True, eq=False)
class _OutputCollector:
    """The sink of one request: collects its output."""

    waiter: _CallWaiter
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    last: OutputDelta | None = None

    def put(self, delta: OutputDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self.last = delta
            self.waiter.one_finished(delta.usage)

    def refuse(self, error: PacelineError) -> None:
        self.waiter.one_refused(error)


def _separated(output: RequestOutput, markers: ReasoningMarkers, prompt: str) -> RequestOutput:
    choices = []
    for choice in output.choices:
        reasoning, answer = markers.split(prompt, choice.text)
        choices.append(replace(choice, text=answer, reasoning_content=reasoning))
    return replace(output, choices=choices)


def _last(sink: _OutputCollector) -> OutputDelta:
    """The last delta of a request that has ended. Raises if it ended with an error."""
    assert sink.last is not None, "the request has ended"
    if sink.last.error is not None:
        raise EngineFailed(f"generation failed: {sink.last.error}")
    return sink.last


def _output(prompt: list[int], params: SamplingParams, sinks: Sequence[_OutputCollector]) -> RequestOutput:
    """The requested choices; the best ones, ranked, where there are more candidates (best_of)."""
    choices: list[Choice] = []
    usages: list[TokenUsage] = []
    is_ranked = len(sinks) > params.n
    for sink in sinks:
        delta = _last(sink)
        assert delta.finish_reason is not None and delta.usage is not None and delta.timings is not None, (
            "the last delta has a finish reason, usage and timings"
        )
        wants = is_ranked or params.logprobs is not None
        choices.append(
            Choice(
                "".join(sink.texts),
                sink.token_ids,
                delta.finish_reason,
                delta.timings,
                sink.logprobs if wants else None,
                delta.clipped_max_tokens,
                num_drafted_tokens=delta.usage.drafted_tokens,
                num_accepted_tokens=delta.usage.accepted_tokens,
            )
        )
        usages.append(delta.usage)
    if is_ranked:
        choices = sorted(choices, key=lambda choice: -choice.mean_logprob)[: params.n]
        if params.logprobs is None:
            choices = [replace(choice, logprobs=None) for choice in choices]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    if params.prompt_logprobs is not None:
        prompt_logprobs = [*[None] * max(params.prompt_logprobs_start, 1), *sinks[0].prompt_logprobs]
    versions = tuple(dict.fromkeys(one for sink in sinks if sink.last for one in sink.last.weight_versions))
    return RequestOutput(prompt, choices, usages[0].cached_tokens, prompt_logprobs, usages[0].fetched_tokens, versions)
