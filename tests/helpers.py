"""Shortcuts for tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.config import SchedulerConfig
from paceline.request import Request, SamplingParams
from paceline.scheduler import EventKind, Scheduler
from paceline.scheduler.draft_depth import DraftDepth
from paceline.testing import Harness

EOS = 0


class RandomDepth(DraftDepth):
    """Adaptive drafts that adapt to nothing: every pass gets a random depth."""

    def __init__(self, max_drafts: int, choice: Callable[[Sequence[int]], int] | None = None) -> None:
        super().__init__(max_drafts)
        self._choice = choice or random.Random(0).choice

    def choose(self, requests: Sequence[Request]) -> int:
        super().choose(requests)
        return self._choice([0, 0, *self._depths])


_numbers = itertools.count()


def prompt(*parts: int | list[int] | range) -> np.ndarray:
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else list(part)
    return np.array(tokens)


def request(tokens: Any = (1, 2, 3), max_tokens: int | None = 4, *, id: str = "", **fields: Any) -> Request:
    """A request that ends by length unless EOS ids or stop ids are given."""
    params = SamplingParams(
        max_tokens=max_tokens, **{k: fields.pop(k) for k in ("min_tokens", "stop_token_ids") if k in fields}
    )
    return Request(id or f"request-{next(_numbers)}", np.array(tokens), params, **fields)


def scheduler(**options: Any) -> Scheduler:
    settings: dict[str, Any] = {"num_pages": 64, "page_size": 4, "max_running": 8, "max_batch_tokens": 256}
    return Scheduler(SchedulerConfig(**settings | options))


def harness(*, overlap: bool = False, lazy: bool = False, vocab: int = 64, **options: Any) -> Harness:
    return Harness(scheduler(**options), overlap=overlap, lazy=lazy, vocab=vocab)


def admissions(subject: Scheduler) -> list[str]:
    """Request ids in the order they were admitted."""
    return [event.request_id for event in subject.journal.events if event.kind is EventKind.ADMIT]


def events(subject: Scheduler, kind: EventKind, request_id: str | None = None) -> list[Any]:
    return [e for e in subject.journal.events if e.kind is kind and request_id in (None, e.request_id)]
