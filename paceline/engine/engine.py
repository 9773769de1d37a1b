"""The engine: scheduler, loop and executor behind a thread, with text on both sides.

Callers live on any thread or event loop; the scheduler lives on the engine's thread alone. They meet in an inbox:
adds and aborts are put there in order, and the thread takes them before every step. With nothing to do it sleeps
on a condition. Every accepted request ends in exactly one last piece, whatever happens: if the loop itself breaks,
all of them end with reason `error` and new ones are refused.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import gc
import itertools
import logging
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from paceline.engine.executor import BusyExecutor, Executor
from paceline.engine.loop import Loop, Trace
from paceline.engine.output import EngineFailed, OutputDelta
from paceline.engine.output_processor import ActiveRequest, OutputProcessor, Sink, Text
from paceline.request import (
    MAX_BAD_WORD_TOKENS,
    FinishReason,
    InvalidRequest,
    PacelineError,
    Pooled,
    Refused,
    Request,
    SamplingParams,
    Tokens,
    as_tokens,
)
from paceline.sampling.grammar import Grammars
from paceline.scheduler.plan import Updates
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.wait_estimate import seconds_until_admitted
from paceline.text.stop import TextStream
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.engine.recording import Recorder

log = logging.getLogger("paceline.engine")
T = TypeVar("T")
Prompt = str | Sequence[int] | Tokens
_IDLE_S = 1.0  # without work, after which the engine looks after itself
_MOST_PROMISES = 10_000
_YOUNG_GARBAGE_S = 60.0  # how often young garbage is collected in an engine that is never idle


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is said of a model and of what it runs on."""

    family: str = "unknown"
    num_parameters: int = 0
    dtype: str = "unknown"
    device: str = "unknown"
    kv_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the engine has come, to be read from any thread: whoever looks twice sees whether it goes on."""

    num_passes: int
    has_work: bool
    since: float  # the last pass, or the arrival of work after a rest; in the engine's clock


@dataclass(slots=True, eq=False)
class _AsyncSink:
    """OutputBatch for a coroutine; those of one step cross over to its event loop together."""

    wants_all_at_once: ClassVar[bool] = False

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[OutputDelta | PacelineError]
    outbox: dict[asyncio.AbstractEventLoop, list[tuple[_AsyncSink, OutputDelta | PacelineError]]]

    def put(self, piece: OutputDelta) -> None:
        self.outbox[self.loop].append((self, piece))

    def refuse(self, error: PacelineError) -> None:
        self.outbox[self.loop].append((self, error))


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        facts: ModelInfo | None = None,
        overlap: str = "on",
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
        on_close: Callable[[], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.tokenizer = tokenizer
        self.clock = clock
        self.recorder = recorder
        watched = executor if recorder is None else recorder.watch(executor)
        self.grammars = Grammars(tokenizer, vocab_size)
        self.loop = Loop(
            scheduler, watched, clock, overlap=overlap != "off", sync=overlap == "sync", trace=trace,
            constraints=self.grammars,
        )  # fmt: skip
        self.vocab_size = vocab_size
        self.facts = facts or ModelInfo()
        # How ids become text, and what to do when all of a step's pieces are with their sinks. An engine in a process
        # of its own sets both before the first request: text is made where it is read.
        self.text_of: Callable[[SamplingParams], Text] = lambda params: TextStream.of(self.tokenizer, params)
        self.after_step: Callable[[], None] = lambda: None
        self.work_s = 0.0  # time in which there was something to do
        self._progress = Progress(0, False, clock())
        self._promised: list[float] = []  # times at which refused requests were asked to come again
        self._chores: Iterator[None] | None = None  # what is left to do while nobody asks for anything
        self._collected = clock()
        self._on_close = on_close
        self._numbers = itertools.count()
        # The engine's thread alone: those that live, and those that wait for their grammar, for whom no one waits.
        self._teller = OutputProcessor(lambda request_id, reason: scheduler.finish(request_id, reason, clock()),
                              self.grammars.detach)  # fmt: skip
        self._compiling: dict[str, ActiveRequest] = {}
        self._wake = threading.Condition()
        # to add, to end, questions; under `_wake`
        self._inbox: list[ActiveRequest | tuple[str, FinishReason] | Callable[[], None]] = []
        self._closing = False
        self._failure: BaseException | None = None
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[_AsyncSink, OutputDelta | PacelineError]]] = (
            defaultdict(list)
        )
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()
        # A thread inside torch when the interpreter goes away can bring the process down; so it ends before.
        atexit.register(_close_if_alive, weakref.ref(self))

    # ------------------------------------------------------------------ callers, on any thread

    def encode(self, prompt: Prompt) -> Tokens:
        """A prompt as checked token ids."""
        tokens = as_tokens(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if not len(tokens):
            raise InvalidRequest("the prompt is empty: give at least one token.")
        if int(tokens.max()) >= self.vocab_size:
            raise InvalidRequest(
                f"the prompt has token id {int(tokens.max())} and the model knows {self.vocab_size} tokens: "
                f"give ids from 0 to {self.vocab_size - 1}."
            )
        return tokens

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sink: Sink,
        request_id: str | None = None,
        tenant: str = "default",
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        pooling: str | None = None,
    ) -> str:
        """Hands a request over and returns its id. `timeout`: seconds after which it ends with reason deadline.
        With `pooling` nothing is generated: the last piece has the prompt's embedding.

        Raises for what can be seen at once; a refusal by the scheduler goes to the sink.
        """
        live = self._prepare(prompt, params, sink, request_id, tenant, priority, timeout, cache_salt, pooling)
        self._post([live])
        return live.request.id

    def submit_all(
        self, prompts: Sequence[Tokens], params: Sequence[SamplingParams], sinks: Sequence[Sink]
    ) -> list[str]:
        """Many at once, so that the scheduler sees all of them before it plans: none is taken if one is wrong."""
        lives = [
            self._prepare(prompt, each, sink, None, "default", 0, None, "")
            for prompt, each, sink in zip(prompts, params, sinks, strict=True)
        ]
        for live in lives:
            if live.compiling is not None:
                live.compiling.result()
        self._post(lives)
        return [live.request.id for live in lives]

    def abort(self, request_id: str) -> None:
        """Ends a request, in whatever state it is. One that has ended already is left alone."""
        self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """As `abort`, for another reason: whoever reads the text has seen its end."""
        with self._wake:
            if not self._closing and self._failure is None:
                self._inbox.append((request_id, reason))
                self._wake.notify()

    def ask(self, question: Callable[[Scheduler], T]) -> Future[T]:
        """Has `question` answered on the engine's thread, between two steps: the only safe place to look around."""
        answer: Future[T] = Future()

        def reply() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                answer.set_result(question(self.scheduler))
            except Exception as error:  # the asker's own
                answer.set_exception(error)

        self._post([reply])
        return answer

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None,
                     tenant: str = "default", priority: int = 0, timeout: float | None = None,
                     cache_salt: str = "", pooling: str | None = None) -> AsyncIterator[OutputDelta]:  # fmt: skip
        """The pieces of one request as they come. Leaving the iteration early aborts the request."""
        queue: asyncio.Queue[OutputDelta | PacelineError] = asyncio.Queue()
        sink = _AsyncSink(asyncio.get_running_loop(), queue, self._outbox)
        request_id = self.submit(prompt, params, sink=sink, request_id=request_id, tenant=tenant, priority=priority,
                                 timeout=timeout, cache_salt=cache_salt, pooling=pooling)  # fmt: skip
        ended = False
        try:
            while not ended:
                item = await queue.get()
                if isinstance(item, PacelineError):
                    ended = True
                    raise item
                ended = item.finish_reason is not None
                yield item
        finally:
            if not ended:
                self.abort(request_id)

    def close(self) -> None:
        """Aborts what is running and ends the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self.grammars.close()
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close()
            if self.recorder is not None:
                self.recorder.close()

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def waits_for(self) -> str:
        """In words, from any thread: what has to happen for it to go on. Of use when nothing changes any more."""
        plan = self.loop.oldest_plan
        if plan is None:
            scheduler = self.scheduler
            return (
                f"a pass to be planned for {scheduler.num_running} running and {scheduler.num_waiting} waiting requests"
            )
        return (f"the device to finish pass {plan.step}, with {plan.num_decodes} decodes and "
                f"{plan.num_prefill_tokens} prompt tokens")  # fmt: skip

    @property
    def failure(self) -> BaseException | None:
        """Why the engine serves no more, if that is so."""
        return self._failure

    def _prepare(self, prompt: Prompt, params: SamplingParams | None, sink: Sink, request_id: str | None, tenant: str,
                 priority: int, timeout: float | None, cache_salt: str,
                 pooling: str | None = None) -> ActiveRequest:  # fmt: skip
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params is {params!r}: give SamplingParams.")
        if params.n != 1 or params.best_of is not None:
            raise InvalidRequest(f"n is {params.n} and best_of {params.best_of}: submit each of params.each_choice().")
        for name in ("grammar", "logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None and not hasattr(self.executor, "launch_delayed"):
                raise InvalidRequest(f"{name} is given, and this device computes no logits: leave it out.")
        if params.seed is None and not params.is_greedy:
            # Drawn once: after a retraction the request goes on with the same noise.
            params = params.with_seed(random.getrandbits(63))
        if timeout is not None and not timeout > 0:
            raise InvalidRequest(f"timeout is {timeout!r}: give seconds, more than 0.")
        tokens = self.encode(prompt)
        for name, ids in (("logprob_token_ids", params.logprob_token_ids), ("logit_bias", dict(params.biases))):
            for token in ids:
                if token >= self.vocab_size:
                    raise InvalidRequest(
                        f"{name} has token {token}: the model knows the ids 0 to {self.vocab_size - 1}."
                    )
        request = Request(
            id=request_id if request_id is not None else f"r{next(self._numbers)}",
            prompt=tokens,
            params=params,
            tenant=tenant,
            priority=priority,
            deadline=None if timeout is None else self.clock() + timeout,
            eos_token_ids=tuple(sorted(self.tokenizer.eos_ids)),
            cache_salt=cache_salt,
            compute_from=None if params.prompt_logprobs is None else 0,
            bad_word_ids=self._bad_word_ids(params.bad_words),
        )
        if pooling is not None:
            if not getattr(self.executor, "can_pool", False):
                raise InvalidRequest("embeddings are asked for, which this device does not compute yet: use a CPU.")
            request.prefill_only, request.pooled = True, Pooled(pooling)
            if pooling == "mean":  # a cached token has no hidden state any more
                request.compute_from = 0
        live = ActiveRequest(request, self.text_of(params), sink, is_quiet=sink.wants_all_at_once and not params.stop)
        if params.grammar is not None:
            live.compiling = self.grammars.compile(params.grammar)
            if live.compiling.done():
                live.compiling.result()  # a wrong one is seen at once
        return live

    def _bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens, at the beginning of a text and within one, where a space comes before it."""
        found = {
            tuple(self.tokenizer.encode(text, add_special=False, allow_special=False))
            for word in words
            for text in (word, f" {word.lstrip()}")
        }
        if (count := sum(map(len, found))) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(f"bad_words has {count} tokens: give at most {MAX_BAD_WORD_TOKENS}.")
        return tuple(sorted(ids for ids in found if ids))

    def _post(self, items: Iterable[ActiveRequest | Callable[[], None]]) -> None:
        with self._wake:
            if self._failure is not None or self._closing:
                raise self._gone()
            self._inbox.extend(items)
            self._wake.notify()

    def _gone(self) -> EngineFailed:
        if self._failure is None:
            return EngineFailed("the engine was closed: start a new one.")
        return EngineFailed(f"the engine has failed ({self._failure}): restart it.")

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                updates = self.loop.step()
                began = self.clock()
                if updates is not None:
                    self._note_pass()
                    self._take(updates)
                else:
                    ended = self.scheduler.take_ended()
                    self._teller.end_all(ended)
                    assert ended or not self.scheduler.has_work, "requests are left and none of them can run"
                self._send()
                if updates is not None and (trace := self.loop.trace) is not None:
                    trace.span("text", self.loop.last_step, began, self.clock())
        except BaseException as error:  # whoever waits must get an answer, whatever broke
            self._fail(error)

    def _wait_for_work(self) -> bool:
        """Sleeps while there is nothing to do, then takes the inbox. False when the engine is to end."""
        if not self.scheduler.has_work:
            self._rest()
        with self._wake:
            inbox, self._inbox = self._inbox, []
            closing = self._closing
        for item in inbox:
            if isinstance(item, tuple):
                if not self.scheduler.finish(*item, self.clock()) and item[0] in self._compiling:
                    self._teller.end(self._compiling.pop(item[0]), item[1])
            elif isinstance(item, ActiveRequest):
                self._add(item)
            else:
                item()
        if closing:
            for request_id in list(self.scheduler.requests):
                self.scheduler.abort(request_id, self.clock())
            for request_id in list(self._compiling):
                self._teller.end(self._compiling.pop(request_id), FinishReason.ABORT)
        self._teller.end_all(self.scheduler.take_ended(), "the engine was closed" if closing else None)
        self._send()
        return not closing

    def _rest(self) -> None:
        """Sleeps until something comes, and in between, when all is quiet, looks after itself, bit by bit."""
        if self._progress.has_work:
            self._progress = dataclasses.replace(self._progress, has_work=False)
        patience = _IDLE_S
        while not self._is_called(None if self._chores is None else patience):
            patience = 0.0
            if self._chores is not None and next(self._chores, "done") == "done":
                self._chores = None
        self._progress = Progress(self._progress.num_passes, True, self.clock())

    def _is_called(self, timeout: float | None) -> bool:
        """Whether something has come, or comes in time."""
        with self._wake:
            return self._wake.wait_for(lambda: bool(self._inbox or self._closing), timeout)

    def _look_after(self) -> Iterator[None]:
        """What is done once whenever there is nothing else to do. Whoever comes waits for one step of it at most."""
        for fault in self.scheduler.check_idle(self.clock()):
            log.error("the books did not add up and were opened anew: %s", fault)
        yield
        gc.collect()
        self._collected = self.clock()
        yield
        while hasattr(self.executor, "run_background_work") and cast(BusyExecutor, self.executor).run_background_work():
            yield

    def _note_pass(self) -> None:
        now, before = self.clock(), self._progress
        self.work_s += now - before.since
        self._chores = self._look_after()
        self._progress = Progress(before.num_passes + 1, True, now)
        if now - self._collected > _YOUNG_GARBAGE_S and not gc.isenabled():
            self._collected = now
            gc.collect(1)

    def _add(self, live: ActiveRequest) -> None:
        request = live.request
        try:
            if request.id in self._compiling:
                raise InvalidRequest(
                    f"request id {request.id!r} is taken by one that has not finished: choose another."
                )
            if live.compiling is not None and not live.compiling.done():
                self._compiling[request.id] = live
                live.compiling.add_done_callback(lambda _: self._compiled(live))
                return
            compiled = None if live.compiling is None else live.compiling.result()
            self.scheduler.add(request, self.clock())
        except PacelineError as error:
            if isinstance(error, Refused) and error.retry:
                error.retry_after_s = self._retry_after()
            live.sink.refuse(error)
        else:
            self._teller.add(live)
            if compiled is not None:
                self.grammars.attach(request, compiled)

    def _compiled(self, live: ActiveRequest) -> None:
        """On the compiler's thread: the request goes on where it was left."""

        def go_on() -> None:
            if self._compiling.pop(live.request.id, None) is live:
                self._add(live)

        with contextlib.suppress(EngineFailed):  # it has answered already
            self._post([go_on])

    def _retry_after(self) -> float | None:
        """When there is likely room for one more. Whoever was told a time before and has not come back goes first:
        else all that are refused would come at once, and all but one in vain."""
        now = self.clock()
        while self._promised and self._promised[0] <= now:
            heappop(self._promised)
        seconds = seconds_until_admitted(self.scheduler, 1 + len(self._promised))
        if seconds is not None and len(self._promised) < _MOST_PROMISES:
            heappush(self._promised, now + seconds)
        return seconds

    def _take(self, updates: Updates) -> None:
        logprobs, self.loop.logprobs = self.loop.logprobs, None
        prompt_logprobs, self.loop.prompt_logprobs = self.loop.prompt_logprobs, ()
        self._teller.take(updates, self.loop.last_step, logprobs, prompt_logprobs)
        for request, why in self.grammars.take_failures():
            self.scheduler.finish(request.id, FinishReason.ERROR, self.clock())
            self._teller.end(self._teller.live[request.id], FinishReason.ERROR, error=why)

    def _send(self) -> None:
        """Lets each event loop know, once, of all that this step has for it."""
        for loop, items in list(self._outbox.items()):
            del self._outbox[loop]
            try:
                loop.call_soon_threadsafe(_put_all, items)
            except RuntimeError:  # that loop was closed: nobody is left to listen
                for request_id, live in list(self._teller.live.items()):
                    if isinstance(live.sink, _AsyncSink) and live.sink.loop is loop:
                        self._teller.forget(live)
                        self.scheduler.abort(request_id, self.clock())
        self.after_step()

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._failure = error
            inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, ActiveRequest):
                item.sink.refuse(self._gone())
            elif not isinstance(item, tuple):
                item()
        for live in [*self._teller.live.values(), *self._compiling.values()]:
            self._teller.end(live, FinishReason.ERROR, error=f"{type(error).__name__}: {error}")
        self._compiling.clear()
        self._send()


def _close_if_alive(reference: weakref.ref[Engine]) -> None:
    engine = reference()
    if engine is not None:
        engine.close()


def _put_all(items: list[tuple[_AsyncSink, OutputDelta | PacelineError]]) -> None:
    for sink, item in items:
        sink.queue.put_nowait(item)
