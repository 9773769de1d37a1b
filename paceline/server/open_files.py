"""The limit of open files: each connection of a front end is one, and a front end without any cannot answer /health."""

from __future__ import annotations

import dataclasses
import logging
import resource

from paceline.config import ServerConfig

log = logging.getLogger("paceline.server")
# Of a front end, besides connections: sockets of the engines, files of batches, pipes of its processes, and connections
# that are being accepted or refused.
RESERVED_FILES = 128


def fit_connections(config: ServerConfig) -> ServerConfig:
    """Raises the limit of this process and its children as far as it may. If that is not enough, max_connections is
    lowered to what fits."""
    soft, hard = (_count(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    needed = config.max_connections + RESERVED_FILES
    if soft < needed:
        soft = int(min(needed, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if soft >= needed:
        return config
    fitting = max(1, int(soft) - RESERVED_FILES)
    log.warning(
        "max_connections is %d instead of %d: a process may have %d open files; raise the hard limit (`ulimit -Hn %d`, "
        "systemd: LimitNOFILE), or lower max_connections",
        fitting,
        config.max_connections,
        soft,
        needed,
    )
    return dataclasses.replace(config, max_connections=fitting)


def _count(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
