"""The supervisor: starts the engine and the front ends, notices at once when one dies, and starts it again.

It speaks to each through the standard input and output, a JSON object a line; requests never pass through here. So it
has nothing to do while all goes well, and what it holds, the listening socket, outlives every front end. When the
supervisor itself is killed, the others find their input ended and end too.

    signal -> front ends drain -> front ends end -> the engine ends -> the supervisor ends
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import ConfigError, ServerConfig, TenantConfig
from paceline.server.engine_client import ServedModel

log = logging.getLogger("paceline.supervisor")
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 30.0
_SOUND_S = 5.0  # having served so long, a process that dies is started at once
_MARGIN_S = 5.0  # beyond what a process was given to end


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """What is to be run."""

    config: ServerConfig
    name: str
    tokenizer: str | int
    engine: dict[str, Any]  # of EngineSetup, but for the address
    tenants: tuple[TenantConfig, ...] = ()


class _Child:
    """A process of ours and the lines between us."""

    def __init__(self, module: str, setup: Any, on_line: Callable[[dict[str, Any]], None]) -> None:
        self._module, self._setup, self._on_line = module, setup, on_line
        self._process: asyncio.subprocess.Process | None = None
        self.listening = False  # a front end that can be told things

    async def run(self, descriptors: tuple[int, ...] = ()) -> int:
        """Until it ends. Returns its status, negative for a signal."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            pass_fds=descriptors, start_new_session=True, limit=1 << 20,
        )  # fmt: skip
        assert process.stdout is not None, "it was asked for"
        try:
            self._write(msgspec.json.encode(self._setup))
            while line := await process.stdout.readline():
                self._on_line(json.loads(line))
            return await process.wait()
        finally:
            self.kill()
            self.close_input()
            await process.wait()

    def tell(self, **what: Any) -> None:
        self._write(json.dumps(what).encode())

    def close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            # Not by the process's own `kill`: that looks first whether it has ended, and so may take the status away
            # from asyncio, which then knows neither it nor the process.
            with contextlib.suppress(ProcessLookupError):  # it has ended, and that is about to be noticed
                os.kill(self._process.pid, signal.SIGKILL)

    def _write(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(line + b"\n")


class Supervisor:
    def __init__(
        self,
        plan: ServerSetup,
        taken: socket.socket,
        *,
        on_loading: Callable[[int, int], None],
        on_ready: Callable[[ServedModel], None],
    ) -> None:
        self._plan, self._taken = plan, taken
        self._on_loading, self._on_ready = on_loading, on_ready
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._front_ends: dict[str, _Child] = {}
        self._engine: _Child | None = None
        self._up: tuple[str, ServedModel] | None = None  # the engine's address, and what it serves
        self._down = "the engine is loading: try again in a moment."
        self._up_since = 0.0
        self._loading = True
        self._draining = False
        self._ending = False
        self._said_ready = False
        self._refused: str | None = None
        self._finished = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Until a signal ends it, or the engine cannot be started. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        front_ends = [
            asyncio.create_task(self._keep_front_end(f"front-end-{index}"))
            for index in range(self._plan.config.workers)
        ]
        engine = asyncio.create_task(self._keep_engine())
        tasks: list[asyncio.Task[Any]] = [engine, *front_ends]
        finished = asyncio.create_task(self._finished.wait())
        try:
            await asyncio.wait([*tasks, finished], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for child in [*self._front_ends.values(), *([self._engine] if self._engine else [])]:
                child.kill()
            for task in [*tasks, finished]:
                task.cancel()
            await asyncio.gather(*tasks, finished, return_exceptions=True)
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._refused is not None:
            raise ConfigError(self._refused)
        return self._status

    # ------------------------------------------------------------------ the engine

    async def _keep_engine(self) -> None:
        delay, generation = _FIRST_DELAY_S, 0
        loop = asyncio.get_running_loop()
        while not self._ending:
            generation += 1
            address = f"ipc://{self._folder}/engine-{generation}"
            setup = {**self._plan.engine, "address": address, "name": self._plan.name,
                     "stall_s": self._plan.config.stall_s, "log_level": self._plan.config.log_level,
                     "log_format": self._plan.config.log_format,
                     "tenants": [replace(tenant, keys=()) for tenant in self._plan.tenants]}  # fmt: skip
            self._loading = True
            self._tell_all(loading=True)
            self._engine = _Child("paceline.server.engine_process", setup, partial(self._hear, address))
            status = await self._engine.run()
            was_up, self._up = self._up is not None, None
            if self._ending:
                return
            if self._refused is not None:
                return
            self._loading = False
            self._down = f"the engine ended unexpectedly ({_in_words(status)}) and is being restarted: try again soon."
            self._tell_all(down=self._down)
            log.error("the engine ended unexpectedly: %s", _in_words(status))
            if not was_up and generation == 1:
                self._status = 1
                self._finished.set()
                return
            sound = was_up and loop.time() - self._up_since > _SOUND_S
            delay = _FIRST_DELAY_S if sound else min(delay * 2, _LONGEST_DELAY_S)
            await asyncio.sleep(delay)

    def _hear(self, address: str, line: dict[str, Any]) -> None:
        if "loading" in line:
            self._on_loading(*line["loading"])
        elif "refused" in line:
            self._refused = line["refused"]
            self._finished.set()
        elif "up" in line:
            served = msgspec.convert(line["up"], ServedModel)
            self._up, self._loading = (address, served), False
            self._up_since = asyncio.get_running_loop().time()
            self._tell_all(up=line["up"], address=address)
            log.info("the engine is up")
            self._maybe_say_ready()

    # ------------------------------------------------------------------ the front ends

    async def _keep_front_end(self, name: str) -> None:
        delay, generation = _FIRST_DELAY_S, 0
        loop = asyncio.get_running_loop()
        while not self._ending:
            generation += 1
            began = loop.time()
            known_as = f"{name}.{generation}"  # another one, as far as the engine is concerned
            setup = {
                "name": known_as, "address": f"ipc://{self._folder}/{known_as}", "socket": self._taken.fileno(),
                "model": self._plan.name, "tokenizer": self._plan.tokenizer, "config": self._plan.config,
                "tenants": self._plan.tenants,
            }  # fmt: skip
            child = _Child("paceline.server.front_end", setup, partial(self._hear_front_end, name))
            self._front_ends[name] = child
            status = await child.run((self._taken.fileno(),))
            self._front_ends.pop(name, None)
            if self._engine is not None:
                self._engine.tell(gone=known_as)
            if self._ending:
                return
            log.error("%s ended unexpectedly: %s", name, _in_words(status))
            if not self._said_ready:
                self._status = 1
                self._finished.set()
                return
            delay = _FIRST_DELAY_S if loop.time() - began > _SOUND_S else min(delay * 2, _LONGEST_DELAY_S)
            await asyncio.sleep(delay)

    def _hear_front_end(self, name: str, line: dict[str, Any]) -> None:
        child = self._front_ends[name]
        if "listening" in line:
            child.listening = True
            child.tell(draining=self._draining)
            if self._up is not None:
                child.tell(up=msgspec.to_builtins(self._up[1]), address=self._up[0])
            elif self._loading:
                child.tell(loading=True)
            else:
                child.tell(down=self._down)
            self._maybe_say_ready()
        elif "draining" in line:
            self._draining = line["draining"]
            self._tell_all(draining=self._draining)

    def _tell_all(self, **what: Any) -> None:
        for child in self._front_ends.values():
            if child.listening:
                child.tell(**what)

    def _maybe_say_ready(self) -> None:
        num_listening = sum(child.listening for child in self._front_ends.values())
        if self._up is not None and num_listening == self._plan.config.workers and not self._said_ready:
            self._said_ready = True
            self._on_ready(self._up[1])

    # ------------------------------------------------------------------ the end

    def _on_signal(self, number: int) -> None:
        if self._ending:  # asked twice: at once
            self._status = 128 + number
            self._finished.set()
            return
        self._ending = True
        asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        seconds = self._plan.config.shutdown_s
        self._tell_all(end=seconds)
        await self._wait_until(lambda: not self._front_ends, seconds + _MARGIN_S)
        if self._engine is not None:
            self._engine.close_input()
            await self._wait_until(lambda: self._up is None, _MARGIN_S)
        self._finished.set()

    async def _wait_until(self, holds: Callable[[], bool], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not holds() and loop.time() < deadline:
            await asyncio.sleep(0.02)


def _in_words(status: int) -> str:
    return f"signal {-status}, {signal.Signals(-status).name}" if status < 0 else f"status {status}"
