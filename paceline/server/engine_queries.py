"""The engine's side of the queries: executes them on the engine thread, between two steps."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from paceline.engine.adapter_loading import load_adapter, unload_adapter
from paceline.engine.cache_flush import flush_when_idle
from paceline.engine.engine import Engine
from paceline.engine.monitor import EngineMonitor
from paceline.engine.output import LoadedAdapter
from paceline.engine.pausing import PauseMode
from paceline.engine.trace_recorder import record_trace
from paceline.engine.weight_update import update_weights
from paceline.request import FinishReason
from paceline.scheduler import Scheduler
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.server.auth import owner_of
from paceline.server.engine_client import ServedModel
from paceline.server.engine_kv_transfer import EngineKvTransfer
from paceline.server.engine_metrics import EngineMetrics
from paceline.server.queries import (
    LONG_QUERIES,
    AbortRequests,
    DeleteResponse,
    EngineStats,
    FlushCache,
    FlushWhenIdle,
    GetAdapters,
    GetHealth,
    GetMetrics,
    GetMonitor,
    GetPins,
    GetRequests,
    GetResponse,
    GetStats,
    Health,
    LoadAdapter,
    PauseEngine,
    PinPrefix,
    PinState,
    Query,
    RecordTrace,
    RequestState,
    ResumeEngine,
    StoreResponse,
    UnloadAdapter,
    UnpinPrefix,
    UpdateWeights,
    response_id_of,
)
from paceline.server.response_store import ResponseStore

T = TypeVar("T")


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
        max_tokens=config.max_request_tokens,
        clips_max_tokens=config.clip_max_tokens,
        max_running=config.max_running,
        kv_tokens=config.num_pages * config.page_size,
        host_kv_tokens=config.num_host_pages * config.page_size,
        kv_bytes_per_token=info.kv_bytes_per_token,
        page_size=config.page_size,
        has_adapters=bool(engine.adapters.loaded),
    )


_MAX_COMPUTING = 20  # times watchdog_s, for one pass of a CPU that computes all the time


class EngineQueries:
    def __init__(
        self,
        engine: Engine,
        watchdog_s: float = math.inf,
        on_weights: Callable[[str, str], None] = lambda path, version: None,
        on_adapters: Callable[[Sequence[LoadedAdapter]], None] = lambda adapters: None,
    ) -> None:
        """`watchdog_s`: seconds without progress, while there is work, after which the engine counts as stuck.
        `on_weights` is called after every weight update with its path and version, `on_adapters` with all adapters
        after one was loaded or unloaded."""
        self._engine, self._watchdog_s, self._on_weights = engine, watchdog_s, on_weights
        self._on_adapters = on_adapters
        self.metrics = EngineMetrics()
        self.kv_transfer: EngineKvTransfer | None = None
        self._responses = ResponseStore()
        self._monitor = EngineMonitor(engine.scheduler, engine.clock)
        self._activity, self._active_at = 0.0, -math.inf  # of the executor: its last value, and when it changed

    def execute(self, query: Query[T]) -> Future[T]:
        """Health is returned at once, on the caller's thread: an engine that is stuck must still report it. So are
        stored responses, which the engine does not know."""
        result: Future[Any] = Future()
        if isinstance(query, GetHealth):
            result.set_result(self.health())
        elif isinstance(query, GetAdapters):
            result.set_result(self._engine.adapters.loaded)
        elif isinstance(query, StoreResponse):
            bounds = {"max_responses": query.max_responses, "max_bytes": query.max_bytes}
            self._responses.put(query.tenant, query.id, query.data, **bounds)
            result.set_result(None)
        elif isinstance(query, GetResponse):
            result.set_result(self._responses.get(query.id, query.tenant))
        elif isinstance(query, DeleteResponse):
            result.set_result(self._responses.delete(query.id, query.tenant))
        elif isinstance(query, LONG_QUERIES):
            threading.Thread(target=self._run_long, args=(query, result), daemon=True).start()
        else:
            return self._engine.call(self._function(query))
        return result

    def _run_long(self, query: Query[object], result: Future[Any]) -> None:
        """On a thread of its own: these block."""
        if not result.set_running_or_notify_cancel():  # from here on it cannot be cancelled
            return
        found: object = None
        try:
            match query:
                case PauseEngine():
                    self._engine.pause(PauseMode(query.mode)).result()
                case UpdateWeights():
                    found = update = update_weights(self._engine, query.path, mode=query.mode, version=query.version)
                    self._on_weights(query.path, update.version)
                case LoadAdapter():
                    found = load_adapter(self._engine, query.name, query.path, replace=query.replace)
                    self._on_adapters(self._engine.adapters.loaded)
                case UnloadAdapter():
                    unload_adapter(self._engine, query.name)
                    self._on_adapters(self._engine.adapters.loaded)
                case FlushWhenIdle():
                    found = flush_when_idle(self._engine, query.timeout_s) * self._engine.scheduler.config.page_size
                case RecordTrace():
                    found = record_trace(self._engine, query.seconds)
            result.set_result(found)
        except BaseException as error:
            result.set_exception(error)

    def _function(self, query: Query[object]) -> Callable[[Scheduler], Any]:
        now = time.monotonic()
        match query:
            case GetStats():
                return lambda scheduler: _stats(scheduler, self._engine)
            case GetRequests():
                return lambda scheduler: [
                    *(
                        _state(scheduler, request, self._engine.clock())
                        for request in _select(scheduler, query.tenant, query.id)
                    ),
                    *self._waiting_for_kv(query.tenant, query.id),
                ][: query.limit]
            case AbortRequests():
                return lambda scheduler: self._abort(scheduler, query)
            case GetMetrics():
                return lambda scheduler: self.metrics.collect(scheduler, self._engine)
            case GetMonitor():
                return lambda _: self._monitor.state()
            case FlushCache():
                return lambda scheduler: self._engine.flush_cache(scheduler) * scheduler.config.page_size
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
            case ResumeEngine():
                self._engine.resume()
                return lambda _: None  # after it
            case _:
                raise AssertionError(f"unknown query: {query}")

    def _abort(self, scheduler: Scheduler, query: AbortRequests) -> int:
        selected = _select(scheduler, query.tenant, query.id)
        count = sum(scheduler.finish(one.id, FinishReason.ABORT, self._engine.clock()) for one in selected)
        for one in self._waiting_for_kv(query.tenant, query.id):
            assert self.kv_transfer is not None, "a request waits for its KV"
            count += self.kv_transfer.finish(one.id, FinishReason.ABORT)
        return count

    def _waiting_for_kv(self, tenant: str | None, response_id: str | None) -> list[RequestState]:
        """Requests that the scheduler does not know yet: a prefill engine computes their prompt."""
        jobs = [] if self.kv_transfer is None else self.kv_transfer.waiting_jobs()
        return [
            RequestState(
                id=job.id,
                tenant=job.tenant,
                state="waiting",
                prompt_tokens=len(job.prompt),
                cached_tokens=0,
                fetched_tokens=0,
                output_tokens=0,
                max_tokens=job.params.max_tokens or 0,
                age_s=self._engine.clock() - began,
                priority=job.priority,
                retractions=0,
                why=f"Request {job.id} waits for the KV of its prompt, which the prefill engine at {peer} computes.",
            )
            for job, began, peer in jobs
            if _is_selected(job.id, job.tenant, tenant, response_id)
        ]

    def health(self) -> Health:
        engine, progress = self._engine, self._engine.progress
        if engine.failure is not None:
            return Health(f"{type(engine.failure).__name__}: {engine.failure}", progress.num_passes, False)
        now, activity = engine.clock(), engine.executor.local.activity
        if activity != self._activity:
            self._activity, self._active_at = activity, now
        # A slow CPU may take longer for a pass than a GPU is waited for. One that computes for ever is stuck too.
        active_at = min(self._active_at, progress.since + _MAX_COMPUTING * self._watchdog_s)
        stuck_s = now - max(progress.since, active_at)
        if progress.has_work and stuck_s > self._watchdog_s:
            return Health(
                f"no progress for {stuck_s:.0f} s: waiting for {engine.waits_for}.", progress.num_passes, False
            )
        return Health(None, progress.num_passes, not progress.has_work, engine.is_paused)


def _select(scheduler: Scheduler, tenant: str | None, response_id: str | None) -> list[TrackedRequest]:
    return [
        request
        for request in scheduler.requests.values()
        # Prompts that are computed for a decode engine are listed there.
        if not request.is_exported and _is_selected(request.id, request.tenant, tenant, response_id)
    ]


def _is_selected(id: str, owner: str, tenant: str | None, response_id: str | None) -> bool:
    is_owned = tenant is None or owner_of(owner) == tenant
    return is_owned and (response_id is None or response_id in (id, response_id_of(id)))


def _state(scheduler: Scheduler, request: TrackedRequest, now: float) -> RequestState:
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


def _stats(scheduler: Scheduler, engine: Engine) -> EngineStats:
    page_size, host = scheduler.config.page_size, scheduler.memory.host
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_finished={reason.value: count for reason, count in scheduler.counters.finished.items()},
        kv_tokens=scheduler.config.num_pages * page_size,
        kv_tokens_free=scheduler.memory.num_available_pages * page_size,
        host_kv_tokens=scheduler.config.num_host_pages * page_size,
        host_kv_tokens_free=0 if host is None else host.pool.num_free * page_size,
        paused=engine.is_paused,
        weight_version=engine.weights.current,
    )
