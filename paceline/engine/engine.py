"""The engine: scheduler, loop and executor behind a thread, with an asynchronous interface.

Callers may be on any thread or event loop; the scheduler is used on the engine's thread only. They meet in an inbox:
adds and aborts are queued in order, and the thread takes them before every step. Without work it sleeps on a condition.
Every accepted request receives exactly one final delta or an error, whatever happens: if the loop itself fails, all
requests end with reason `error` and new ones are refused.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import gc
import itertools
import logging
import math
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, TypeVar

from paceline.engine.adapters import Adapters
from paceline.engine.executor import Executor
from paceline.engine.job import Job
from paceline.engine.loop import Loop, Trace
from paceline.engine.output import EngineFailed, OutputDelta
from paceline.engine.output_processor import ActiveRequest, OutputProcessor, Sink
from paceline.engine.pausing import OPERATOR, PauseControl, PauseMode
from paceline.engine.pooling import Pooler
from paceline.engine.recent_outputs import RecentOutputs
from paceline.engine.weight_versions import WeightVersions
from paceline.model.spec import ModelSpec
from paceline.request import (
    MAX_BAD_WORD_TOKENS,
    FinishReason,
    InvalidRequest,
    PacelineError,
    Refused,
    Request,
    Tokens,
    as_tokens,
)
from paceline.sampling.grammar import Grammars
from paceline.scheduler.plan import NO_TOKENS
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.scheduler.wait_estimate import seconds_until_admitted
from paceline.text.stop import TextStream
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.engine.recording import Recorder
    from paceline.model.decoder import Decoder

log = logging.getLogger("paceline.engine")
T = TypeVar("T")
Prompt = str | Sequence[int] | Tokens
_IDLE_S = 1.0  # without work, after which maintenance begins
_MAX_PROMISES = 10_000
_YOUNG_GARBAGE_S = 60.0  # between collections of young garbage in an engine that is never idle


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model and the device it runs on, for humans."""

    family: str = "unknown"
    num_parameters: int = 0
    dtype: str = "unknown"
    device: str = "unknown"
    kv_bytes_per_token: int = 0
    kv_dtype: str = "unknown"
    kv_scales: str = ""  # digest of the scales of an FP8 KV cache
    kv_rank_bytes: tuple[int, ...] = ()  # per token, that each rank of tensor parallelism has; empty: there is one


@dataclass(frozen=True, slots=True)
class Progress:
    """A liveness sample that any thread may read: two samples show whether the engine makes progress."""

    num_passes: int
    has_work: bool
    since: float  # the last pass, or the arrival of work after an idle period; in the engine's clock


