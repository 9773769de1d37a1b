"""The interface to an engine in another process, by messages: `MessageClient`, and its transport over ZeroMQ.

The engine may exit and be restarted while the front end keeps running: `disconnect` fails everything in progress at
once, `connect` connects to the next engine. Numbers are never reused, so late messages of an old engine are ignored.

Text is decoded here and stop strings are found here. The engine is told so, and may have generated a few tokens more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import msgspec
import zmq

from paceline.codec import encode
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed, OutputDelta
from paceline.request import FinishReason, PacelineError
from paceline.server.engine_client import ABORT_TIMEOUT_S, EngineSilent, EngineState, OnAborted, ServedModel
from paceline.server.messages import (
    EngineHealth,
    ErrorReply,
    FinishRequest,
    MessageToEngine,
    OutputBatch,
    QueryRequest,
    QueryResult,
    RegisterFrontEnd,
    ReplicaReport,
    SubmitJob,
    decode_to_front_end,
)
from paceline.server.process_messages import BEAT_S
from paceline.server.queries import LONG_QUERIES, QUERY_RESULTS, EngineQuery, Health, Query
from paceline.text.stop import TextStream
from paceline.text.tokenizer import Tokenizer

T = TypeVar("T")

_QUERY_TIMEOUT_S = 5.0  # a stuck engine returns no result
_MAX_SILENT = 6  # checks, `BEAT_S` apart; counted, since this process may have been stopped itself


OutputQueue = asyncio.Queue[tuple[int, OutputDelta | PacelineError]]  # index of the job, and what it got


@dataclass(slots=True, eq=False)
class _JobOutput:
    """Turns the output of one job into text and puts it into the queue of its response."""

    client: MessageClient
    index: int
    job: Job
    text: TextStream
    queue: OutputQueue
    stopped: bool = False  # by a stop string: later output is dropped

    def put(self, output: OutputDelta) -> bool:
        """Returns whether it was the last output."""
        is_last = output.finish_reason is not None
        if not self.stopped:
            # The engine reports `stop` for a stop token only, and that token is not part of the text.
            ids = output.token_ids[:-1] if output.finish_reason is FinishReason.STOP else output.token_ids
            text = self.text.push(ids)
            self.stopped = self.text.matched is not None
            if self.stopped and not is_last:
                self.client.send(FinishRequest(self.job.id, FinishReason.STOP))
            if is_last:
                text += self.text.close()
            object.__setattr__(output, "text", text)  # safe: it was decoded a moment ago and is not shared yet
            if not is_last:
                self.queue.put_nowait((self.index, output))
                return False
        elif not is_last:
            return False
        else:
            output = replace(output, text="", token_ids=(), logprobs=(), prompt_logprobs=())
        if self.stopped and output.usage is not None:
            num_tokens = self.text.num_tokens
            accepted = min(output.usage.accepted_tokens, num_tokens)
            usage = replace(output.usage, completion_tokens=num_tokens, accepted_tokens=accepted)
            matched = self.text.matched
            output = replace(output, finish_reason=FinishReason.STOP, usage=usage, error=None, matched_stop=matched)
        self.queue.put_nowait((self.index, output))
        return True


async def wait_aborted(queue: OutputQueue, num_unfinished: int, on_aborted: OnAborted) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            while num_unfinished:
                index, item = await queue.get()
                if isinstance(item, PacelineError):
                    return
                on_aborted(index, item)
                num_unfinished -= item.finish_reason is not None


class MessageClient:
    """An `EngineClient` of one engine. Subclasses transport the messages: they implement `send` and call `receive`."""

    def __init__(
        self, name: str, tokenizer: Tokenizer | None, on_report: Callable[[ReplicaReport], None] | None = None
    ) -> None:
        """`tokenizer`: None for a client that has queries and no jobs."""
        self._name, self._tokenizer, self._on_report, self._engine = name, tokenizer, on_report, ""
        self._loop = asyncio.get_running_loop()
        self._model: ServedModel | None = None
        self.loading = True
        self._health = Health()
        self._num_silent = 0  # checks since the last message of the engine
        self._checking: asyncio.TimerHandle | None = None
        self._unavailable_reason = "The engine is loading: retry in a moment."
        self._numbers = itertools.count()
        self._jobs: dict[int, _JobOutput] = {}
        self._queries: dict[int, tuple[Query[object], asyncio.Future[Any]]] = {}

    # ------------------------------------------------------------------ connection to the engine

    def send(self, message: MessageToEngine) -> None:
        raise NotImplementedError

    def connect(self, address: str, model: ServedModel) -> None:
        """`address` identifies the engine in its reports."""
        assert self._model is None, "disconnect first"
        self._model, self.loading, self._engine = model, False, address
        self._health, self._num_silent = Health(), 0
        self._checking = self._loop.call_later(BEAT_S, self._check)

    def disconnect(self, error: PacelineError) -> None:
        """The engine is gone: fails jobs and queries in progress, and new ones until `connect`."""
        self._unavailable_reason = str(error)
        self._model, self.loading, self._engine = None, False, ""
        if self._checking is not None:
            self._checking.cancel()
        self.fail_all(error)
        self._fail_queries(error)

    def _fail_queries(self, error: PacelineError, but: tuple[type[EngineQuery], ...] = ()) -> None:
        for query, future in self._queries.values():
            if not future.done() and not isinstance(query, but):
                future.set_exception(error)

    def _check(self) -> None:
        """An engine that is stopped answers nothing until it continues, or until the supervisor replaces it."""
        self._checking = self._loop.call_later(BEAT_S, self._check)
        self._num_silent += 1
        if self.is_silent:
            self._fail_queries(self._silence(), LONG_QUERIES)

    @property
    def is_silent(self) -> bool:
        """Whether it is connected and shows no sign of life."""
        return self.is_up and self._num_silent >= _MAX_SILENT

    def _silence(self) -> EngineSilent:
        return EngineSilent(
            f"The engine has not responded for {self._num_silent * BEAT_S:.0f} s: see the server's log."
        )

    def state(self, role: str) -> EngineState:
        if not self.is_up:
            return EngineState(role, self._unavailable_reason, self.loading)
        health = self._health
        failure = str(self._silence()) if self.is_silent else health.failure
        return EngineState(role, failure, paused=health.paused, num_passes=health.num_passes)

    def fail_all(self, error: PacelineError) -> None:
        """Ends every response with `error` and aborts its jobs in the engine."""
        jobs, self._jobs = self._jobs, {}
        for one in jobs.values():
            self.send(FinishRequest(one.job.id, FinishReason.ABORT))
            one.queue.put_nowait((one.index, error))

    @property
    def is_up(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> ServedModel:
        if self._model is None:
            raise EngineFailed(self._unavailable_reason)
        return self._model

    # ------------------------------------------------------------------ requests

    async def stream(
        self, jobs: Sequence[Job], on_aborted: OnAborted | None = None
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        queue: OutputQueue = asyncio.Queue()
        assert self.model, "raises if there is no engine"
        numbers: list[int] = []
        try:
            for index, job in enumerate(jobs):
                numbers.append(self.submit(index, job, queue))
            num_unfinished = len(jobs)
            while num_unfinished:
                index, item = await queue.get()
                if isinstance(item, PacelineError):
                    raise item
                num_unfinished -= item.finish_reason is not None
                yield index, item
        finally:
            num_aborted = sum(map(self.abort, numbers))
            try:
                if num_aborted and on_aborted is not None:
                    await wait_aborted(queue, num_aborted, on_aborted)
            finally:
                for number in numbers:
                    self.forget(number)

    def submit(self, index: int, job: Job, queue: OutputQueue) -> int:
        """Sends a job, whose output goes into `queue`. Returns its number."""
        number = next(self._numbers)
        self.expect(number, index, job, queue)
        self.send(SubmitJob(self._name, number, job))
        return number

    def expect(self, number: int, index: int, job: Job, queue: OutputQueue) -> None:
        """The output of job `number` goes into `queue`."""
        assert self._tokenizer is not None, "a client with jobs has a tokenizer"
        self._jobs[number] = _JobOutput(self, index, job, TextStream.of(self._tokenizer, job.params), queue)

    def abort(self, number: int) -> bool:
        """Aborts a job, unless it has finished; what it has produced still comes until `forget`. Returns whether it was
        unfinished."""
        one = self._jobs.get(number)
        if one is not None:
            self.send(FinishRequest(one.job.id, FinishReason.ABORT))
        return one is not None

    def forget(self, number: int) -> None:
        self._jobs.pop(number, None)

    async def query(self, query: Query[T]) -> T:
        assert self.model, "raises if there is no engine"
        if self.is_silent:
            raise self._silence()
        number = next(self._numbers)
        future: asyncio.Future[T] = self._loop.create_future()
        self._queries[number] = (query, future)
        self.send(QueryRequest(self._name, number, cast(EngineQuery, query)))
        try:
            return await asyncio.wait_for(future, None if isinstance(query, LONG_QUERIES) else _QUERY_TIMEOUT_S)
        except TimeoutError:
            raise EngineSilent(
                f"The engine has not responded for {_QUERY_TIMEOUT_S:.0f} s: see the server's log."
            ) from None
        finally:
            self._queries.pop(number, None)

    async def close(self) -> None:
        self.disconnect(EngineFailed("The front end was closed."))

    # ------------------------------------------------------------------ messages from the engine

    def receive(self, data: bytes) -> None:
        self._num_silent = 0
        message = decode_to_front_end(data)
        if isinstance(message, OutputBatch):
            for number, output in message.outputs:
                job = self._jobs.get(number)
                if job is not None and job.put(output):
                    del self._jobs[number]
        elif isinstance(message, ReplicaReport):
            if self._on_report is not None and message.engine == self._engine:  # else: of one that is gone
                self._on_report(message)
        elif isinstance(message, EngineHealth):
            if message.engine == self._engine:
                self._health = message.health
        elif isinstance(message, QueryResult):
            self._on_query_result(message)
        else:
            self._on_error(message)

    def _on_query_result(self, message: QueryResult) -> None:
        query, future = self._queries.get(message.number, (None, None))
        if future is not None and not future.done():
            future.set_result(msgspec.msgpack.decode(message.result, type=QUERY_RESULTS[type(query)]))

    def _on_error(self, message: ErrorReply) -> None:
        job = self._jobs.pop(message.number, None)
        if job is not None:
            job.queue.put_nowait((job.index, message.error()))
        _, future = self._queries.get(message.number, (None, None))
        if future is not None and not future.done():
            future.set_exception(message.error())


class RemoteClient(MessageClient):
    """The transport over ZeroMQ, between processes of one machine."""

    def __init__(
        self,
        name: str,
        address: str,
        tokenizer: Tokenizer | None,
        on_report: Callable[[ReplicaReport], None] | None = None,
    ) -> None:
        """Binds `address` and receives on the running event loop."""
        super().__init__(name, tokenizer, on_report)
        self._address = address
        self._context = zmq.Context()
        self._receiver = self._context.socket(zmq.PULL)
        self._receiver.set_hwm(0)
        self._receiver.bind(address)
        self._sender: zmq.Socket[bytes] | None = None
        self._loop.add_reader(self._receiver.fileno(), self._receive)

    def connect(self, address: str, model: ServedModel) -> None:
        super().connect(address, model)
        self._sender = self._context.socket(zmq.PUSH)
        self._sender.set_hwm(0)
        self._sender.linger = 0
        self._sender.connect(address)
        self.send(RegisterFrontEnd(self._name, self._address, self._on_report is not None))

    def disconnect(self, error: PacelineError) -> None:
        if self._sender is not None:
            self._sender.close(linger=0)
            self._sender = None
        super().disconnect(error)

    def send(self, message: MessageToEngine) -> None:
        if self._sender is not None:
            self._sender.send(encode(message), zmq.NOBLOCK)

    async def close(self) -> None:
        await super().close()
        self._loop.remove_reader(self._receiver.fileno())
        self._receiver.close(linger=0)
        self._context.term()

    def _receive(self) -> None:
        # The file descriptor signals once for any number of messages, so all of them must be received. But only one per
        # callback: an engine that is faster than this process would otherwise keep it reading, and nothing would be
        # sent to clients in the meantime.
        if self._receiver.closed:
            return
        try:
            data = self._receiver.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        self._loop.call_soon(self._receive)
        self.receive(data)
