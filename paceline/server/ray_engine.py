"""The engine deployment of Ray Serve: each replica runs one engine process, as `paceline serve` does.

The replica supervises the process and carries bytes between it and the ingress. The engine shares no interpreter with
Ray. If the process exits, the replica exits: its callers learn of both in one way, and Ray starts another replica.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator

import msgspec
import zmq
import zmq.asyncio

from paceline.cluster.load import LoadReport
from paceline.codec import encode
from paceline.config import ConfigError
from paceline.engine.output import EngineFailed
from paceline.logs import set_up_logs
from paceline.request import FinishReason
from paceline.server.engine_client import EngineGone, ServedModel
from paceline.server.messages import FinishRequest, QueryRequest, RegisterFrontEnd, ReplicaReport, SubmitJob
from paceline.server.process_messages import (
    EngineReady,
    EngineSetup,
    FromEngine,
    FrontEndGone,
    LineDecoder,
    ModelSource,
    ProtocolError,
    StartupFailed,
)
from paceline.server.queries import GetHealth
from paceline.server.ray_calls import RunJob, StreamStart, ToReplica
from paceline.server.remote_client import RemoteClient
from paceline.server.supervisor import ChildProcess, describe_status

log = logging.getLogger("paceline.server")
_CLOSE_TIMEOUT_S = 5.0
_MAX_MESSAGES = 64  # in one item of a stream
_LEASE_S = 30.0  # of a stream without jobs; with jobs `drain_s` is added: a draining replica is not renewed


class _Delta(msgspec.Struct):
    """What the replica reads of an `OutputDelta`."""

    finish_reason: str | None = None


class _Outputs(msgspec.Struct, tag="OutputBatch"):
    outputs: list[tuple[int, _Delta]]


class _Error(msgspec.Struct, tag="ErrorReply"):
    number: int


class _Result(msgspec.Struct, tag="QueryResult"):
    pass


class _Report(msgspec.Struct, tag="ReplicaReport"):
    pass


class _Health(msgspec.Struct, tag="EngineHealth"):
    pass


_decoder = msgspec.msgpack.Decoder(_Outputs | _Error | _Result | _Report | _Health)


def ended_jobs(data: bytes) -> list[int]:
    """The numbers of the jobs that end with a message to a front end."""
    match message := _decoder.decode(data):
        case _Outputs():
            return [number for number, delta in message.outputs if delta.finish_reason is not None]
        case _Error():
            return [message.number]
        case _:
            return []


class EngineReplica:
    async def __init__(self, setup: EngineSetup, num_cpus: float, target_queue_s: float, drain_s: float) -> None:  # type: ignore[misc]
        """Starts the engine process and waits until it is ready. `num_cpus`: its share of a CPU; 0: it has GPUs."""
        from ray import serve

        self._id: str = serve.get_replica_context().replica_id.unique_id
        set_up_logs(setup.log_level, setup.log_format, f"replica {self._id}")
        self._target_queue_s, self._lease_s = target_queue_s, drain_s + _LEASE_S
        self._loop = asyncio.get_running_loop()
        self._folder = tempfile.mkdtemp(prefix="paceline-")
        setup = msgspec.structs.replace(setup, address=f"ipc://{self._folder}/engine", **_share(setup.source, num_cpus))
        self._setup, self._weights, self._ready = setup, setup.source.weights_id, self._loop.create_future()
        decoder: LineDecoder[FromEngine] = LineDecoder(FromEngine)
        self._child = ChildProcess("paceline.server.engine_process", setup, decoder, self._on_message)
        self._is_closing = False
        self._supervised = self._loop.create_task(self._supervise())
        self._running: dict[tuple[str, int], asyncio.Future[None]] = {}  # by front end and number
        self._streams: dict[str, str] = {}  # front end -> its name at the engine, another one for each stream
        self._renewed: dict[str, float] = {}  # by that name
        self._num_streams = itertools.count()
        self._load = LoadReport()
        self._context = zmq.asyncio.Context()
        self._model: ServedModel = await self._ready
        self._control = RemoteClient(self._id, f"ipc://{self._folder}/control", None, self._on_report)
        self._control.connect(setup.address, self._model)

    # ------------------------------------------------------------------ the engine process

    async def _supervise(self) -> None:
        try:
            status = describe_status(await self._child.run())
        except ProtocolError as error:
            status = str(error)
        if not self._ready.done():
            self._ready.set_exception(EngineFailed(f"The engine exited before it was ready: {status}."))
        elif not self._is_closing and not self._ready.exception():
            log.error("the engine exited unexpectedly (%s): this replica exits, and Ray starts another one", status)
            logging.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(1)

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, EngineReady) and not self._ready.done():
            self._ready.set_result(message.model)
        elif isinstance(message, StartupFailed) and not self._ready.done():
            self._ready.set_exception(ConfigError(message.message))

    def _on_report(self, report: ReplicaReport) -> None:
        self._load = report.load

    # ------------------------------------------------------------------ calls of the ingress

    async def outputs(self, to: ToReplica, front_end: str) -> AsyncGenerator[list[bytes], None]:
        """What the engine sends to a front end: first `StreamStart`, then one message per step, or several in one item
        where Ray is slower. Closing the stream, or not renewing it, aborts the jobs of the front end."""
        self._check(to)
        name = self._streams[front_end] = f"{front_end}.{next(self._num_streams)}"
        address = f"ipc://{self._folder}/{name}"
        socket = self._context.socket(zmq.PULL)
        socket.set_hwm(0)
        socket.bind(address)
        self._renewed[name] = self._loop.time()
        try:
            self._control.send(RegisterFrontEnd(name, address, reports=True))
            yield [encode(StreamStart(self._weights, self._setup.address, self._model))]
            while self._is_renewed(name):
                if not await socket.poll(1000):
                    continue
                batch: list[bytes] = []
                while len(batch) < _MAX_MESSAGES and await socket.poll(0):
                    batch.append(await socket.recv())
                yield batch
                for data in batch:
                    for number in ended_jobs(data):
                        self._end(name, number)
            unseen_s = self._loop.time() - self._renewed[name]
            log.warning(
                "%s has not renewed its stream for %.0f s: it ends, with its requests",
                front_end,
                unseen_s,
            )
        finally:
            self._child.send(FrontEndGone(name))
            socket.close(linger=0)
            del self._renewed[name]
            if self._streams[front_end] == name:
                del self._streams[front_end]
            for key in list(self._running):
                if key[0] == name:
                    self._end(*key)

    def _is_renewed(self, name: str) -> bool:
        """Whether the front end of a stream is there. Ray may lose the cancellation of a stream that is being opened:
        without jobs it must not keep the replica from stopping. A front end that is there opens it again."""
        has_jobs = any(stream == name for stream, _ in self._running)
        return self._loop.time() - self._renewed[name] < (self._lease_s if has_jobs else _LEASE_S)

    def _end(self, name: str, number: int) -> None:
        done = self._running.get((name, number))
        if done is not None and not done.done():
            done.set_result(None)

    async def run(self, call: RunJob) -> None:
        """Runs a job. Returns when its last output is sent, so that Ray knows how many are in progress; if Ray cancels
        the call, the job is aborted."""
        key = self._stream_of(call.front_end), call.number
        done = self._running[key] = self._loop.create_future()
        try:
            self._control.send(SubmitJob(*key, call.job))
            await done
        except asyncio.CancelledError:
            self._control.send(FinishRequest(call.job.id, FinishReason.ABORT))
            raise
        finally:
            del self._running[key]

    async def tell(self, to: ToReplica, message: FinishRequest | QueryRequest) -> None:
        """A message to the engine; an answer comes by the stream."""
        self._check(to)
        if isinstance(message, QueryRequest):
            message = msgspec.structs.replace(message, front_end=self._stream_of(message.front_end))
        self._control.send(message)

    async def renew(self, to: ToReplica, front_end: str) -> None:
        self._check(to)
        self._renewed[self._stream_of(front_end)] = self._loop.time()

    def _stream_of(self, front_end: str) -> str:
        if front_end not in self._streams:
            raise EngineGone(f"Replica {self._id} has no stream to {front_end}.")
        return self._streams[front_end]

    def _check(self, to: ToReplica) -> None:
        if to.replica != self._id:  # the router sends a call for a replica that is gone to any other one
            raise EngineGone(f"Replica {to.replica} has stopped.")

    # ------------------------------------------------------------------ calls of Ray

    async def check_health(self) -> None:
        health = await self._control.query(GetHealth())
        if health.failure is not None:
            raise EngineFailed(health.failure)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For `ray_scaling.scale_by_queue_time`."""
        busy = (self._load.num_running + self._load.num_waiting) / self._model.max_running
        return {"queue_time": self._load.wait_s / self._target_queue_s, "busy": busy}

    async def __del__(self) -> None:
        """Called by Ray once all calls have ended, or `drain_s` have passed."""
        self._is_closing = True
        self._child.close_input()
        await asyncio.wait([self._supervised], timeout=_CLOSE_TIMEOUT_S)
        self._child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _share(source: ModelSource, num_cpus: float) -> dict[str, object]:
    """On a CPU an engine gets as many cores as Ray has reserved, and memory for KV in proportion."""
    if not num_cpus:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"num_replicas": max(1, int(cores / num_cpus))}
