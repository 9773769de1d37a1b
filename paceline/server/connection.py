"""HTTP connections: uvicorn's, with bounds on what a client may do and a short way for tokens.

A client has `header_s` seconds from the first moment on, `max_header_bytes` for its headers, and there may be
`max_connections` of them. What is left to the app are the body (`asgi.read_body`) and readers that do not read.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from paceline.config import ServerConfig
from paceline.server.errors import ApiError
from paceline.server.metrics import ServerCounters

BACKLOG = 4096


class _State(ServerState):
    """With a date that is right to the second and costs nothing while nobody asks."""

    def __init__(self) -> None:
        super().__init__()
        self._date = (0, b"")

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        now = int(time.time())
        if self._date[0] != now:
            self._date = (now, formatdate(now, usegmt=True).encode())
        return [(b"date", self._date[1])]

    @default_headers.setter
    def default_headers(self, _: list[tuple[bytes, bytes]]) -> None:
        pass


class Connection(H11Protocol):
    def __init__(
        self, config: uvicorn.Config, state: ServerState, limits: ServerConfig, tally: ServerCounters, loop: Any
    ) -> None:
        super().__init__(config, state, {"connection": self}, loop)
        self._limits, self._tally = limits, tally
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._tally.connections += 1
        if len(self.connections) > self._limits.max_connections:
            error = ApiError(f"{self._limits.max_connections} connections are open (max_connections): come back later.",
                             status=503, kind="server_error", code="too_many_connections")  # fmt: skip
            body = error.body()
            transport.write(
                b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            )
            transport.close()
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tally.connections -= 1
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        if self.transport.is_closing():
            return
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()
        elif self._patience is None and self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._expect_headers()  # of a further request on this connection: it has begun to arrive

    def _expect_headers(self) -> None:
        self._patience = self.loop.call_later(self._limits.header_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._tally.slow_clients += 1
        self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()
        self._cut_off_later()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._cut_off_later()

    def _cut_off_later(self) -> None:
        """Closing waits for the client to read what is left, and it may never do that."""
        self.loop.call_later(self._limits.slow_reader_s, self.transport.abort)

    # ------------------------------------------------------------------ for `EventStream`

    def write_chunk(self, data: bytes) -> bool:
        """A chunk of a body, without the way through h11. Whether the client reads: if not, wait for `drain`."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self.flow.write_paused

    async def drain(self) -> None:
        """Until the client has read enough; a slow one is cut off, which ends its answer like any that goes away."""
        try:
            await asyncio.wait_for(self.flow.drain(), self._limits.slow_reader_s)
        except TimeoutError:
            self._tally.slow_clients += 1
            self.transport.abort()


async def listen(
    app: Callable[..., Any], config: ServerConfig, taken: socket.socket, tally: ServerCounters
) -> asyncio.base_events.Server:
    """Accepts connections from now on."""
    settings = uvicorn.Config(
        app,
        http=Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=int(max(1, config.keep_alive_s)),
        h11_max_incomplete_event_size=config.max_header_bytes,
    )
    settings.load()
    loop = asyncio.get_running_loop()
    make = partial(Connection, settings, _State(), config, tally, loop)
    # asyncio accepts as many at a time as it lets wait. Few at a time share a burst between the workers.
    server = await loop.create_server(make, sock=taken, backlog=1 if config.workers > 1 else 64)
    taken.listen(BACKLOG)
    return server
