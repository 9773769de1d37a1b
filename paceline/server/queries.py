"""Queries that a front end sends to the engine, and their results. All of them are data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, get_args

import msgspec

from paceline.engine.output import LoadedAdapter, WeightUpdate
from paceline.server.limits import MAX_LISTED_REQUESTS
from paceline.server.metrics import MetricFamily

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine is doing now, and what it has done since it started."""

    num_running: int = 0
    num_waiting: int = 0
    num_finished: Mapping[str, int] = field(default_factory=dict)  # by finish reason
    kv_tokens: int = 0
    kv_tokens_free: int = 0  # empty, or holding a cached prefix that no request uses
    host_kv_tokens: int = 0
    host_kv_tokens_free: int = 0
    paused: bool = False
    weight_version: str = "0"


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine can generate. Returned at once, whatever the engine is busy with."""

    failure: str | None = None  # why it cannot
    num_passes: int = 0  # forward passes so far
    idle: bool = True
    paused: bool = False


@dataclass(frozen=True, slots=True)
class RequestState:
    """One request in progress."""

    id: str
    tenant: str
    state: str
    prompt_tokens: int
    cached_tokens: int
    fetched_tokens: int  # of the cached ones, from host memory
    output_tokens: int
    max_tokens: int
    age_s: float
    priority: int
    retractions: int
    why: str


@dataclass(frozen=True, slots=True)
class PinState:
    name: str
    num_tokens: int
    expires_in_s: float | None


class Query(msgspec.Struct, Generic[Result], frozen=True, tag=True):
    """What an engine answers with a `Result`."""


class GetHealth(Query[Health], frozen=True):
    pass


class GetStats(Query[EngineStats], frozen=True):
    pass


class GetRequests(Query[list[RequestState]], frozen=True):
    """Requests of one tenant, or of all; with an id, those of that response."""

    tenant: str | None = None
    id: str | None = None
    limit: int = MAX_LISTED_REQUESTS


class AbortRequests(Query[int], frozen=True):
    """Aborts the requests of the response with this id. The result is their number."""

    id: str
    tenant: str | None = None


class GetMetrics(Query[list[MetricFamily]], frozen=True):
    pass


class GetMonitor(Query[dict[str, Any]], frozen=True):
    """What the live page shows: `EngineMonitor.state()` of one replica."""

    replica: int = 0


class FlushCache(Query[int], frozen=True):
    """Evicts every cached prefix that is not in use. The result is the number of tokens freed."""


class FlushWhenIdle(Query[int], frozen=True):
    """The same once running requests have finished; new ones wait meanwhile."""

    timeout_s: float


class GetPins(Query[list[PinState]], frozen=True):
    pass


class PinPrefix(Query[int], frozen=True):
    """Protects a prefix from eviction. The result is the number of tokens pinned."""

    name: str
    prompt: list[int]
    expires_in_s: float | None = None
    tenant: str = "default"
    cache_salt: str = ""


class UnpinPrefix(Query[None], frozen=True):
    name: str


class PauseEngine(Query[None], frozen=True):
    """Stops launching passes; the result comes when none is in flight."""

    mode: str = "wait"


class ResumeEngine(Query[None], frozen=True):
    pass


class UpdateWeights(Query[WeightUpdate], frozen=True):
    """Replaces the weights by those at `path`."""

    path: str
    mode: str = "wait"
    version: str | None = None


class GetAdapters(Query[list[LoadedAdapter]], frozen=True):
    """The loaded LoRA adapters. Returned at once, whatever the engine is busy with."""


class LoadAdapter(Query[LoadedAdapter], frozen=True):
    """Loads the adapter at `path`. replace: an adapter of this name is replaced."""

    name: str
    path: str
    replace: bool = False


class UnloadAdapter(Query[None], frozen=True):
    name: str


class RecordTrace(Query[bytes], frozen=True):
    """Records for some seconds. The result is a file for Perfetto."""

    seconds: float


class StoreResponse(Query[None], frozen=True):
    """Keeps a response of `/v1/responses`, within these bounds for its tenant."""

    tenant: str
    id: str
    data: bytes
    max_responses: int
    max_bytes: int


class GetResponse(Query[bytes | None], frozen=True):
    """A stored response of one tenant, or of any; None if there is none."""

    id: str
    tenant: str | None


class DeleteResponse(Query[bool], frozen=True):
    """The result is whether there was one."""

    id: str
    tenant: str | None


EngineQuery = (
    GetHealth
    | GetStats
    | GetRequests
    | AbortRequests
    | GetMetrics
    | GetMonitor
    | FlushCache
    | FlushWhenIdle
    | GetPins
    | PinPrefix
    | UnpinPrefix
    | PauseEngine
    | ResumeEngine
    | UpdateWeights
    | GetAdapters
    | LoadAdapter
    | UnloadAdapter
    | RecordTrace
    | StoreResponse
    | GetResponse
    | DeleteResponse
)
# They take as long as they take.
LONG_QUERIES = (FlushWhenIdle, PauseEngine, UpdateWeights, LoadAdapter, UnloadAdapter, RecordTrace)
# By the base class that each declares.
QUERY_RESULTS = {kind: get_args(vars(kind)["__orig_bases__"][0])[0] for kind in get_args(EngineQuery)}


def response_id_of(request_id: str) -> str:
    """The id of the response a request belongs to: `cmpl-1f-0` is a part of `cmpl-1f`."""
    return request_id.rpartition("-")[0] if request_id.count("-") == 2 else request_id
