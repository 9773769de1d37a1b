"""`LLM`: a model to call from Python. Prompts in, outputs out, as many at once as there are."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from paceline.engine.build import build_engine
from paceline.engine.engine import Engine, Prompt
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed, OutputDelta, Timings, TokenLogprob, TokenUsage
from paceline.request import FinishReason, InvalidRequest, PacelineError, SamplingParams

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt. `logprobs` has an entry for each token id, if they were asked for."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    timings: Timings
    logprobs: list[TokenLogprob] | None = None

    @property
    def mean_logprob(self) -> float:
        """By which the best of several is chosen."""
        assert self.logprobs is not None, "only choices that are compared have it"
        return sum(one.logprob for one in self.logprobs) / max(len(self.logprobs), 1)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt: `n` choices, of which `text`, `token_ids`, ... are the first's.

    `prompt_logprobs` begins with None: nothing comes before the first token.
    """

    prompt_token_ids: list[int]
    choices: list[Choice]
    num_cached_tokens: int  # of the prompt; they were computed for an earlier one
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_fetched_tokens: int = 0  # of the cached ones: from host memory

    @property
    def text(self) -> str:
        return self.choices[0].text

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


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection stops the engine too, for as long as many passes take where there are many prompts to look through.
    The engine itself collects what is young once a minute."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class LLM:
    """A model, loaded and ready.

    `model` is a folder, a .gguf file, a hub id, or None for the default model, fetched on first use. With
    `load="random", shape=NAME` there are random weights instead. Further options are those of `EngineConfig` and
    `SchedulerConfig`; `max_wait` is infinite unless given, since offline nobody waits for the first token.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.engine = build_engine(model, **{"max_wait": math.inf, **options})
        self._is_owner = True

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Around an engine that is there already and may outlive it."""
        llm = cls.__new__(cls)
        llm.engine, llm._is_owner = engine, False
        return llm

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @_no_garbage_collection()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """The outputs for one prompt or many, in their order; each is a text or a list of token ids.

        `params` is one for all or one for each. If one prompt is refused, nothing is generated and its error raised.
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        listed: Any = [prompts] if one else prompts
        each = self._each_params(len(listed), params)
        encoded = []
        for index, prompt in enumerate(listed):
            try:
                encoded.append(self.engine.encode(prompt))
            except InvalidRequest as error:
                raise InvalidRequest(f"prompts[{index}]: {error}") from None
        # Each choice is a request of its own; those of one prompt share its computation through the prefix tree.
        variants = [one.each_choice() for one in each]
        flat = [(prompt, one) for prompt, ones in zip(encoded, variants, strict=True) for one in ones]
        with ExitStack() as stack:
            bar = stack.enter_context(_Bar(len(flat))) if progress else None
            gathering = _Gathering(len(flat), bar)
            sinks = [_OutputCollector(gathering) for _ in flat]
            # Who may run longest comes first: one that begins last would run on alone when all others have ended.
            longest = [math.inf if one.max_tokens is None else one.max_tokens for _, one in flat]
            order = sorted(range(len(flat)), key=lambda index: -longest[index])
            # A progress bar counts tokens as they are produced.
            jobs = [Job(flat[index][0], flat[index][1], stream=progress) for index in order]
            request_ids = self.engine.submit_all(jobs, [sinks[index] for index in order])
            try:
                gathering.wait()
            finally:
                if gathering.num_left:  # a refusal, or the user's interrupt: nobody wants the others any more
                    for request_id in request_ids:
                        self.engine.abort(request_id)
        left = iter(sinks)
        return [
            _output(given if isinstance(given, list) else prompt.tolist(), one, [next(left) for _ in ones])
            for given, prompt, one, ones in zip(listed, encoded, each, variants, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """The next message of one conversation or of many; `template_options` go to the model's chat template."""
        many = bool(messages) and isinstance(messages[0], Sequence) and not isinstance(messages[0], str | bytes)
        conversations: Sequence[Any] = messages if many else [messages]
        prompts = [self.engine.tokenizer.encode_chat(one, **template_options) for one in conversations]
        return self.generate(prompts, params, progress)

    def close(self) -> None:
        self.engine.close()

    def __del__(self) -> None:
        # The engine's thread keeps the engine, and so the model, alive: dropping the last LLM must end it.
        if getattr(self, "_is_owner", False):
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _each_params(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> Sequence[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequest(f"params has {len(params)} entries for {count} prompts: give one, or one for each.")
        return params


class _Gathering:
    """Waits until every request of one call has ended."""

    def __init__(self, count: int, bar: _Bar | None) -> None:
        self.num_left = count
        self._bar = bar
        self._changed = threading.Condition()
        self._refusal: PacelineError | None = None

    def one_ended(self, refusal: PacelineError | None = None) -> None:
        with self._changed:
            self.num_left -= 1
            self._refusal = self._refusal or refusal
            self._changed.notify()

    def note(self, piece: OutputDelta) -> None:
        if self._bar is not None:
            self._bar.note(piece)

    def wait(self) -> None:
        with self._changed:
            while self.num_left and self._refusal is None:
                self._changed.wait()
            if self._refusal is not None:
                raise self._refusal


@dataclass(slots=True, eq=False)
class _OutputCollector:
    """The sink of one request."""

    gathering: _Gathering
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    last: OutputDelta | None = None

    def put(self, piece: OutputDelta) -> None:
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.prompt_logprobs.extend(piece.prompt_logprobs)
        self.gathering.note(piece)
        if piece.finish_reason is not None:
            self.last = piece
            self.gathering.one_ended()

    def refuse(self, error: PacelineError) -> None:
        self.gathering.one_ended(error)


def _output(prompt: list[int], params: SamplingParams, sinks: Sequence[_OutputCollector]) -> RequestOutput:
    """The choices that were asked for, the best first where there are more candidates."""
    choices: list[Choice] = []
    usages: list[TokenUsage] = []
    is_ranked = len(sinks) > params.n
    for sink in sinks:
        piece = sink.last
        assert piece is not None and piece.finish_reason is not None, "the last piece says how it ended"
        if piece.error is not None:
            raise EngineFailed(f"generation failed: {piece.error}")
        assert piece.usage is not None and piece.timings is not None, "the last piece says what it took"
        wants = is_ranked or params.logprobs is not None
        choices.append(Choice("".join(sink.texts), sink.token_ids, piece.finish_reason, piece.timings,
                              sink.logprobs if wants else None))  # fmt: skip
        usages.append(piece.usage)
    if is_ranked:
        choices = sorted(choices, key=lambda choice: -choice.mean_logprob)[: params.n]
        if params.logprobs is None:
            choices = [replace(choice, logprobs=None) for choice in choices]
    told = None if params.prompt_logprobs is None else [None, *sinks[0].prompt_logprobs]
    return RequestOutput(prompt, choices, usages[0].cached_tokens, told, usages[0].fetched_tokens)


class _Bar:
    """A progress bar: requests that have ended, tokens so far, tokens a second."""

    def __init__(self, num_requests: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        self._task = self._progress.add_task("prompts", total=num_requests, tokens="")
        self._num_tokens = 0
        self._began = time.monotonic()

    def note(self, piece: OutputDelta) -> None:
        self._num_tokens += len(piece.token_ids)
        rate = self._num_tokens / max(time.monotonic() - self._began, 1e-9)
        ended = 0 if piece.finish_reason is None else 1
        self._progress.update(self._task, advance=ended, tokens=f"{self._num_tokens} tokens, {rate:.1f} a second")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