def _nothing(*_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """Callbacks, all on the engine's thread."""

    after_step: Callable[[], None] = _nothing  # all deltas of a step were delivered to their sinks
    on_failure: Callable[[BaseException], None] = _nothing  # the engine failed and every request was answered
    on_pause: Callable[[bool], None] = _nothing  # the operator has paused (True) or resumed
    on_close: Callable[[], None] = _nothing  # the thread has ended; called on the thread that closes the engine


Item = OutputDelta | PacelineError


@dataclass(slots=True, eq=False)
class _AsyncSink:
    """Delivers to a coroutine. The deltas of one step cross to its event loop together."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Item]
    outbox: dict[asyncio.AbstractEventLoop, list[tuple[_AsyncSink, Item]]]

    def put(self, delta: OutputDelta) -> None:
        self.outbox[self.loop].append((self, delta))

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
        spec: ModelSpec | None = None,
        info: ModelInfo | None = None,
        overlap: str = "on",
        detokenize: bool = True,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
        hooks: EngineHooks | None = None,
        recorder: Recorder | None = None,
        grammars: Grammars | None = None,
        recent_outputs: RecentOutputs | None = None,
    ) -> None:
        """`detokenize=False`: deltas have token ids and no text, and stop strings are not looked for; for an engine
        whose text is produced by another process. `grammars`: those that have been set up for this tokenizer.
        `recent_outputs`: where draft sources are looked for; default: none."""
        self.scheduler = scheduler
        self.executor = executor
        self.tokenizer = tokenizer
        self._bad_word_ids = lru_cache(maxsize=64)(partial(_encode_bad_words, tokenizer))  # once for all choices
        self.clock = clock
        self.recorder = recorder
        self.vocab_size = vocab_size
        self.spec = spec  # None: the executor runs no model
        self.info = info or ModelInfo()
        self.weights = WeightVersions()
        self.adapters = Adapters()
        self.grammars = grammars or Grammars(tokenizer, vocab_size)
        self._recent_outputs = recent_outputs or RecentOutputs(0)
        self.loop = Loop(
            scheduler,
            executor if recorder is None else recorder.watch(executor),
            clock,
            overlap=overlap != "off",
            sync=overlap == "sync",
            trace=trace,
            constraints=self.grammars,
        )
        self.work_s = 0.0  # time with unfinished requests
        self._detokenize = detokenize
        self._hooks = hooks or EngineHooks()
        self._closed = False
        self._progress = Progress(0, False, clock())
        self._promised: list[float] = []  # times at which refused requests were asked to retry
        self._pauses = PauseControl(scheduler, clock)
        self._maintenance: Iterator[None] | None = None  # what is left to do while idle
        self._expects_until = -math.inf  # before which no maintenance begins: a caller prepares requests
        self._collected = clock()
        self._numbers = itertools.count()
        # Only on the engine's thread: accepted requests, and those whose grammar is still being compiled.
        self._outputs = OutputProcessor(
            lambda request_id, reason: scheduler.finish(request_id, reason, clock()),
            self._on_finished,
            self.weights.of,
            self._retry_after,
        )
        self._compiling: dict[str, ActiveRequest] = {}
        # When those give up: times, numbers (which break ties), reasons, requests.
        self._compile_numbers = itertools.count()
        self._given_up: list[tuple[float, int, FinishReason, ActiveRequest]] = []
        self._wake = threading.Condition()
        # Requests to add, requests to end, functions to call; guarded by `_wake`
        self._inbox: list[ActiveRequest | tuple[str, FinishReason] | Callable[[], None]] = []
        self._closing = False
        self._failure: BaseException | None = None
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[_AsyncSink, Item]]] = defaultdict(list)
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()
        # A thread inside torch during interpreter shutdown can crash the process, so it is ended before.
        atexit.register(_close_if_alive, weakref.ref(self))

    # ------------------------------------------------------------------ callers, on any thread

    def encode(self, prompt: Prompt) -> Tokens:
        """A prompt as checked token ids."""
        tokens = as_tokens(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        self._check_prompt(tokens)
        return tokens

    def expect_requests(self) -> None:
        """Postpones maintenance for a second. Called before many requests are prepared: both need the interpreter lock,
        and the requests would wait."""
        self._expects_until = self.clock() + _IDLE_S

    def submit(self, job: Job, sink: Sink) -> str:
        """Queues a request and returns its id.

        Raises for what can be checked at once; a refusal by the scheduler goes to the sink.
        """
        active = self._prepare(job, sink)
        self._post([active])
        return active.request.id

    def submit_all(self, jobs: Sequence[Job], sinks: Sequence[Sink]) -> list[str]:
        """Queues many requests at once, so that the scheduler sees all of them before it plans. None is queued if one
        is invalid."""
        every = [self._prepare(job, sink) for job, sink in zip(jobs, sinks, strict=True)]
        for active in every:
            if active.compiling is not None:
                active.compiling.result()
        self._post(every)
        return [active.request.id for active in every]

    def abort(self, request_id: str) -> None:
        """Ends a request in any state. One that has ended already is left alone."""
        self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """As `abort`, with another reason: a stop string was found outside the engine."""
        with self._wake:
            if not self._closing and self._failure is None:
                self._inbox.append((request_id, reason))
                self._wake.notify()

    def call(self, function: Callable[[Scheduler], T]) -> Future[T]:
        """Calls `function` on the engine's thread between two steps: the only safe place to inspect the scheduler."""
        answer: Future[T] = Future()

        def reply() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function(self.scheduler))
            except Exception as error:  # the caller's
                answer.set_exception(error)

        self._post([reply])
        return answer

    def pause(self, mode: PauseMode = PauseMode.WAIT, *, who: str = OPERATOR) -> Future[None]:
        """Stops launching passes until `resume`. The result comes when no pass is in flight. Requests can be added and
        aborted meanwhile."""
        at_rest: Future[None] = Future()

        def begin() -> None:
            try:
                self._pauses.pause(who, mode, at_rest)
            except PacelineError as error:
                at_rest.set_exception(error)
                return
            if who == OPERATOR:
                self._hooks.on_pause(True)

        self._post([begin])
        return at_rest

    def resume(self, *, who: str = OPERATOR) -> None:
        def end() -> None:
            self._pauses.resume(who)
            if who == OPERATOR:
                self._hooks.on_pause(False)

        with contextlib.suppress(EngineFailed):  # then there is nothing to resume
            self._post([end])

    @property
    def is_paused(self) -> bool:
        return self._pauses.is_paused

    def replace_weights(self, decoder: Decoder, version: str) -> Future[int]:
        """Copies the weights of a decoder of the same shape, and drops all KV. The engine must be paused. The result is
        the number of pages dropped. If copying fails, the engine fails: its weights are incomplete."""
        answer: Future[int] = Future()

        def replace() -> None:
            if self._failure is not None:
                answer.set_exception(self._unavailable())
                return
            assert self.is_paused, "weights are replaced while the engine is paused"
            try:
                self.executor.load_weights(decoder)
            except BaseException as error:
                answer.set_exception(EngineFailed(f"the weights were replaced only in part: {error!r}"))
                raise
            pages = self.scheduler.drop_kv(self.clock())
            self.weights.replace(version, self.clock())
            answer.set_result(pages)

        self._post([replace])
        return answer

    def fail(self, error: BaseException) -> None:
        """Ends the engine with an error: something that it needs is gone. Any thread may call it."""

        def end() -> None:
            if self._failure is None:
                raise error

        with contextlib.suppress(EngineFailed):  # it has ended already
            self._post([end])

    async def stream(self, job: Job) -> AsyncIterator[OutputDelta]:
        """The deltas of one request as they are produced. Leaving the iteration early aborts the request."""
        queue: asyncio.Queue[Item] = asyncio.Queue()
        request_id = self.submit(job, _AsyncSink(asyncio.get_running_loop(), queue, self._outbox))
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
        """Aborts all requests and ends the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._pauses.fail(self._unavailable())
        self.grammars.close()
        if not self._closed:
            self._closed = True
            self.executor.close()
            self._hooks.on_close()
            if self.recorder is not None:
                self.recorder.close()

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def waits_for(self) -> str:
        """What has to happen for the engine to continue, from any thread; for reports of a stalled engine."""
        plan = self.loop.awaited_plan
        if plan is None:
            scheduler = self.scheduler
            return f"a plan for {scheduler.num_running} running and {scheduler.num_waiting} waiting requests"
        return (
            f"the device to finish pass {plan.step} ({plan.num_decodes} decode rows, "
            f"{plan.num_prefill_tokens} prefill tokens)"
        )

    @property
    def failure(self) -> BaseException | None:
        """Why the engine does not serve any more, if that is so."""
        return self._failure

    def _prepare(self, job: Job, sink: Sink) -> ActiveRequest:
        params, supports = job.params, self.executor.capabilities
        if params.n != 1 or params.best_of is not None:
            raise InvalidRequest(f"n is {params.n} and best_of {params.best_of}: submit each of params.each_choice().")
        for name in ("grammar", "logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None and not supports.logits:
                raise InvalidRequest(f"{name} is given, and this executor does not compute logits: leave it out.")
        if job.pooling is not None and not supports.pooling:
            raise InvalidRequest(
                f"pooling is {job.pooling!r}, and this executor does not compute hidden states: leave it out."
            )
        if params.seed is None and not params.is_greedy:
            # Drawn once: after a retraction the request continues with the same noise.
            params = params.with_seed(random.getrandbits(63))
        for name in ("timeout_s", "queue_timeout_s", "running_timeout_s"):
            seconds = getattr(job, name)
            if seconds is not None and not seconds > 0:
                raise InvalidRequest(f"{name} is {seconds!r}: give seconds, more than 0.")
        self._check_prompt(job.prompt)
        self._check_ids(job.draft_source, "draft_source")
        if len(job.draft_source) > self.scheduler.config.context_tokens:
            raise InvalidRequest(
                f"draft_source has {len(job.draft_source)} tokens: give at most "
                f"{self.scheduler.config.context_tokens}, the context length."
            )
        for name, ids in (("logprob_token_ids", params.logprob_token_ids), ("logit_bias", dict(params.biases))):
            for token in ids:
                if token >= self.vocab_size:
                    raise InvalidRequest(
                        f"{name} has token id {token}: the model's ids are 0 to {self.vocab_size - 1}."
                    )
        request = Request(
            id=job.id or f"r{next(self._numbers)}",
            prompt=job.prompt,
            params=params,
            tenant=job.tenant,
            priority=job.priority,
            deadline=None if job.timeout_s is None else self.clock() + job.timeout_s,
            queue_timeout_s=job.queue_timeout_s or math.inf,
            running_timeout_s=job.running_timeout_s or math.inf,
            eos_token_ids=tuple(sorted(self.tokenizer.eos_ids)),
            cache_salt=job.cache_salt,
            adapter=self.adapters.resolve(job.adapter),
            pooling=job.pooling,
            bad_word_ids=self._bad_word_ids(params.bad_words),
            is_exported=job.is_exported,
            num_prefilled=job.num_prefilled,
            keys=job.request_keys,
            draft_source=job.draft_source if self.scheduler.config.draft_tokens else NO_TOKENS,
        )
        active = ActiveRequest(
            TrackedRequest(request),
            sink,
            TextStream.of(self.tokenizer, params) if self._detokenize else None,
            is_streamed=job.stream or bool(params.stop),
            pooler=None if job.pooling is None else Pooler(job.pooling),
        )
        if params.grammar is not None:
            active.compiling = self.grammars.compile(params.grammar, job.tenant)
            if active.compiling.done():
                active.compiling.result()  # raises at once if the grammar is known to be invalid
        return active

    def _check_prompt(self, tokens: Tokens) -> None:
        if not len(tokens):
            raise InvalidRequest("the prompt is empty: give at least one token.")
        self._check_ids(tokens, "the prompt")

    def _check_ids(self, tokens: Tokens, name: str) -> None:
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            raise InvalidRequest(
                f"{name} has token id {int(tokens.max())}: the model's ids are 0 to {self.vocab_size - 1}."
            )

    def _post(self, items: Iterable[ActiveRequest | Callable[[], None]]) -> None:
        with self._wake:
            if self._failure is not None or self._closing:
                raise self._unavailable()
            self._inbox.extend(items)
            self._wake.notify()

    def _unavailable(self) -> EngineFailed:
        if self._failure is None:
            return EngineFailed("the engine was closed: start a new one.")
        return EngineFailed(f"the engine has failed ({self._failure}): restart it.")

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                output = self.loop.step(launch=self._pauses.may_launch and not self.is_paused)
                began = self.clock()
                if output is not None:
                    self._note_pass()
                    self._outputs.process(output)
                else:
                    ended = self.scheduler.take_ended()
                    self._outputs.end_all(ended)
                    assert ended or not self.scheduler.has_work or self._pauses.is_requested, (
                        "requests are left and none of them can run"
                    )
                self._send()
                self._pauses.update()
                if output is not None and (trace := self.loop.trace) is not None:
                    trace.span("text", output.step, began, self.clock())
        except BaseException as error:  # every caller must get an answer, whatever failed
            self._fail(error)

    def _wait_for_work(self) -> bool:
        """Sleeps while there is nothing to do, then processes the inbox. False when the engine closes."""
        if self._pauses.is_paused:
            self._wait_paused()
        elif not self.scheduler.has_work:
            self._idle()
        with self._wake:
            inbox, self._inbox = self._inbox, []
            closing = self._closing
        for item in inbox:
            if isinstance(item, tuple):
                if not self.scheduler.finish(*item, self.clock()) and item[0] in self._compiling:
                    active = self._compiling.pop(item[0])
                    if active.compiling is not None:
                        self.grammars.abandon(active.compiling)
                    self._outputs.end(active, item[1])
            elif isinstance(item, ActiveRequest):
                self._add(item)
            else:
                item()
        self._expire_compiling()
        if closing:
            for request_id in list(self.scheduler.requests):
                self.scheduler.abort(request_id, self.clock())
            for request_id in list(self._compiling):
                self._outputs.end(self._compiling.pop(request_id), FinishReason.ABORT)
        self._outputs.end_all(self.scheduler.take_ended(), "the engine was closed" if closing else None)
        self._send()
        return not closing

    def _wait_paused(self) -> None:
        """Sleeps until there is something in the inbox, or a deadline passes."""
        self._progress = dataclasses.replace(self._progress, has_work=False)
        deadline = self.scheduler.next_deadline
        self._has_mail(None if deadline is None else max(0.0, deadline - self.clock()))
        self.scheduler.expire(self.clock())
        self._progress = Progress(self._progress.num_passes, True, self.clock())

    def _idle(self) -> None:
        """Sleeps until there is work. After a second, if none is expected, it runs maintenance, one unit at a time."""
        if self._progress.has_work:
            self._progress = dataclasses.replace(self._progress, has_work=False)
        patience = _IDLE_S
        while not self._has_mail(None if self._maintenance is None else patience):
            patience = max(0.0, self._expects_until - self.clock())
            if not patience and self._maintenance is not None and next(self._maintenance, "done") == "done":
                self._maintenance = None
        self._progress = Progress(self._progress.num_passes, True, self.clock())

    def _has_mail(self, timeout: float | None) -> bool:
        """Whether the inbox has an item or gets one within `timeout`, or a request waits too long for its grammar."""
        until = self._given_up[0][0] if self._given_up else math.inf
        if until < math.inf:
            timeout = min(math.inf if timeout is None else timeout, max(0.0, until - self.clock()))
        with self._wake:
            has_mail = self._wake.wait_for(lambda: bool(self._inbox or self._closing), timeout)
        return has_mail or until <= self.clock()

    def _expire_compiling(self) -> None:
        """Ends requests whose time has passed while their grammar is compiled: the scheduler does not know them yet."""
        if len(self._given_up) > 64 + 4 * len(self._compiling):  # mostly of requests that have their grammar
            self._given_up = [one for one in self._given_up if self._is_compiling(one[-1])]
            heapify(self._given_up)
        while self._given_up and (
            self._given_up[0][0] <= self.clock() or not self._is_compiling(self._given_up[0][-1])
        ):
            _, _, reason, active = heappop(self._given_up)
            if self._is_compiling(active) and active.compiling is not None:
                del self._compiling[active.request.id]
                self.grammars.abandon(active.compiling)
                self._outputs.end(active, reason)

    def _is_compiling(self, active: ActiveRequest) -> bool:
        return self._compiling.get(active.request.id) is active

    def _give_up_later(self, active: ActiveRequest) -> None:
        asked, config = active.request.request, self.scheduler.config
        limit_s = math.inf if active.request.background else config.queue_timeout_s
        times = (
            (asked.deadline, FinishReason.DEADLINE),
            (self.clock() + min(asked.queue_timeout_s, limit_s), FinishReason.QUEUE_TIMEOUT),
        )
        for at, reason in times:
            if at is not None and at < math.inf:
                heappush(self._given_up, (at, next(self._compile_numbers), reason, active))

    def _maintain(self) -> Iterator[None]:
        """What is done once in every idle period. A new request waits for one unit of it at most."""
        faults = self.scheduler.check_idle(self.clock())
        for fault in faults:
            log.error("scheduler state was inconsistent and has been reset: %s", fault)
        if faults:
            self._hooks.after_step()  # routers must not wait for the next request to learn that nothing is cached
        yield
        gc.collect()
        self._collected = self.clock()
        yield
        while self.executor.run_background_work():
            yield

    def _note_pass(self) -> None:
        now, before = self.clock(), self._progress
        self.work_s += now - before.since
        self._maintenance = self._maintain()
        self._progress = Progress(before.num_passes + 1, True, now)
        if now - self._collected > _YOUNG_GARBAGE_S and not gc.isenabled():
            self._collected = now
            gc.collect(1)

    def _add(self, active: ActiveRequest) -> None:
        request = active.request.request
        try:
            if request.id in self._compiling:
                raise InvalidRequest(
                    f"request id {request.id!r} is in use by an unfinished request: choose another id."
                )
            if active.compiling is not None and not active.compiling.done():
                self._compiling[request.id] = active
                self._give_up_later(active)
                active.compiling.add_done_callback(lambda _: self._compiled(active))
                return
            compiled = None if active.compiling is None else active.compiling.result()
            if (adapter := self.adapters.renewed(request.adapter)) != request.adapter:
                request = dataclasses.replace(request, adapter=adapter)
            if not len(request.draft_source) and len(source := self._recent_outputs.find(request)):
                request = dataclasses.replace(request, draft_source=source)
            active.request = self.scheduler.add(request, self.clock())
        except PacelineError as error:
            if isinstance(error, Refused) and error.retry:
                error.retry_after_s = self._retry_after()
            active.sink.refuse(error)
        else:
            self._outputs.add(active)
            if compiled is not None:
                self.grammars.attach(active.request, compiled)

    def forget_history(self, scheduler: Scheduler) -> bool:
        """As the scheduler's, with the stored outputs and the time worked. On the engine's thread. Returns False, and
        does nothing, while a pass is in flight."""
        if scheduler.has_work:
            return False
        scheduler.forget_history()
        self._recent_outputs.clear()
        self.work_s = 0.0
        return True

    def flush_cache(self, scheduler: Scheduler) -> int:
        """Drops every cached prefix that no running request uses, and all stored outputs. On the engine's thread.
        Returns the pages freed."""
        self._recent_outputs.clear()
        return scheduler.flush_cache()

    def _on_finished(self, request: TrackedRequest) -> None:
        self.grammars.detach(request)
        self._recent_outputs.add(request)
        if self.adapters.has_retired:
            self.adapters.sweep(self.executor, self.scheduler)

    def num_preparing(self, adapter: str) -> int:
        """Requests with this adapter whose grammar is being compiled. On the engine's thread."""
        return sum(active.request.adapter == adapter for active in self._compiling.values())

    def _compiled(self, active: ActiveRequest) -> None:
        """On the compiler's thread: adds the request now that its grammar is ready."""

        def add() -> None:
            if self._compiling.pop(active.request.id, None) is active:
                self._add(active)

        with contextlib.suppress(EngineFailed):  # the request was answered when the engine closed or failed
            self._post([add])

    def _retry_after(self) -> float | None:
        """Seconds until another request is likely to be accepted. Clients that were given a time and have not returned
        yet count as waiting: otherwise all refused clients would return at once, all but one in vain."""
        now = self.clock()
        while self._promised and self._promised[0] <= now:
            heappop(self._promised)
        seconds = seconds_until_admitted(self.scheduler, 1 + len(self._promised))
        if seconds is not None and len(self._promised) < _MAX_PROMISES:
            heappush(self._promised, now + seconds)
        return seconds

    def _send(self) -> None:
        """Wakes each event loop once for everything this step has for it."""
        for loop, items in list(self._outbox.items()):
            del self._outbox[loop]
            try:
                loop.call_soon_threadsafe(_put_all, items)
            except RuntimeError:  # the event loop was closed: its requests have no reader any more
                for request_id, active in list(self._outputs.active.items()):
                    if isinstance(active.sink, _AsyncSink) and active.sink.loop is loop:
                        self._outputs.forget(active)
                        self.scheduler.abort(request_id, self.clock())
        self._hooks.after_step()

    def _fail(self, error: BaseException) -> None:
        log.error("the engine failed; all requests end with an error", exc_info=error)
        with self._wake:
            self._failure = error
            inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, ActiveRequest):
                item.sink.refuse(self._unavailable())
            elif not isinstance(item, tuple):
                item()
        for active in [*self._outputs.active.values(), *self._compiling.values()]:
            self._outputs.end(active, FinishReason.ERROR, error=f"{type(error).__name__}: {error}")
        self._compiling.clear()
        self._pauses.fail(self._unavailable())
        self._send()
        self._hooks.on_failure(error)


def _close_if_alive(reference: weakref.ref[Engine]) -> None:
    engine = reference()
    if engine is not None:
        engine.close()


def _put_all(items: list[tuple[_AsyncSink, Item]]) -> None:
    for sink, item in items:
        sink.queue.put_nowait(item)


def _encode_bad_words(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens: at the beginning of a text, and within one, where a space precedes it."""
    found = {
        tuple(tokenizer.encode(text, add_special=False, allow_special=False))
        for word in words
        for text in (word, f" {word.lstrip()}")
    }
    if (count := sum(map(len, found))) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(f"bad_words has {count} tokens: give at most {MAX_BAD_WORD_TOKENS}.")
    return tuple(sorted(ids for ids in found if ids))
