"""A front end's process: HTTP on one side, the engine's process on the other.

It is started by the supervisor and listens to it on its standard input: where the engine is, that it is gone, that
it is time to drain, and, by the end of the input, that the supervisor itself is gone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.config import ServerConfig, TenantConfig
from paceline.engine.output import EngineFailed
from paceline.server.app import App
from paceline.server.connection import listen
from paceline.server.engine_client import ServedModel
from paceline.server.errors import shutting_down
from paceline.server.limits import Keys
from paceline.server.logs import set_up_logs
from paceline.server.metrics import ServerCounters
from paceline.server.remote_client import RemoteClient
from paceline.text.load import load_tokenizer
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger("paceline.server")
_COLLECT_S = 5.0
_LAST_WORDS_S = 2.0  # for streams to take their error, once the time to finish is over


@dataclass(frozen=True, slots=True)
class FrontEndSetup:
    """All that the process must know, as one line of JSON on its standard input."""

    name: str
    address: str  # where it hears from the engine
    socket: int  # a descriptor that listens
    model: str
    tokenizer: str | int  # a model's path, or the size of a synthetic vocabulary
    config: ServerConfig
    tenants: tuple[TenantConfig, ...] = ()


class _FrontEnd:
    def __init__(self, setup: FrontEndSetup, tokenizer: Tokenizer) -> None:
        self._setup = setup
        self._client = RemoteClient(setup.name, setup.address, tokenizer)
        self._tally = ServerCounters()
        self._app = App(
            self._client, tokenizer, setup.config, name=setup.model, tally=self._tally, worker=setup.name,
            keys=Keys(setup.tenants, setup.config.admin_key), tell=self._say,
        )  # fmt: skip
        self._ended = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None  # kept: the loop itself does not

    async def serve(self, taken: socket.socket) -> None:
        server = await listen(self._app, self._setup.config, taken, self._tally)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._obey())]
        gc.collect()
        gc.freeze()
        gc.disable()  # `_collect` does it
        tasks += [asyncio.create_task(self._collect()), asyncio.create_task(self._ended.wait())]
        self._say(listening=True)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # one that broke ends the process, and the supervisor starts another
        server.close()
        await self._client.close()

    async def _collect(self) -> None:
        """Garbage: as soon as nobody is being answered, and once a minute where there always is somebody. All that was
        loaded is frozen, so it looks at little; left to Python, connections that ended would wait for hours."""
        counted = num_busy = 0
        while True:
            await asyncio.sleep(_COLLECT_S)
            served = sum(self._tally.responses.values()) + self._tally.disconnects
            num_busy = num_busy + 1 if self._tally.streams else 0
            if served != counted and (not num_busy or num_busy * _COLLECT_S >= 60):
                gc.collect()
                counted, num_busy = served, 0

    async def _obey(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 20)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            message = json.loads(line)
            if "up" in message:
                self._client.connect(message["address"], msgspec.convert(message["up"], ServedModel))
            elif "down" in message:
                self._client.lose(EngineFailed(message["down"]))
            elif "loading" in message:
                self._client.loading = True
            elif "draining" in message:
                self._app.draining = message["draining"]
            elif "end" in message:
                self._ending = asyncio.create_task(self._end(message["end"]))
        os._exit(1)  # the supervisor is gone; the engine goes too

    async def _end(self, seconds: float) -> None:
        """Refuses new requests, lets running ones finish for so long, tells the rest, and ends."""
        self._app.draining = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self._tally.streams and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._client.end_all(shutting_down())
        deadline = asyncio.get_running_loop().time() + _LAST_WORDS_S
        while self._tally.streams and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._ended.set()

    def _say(self, **what: Any) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal tells everybody; only the supervisor decides
    setup = msgspec.json.decode(_first_line(), type=FrontEndSetup)
    set_up_logs(setup.config.log_level, setup.config.log_format, setup.name)
    if isinstance(setup.tokenizer, int):
        tokenizer = synthetic_tokenizer(setup.tokenizer)
    else:
        tokenizer = load_tokenizer(setup.tokenizer)
    with socket.socket(fileno=setup.socket) as taken:

        async def serve() -> None:
            await _FrontEnd(setup, tokenizer).serve(taken)

        asyncio.run(serve())


def _first_line() -> bytes:
    """Byte by byte: what follows it belongs to the event loop."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(1)
        line += byte
    return line


if __name__ == "__main__":
    main()
