"""The engine's side of the door: answers to what a front end may ask."""

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
from paceline.server.engine_client import (
    AbortRequests,
    EngineStats,
    FlushCache,
    GetHealth,
    GetLive,
    GetMetrics,
    GetPins,
    GetRequests,
    GetStats,
    Health,
    PinPrefix,
    PinState,
    Question,
    RequestState,
    ServedModel,
    UnpinPrefix,
    answer_of,
)
from paceline.server.engine_metrics import EngineMetrics


def served_by(engine: Engine, name: str) -> ServedModel:
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
        """`stall_s`: how long work may lie there without any progress before the engine counts as stuck."""
        self._engine, self._stall_s = engine, stall_s
        self.metrics = EngineMetrics()
        self._live = EngineMonitor(engine.scheduler, engine.clock)

    def ask(self, question: Question) -> Future[Any]:
        """Answered between two steps; health at once, on the caller's thread: an engine that is stuck must not keep
        that to itself."""
        if isinstance(question, GetHealth):
            answer: Future[Any] = Future()
            answer.set_result(self._health())
            return answer
        return self._engine.call(self._function(question))

    def _function(self, question: Question) -> Callable[[Scheduler], Any]:
        now = time.monotonic()
        match question:
            case GetStats():
                return _stats
            case GetRequests():
                return lambda scheduler: [
                    _state(scheduler, request, self._engine.clock())
                    for request in _chosen(scheduler, question.tenant, question.id)[: question.limit]
                ]
            case AbortRequests():
                return lambda scheduler: sum(
                    scheduler.finish(request.id, FinishReason.ABORT, self._engine.clock())
                    for request in _chosen(scheduler, question.tenant, question.id)
                )
            case GetMetrics():
                return lambda scheduler: self.metrics.collect(scheduler, self._engine)
            case GetLive():
                return lambda _: self._live.state()
            case FlushCache():
                return lambda scheduler: scheduler.flush_cache() * scheduler.config.page_size
            case GetPins():
                return lambda scheduler: [
                    PinState(pin.name, pin.node.depth, None if math.isinf(pin.expires) else pin.expires - now)
                    for pin in scheduler.memory.pins.values()
                ]
            case PinPrefix():
                expires = math.inf if question.expires_in_s is None else now + question.expires_in_s
                return lambda scheduler: scheduler.pin(
                    question.name, question.prompt, self._engine.clock(), expires=expires, tenant=question.tenant,
                    cache_salt=question.cache_salt,
                )  # fmt: skip
            case UnpinPrefix():
                return lambda scheduler: scheduler.unpin(question.name, self._engine.clock())
            case _:
                raise AssertionError(f"nobody answers {question}")

    def _health(self) -> Health:
        engine, progress = self._engine, self._engine.progress
        if engine.failure is not None:
            return Health(f"{type(engine.failure).__name__}: {engine.failure}", progress.num_passes, False)
        stuck_s = engine.clock() - progress.since
        if progress.has_work and stuck_s > self._stall_s:
            return Health(f"no progress for {stuck_s:.0f} s: waits for {engine.waits_for}.", progress.num_passes, False)
        return Health(None, progress.num_passes, not progress.has_work)


def _chosen(scheduler: Scheduler, tenant: str | None, answer_id: str | None) -> list[Request]:
    return [
        request
        for request in scheduler.requests.values()
        if (tenant is None or request.tenant == tenant)
        and (answer_id is None or request.id == answer_id or answer_of(request.id) == answer_id)
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
