"""Ports for servers that must be told theirs."""

from __future__ import annotations

import contextlib
import random
import socket

# Below what systems give to outgoing connections: one of those would take a port between the search and its use. Above
# what Ray gives to its workers.
_FIRST, _END = 20_000, 32_000


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free now."""
    rng = random.SystemRandom()
    while True:
        first = rng.randrange(_FIRST, _END - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
