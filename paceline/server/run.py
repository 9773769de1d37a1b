"""Runs the server: binds the socket, then starts the supervisor."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from paceline.config import ConfigError, ServerConfig
from paceline.logs import set_up_logs
from paceline.request import Unavailable
from paceline.server.connection import is_loopback
from paceline.server.engine_client import ServedModel
from paceline.server.open_files import fit_connections
from paceline.server.supervisor import ServerSetup, Supervisor

log = logging.getLogger("paceline.server")


def bind(config: ServerConfig) -> socket.socket:
    """Binds the listening socket, before the model is loaded: an address in use is reported at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening_socket = socket.socket(family, socket.SOCK_STREAM)
    listening_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening_socket.bind((config.host, config.port))
    except (OSError, UnicodeError) as error:
        listening_socket.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise Unavailable(
                f"port is {config.port}, which is already in use: stop that program, or choose another port (0: any)."
            ) from None
        # The network of the machine may not be up yet.
        may_pass = isinstance(error, OSError) and error.errno in (errno.EADDRNOTAVAIL, socket.EAI_AGAIN)
        kind = Unavailable if may_pass else ConfigError
        raise kind(f"host is {config.host!r}, port is {config.port}: {error}; choose another address.") from None
    return listening_socket


def url_of(listening_socket: socket.socket) -> str:
    host, port = listening_socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    setup: ServerSetup,
    listening_socket: socket.socket,
    on_loading: Callable[[int, int], None],
    on_ready: Callable[[ServedModel], None],
) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit status."""
    set_up_logs(setup.config.log_level, setup.config.log_format, "server")
    setup = replace(setup, config=fit_connections(setup.config))
    if not any(tenant.keys for tenant in setup.tenants) and not is_loopback(listening_socket):
        log.warning(
            "host is %s and there are no API keys: every machine that reaches it can use the server; configure tenants "
            "with keys, or listen on 127.0.0.1",
            setup.config.host,
        )

    async def main() -> int:
        return await Supervisor(setup, listening_socket, on_loading=on_loading, on_ready=on_ready).run()

    return asyncio.run(main())
