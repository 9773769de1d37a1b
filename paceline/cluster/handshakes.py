"""Handshakes: how many strangers may try to prove themselves to a prefill engine, and how often that is logged.

Each handshake has a thread, and anybody who reaches the address can begin one. A stranger never keeps a peer out: when
all places are taken, a newcomer gets that of the oldest handshake of the address that has the most. Plain Python: no
I/O, and the time is an argument.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

log = logging.getLogger("paceline.kv")
MAX_HANDSHAKES = 16  # at the same time
MAX_PER_SECOND = 50  # of one address
LOG_INTERVAL_S = 10.0
_Key = TypeVar("_Key", bound=Hashable)


def group_of(host: str) -> str:
    """What counts as one address: of IPv6 the network, since a host has as many addresses as it likes."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False))


class Handshakes(Generic[_Key]):
    def __init__(self) -> None:
        self._open: dict[_Key, str] = {}  # their address; the oldest first
        self._second, self._begun = 0, Counter[str]()  # by address, in this second

    def admit(self, key: _Key, address: str, now: float) -> tuple[bool, _Key | None]:
        """Whether this handshake may begin, and which one must end for it."""
        if int(now) != self._second:
            self._second, self._begun = int(now), Counter()
        self._begun[address] += 1
        if self._begun[address] > MAX_PER_SECOND:
            return False, None
        victim = None
        if len(self._open) >= MAX_HANDSHAKES:
            held = Counter(self._open.values())
            victim = max(self._open, key=lambda one: held[self._open[one]])  # the first of those: the oldest
            del self._open[victim]
        self._open[key] = address
        return True, victim

    def ended(self, key: _Key) -> None:
        self._open.pop(key, None)


class RejectionLog:
    """Logs the first rejection at once, and then at most one line in `LOG_INTERVAL_S`."""

    def __init__(self) -> None:
        self._count, self._reason = 0, ""
        self._logged = float("-inf")

    def add(self, reason: str, now: float) -> None:
        self._count, self._reason = self._count + 1, reason
        self.flush(now)

    def flush(self, now: float) -> None:
        """Must be called now and then."""
        if not self._count or now - self._logged < LOG_INTERVAL_S:
            return
        if self._count == 1:
            log.warning("a decode engine was rejected: %s", self._reason)
        else:
            log.warning("%d decode engines were rejected; the last one: %s", self._count, self._reason)
        self._count, self._logged = 0, now
