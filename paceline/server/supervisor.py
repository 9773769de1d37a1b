"""The supervisor: starts the engines and the front ends, detects when one exits or hangs, and restarts it.

It exchanges the messages of `process_messages.py` with each of them; requests never pass through it. While all
processes are healthy it only counts their signs of life, and the listening socket, which it owns, outlives every front
end. When the supervisor itself is killed, its children reach the end of their input and exit.

    signal -> front ends drain -> front ends exit -> engines exit -> supervisor exits
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from paceline.config import ServerConfig, TenantConfig
from paceline.request import PacelineError
from paceline.server.auth import batch_tenants
from paceline.server.engine_client import ServedModel
from paceline.server.process_messages import (
    BEAT_S,
    AdaptersChanged,
    Alive,
    EngineDown,
    EngineLoading,
    EngineReady,
    EngineSetup,
    EngineUp,
    FromEngine,
    FromFrontEnd,
    FrontEndGone,
    FrontEndListening,
    FrontEndSetup,
    KvEventsSetup,
    KvTransferSetup,
    LineDecoder,
    LoadingProgress,
    ModelSource,
    SetDraining,
    SetPaused,
    Shutdown,
    StartupFailed,
    ToFrontEnd,
    WeightsReplaced,
    encode_line,
    engine_name,
)

log = logging.getLogger("paceline.supervisor")
_MIN_RESTART_DELAY_S, _MAX_RESTART_DELAY_S = 0.2, 30.0
_STABLE_S = 5.0  # a process that ran this long is restarted after the minimum delay
_EXIT_MARGIN_S = 5.0  # on top of the time a process was given to exit
_MAX_LINE_BYTES = 1 << 20
_LOADING_PATIENCE = 6  # a library that is loaded may hold the interpreter lock, and so the signs of life
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """What the supervisor runs."""

    config: ServerConfig
    name: str  # of the served model
    tokenizer: str | int  # a model's path, or the size of a synthetic vocabulary
    source: ModelSource
    tenants: tuple[TenantConfig, ...] = ()


class ChildProcess(Generic[_Message]):
    """A Python module run as a child process, and the messages to and from it."""

    def __init__(
        self,
        module: str,
        setup: msgspec.Struct,
        decoder: LineDecoder[_Message],
        on_message: Callable[[_Message], None],
    ) -> None:
        self._module, self._setup, self._decoder, self._on_message = module, setup, decoder, on_message
        self._process: asyncio.subprocess.Process | None = None
        self._num_silent: int | None = None  # checks since the last sign of life; None: there was none yet
        self._failure: str | None = None  # that it has reported
        self._hangs = self._has_exited = False
        self.is_listening = False  # front ends only: it reads messages

    async def run(self, descriptors: tuple[int, ...] = ()) -> int:
        """Runs the process until it exits. Returns its exit status, negative for a signal."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        assert process.stdout is not None, "stdout is a pipe"
        try:
            self.send(self._setup)
            while line := await process.stdout.readline():
                message = self._decoder.decode(line)
                if isinstance(message, Alive):
                    self._num_silent, self._failure = 0, message.failure
                elif not self._hangs:  # what it wrote before it was killed is void
                    self._on_message(message)
            return await process.wait()
        finally:
            self.kill()
            self.close_input()
            await process.wait()
            self._has_exited = True

    def send(self, message: msgspec.Struct) -> None:
        """Writes one line. A process that has exited gets nothing: `run` returns and reports it."""
        stdin = None if self._process is None else self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(encode_line(message))  # asyncio closes the pipe, and raises nothing, if its reader is gone

    def close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def check(self, patience_s: float) -> str | None:
        """Counts one more `BEAT_S` without a sign of life. Kills the process if there was none for `patience_s`, or if
        it has reported a failure, and returns the reason. Checks are counted, since this process may have been stopped
        itself."""
        if self._num_silent is None or self._hangs or self._has_exited:
            return None
        self._num_silent += 1
        why = self._failure
        if why is None and self._num_silent * BEAT_S > patience_s:
            why = f"no sign of life for {patience_s:g} s"
        if why is not None:
            self._hangs = True
            self.kill()
        return why

    def kill(self) -> None:
        """Kills the process and those that it has started, such as the ranks of an engine: one that is stopped would
        not notice that its parent is gone, and would keep its memory."""
        # Not `self._process.kill()`: it polls the process first and may reap it, and then asyncio's child watcher
        # finds no such process and loses the exit status.
        if self._process is not None and not self._has_exited:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # all of them have exited
                os.killpg(self._process.pid, signal.SIGKILL)


