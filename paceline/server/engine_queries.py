"""The engine's side of the queries: executes them on the engine thread, between two steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from paceline.engine.engine import Engine
from paceline.engine.monitor import EngineMonitor
from paceline.request import FinishReason, Request
from paceline.scheduler import Scheduler
from paceline.server.engine_client import ServedModel
from paceline.server.engine_metrics import EngineMetrics
from paceline.server.queries import (
    AbortRequests,
    EngineQuery,
    EngineStats,
    FlushCache,
    GetHealth,
    GetMetrics,
    GetMonitor,
    GetPins,
    GetRequests,
    GetStats,
    Health,
    PinPrefix,
    PinState,
    RequestState,
    UnpinPrefix,
    response_id_of,
)


def served_model(engine: Engine, name: str) -> ServedModel:
    config, info = engine.scheduler.config, engine.info
    return ServedModel(
        name=name,
        family=info.family,
        num_parameters=info.num_parameters,
        dtype=info.dtype,
        device=info.device,
        vocab_size=engine.vocab_size,
        context_tokens=config.context_tokens,
        max_tokens=min(config.context_tokens, (config.num_pages - config.pin_quota_pages) * config.page_size),
        max_running=config.max_running,
        kv_tokens=config.num_pages * config.page_size,
        host_kv_tokens=config.num_host_pages * config.page_size,
        kv_bytes_per_token=info.kv_bytes_per_token,
    )


class EngineQueries:
    def __init__(self, engine: Engine, stall_s: float = math.inf) -> None:
        """`stall_s`: seconds without progress, while there is work, after which the engine counts as stuck."""
        self._engine, self._stall_s = engine, stall_s
        self.metrics = EngineMetrics()
        self._monitor = EngineMonitor(engine.scheduler, engine.clock)

    def execute(self, query: EngineQuery) -> Future[Any]:
        """Health is returned at once, on the caller's thread: an engine that is stuck must still report it."""
        if isinstance(query, GetHealth):
            result: Future[Any] = Future()
            result.set_result(self._health())
            return result
        return self._engine.call(self._function(query))

    def _function(self, query: EngineQuery) -> Callable[[Scheduler], Any]:
        now = time.monotonic()
        match query:
            case GetStats():
                return _stats
            case GetRequests():
                return lambda scheduler: [
                    _state(scheduler, request, self._engine.clock())
                    for request in _select(scheduler, query.tenant, query.id)[: query.limit]
                ]
            case AbortRequests():
                return lambda scheduler: sum(
                    scheduler.finish(request.id, FinishReason.ABORT, self._engine.clock())
                    for request in _select(scheduler, query.tenant, query.id)
                )
            case GetMetrics():
                return lambda scheduler: self.metrics.collect(scheduler, self._engine)
            case GetMonitor():
                return lambda _: self._monitor.state()
            case FlushCache():
                return lambda scheduler: scheduler.flush_cache() * scheduler.config.page_size
            case GetPins():
                return lambda scheduler: [
                    PinState(pin.name, pin.node.depth, None if math.isinf(pin.expires) else pin.expires - now)
                    for pin in scheduler.memory.pins.values()
                ]
            case PinPrefix():
                expires = math.inf if query.expires_in_s is None else now + query.expires_in_s
                return lambda scheduler: scheduler.pin(
                    query.name,
                    query.prompt,
                    self._engine.clock(),
                    expires=expires,
                    tenant=query.tenant,
                    cache_salt=query.cache_salt,
                )
            case UnpinPrefix():
                return lambda scheduler: scheduler.unpin(query.name, self._engine.clock())
            case _:
                raise AssertionError(f"unknown query: {query}")

    def _health(self) -> Health:
        engine, progress = self._engine, self._engine.progress
        if engine.failure is not None:
            return Health(f"{type(engine.failure).__name__}: {engine.failure}", progress.num_passes, False)
        stuck_s = engine.clock() - progress.since
        if progress.has_work and stuck_s > self._stall_s:
            return Health(
                f"no progress for {stuck_s:.0f} s: waiting for {engine.waits_for}.", progress.num_passes, False
            )
        return Health(None, progress.num_passes, not progress.has_work)


def _select(scheduler: Scheduler, tenant: str | None, response_id: str | None) -> list[Request]:
    return [
        request
        for request in scheduler.requests.values()
        if (tenant is None or request.tenant == tenant)
        and (response_id is None or response_id in (request.id, response_id_of(request.id)))
    ]


def _state(scheduler: Scheduler, request: Request, now: float) -> RequestState:
    return RequestState(
        id=request.id,
        tenant=request.tenant,
        state=request.phase.value,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.num_cached,
        fetched_tokens=request.num_fetched,
        output_tokens=len(request.output),
        max_tokens=request.max_tokens,
        age_s=now - request.arrival,
        priority=request.priority,
        retractions=request.retractions,
        why=scheduler.explain(request.id),
    )


def _stats(scheduler: Scheduler) -> EngineStats:
    page_size, host = scheduler.config.page_size, scheduler.memory.host
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_finished={reason.value: count for reason, count in scheduler.counters.finished.items()},
        kv_tokens=scheduler.config.num_pages * page_size,
        kv_tokens_free=scheduler.memory.num_available_pages * page_size,
        host_kv_tokens=scheduler.config.num_host_pages * page_size,
        host_kv_tokens_free=0 if host is None else host.pool.num_free * page_size,
    )
