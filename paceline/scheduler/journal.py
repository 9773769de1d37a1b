"""Why: every decision with its reason, and the counters.

An event is a small tuple in a bounded ring; a steady decode step writes none. Listeners get each event as it
happens (a recorder, a live page); with no listener an event costs well under a microsecond.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from paceline.request import FinishReason


class EventKind(StrEnum):
    ADD = "add"
    REFUSE = "refuse"
    ADMIT = "admit"  # detail: cached tokens, tokens to compute
    WAIT = "wait"  # detail: the reason; written when it changes
    EVICT = "evict"  # detail: pages
    SPILL = "spill"  # detail: pages of these that go to the host, pages forgotten there for it
    FETCH = "fetch"  # detail: tokens that come from the host and are not computed
    RETRACT = "retract"  # detail: who needed the room, pages given back
    DUPLICATE = "duplicate"  # detail: pages that two rows computed
    RESERVE = "reserve"  # memory that comes free is kept for this request
    PIN = "pin"
    UNPIN = "unpin"
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
    admitted: int = 0  # a retracted request that comes back counts again
    prompt_tokens: int = 0  # of admitted requests, also when they come back
    hit_tokens: int = 0  # of these, found in the tree
    fetched_tokens: int = 0  # of these, brought back from the host
    computed_tokens: int = 0  # fed to prefill
    decoded_tokens: int = 0
    discarded_tokens: int = 0  # of passes whose request had ended meanwhile
    retractions: int = 0
    evicted_pages: int = 0
    spilled_pages: int = 0  # of these, copied to the host
    forgotten_pages: int = 0  # there, for others
    duplicate_pages: int = 0
    overtakes: int = 0
    device_s: float = 0.0  # of passes that were committed, where it is measured
    repairs: int = 0  # times the books did not add up and were opened anew
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Journal:
    def __init__(self, max_events: int) -> None:
        self.events: deque[Event] = deque(maxlen=max_events)
        self.listeners: list[Callable[[Event], None]] = []
        self.counters = Counters()

    def write(self, time: float, step: int, kind: EventKind, request_id: str, *detail: object) -> None:
        event = Event(time, step, kind, request_id, detail)
        self.events.append(event)
        for listener in self.listeners:
            listener(event)

    def digest(self) -> str:
        """One hash over the remembered events: equal runs have equal digests."""
        hasher = hashlib.sha256()
        for event in self.events:
            hasher.update(repr(event).encode())
        return hasher.hexdigest()