class Supervisor:
    def __init__(
        self,
        setup: ServerSetup,
        listening_socket: socket.socket,
        *,
        on_loading: Callable[[int, int], None],
        on_ready: Callable[[ServedModel], None],
    ) -> None:
        self._setup, self._listening_socket = setup, listening_socket
        self._on_loading, self._on_ready = on_loading, on_ready
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._kv_token = secrets.token_hex(32)  # of the engines of this server
        self._front_ends: dict[str, ChildProcess[FromFrontEnd]] = {}
        self._engines: dict[int, ChildProcess[FromEngine]] = {}  # by replica
        self._engine_states: list[EngineUp | EngineDown | EngineLoading] = [
            EngineLoading(replica) for replica in range(setup.config.replicas)
        ]
        self._loading: dict[int, LoadingProgress] = {}  # by replica
        self._weights: WeightsReplaced | None = None
        self._adapters: AdaptersChanged | None = None
        self._up_since = [0.0] * setup.config.replicas
        self._draining = False
        self._paused = False  # the engines, by the operator
        self._shutting_down = False
        self._reported_ready = False
        self._startup_error: PacelineError | None = None
        self._finished = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Runs until a signal, or until the engine cannot be started. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        front_ends = [
            asyncio.create_task(self._run_front_end(f"front-end-{index}"))
            for index in range(self._setup.config.workers)
        ]
        engines = [asyncio.create_task(self._run_engine(replica)) for replica in range(self._setup.config.replicas)]
        watching = asyncio.create_task(self._watch())
        tasks: list[asyncio.Task[object]] = [*engines, *front_ends, watching]
        finished = asyncio.create_task(self._finished.wait())
        try:
            pending = {*tasks, finished}
            while not finished.done():  # in a shutdown the front ends end one after the other
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for front_end in self._front_ends.values():
                front_end.kill()
            for engine in self._engines.values():
                engine.kill()
            for task in [*tasks, finished]:
                task.cancel()
            await asyncio.gather(*tasks, finished, return_exceptions=True)
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._startup_error is not None:
            raise self._startup_error
        return self._status

    async def _watch(self) -> None:
        """Kills a process that hangs, so that it is started again."""
        stall_s = self._setup.config.stall_s
        while True:
            await asyncio.sleep(BEAT_S)
            if self._shutting_down:  # it has a time limit of its own
                continue
            for replica, engine in list(self._engines.items()):
                is_up = isinstance(self._engine_states[replica], EngineUp)
                why = engine.check(stall_s if is_up else _LOADING_PATIENCE * stall_s)
                if why is not None:
                    name = engine_name(replica, self._setup.config.replicas)
                    log.error("%s hangs: %s. It is killed and started again.", name, why)
                    # Now, and not when it has exited: a process that waits for a device may outlive SIGKILL for long.
                    self._set_engine_state(EngineDown(_restarting(name, why), replica))
            for name, front_end in list(self._front_ends.items()):
                why = front_end.check(stall_s if front_end.is_listening else _LOADING_PATIENCE * stall_s)
                if why is not None:
                    log.error("%s hangs: %s. It is killed and started again.", name, why)

    # ------------------------------------------------------------------ engine

    @property
    def _engine_tenants(self) -> tuple[TenantConfig, ...]:
        tenants = [replace(tenant, keys=()) for tenant in self._setup.tenants]
        if self._setup.config.batch_folder is not None:
            tenants += batch_tenants(tenants)
        if self._setup.config.replicas > 1:  # the front end counts
            tenants = [replace(tenant, max_requests=None, tokens_per_minute=None) for tenant in tenants]
        return tuple(tenants)

    def _kv_events(self, replica: int) -> KvEventsSetup | None:
        events, replay = self._setup.config.kv_event_addresses(replica)
        if events is None:
            return None
        return KvEventsSetup(events, replay, self._setup.config.kv_events_topic, replica)

    def _source(self, replica: int, generation: int) -> ModelSource:
        """What an engine process loads. It records to a file of its own: one that has exited keeps its recording."""
        source = self._setup.source
        if source.options.get("record") is None:
            return source
        path = Path(source.options["record"])
        name = path.stem + (f"-{replica}" if self._setup.config.replicas > 1 else "")
        name += f".{generation}" if generation > 1 else ""
        options = {**source.options, "record": str(path.with_name(name + path.suffix))}
        return msgspec.structs.replace(source, options=options)

    def _kv_transfer(self, replica: int, generation: int) -> KvTransferSetup | None:
        config = self._setup.config
        if config.role == "both" and not config.prefill_replicas:
            return None
        setup = KvTransferSetup(
            config.role,
            config.kv_token or self._kv_token,
            config.kv_listen or "",
            config.prefill_addresses,
            config.prefill_from_tokens,
            config.prefill_timeout_s,
            config.kv_transport == "nixl",
        )
        if not config.prefill_replicas:
            return setup
        if replica >= config.prefill_replicas:
            return msgspec.structs.replace(setup, role="decode")
        return msgspec.structs.replace(setup, role="prefill", listen=f"unix:{self._folder}/kv-{replica}-{generation}")

    async def _run_engine(self, replica: int) -> None:
        delay, generation = _MIN_RESTART_DELAY_S, 0
        config = self._setup.config
        name = engine_name(replica, config.replicas)
        decoder: LineDecoder[FromEngine] = LineDecoder(FromEngine)
        loop = asyncio.get_running_loop()
        while not self._shutting_down:
            generation += 1
            setup = EngineSetup(
                name=self._setup.name,
                address=f"ipc://{self._folder}/engine-{replica}-{generation}",
                source=self._source(replica, generation),
                watchdog_s=config.watchdog_s,
                tenants=self._engine_tenants,
                log_level=config.log_level,
                log_format=config.log_format,
                weights=self._weights,
                adapters=self._adapters,
                kv_events=self._kv_events(replica),
                kv_transfer=self._kv_transfer(replica, generation),
                replica=replica,
                num_replicas=config.replicas,
            )
            self._set_engine_state(EngineLoading(replica))
            self._engines[replica] = ChildProcess(
                "paceline.server.engine_process", setup, decoder, partial(self._on_engine_message, setup)
            )
            was_up_since = self._up_since[replica]
            status = await self._engines[replica].run()
            was_up = self._up_since[replica] != was_up_since
            down = EngineDown(_restarting(name, describe_status(status)), replica)
            if self._shutting_down or self._startup_error is not None:
                self._engine_states[replica] = down
                return
            if not isinstance(self._engine_states[replica], EngineDown):
                self._set_engine_state(down)
            log.error("%s exited unexpectedly: %s", name, describe_status(status))
            is_current = setup.weights == self._weights and setup.adapters == self._adapters
            if not was_up and generation == 1 and is_current:
                self._status = 1
                self._finished.set()
                return
            is_stable = was_up and loop.time() - self._up_since[replica] > _STABLE_S
            delay = _MIN_RESTART_DELAY_S if is_stable else min(delay * 2, _MAX_RESTART_DELAY_S)
            await asyncio.sleep(delay)

    def _set_engine_state(self, state: EngineUp | EngineDown | EngineLoading) -> None:
        self._engine_states[state.replica] = state
        self._send_to_front_ends(state)

    def _on_engine_message(self, setup: EngineSetup, message: FromEngine) -> None:
        match message:
            case LoadingProgress():
                self._loading[setup.replica] = message
                if len(self._loading) == self._setup.config.replicas:
                    progress = self._loading.values()
                    self._on_loading(sum(one.done for one in progress), sum(one.total for one in progress))
            case WeightsReplaced():
                self._weights = message
            case AdaptersChanged():
                self._adapters = message
            case SetPaused():
                if isinstance(self._engine_states[setup.replica], EngineUp):  # else it does what it was told to
                    self._paused = message.paused
            case StartupFailed():
                if self._reported_ready and self._setup.config.replicas > 1:  # the others still serve
                    name = engine_name(setup.replica, self._setup.config.replicas)
                    log.error("%s cannot start: %s", name, message.message)
                else:
                    self._startup_error = message.error()
                    self._finished.set()
            case EngineReady():
                # Weights or adapters were replaced while it loaded.
                if setup.weights != self._weights or setup.adapters != self._adapters:
                    self._engines[setup.replica].kill()
                    return
                if message.paused != self._paused:  # no front end may reach it before it is as the others are
                    self._engines[setup.replica].send(SetPaused(self._paused))
                    return
                self._up_since[setup.replica] = asyncio.get_running_loop().time()
                kv_address = "" if setup.kv_transfer is None else setup.kv_transfer.listen
                self._set_engine_state(EngineUp(setup.address, message.model, setup.replica, kv_address))
                log.info("%s is up", engine_name(setup.replica, self._setup.config.replicas))
                self._report_ready_once()

    # ------------------------------------------------------------------ front ends

    async def _run_front_end(self, name: str) -> None:
        delay, generation = _MIN_RESTART_DELAY_S, 0
        descriptor = self._listening_socket.fileno()
        decoder: LineDecoder[FromFrontEnd] = LineDecoder(FromFrontEnd)
        loop = asyncio.get_running_loop()
        while not self._shutting_down:
            generation += 1
            started = loop.time()
            unique_name = f"{name}.{generation}"  # to the engine, a restarted front end is another one
            setup = FrontEndSetup(
                name=unique_name,
                address=f"ipc://{self._folder}/{unique_name}",
                socket=descriptor,
                model=self._setup.name,
                tokenizer=self._setup.tokenizer,
                config=self._setup.config,
                tenants=self._setup.tenants,
            )
            child = ChildProcess("paceline.server.front_end", setup, decoder, partial(self._on_front_end_message, name))
            self._front_ends[name] = child
            status = await child.run((descriptor,))
            self._front_ends.pop(name, None)
            for engine in self._engines.values():
                engine.send(FrontEndGone(unique_name))
            if self._shutting_down or self._startup_error is not None:
                return
            log.error("%s exited unexpectedly: %s", name, describe_status(status))
            if not self._reported_ready:
                self._status = 1
                self._finished.set()
                return
            is_stable = loop.time() - started > _STABLE_S
            delay = _MIN_RESTART_DELAY_S if is_stable else min(delay * 2, _MAX_RESTART_DELAY_S)
            await asyncio.sleep(delay)

    def _on_front_end_message(self, name: str, message: FromFrontEnd) -> None:
        match message:
            case FrontEndListening():
                child = self._front_ends[name]
                child.is_listening = True
                child.send(SetDraining(self._draining))
                for state in self._engine_states:
                    child.send(state)
                self._report_ready_once()
            case SetDraining():
                self._draining = message.draining
                self._send_to_front_ends(message)
            case StartupFailed():
                if self._reported_ready:  # another one still serves, and what is wrong may be corrected
                    log.error("%s cannot start: %s", name, message.message)
                else:
                    self._startup_error = message.error()
                    self._finished.set()

    def _send_to_front_ends(self, message: ToFrontEnd) -> None:
        for child in self._front_ends.values():
            if child.is_listening:
                child.send(message)

    def _report_ready_once(self) -> None:
        num_listening = sum(child.is_listening for child in self._front_ends.values())
        all_listen = num_listening == self._setup.config.workers
        up = [state for state in self._engine_states if isinstance(state, EngineUp)]
        if len(up) == len(self._engine_states) and all_listen and not self._reported_ready:
            self._reported_ready = True
            self._on_ready(up[0].model)

    # ------------------------------------------------------------------ shutdown

    def _on_signal(self, number: int) -> None:
        if self._shutting_down:  # a second signal: exit now
            self._status = 128 + number
            self._finished.set()
            return
        self._shutting_down = True
        asyncio.get_running_loop().create_task(self._shut_down())

    async def _shut_down(self) -> None:
        timeout_s = self._setup.config.shutdown_s
        self._send_to_front_ends(Shutdown(timeout_s))
        await self._wait_until(lambda: not self._front_ends, timeout_s + _EXIT_MARGIN_S)
        for engine in self._engines.values():
            engine.close_input()
        await self._wait_until(
            lambda: not any(isinstance(state, EngineUp) for state in self._engine_states), _EXIT_MARGIN_S
        )
        self._finished.set()

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition() and loop.time() < deadline:
            await asyncio.sleep(0.02)


def _restarting(name: str, why: str) -> str:
    return f"The {name} exited unexpectedly ({why}) and is being restarted: retry soon."


def describe_status(status: int) -> str:
    return f"signal {-status}, {signal.Signals(-status).name}" if status < 0 else f"status {status}"
