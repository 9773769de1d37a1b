"""The door to an engine in a process of its own.

The engine may die and come back while the front end stays: `disconnect` ends all that was asked of it with an
error at once, `connect` leads to the next one. Numbers are never used twice, so what a dead engine still had to say
reaches nobody.
Here ids become text, and a stop string is seen; the engine is told so and has made a token or two for nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import zmq

from paceline.engine.output import EngineFailed, OutputDelta
from paceline.request import FinishReason, PacelineError
from paceline.server.engine_client import Job, ServedModel
from paceline.server.messages import (
    End,
    Hello,
    OutputBatch,
    QueryMessage,
    Refusal,
    Reply,
    Submit,
    decode_to_front_end,
    encode,
)
from paceline.server.queries import QUERY_RESULTS, EngineQuery
from paceline.text.stop import TextStream, TokenText
from paceline.text.tokenizer import Tokenizer

_ANSWER_S = 5.0  # how long an answer may take; an engine that is stuck gives none


@dataclass(slots=True, eq=False)
class _Listener:
    """One job's way to whoever reads it."""

    client: RemoteClient
    index: int
    job: Job
    text: TextStream
    queue: asyncio.Queue[tuple[int, OutputDelta] | Exception]
    stopped: bool = False  # by a stop string: what still comes is not shown

    def put(self, piece: OutputDelta) -> bool:
        """Whether it was the last."""
        ended = piece.finish_reason is not None
        if not self.stopped:
            text = self.text.push(TokenText.ids(piece.text))
            self.stopped = self.text.matched is not None
            if self.stopped and not ended:
                self.client.send(End(self.job.id, FinishReason.STOP))
            if ended:
                text += self.text.close()
            object.__setattr__(piece, "text", text)  # decoded a moment ago: nobody else has seen it
            if not ended:
                self.queue.put_nowait((self.index, piece))
                return False
        elif not ended:
            return False
        else:
            piece = replace(piece, text="", token_ids=(), logprobs=(), prompt_logprobs=())
        if self.stopped and piece.usage is not None:
            usage = replace(piece.usage, completion_tokens=self.text.num_tokens)
            piece = replace(piece, finish_reason=FinishReason.STOP, usage=usage, error=None)
        self.queue.put_nowait((self.index, piece))
        return True


class RemoteClient:
    def __init__(self, name: str, address: str, tokenizer: Tokenizer) -> None:
        """Listens at `address`, on the running event loop."""
        self._name, self._address, self._tokenizer = name, address, tokenizer
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._inlet = self._context.socket(zmq.PULL)
        self._inlet.set_hwm(0)
        self._inlet.bind(address)
        self._outlet: zmq.Socket[bytes] | None = None
        self._model: ServedModel | None = None
        self.loading = True
        self._why_not = "the engine is loading: try again in a moment."
        self._numbers = itertools.count()
        self._listeners: dict[int, _Listener] = {}
        self._asked: dict[int, tuple[EngineQuery, asyncio.Future[Any]]] = {}
        self._loop.add_reader(self._inlet.fileno(), self._receive)

    # ------------------------------------------------------------------ the engine comes and goes

    def connect(self, address: str, served: ServedModel) -> None:
        assert self._outlet is None, "there is an engine already"
        self._outlet = self._context.socket(zmq.PUSH)
        self._outlet.set_hwm(0)
        self._outlet.linger = 0
        self._outlet.connect(address)
        self._model, self.loading = served, False
        self.send(Hello(self._name, self._address))

    def disconnect(self, error: PacelineError) -> None:
        """There is no engine any more: whoever waits for it is told, and whoever asks before the next one comes."""
        self._why_not = str(error)
        self._model, self.loading = None, False
        if self._outlet is not None:
            self._outlet.close(linger=0)
            self._outlet = None
        self.fail_all(error)
        asked, self._asked = self._asked, {}
        for _, future in asked.values():
            if not future.done():
                future.set_exception(error)

    def fail_all(self, error: PacelineError) -> None:
        """Ends every answer with this error; the engine drops what it was doing for them."""
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            self.send(End(listener.job.id, FinishReason.ABORT))
            listener.queue.put_nowait(error)

    @property
    def model(self) -> ServedModel:
        if self._model is None:
            raise EngineFailed(self._why_not)
        return self._model

    @property
    def num_open(self) -> int:
        return len(self._listeners)

    # ------------------------------------------------------------------ asking

    async def stream(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        queue: asyncio.Queue[tuple[int, OutputDelta] | Exception] = asyncio.Queue()
        assert self.model, "an engine is there, or this raises"
        numbers = []
        try:
            for index, job in enumerate(jobs):
                number = next(self._numbers)
                numbers.append(number)
                text = TextStream.of(self._tokenizer, job.params)
                self._listeners[number] = _Listener(self, index, job, text, queue)
                self.send(Submit.of(self._name, number, job))
            num_left = len(jobs)
            while num_left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                num_left -= item[1].finish_reason is not None
                yield item
        finally:
            for number in numbers:
                listener = self._listeners.pop(number, None)
                if listener is not None:
                    self.send(End(listener.job.id, FinishReason.ABORT))

    async def query(self, query: EngineQuery) -> Any:
        assert self.model, "an engine is there, or this raises"
        number = next(self._numbers)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._asked[number] = (query, future)
        self.send(QueryMessage(self._name, number, query))
        try:
            return await asyncio.wait_for(future, _ANSWER_S)
        except TimeoutError:
            raise EngineFailed(f"the engine has not answered for {_ANSWER_S:.0f} s: look at its log.") from None
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        self.disconnect(EngineFailed("the front end was closed."))
        self._loop.remove_reader(self._inlet.fileno())
        self._inlet.close(linger=0)
        self._context.term()

    def send(self, message: Hello | Submit | End | QueryMessage) -> None:
        if self._outlet is not None:
            self._outlet.send(encode(message), zmq.NOBLOCK)

    # ------------------------------------------------------------------ what comes

    def _receive(self) -> None:
        # The descriptor tells once of any number of messages: all of them are taken, but one at a time. Else an engine
        # that is quicker than this would keep it reading, and nothing would be sent to clients before it is done.
        if self._inlet.closed:
            return
        try:
            data = self._inlet.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        self._loop.call_soon(self._receive)
        message = decode_to_front_end(data)
        if isinstance(message, OutputBatch):
            for number, piece in message.pieces:
                listener = self._listeners.get(number)
                if listener is not None and listener.put(piece):
                    del self._listeners[number]
        elif isinstance(message, Reply):
            self._settle(message)
        else:
            self._refuse(message)

    def _settle(self, message: Reply) -> None:
        question, future = self._asked.get(message.number, (None, None))
        if future is not None and not future.done():
            future.set_result(msgspec.msgpack.decode(message.answer, type=QUERY_RESULTS[type(question)]))

    def _refuse(self, message: Refusal) -> None:
        listener = self._listeners.pop(message.number, None)
        if listener is not None:
            listener.queue.put_nowait(message.error())
        _, future = self._asked.get(message.number, (None, None))
        if future is not None and not future.done():
            future.set_exception(message.error())
