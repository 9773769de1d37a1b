"""Running the server: a socket, taken before anything slow, and a supervisor on it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from paceline.config import ConfigError, ServerConfig
from paceline.server.engine_client import ServedModel
from paceline.server.logs import set_up_logs
from paceline.server.supervisor import ServerSetup, Supervisor


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


def run(
    plan: ServerSetup,
    taken: socket.socket,
    on_loading: Callable[[int, int], None],
    on_ready: Callable[[ServedModel], None],
) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit status."""
    set_up_logs(plan.config.log_level, plan.config.log_format, "server")

    async def main() -> int:
        return await Supervisor(plan, taken, on_loading=on_loading, on_ready=on_ready).run()

    return asyncio.run(main())
