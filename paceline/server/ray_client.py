"""The interface to engines that are replicas of a Ray Serve deployment, in the process of the ingress.

A stream from each replica carries what its engine sends, one message per step (`EngineReplica.outputs`). A job is one
call of `EngineReplica.run`, which lasts as long as the job: Ray counts it, waits for it before it stops a replica, and
cancels it. Ray asks its request router for the replica of the call, on another thread; the router asks this client
(`ReplicaDirectory`), which decides as `ReplicaClient` does for engines on one machine. A replica has a slot, its index
in the router; slots are used again.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from paceline.cluster.router import NoReplica, Router
from paceline.config import ServerConfig, TenantConfig
from paceline.engine.output import Conflict, EngineFailed
from paceline.request import FinishReason, PacelineError
from paceline.server.engine_client import EngineGone, EngineState, ServedModel
from paceline.server.messages import FinishRequest, MessageToEngine, ReplicaReport
from paceline.server.queries import Query, UpdateWeights
from paceline.server.ray_calls import RunJob, ToReplica, decode_start
from paceline.server.remote_client import MessageClient, OutputQueue
from paceline.server.replica_client import ReplicaClient, RoutedJob
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

T = TypeVar("T")

log = logging.getLogger("paceline.server")
_RENEW_S = 10.0
_RECONNECT_S = 1.0
_NO_ENGINE = "No engine is running: Ray Serve is starting one, retry soon."
_WAIT_FOR_ENGINE_S = 30.0  # of a job, while Ray starts one


@dataclass(slots=True, eq=False)
class _Call:
    """A job on its way to, or at, a replica."""

    index: int
    one: RoutedJob
    queue: OutputQueue
    task: asyncio.Task[None] | None = None
    is_routed: bool = False


class _Slot(MessageClient):
    """One replica: its messages come by a stream, which `RayClient` reads, and go by handle calls."""

    def __init__(
        self,
        name: str,
        on_report: Callable[[ReplicaReport], None],
        tell: Callable[[str, MessageToEngine], None],
        cancel: Callable[[int], None],
    ) -> None:
        super().__init__(name, None, on_report)
        self._tell, self._cancel = tell, cancel
        self.replica_id = ""  # of Ray; "": the slot is free
        self.reading: asyncio.Task[None] | None = None
        self.is_draining = False  # Ray is about to stop it, and sends it no calls

    def use(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def is_up(self) -> bool:
        return self.is_connected and not self.is_draining

    @property
    def is_connected(self) -> bool:
        return self._model is not None

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def has_job(self, number: int) -> bool:
        return number in self._jobs

    def send(self, message: MessageToEngine) -> None:
        if isinstance(message, FinishRequest) and message.reason is FinishReason.ABORT:
            return  # by cancelling the call
        if self.is_up:
            self._tell(self.replica_id, message)
        elif isinstance(message, FinishRequest):
            for number in [number for number, one in self._jobs.items() if one.job.id == message.id]:
                self._cancel(number)

    def abort(self, number: int) -> bool:
        self._cancel(number)
        return number in self._jobs

    def fail_all(self, error: PacelineError) -> None:
        numbers = list(self._jobs)
        super().fail_all(error)
        for number in numbers:
            self._cancel(number)


class RayClient(ReplicaClient):
    def __init__(
        self,
        name: str,
        handle: DeploymentHandle,
        weights: str,
        config: ServerConfig,
        tenants: Sequence[TenantConfig],
        num_slots: int,
    ) -> None:
        """Uses replicas with these weights only: in an update to another model there are others. Call `start` next."""
        self.loop = asyncio.get_running_loop()
        self._handle, self._weights, self._num_slots = handle, weights, num_slots
        self._last_model: ServedModel | None = None
        self._numbers = itertools.count()  # of jobs, at all replicas
        self._calls: dict[int, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone: set[str] = set()  # replicas whose stream has just ended
        self._foreign: set[str] = set()  # replicas of another model
        self._changed = asyncio.Event()
        super().__init__(name, "", None, config, tenants)

    async def start(self, load: Callable[[ServedModel], Tokenizer]) -> Tokenizer:
        """Waits for the first replica. `load` loads the tokenizer of its model."""
        self._spawn(self._renew())
        DIRECTORY.attach(self)
        self._handle.options(stream=True)  # creates Ray's router, which learns which replicas there are
        while self._last_model is None:
            await self._changed.wait()
        tokenizer = load(self._last_model)
        for slot in self._slots:
            slot.use(tokenizer)
        return tokenizer

    def _make_replicas(
        self, address: str, tokenizer: Tokenizer | None, config: ServerConfig
    ) -> Sequence[MessageClient]:
        self._slots = [
            _Slot(self._name, partial(self._on_report, slot), self._tell, self._cancel)
            for slot in range(self._num_slots)
        ]
        return self._slots

    @property
    def engines(self) -> Sequence[EngineState]:
        up = [slot.state("both") for slot in self._slots if slot.is_up]
        return up or [EngineState("both", _NO_ENGINE)]

    @property
    def model(self) -> ServedModel:
        assert self._last_model is not None, "start comes first"
        return self._last_model  # requests wait while Ray replaces an engine

    @property
    def loading(self) -> bool:
        return False

    async def close(self) -> None:
        tasks = [*self._tasks, *(slot.reading for slot in self._slots if slot.reading is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """In a context of its own: Ray would take its calls for parts of the HTTP request that is being handled."""
        task = self.loop.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------------ replicas

    def set_replicas(self, ids: Sequence[str]) -> None:
        """The replicas that Ray sends calls to. Others are stopped by it as soon as their calls have ended."""
        known = {slot.replica_id for slot in self._slots}
        for index, slot in enumerate(self._slots):
            if slot.replica_id and slot.replica_id not in ids and not slot.is_draining:
                slot.is_draining = True
                if self._router is not None:
                    self._router.drain(index, True)
                self._close_if_drained(index)
        for replica_id in ids:
            if replica_id not in known | self._gone | self._foreign:
                free = next((index for index, slot in enumerate(self._slots) if not slot.replica_id), None)
                if free is None:
                    log.error("replica %s gets no requests: there are %d of them", replica_id, len(self._slots))
                    continue
                slot = self._slots[free]
                slot.replica_id, slot.is_draining = replica_id, False
                slot.reading = self._spawn(self._read(free, replica_id))

    async def _read(self, index: int, replica_id: str) -> None:
        slot, reason = self._slots[index], f"Replica {replica_id} has stopped."
        stream = self._handle.options(stream=True).outputs.remote(ToReplica(replica_id), self._name)
        try:
            async for batch in stream:
                for data in batch:
                    if slot.is_connected:
                        slot.receive(data)
                        continue
                    start = decode_start(data)
                    if start.weights != self._weights:
                        self._foreign.add(replica_id)
                        reason = f"Replica {replica_id} runs another model."
                        stream.cancel()
                        return
                    self.connect(index, start.address, start.model)
                    self._known_router().drain(index, slot.is_draining)
                    self._last_model = start.model
                    self._changed.set()
        except asyncio.CancelledError:
            stream.cancel()
            raise
        except Exception as error:
            reason = f"Replica {replica_id} exited unexpectedly ({type(error).__name__}) and is replaced: retry soon."
            log.error("%s", reason)
        finally:
            self._gone.add(replica_id)
            self.loop.call_later(_RECONNECT_S, self._forget_gone, replica_id)
            slot.replica_id, slot.reading = "", None
            self.disconnect(index, EngineGone(reason))

    def _known_router(self) -> Router:
        assert self._router is not None, "an engine is connected"
        return self._router

    def _forget_gone(self, replica_id: str) -> None:
        """If Ray still has the replica, its stream is opened again."""
        self._gone.discard(replica_id)
        self.set_replicas(DIRECTORY.replica_ids)

    def _close_if_drained(self, index: int) -> None:
        slot = self._slots[index]
        if slot.is_draining and not slot.num_jobs and slot.reading is not None:
            slot.reading.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            for slot in self._slots:
                if slot.is_up:
                    self._spawn(self._send("renew", slot.replica_id, self._name))

    def _tell(self, replica_id: str, message: MessageToEngine) -> None:
        self._spawn(self._send("tell", replica_id, message))

    async def _send(self, method: str, replica_id: str, argument: object) -> None:
        try:
            await getattr(self._handle, method).remote(ToReplica(replica_id), argument)
        except Exception as error:  # the end of its stream says the rest
            log.warning("replica %s cannot be reached (%s): %s", replica_id, method, type(error).__name__)

    # ------------------------------------------------------------------ jobs

    def _submit(self, index: int, one: RoutedJob, queue: OutputQueue) -> None:
        one.number, one.replica, one.route_id = next(self._numbers), 0, ""
        call = self._calls[one.number] = _Call(index, one, queue)
        call.task = self._spawn(self._run(one.number, call))

    async def _run(self, number: int, call: _Call) -> None:
        try:
            # Here and not in `choose`: Ray routes a few calls at a time, and a stream has to be among them.
            async with asyncio.timeout(_WAIT_FOR_ENGINE_S):
                while not any(slot.is_up for slot in self._slots):
                    self._changed.clear()
                    await self._changed.wait()
            response = self._handle.run.remote(RunJob(self._name, number, self._job_to_send(call.one)))
            try:
                await response
            except asyncio.CancelledError:
                response.cancel()
                raise
        except TimeoutError:
            self._fail(number, call, EngineFailed(f"No engine is up for {_WAIT_FOR_ENGINE_S:.0f} s: retry later."))
        except Exception as error:  # Ray has many: the replica was killed, its node is gone, ...
            self._fail(
                number, call, EngineGone(f"The engine exited unexpectedly ({type(error).__name__}): retry soon.")
            )
        finally:
            self._calls.pop(number, None)

    def _fail(self, number: int, call: _Call, error: PacelineError) -> None:
        """Unless the end of the replica's stream was noticed before."""
        slot = self._slots[call.one.replica]
        if not call.is_routed or slot.has_job(number):
            slot.forget(number)
            call.queue.put_nowait((call.index, error))

    def _cancel(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None and call.task is not None:
            call.task.cancel()

    def choose(self, number: int, ids: Sequence[str]) -> str | None:
        """The replica of a job, or None if it has ended. `ids`: the replicas that Ray knows. Ray asks again if it could
        not send the job there."""
        self.set_replicas(ids)
        call = self._calls.get(number)
        if call is None:
            return None
        if call.is_routed:
            self._known_router().finished(call.one.route_id)
            self._slots[call.one.replica].forget(number)
            call.is_routed = False
        try:
            self._route(call.one)
        except NoReplica as error:  # the last one has just gone; the job is sent again, once
            self._fail(number, call, EngineGone(str(error)))
            self._cancel(number)
            return None
        slot = self._slots[call.one.replica]
        slot.expect(number, call.index, call.one.job, call.queue)
        call.is_routed = True
        return slot.replica_id

    def _end(self, one: RoutedJob, num_output_tokens: int) -> None:
        if self._router is not None:
            super()._end(one, num_output_tokens)
        self._close_if_drained(one.replica)

    # ------------------------------------------------------------------ queries

    async def query(self, query: Query[T]) -> T:
        if not any(slot.is_up for slot in self._slots):
            raise EngineFailed(_NO_ENGINE)
        if isinstance(query, UpdateWeights):
            raise Conflict("Engines of Ray Serve load their weights when they start: deploy with another model.")
        return await super().query(query)

    def _monitored(self, number: int) -> MessageClient:
        up = [slot for slot in self._slots if slot.is_up]
        return up[min(number, len(up) - 1)]


class ReplicaDirectory:
    """Connects the request router, which Ray creates and calls on a thread of its own, with the client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: RayClient | None = None
        self.replica_ids: Sequence[str] = ()

    def publish(self, ids: Sequence[str]) -> None:
        with self._lock:
            self.replica_ids = ids
            client = self._client
        if client is not None:
            client.loop.call_soon_threadsafe(client.set_replicas, ids)

    def attach(self, client: RayClient) -> None:
        with self._lock:
            self._client = client
        client.set_replicas(self.replica_ids)

    async def choose(self, call: RunJob, ids: Sequence[str]) -> str | None:
        client = self._client
        if client is None:  # a handle outside the ingress: by Ray's queue lengths
            return None

        async def choose() -> str | None:
            return client.choose(call.number, ids)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(choose(), client.loop))


DIRECTORY = ReplicaDirectory()
