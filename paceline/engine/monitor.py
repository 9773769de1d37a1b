"""The state shown on the live page, collected in the engine's process.

It reads the scheduler only on request and is notified of finished requests. It reports token counts, never tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Literal, TypedDict

import numpy as np

from paceline.scheduler import Scheduler
from paceline.scheduler.journal import Event, EventKind
from paceline.scheduler.snapshot import snapshot
from paceline.scheduler.tracked_request import TrackedRequest

_RECENT = 200  # finished requests that percentiles are computed over
_SHOWN = 40  # of these, listed in the table
_HISTORY = 300  # samples, about a second apart while requests run
_MIN_SAMPLE_S = 0.45  # between two samples


class FinishedRequest(TypedDict):
    """What the page lists of a request that has finished. Times are seconds; None for what never happened."""

    id: str
    tenant: str
    at: float
    prompt: int
    cached: int
    output: int
    reason: str
    wait: float | None
    ttft: float | None
    tpot: float | None
    retractions: int


class EngineMonitor:
    """All methods are called on the engine's thread."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._requests: dict[str, TrackedRequest] = {}
        self._recent: deque[FinishedRequest] = deque(maxlen=_RECENT)
        self._samples: deque[list[float | None]] = deque(maxlen=_HISTORY)  # time and the values the page plots
        self._sampled_at = -math.inf
        self._began = clock()
        scheduler.journal.listeners.append(self._on_event)

    def state(self) -> dict[str, object]:
        now = self._clock()
        self._sample(now)
        config = self._scheduler.config
        return {
            "now": now,
            "uptime": now - self._began,
            "policy": config.policy,
            "page_size": config.page_size,
            "max_running": config.max_running,
            "prefix_cache": config.prefix_cache,
            "speculates": config.draft_tokens > 0,
            "snapshot": snapshot(self._scheduler, now),
            "samples": list(self._samples),
            "recent": [{**one, "ago": now - one["at"]} for one in reversed(self._recent)][:_SHOWN],
            "latency": {
                "wait": self._percentiles("wait"),
                "ttft": self._percentiles("ttft"),
                "tpot": self._percentiles("tpot"),
            },
        }

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.ADD:
            self._requests[event.request_id] = self._scheduler.requests[event.request_id]
        elif event.kind is EventKind.FINISH:
            request = self._requests.pop(event.request_id, None)
            if request is not None:
                self._recent.append(_finished(request, event.time))
            if event.time - self._sampled_at >= 1.0:
                self._sample(event.time)

    def _sample(self, now: float) -> None:
        if now - self._sampled_at < _MIN_SAMPLE_S:
            return
        self._sampled_at = now
        counters, config = self._scheduler.counters, self._scheduler.config
        # As in a snapshot: requests with a slot, including those whose last pass is in flight.
        num_running = config.max_running - self._scheduler.memory.slots.num_free
        ttfts = [ttft for one in self._recent if (ttft := one["ttft"]) is not None and now - one["at"] <= 30]
        self._samples.append(
            [now, counters.decoded_tokens, counters.computed_tokens, counters.prompt_tokens, counters.hit_tokens,
             num_running, self._scheduler.num_waiting, *_percentiles_of(ttfts), counters.drafted_tokens,
             counters.accepted_tokens]
        )  # fmt: skip

    def _percentiles(self, name: Literal["wait", "ttft", "tpot"]) -> list[float | None]:
        return _percentiles_of([value for one in self._recent if (value := one[name]) is not None])


def _percentiles_of(values: list[float]) -> list[float | None]:
    """p50 and p99, or None without values."""
    return [float(np.percentile(values, percent)) for percent in (50, 99)] if values else [None, None]


def _finished(request: TrackedRequest, now: float) -> FinishedRequest:
    def since(moment: float | None) -> float | None:
        return None if moment is None else moment - request.arrival

    ttft, tokens = since(request.first_token), len(request.output)
    return {
        "id": request.id,
        "tenant": request.tenant,
        "at": now,
        "prompt": len(request.prompt),
        "cached": request.num_cached,
        "output": tokens,
        "reason": str(request.finish_reason),
        "wait": since(request.first_admitted),
        "ttft": ttft,
        "tpot": (now - request.first_token) / (tokens - 1) if request.first_token is not None and tokens > 1 else None,
        "retractions": request.retractions,
    }
