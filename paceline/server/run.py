"""Running the server: a socket, uvicorn, and an end that comes.

After a signal the server takes no new requests and gives running ones `shutdown_s` seconds; then the engine is closed,
which ends every stream with a proper error. uvicorn's own deadline behind that is for clients that do not read.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from paceline.config import ConfigError, ServerConfig
from paceline.server.app import App
from paceline.server.client import EngineClient

_LAST_WORDS_S = 2  # for streams to take their error, once the engine is closed
_BACKLOG = 2048


def bind(config: ServerConfig) -> socket.socket:
    """The socket, before anything slow: an address that cannot be had is an error at once, not after the loading."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((config.host, config.port))
    except (OSError, UnicodeError) as error:
        taken.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port is {config.port}, which another program uses: end that one, or choose another port (0: any)."
            ) from None
        raise ConfigError(f"host is {config.host!r}, port is {config.port}: {error}; choose others.") from None
    return taken


def url_of(taken: socket.socket) -> str:
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, client: EngineClient, shutdown_s: float, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._client, self._shutdown_s, self._on_ready = client, shutdown_s, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._close_after(self._shutdown_s))
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()
            with suppress(asyncio.CancelledError):
                await closing
            await self._client.close()

    async def _close_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._client.close()


def run(
    app: App, client: EngineClient, config: ServerConfig, taken: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Serves until SIGINT or SIGTERM."""
    settings = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_level=logging.WARNING,
        access_log=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=int(config.shutdown_s) + 1 + _LAST_WORDS_S,
    )
    server = _Server(settings, client, config.shutdown_s, on_ready)

    def end(*_: object) -> None:
        server.should_exit = True

    # uvicorn has its own handlers while it serves, and afterwards raises the signals it got once more: by then they
    # have done their work.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    # Everything loaded so far stays: the collector need not look through it again and again.
    gc.collect()
    gc.freeze()
    server.run(sockets=[taken])
