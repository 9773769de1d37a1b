"""IncomingTransfers: what a decode engine expects from prefill engines. Plain Python: no I/O, and time is an argument.

Every transfer is settled exactly once: it is complete, or it has failed and the request is computed here. A failed one
is released exactly once, when nothing can write its memory any more:

    waiting ──all pages, PrefillDone──▶ complete (its pages are placed)
       │
       └──failed, timed out, cancelled──▶ settled ──the peer ends it, or is gone for `GRACE_S`──▶ released

Where the peer sends pages instead of writing them (`is_shared` false), a failed transfer is released at once. Messages
may be lost, repeated, late or of unknown transfers: nothing is settled twice, and nothing waits for ever except memory
that a peer which is alive may still write.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from paceline.cluster.kv_protocol import PagesSent, PrefillDone, PrefillFailed
from paceline.request import FinishReason

# After the end of a connection, which is when all ranks of the peer are gone (`SharedPages.connection`): copies of a
# process that was killed may still run.
GRACE_S = 2.0


class Cause(StrEnum):
    """Why a transfer failed."""

    TIMEOUT = "timeout"
    SILENT = "silent"  # the prefill engine shows no sign of life
    CONNECTION = "connection"  # refused, lost or broken
    DAMAGED = "damaged"  # checksum or size
    INCOMPLETE = "incomplete"  # pages are missing at the end
    REFUSED = "refused"  # the prefill engine could not compute the prompt
    WEIGHTS = "weights"  # of another version
    CANCELLED = "cancelled"  # the request has ended


@dataclass(frozen=True, slots=True)
class Settled:
    id: str
    cause: Cause | None  # None: complete
    detail: str = ""
    num_cached_tokens: int = 0  # by the prefill engine


@dataclass(frozen=True, slots=True)
class Released:
    id: str


Outcome = Settled | Released


@dataclass(slots=True, eq=False)
class _Transfer:
    id: str
    peer: str
    is_shared: bool
    weights: str
    deadline: float
    arrived: np.ndarray  # by page
    is_settled: bool = False
    released_at: float | None = None  # if nothing else releases it before


@dataclass(slots=True, eq=False)
class IncomingTransfers:
    num_stray: int = 0  # messages of transfers that are unknown or have ended
    failures: Counter[Cause] = field(default_factory=Counter)
    num_completed: int = 0
    _transfers: dict[str, _Transfer] = field(default_factory=dict)

    def start(
        self, id: str, peer: str, num_pages: int, deadline: float, *, weights: str = "0", is_shared: bool = True
    ) -> None:
        """`weights`: the version that computes the request here."""
        assert id not in self._transfers and num_pages > 0, f"transfer {id} exists, or is empty"
        arrived = np.zeros(num_pages, np.bool_)
        self._transfers[id] = _Transfer(id, peer, is_shared, weights, deadline, arrived)

    @property
    def num_waiting(self) -> int:
        return sum(not one.is_settled for one in self._transfers.values())

    @property
    def next_time(self) -> float | None:
        """When `expire` has something to do."""
        times = [one.released_at if one.is_settled else one.deadline for one in self._transfers.values()]
        return min((at for at in times if at is not None), default=None)

    def waits_for(self, peer: str) -> int:
        return sum(one.peer == peer and not one.is_settled for one in self._transfers.values())

    # ------------------------------------------------------------------ what happens

    def wants(self, peer: str, message: PagesSent) -> bool:
        """Whether the payload of a message is to be written: it belongs to a transfer that waits for these pages."""
        one = self._find(peer, message.id)
        if one is None or one.is_settled or not self._is_inside(one, message):
            return False
        return not one.arrived[message.first : message.first + message.count].all()

    def on_pages(self, peer: str, message: PagesSent, *, is_intact: bool = True) -> list[Outcome]:
        one = self._find(peer, message.id)
        if one is None or one.is_settled:
            self.num_stray += 1
            return []
        if not self._is_inside(one, message) or not is_intact:
            detail = f"pages {message.first} to {message.first + message.count} of {len(one.arrived)}"
            return self._fail(one, Cause.DAMAGED, detail)
        one.arrived[message.first : message.first + message.count] = True
        return []

    def on_done(self, peer: str, message: PrefillDone) -> list[Outcome]:
        one = self._find(peer, message.id)
        if one is None:
            self.num_stray += 1
            return []
        if one.is_settled:  # it was given up before: now nothing writes it any more
            return self._release(one)
        missing = len(one.arrived) - int(one.arrived.sum())
        if missing or message.num_pages != len(one.arrived):
            return self._end(one, Cause.INCOMPLETE, f"{missing} of {len(one.arrived)} pages are missing")
        if message.weights != one.weights:
            return self._end(one, Cause.WEIGHTS, f"version {message.weights}, not {one.weights}")
        del self._transfers[one.id]
        self.num_completed += 1
        return [Settled(one.id, None, num_cached_tokens=message.num_cached_tokens)]

    def on_failed(self, peer: str, message: PrefillFailed) -> list[Outcome]:
        one = self._find(peer, message.id)
        if one is None:
            self.num_stray += 1
            return []
        # The prefill engine knows the deadline, too, and may notice first that it has passed.
        cause = Cause.TIMEOUT if message.reason == FinishReason.DEADLINE else Cause.REFUSED
        return self._release(one) if one.is_settled else self._end(one, cause, message.reason)

    def on_disconnect(self, peer: str, now: float, detail: str) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for one in [one for one in self._transfers.values() if one.peer == peer]:
            if not one.is_settled:
                outcomes += self._fail(one, Cause.CONNECTION, detail)
            if one.released_at is None:
                one.released_at = now + GRACE_S
        return outcomes

    def on_silence(self, peer: str, detail: str) -> list[Outcome]:
        """The peer may continue, and write what it was asked for: its memory is not released yet."""
        return [
            outcome
            for one in list(self._transfers.values())
            if one.peer == peer and not one.is_settled
            for outcome in self._fail(one, Cause.SILENT, detail)
        ]

    def cancel(self, id: str) -> list[Outcome]:
        """The request has ended."""
        one = self._transfers.get(id)
        return [] if one is None or one.is_settled else self._fail(one, Cause.CANCELLED, "the request has ended")

    def expire(self, now: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for one in list(self._transfers.values()):
            if not one.is_settled and one.deadline <= now:
                outcomes += self._fail(one, Cause.TIMEOUT, f"{int(one.arrived.sum())} of {len(one.arrived)} pages came")
            elif one.is_settled and one.released_at is not None and one.released_at <= now:
                outcomes += self._release(one)
        return outcomes

    # ------------------------------------------------------------------ steps

    def _find(self, peer: str, id: str) -> _Transfer | None:
        one = self._transfers.get(id)
        return one if one is not None and one.peer == peer else None

    @staticmethod
    def _is_inside(one: _Transfer, message: PagesSent) -> bool:
        return message.first >= 0 and message.count > 0 and message.first + message.count <= len(one.arrived)

    def _fail(self, one: _Transfer, cause: Cause, detail: str) -> list[Outcome]:
        """Gives it up while the peer may still write."""
        one.is_settled = True
        self.failures[cause] += 1
        settled = Settled(one.id, cause, detail)
        return [settled] if one.is_shared else [settled, *self._release(one)]

    def _end(self, one: _Transfer, cause: Cause, detail: str) -> list[Outcome]:
        """The peer has ended it: nothing writes it any more."""
        self.failures[cause] += 1
        return [Settled(one.id, cause, detail), *self._release(one)]

    def _release(self, one: _Transfer) -> list[Outcome]:
        del self._transfers[one.id]
        return [Released(one.id)]
