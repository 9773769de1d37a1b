"""Queries to several engines: which of them are asked, and how their answers become one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.server.metrics import MetricFamily, gauge
from paceline.server.queries import (
    AbortRequests,
    DeleteResponse,
    EngineStats,
    FlushCache,
    FlushWhenIdle,
    GetAdapters,
    GetMetrics,
    GetPins,
    GetRequests,
    GetResponse,
    GetStats,
    PinPrefix,
    PinState,
    Query,
    RequestState,
    UnpinPrefix,
)

# What an engine that hangs may leave unanswered: the others are shown.
OVERVIEWS = (GetStats, GetRequests, GetMetrics, GetPins, GetAdapters)

# What an engine that exits meanwhile may leave unanswered, since its state is gone with it. Other queries change all
# engines, and fail if one did not answer.
READ_ONLY = (*OVERVIEWS, AbortRequests, GetResponse, DeleteResponse)

# A prefix is pinned where it is cached: one engine that has it is enough.
PINS = (PinPrefix, UnpinPrefix)


def combine(query: Query[object], answers: Mapping[int, Any]) -> Any:
    """One answer from those of the engines, by replica."""
    found = list(answers.values())
    match query:
        case GetStats():
            return _stats(found)
        case GetRequests():
            requests: list[RequestState] = [one for part in found for one in part]
            return requests[: query.limit]
        case GetMetrics():
            return _metrics(answers)
        case GetPins():
            pins: dict[str, PinState] = {pin.name: pin for part in found for pin in part}
            return list(pins.values())
        case GetAdapters():  # what all of them have
            return [one for one in found[0] if all(one.adapter in (two.adapter for two in part) for part in found)]
        case AbortRequests() | FlushCache() | FlushWhenIdle():
            return sum(found)
        case PinPrefix():
            return max(found)
        case GetResponse():
            return next((data for data in found if data is not None), None)
        case DeleteResponse():
            return any(found)
        case _:
            return found[0]


def _stats(found: Sequence[EngineStats]) -> EngineStats:
    finished: Counter[str] = Counter()
    for one in found:
        finished.update(one.num_finished)
    names = ("num_running", "num_waiting", "kv_tokens", "kv_tokens_free", "host_kv_tokens", "host_kv_tokens_free")
    return replace(
        found[0],
        **{name: sum(getattr(one, name) for one in found) for name in names},
        num_finished=dict(finished),
        paused=any(one.paused for one in found),
    )


def _metrics(answers: Mapping[int, Sequence[MetricFamily]]) -> list[MetricFamily]:
    """Every metric of each engine, with the label `replica`."""
    found: dict[str, MetricFamily] = {}
    for replica, families in answers.items():
        for family in families:
            merged = found.setdefault(family.name, replace(family, values=[]))
            merged.values.extend(({**labels, "replica": str(replica)}, value) for labels, value in family.values)
    return [gauge("replicas_up", "Engines that respond.", len(answers)), *found.values()]
