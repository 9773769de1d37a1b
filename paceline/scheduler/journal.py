"""The journal: every decision with its reason, and the counters.

An event is a small tuple in a bounded ring; a steady decode step writes none. Listeners (a recorder, the live page) are
called with each event as it is written; with no listener an event costs well under a microsecond.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from paceline.request import FinishReason
from paceline.scheduler.now import Now


class EventKind(StrEnum):
    ADD = "add"
    REFUSE = "refuse"
    ADMIT = "admit"  # detail: cached tokens, tokens to compute
    WAIT = "wait"  # detail: the reason; written when it changes
    EVICT = "evict"  # detail: pages
    SPILL = "spill"  # detail: evicted pages copied to host memory, host pages forgotten to make space
    FETCH = "fetch"  # detail: tokens fetched from host memory instead of computed
    RECEIVE = "receive"  # detail: pages that another engine computed, now in host memory
    RETRACT = "retract"  # detail: what needed the memory, pages released
    DUPLICATE = "duplicate"  # detail: pages that two rows computed
    RESERVE = "reserve"  # freed memory is kept for this request
    PIN = "pin"
    UNPIN = "unpin"
    DROP = "drop"  # detail: pages that may contain NaN, requests that are computed again
    REPAIR = "repair"  # detail: what was wrong
    FINISH = "finish"  # detail: reason, output tokens


class Event(NamedTuple):
    time: float
    step: int
    kind: EventKind
    request_id: str
    detail: tuple[object, ...]


@dataclass(slots=True)
class Counters:
    """Totals since the start. Tokens are counted when their pass is planned."""

    steps: int = 0
    added: int = 0
    refused: int = 0
    admitted: int = 0  # a retracted request counts again when it is readmitted
    prompt_tokens: int = 0  # of admitted requests, also on readmission
    hit_tokens: int = 0  # of these, found in the prefix cache
    fetched_tokens: int = 0  # of these, fetched from host memory
    computed_tokens: int = 0  # fed to prefill
    drafted_tokens: int = 0  # drafts that passes verified (speculative decoding)
    accepted_tokens: int = 0  # of these, accepted
    decoded_tokens: int = 0
    discarded_tokens: int = 0  # of requests that ended, or lost KV that may contain NaN, while the pass was in flight
    retractions: int = 0
    evicted_pages: int = 0
    spilled_pages: int = 0  # of these, copied to host memory
    forgotten_pages: int = 0  # dropped from host memory to make space
    received_pages: int = 0  # computed by another engine and placed in host memory
    duplicate_pages: int = 0
    overtakes: int = 0
    nan_dropped_pages: int = 0  # on the device and in host memory, because they may contain NaN
    nan_recomputations: int = 0  # requests that were computed again because they had read such pages
    device_s: float = 0.0  # of committed passes
    repairs: int = 0  # times that the scheduler state was inconsistent and was reset
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    @classmethod
    def total(cls, counters: Sequence[Counters]) -> Counters:
        """The sums of all counters, of several schedulers."""
        if len(counters) == 1:
            return counters[0]
        names = [item.name for item in dataclasses.fields(cls) if item.name != "finished"]
        finished = {reason: sum(one.finished[reason] for one in counters) for reason in FinishReason}
        return cls(**{name: sum(getattr(one, name) for one in counters) for name in names}, finished=finished)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Journal:
    def __init__(self, max_events: int) -> None:
        self.events: deque[Event] = deque(maxlen=max_events)
        self.listeners: list[Callable[[Event], None]] = []
        self.counters = Counters()

    def clear(self) -> None:
        self.events.clear()
        self.counters = Counters()

    def write(self, now: Now, kind: EventKind, request_id: str, *detail: object) -> None:
        event = Event(now.time, now.step, kind, request_id, detail)
        self.events.append(event)
        for listener in self.listeners:
            listener(event)

    def digest(self) -> str:
        """A hash over the events in the ring: equal runs have equal digests."""
        hasher = hashlib.sha256()
        for event in self.events:
            hasher.update(repr(event).encode())
        return hasher.hexdigest()
