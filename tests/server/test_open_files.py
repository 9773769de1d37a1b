"""More connections than a process may have, or should have: requests are answered, and the log has one line."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.config import ServerConfig
from paceline.server.connection import listen
from paceline.server.http import Receive, Scope, Send
from paceline.server.metrics import ServerCounters
from tests.server.process import ServerProcess, serving
from tests.server.virtual import complete, connect, get

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"


class Socket(socket.socket):
    """A listening socket of a process that may run out of file descriptors."""

    has_files = True

    def accept(self) -> Any:
        if not self.has_files:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class Clients:
    """A server whose /wait answers when the test ends, and connections to it."""

    def __init__(self, listening: Socket) -> None:
        self.listening, self.end = listening, asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/wait":
            await self.end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def open(self, data: bytes = b"") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*self.listening.getsockname())
        self.writers.append(writer)
        writer.write(data)
        return reader

    async def status(self, data: bytes) -> bytes:
        """Of the response to a request on a new connection."""
        line = await asyncio.wait_for((await self.open(data)).readline(), 15)
        return line[9:12]


def with_clients(use: Callable[[Clients], Awaitable[None]], max_connections: int) -> None:
    async def run() -> None:
        listening, counters = Socket(), ServerCounters()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        clients = Clients(listening)
        server = await listen(clients, ServerConfig(max_connections=max_connections), listening, counters)
        try:
            await use(clients)
        finally:
            clients.end.set()
            for writer in clients.writers:
                writer.close()
            while counters.connections:
                await asyncio.sleep(0.001)
            server.close()

    asyncio.run(run())


def test_a_connection_that_is_idle_for_longest_makes_room_for_another() -> None:
    async def use(clients: Clients) -> None:
        busy = await clients.open(WAIT)
        idle = [await clients.open(data) for data in (b"", b"GET /health", HEALTH.replace(b"close", b"keep-alive"))]
        assert (await idle[2].readline()).startswith(b"HTTP/1.1 200")
        for _ in range(20):
            assert await clients.status(HEALTH.replace(b"close", b"keep-alive")) == b"200"
        for reader in idle:
            assert b"503" not in await asyncio.wait_for(reader.read(), 15)  # closed
        clients.end.set()
        assert (await asyncio.wait_for(busy.readline(), 15)).startswith(b"HTTP/1.1 200")

    with_clients(use, max_connections=4)


def test_probes_are_answered_although_every_connection_has_a_request() -> None:
    async def use(clients: Clients) -> None:
        for _ in range(4):
            await clients.open(WAIT)
        assert await clients.status(WAIT) == b"503"
        for _ in range(100):
            await clients.open()  # idle ones cannot keep probes out
        for path in (b"/health", b"/ready", b"/metrics"):
            assert await clients.status(HEALTH.replace(b"/health", path)) == b"200"
        assert await clients.status(WAIT) == b"503"

    with_clients(use, max_connections=4)


def test_without_descriptors_idle_connections_are_closed_and_one_line_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(clients: Clients) -> None:
        idle = [await clients.open() for _ in range(20)]
        assert await clients.status(HEALTH) == b"200"
        clients.listening.has_files = False
        waiting = [asyncio.create_task(clients.status(HEALTH)) for _ in range(5)]
        await asyncio.wait([asyncio.create_task(one.read()) for one in idle], timeout=60)
        assert all(one.at_eof() for one in idle)
        assert not any(one.done() for one in waiting)
        clients.listening.has_files = True
        assert await asyncio.gather(*waiting) == [b"200"] * 5

    with caplog.at_level(logging.WARNING):
        with_clients(use, max_connections=100)
    (record,) = caplog.records
    assert "no connection can be accepted (Too many open files)" in record.getMessage() and record.exc_info is None


def limited(kind: str, count: int) -> tuple[str, ...]:
    return ("bash", "-c", f'ulimit -{kind}n {count} && exec "$@"', "-")


def flood(server: ServerProcess, count: int) -> ExitStack:
    sockets = ExitStack()
    for _ in range(count):
        sockets.enter_context(connect(server))
    return sockets


def test_max_connections_is_lowered_to_what_the_hard_limit_allows() -> None:
    options = ("--executor", "virtual", "--log-level", "warning", "--header-s", "300")
    with serving(*options, prefix=limited("", 256)) as server, flood(server, 600):
        for _ in range(3):
            assert get(server, "/health").status_code == 200
            assert complete(server, [7, 8], 3).status_code == 200
        assert server.output.count("max_connections is 128 instead of 4096") == 1
        assert "Traceback" not in server.output and "no connection can be accepted" not in server.output


def test_the_soft_limit_is_raised_to_what_max_connections_needs() -> None:
    options = ("--executor", "virtual", "--log-level", "warning", "--max-connections", "500")
    with serving(*options, prefix=limited("S", 256)) as server:
        (front_end,) = server.children["front_end"]
        limits = Path(f"/proc/{front_end}/limits").read_text()
        soft = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3]
        assert math.inf if soft == "unlimited" else int(soft) >= 628
        assert "max_connections is" not in server.output
