"""The interface to several engines as if they were one: the router chooses the engine of each job.

Each front end has a router of its own, fed by the same reports of the engines. A job whose engine exits before the
first output is sent to another one, once: a request that kills engines must not kill all of them. With a single engine
nothing is routed, and calls go straight to its `RemoteClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from paceline.cluster.router import Decision, NoReplica, Router, RouteRequest
from paceline.config import ServerConfig, TenantConfig
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed, OutputDelta
from paceline.request import PacelineError
from paceline.server.auth import batch_tenants
from paceline.server.engine_client import EngineGone, EngineSilent, EngineState, OnAborted, ServedModel
from paceline.server.messages import ReplicaReport
from paceline.server.metrics import MetricFamily, counter
from paceline.server.queries import (
    EngineQuery,
    GetMetrics,
    GetMonitor,
    Query,
    RecordTrace,
    StoreResponse,
)
from paceline.server.rate_limiter import RateLimiter
from paceline.server.remote_client import MessageClient, OutputQueue, RemoteClient, wait_aborted
from paceline.server.replica_queries import OVERVIEWS, PINS, READ_ONLY, combine
from paceline.text.tokenizer import Tokenizer

T = TypeVar("T")

log = logging.getLogger("paceline.server")
# Errors of an engine that do not fail a query to all of them, as long as one has answered.
_DROPPED: tuple[tuple[tuple[type[EngineQuery], ...], tuple[type[PacelineError], ...]], ...] = (
    (PINS, (PacelineError,)),
    (OVERVIEWS, (EngineGone, EngineSilent)),
    (READ_ONLY, (EngineGone,)),
)


@dataclass(slots=True, eq=False)
class RoutedJob:
    """A job and where it was sent."""

    job: Job
    began: float
    route_id: str = ""
    replica: int = 0
    number: int | None = None  # of the job, at its replica; None: not sent
    prefill_at: str = ""  # address of the engine that computes its prompt, until that is done; "": its own
    has_output: bool = False
    was_retried: bool = False
    is_finished: bool = False


class ReplicaClient:
    def __init__(
        self,
        name: str,
        address: str,
        tokenizer: Tokenizer | None,
        config: ServerConfig,
        tenants: Sequence[TenantConfig] = (),
    ) -> None:
        """Binds `address`, or addresses that begin with it, and receives on the running event loop."""
        self._name = name
        self._replicas = self._make_replicas(address, tokenizer, config)
        self._strategy, self._role = config.router, config.role
        # From the first connection on: the page size is known then. Prefill engines have a router of their own.
        self._router: Router | None = None
        self._prefill_router: Router | None = None
        self._num_prefill, self._prefill_from_tokens = config.prefill_replicas, config.prefill_from_tokens
        self._kv_addresses: dict[int, str] = {}  # of prefill engines
        self._route_ids = map(str, itertools.count())
        self._limiter = RateLimiter([*tenants, *batch_tenants(tenants)])
        self._refused: Counter[str] = Counter()  # by tenant
        self._reasons: Counter[str] = Counter()  # of decisions
        self._num_retried = self._num_prefilled = 0

    # ------------------------------------------------------------------ connections to the engines

    def _make_replicas(
        self, address: str, tokenizer: Tokenizer | None, config: ServerConfig
    ) -> Sequence[MessageClient]:
        if config.replicas == 1:
            return [RemoteClient(self._name, address, tokenizer)]
        return [
            RemoteClient(self._name, f"{address}-{replica}", tokenizer, partial(self._on_report, replica))
            for replica in range(config.replicas)
        ]

    def connect(self, replica: int, address: str, model: ServedModel, kv_address: str = "") -> None:
        """`kv_address`: where decode engines reach a prefill engine."""
        self._replicas[replica].connect(address, model)
        if len(self._replicas) > 1:
            if self._router is None:
                self._router = Router(len(self._replicas), model.page_size, self._strategy)
                if self._num_prefill:
                    self._prefill_router = Router(len(self._replicas), model.page_size, self._strategy)
            self._kv_addresses[replica] = kv_address
            router = self._router_of(replica)
            assert router is not None, "it was made above"
            router.start(replica, time.monotonic())

    def _router_of(self, replica: int) -> Router | None:
        """In each router, the replicas of the other one are down."""
        return self._prefill_router if replica < self._num_prefill else self._router

    def disconnect(self, replica: int, error: PacelineError) -> None:
        router = self._router_of(replica)
        if router is not None:
            router.stop(replica)  # first: jobs are sent elsewhere
        self._replicas[replica].disconnect(error)

    def set_loading(self, replica: int) -> None:
        self._replicas[replica].loading = True

    def fail_all(self, error: PacelineError) -> None:
        for one in self._replicas:
            one.fail_all(error)

    @property
    def engines(self) -> Sequence[EngineState]:
        return [one.state(self._role_of(replica)) for replica, one in enumerate(self._replicas)]

    def _role_of(self, replica: int) -> str:
        if not self._num_prefill:
            return self._role
        return "prefill" if replica < self._num_prefill else "decode"

    @property
    def model(self) -> ServedModel:
        up = (one for one in self._replicas if one.is_up)
        return next(up, self._replicas[0]).model

    @property
    def loading(self) -> bool:
        return not any(one.is_up for one in self._replicas) and any(one.loading for one in self._replicas)

    async def close(self) -> None:
        for one in self._replicas:
            await one.close()

    def _on_report(self, replica: int, report: ReplicaReport) -> None:
        router = self._router_of(replica)
        if router is not None:
            report.changes.apply(router, replica)
            router.report(replica, report.load, time.monotonic(), report.num_received)

    # ------------------------------------------------------------------ requests

    def stream(
        self, jobs: Sequence[Job], on_aborted: OnAborted | None = None
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        if len(self._replicas) == 1:
            return self._replicas[0].stream(jobs, on_aborted)
        return self._routed_stream(jobs, on_aborted)

    async def _routed_stream(
        self, jobs: Sequence[Job], on_aborted: OnAborted | None
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        queue: OutputQueue = asyncio.Queue()
        assert self.model, "raises if there is no engine"
        routed: list[RoutedJob] = []
        try:
            for index, job in enumerate(jobs):
                self._acquire(job)
                routed.append(RoutedJob(job, time.monotonic()))
                self._submit(index, routed[-1], queue)
            num_unfinished = len(jobs)
            while num_unfinished:
                index, item = await queue.get()
                one = routed[index]
                if isinstance(item, PacelineError):
                    if not isinstance(item, EngineGone) or one.has_output or one.was_retried:
                        raise item
                    one.was_retried = True
                    if one.prefill_at:
                        self._prefill_ended(one)
                    self._num_retried += 1
                    self._submit(index, one, queue)
                    continue
                one.has_output = True
                if one.prefill_at:
                    self._prefill_ended(one)
                if item.finish_reason is not None:
                    self._end(one, 0 if item.usage is None else item.usage.completion_tokens)
                    num_unfinished -= 1
                yield index, item
        finally:
            unfinished = [one for one in routed if not one.is_finished]
            sent = [(self._replicas[one.replica], one.number) for one in unfinished if one.number is not None]
            num_aborted = sum(client.abort(number) for client, number in sent)
            try:
                if num_aborted and on_aborted is not None:
                    await wait_aborted(queue, num_aborted, on_aborted)
            finally:
                for client, number in sent:
                    client.forget(number)
                for one in unfinished:
                    self._end(one, 0)

    def _acquire(self, job: Job) -> None:
        try:
            self._limiter.acquire(job.tenant, len(job.prompt), time.monotonic())
        except PacelineError:
            self._refused[job.tenant] += 1
            raise

    def _submit(self, index: int, one: RoutedJob, queue: OutputQueue) -> None:
        self._route(one)
        one.number = self._replicas[one.replica].submit(index, self._job_to_send(one), queue)

    def _route(self, one: RoutedJob) -> None:
        """Chooses the replica of a job."""
        assert self._router is not None, "an engine is, or was, connected"
        job, now = one.job, time.monotonic()
        namespace = (job.tenant, job.cache_salt, job.adapter_version)
        one.route_id = next(self._route_ids)
        request = RouteRequest(one.route_id, job.prefix_keys, namespace, job.tenant, job.params.max_tokens)
        decision = self._choose(request, now)
        self._reasons[decision.reason.value] += 1
        one.replica = decision.replica
        if one.replica >= self._num_prefill > 0:
            self._choose_prefill(one, request, decision.num_cached_tokens, now)
        if one.was_retried:
            log.warning("request %s is sent to engine %d: the other one exited", job.id, one.replica)

    def _job_to_send(self, one: RoutedJob) -> Job:
        """With its prefill engine. A job that is sent again has less time left."""
        job = replace(one.job, prefill_at=one.prefill_at) if one.prefill_at else one.job
        if not one.was_retried or job.timeout_s is None:
            return job
        return replace(job, timeout_s=max(1e-3, job.timeout_s - (time.monotonic() - one.began)))

    def _choose(self, request: RouteRequest, now: float) -> Decision:
        """The replica that decodes; if all of those are down, a prefill engine computes the whole request."""
        for router in (self._router, self._prefill_router):
            with contextlib.suppress(NoReplica):
                if router is not None:
                    return router.choose(request, now)
        assert self.model, "raises what happened to the engines"
        raise NoReplica("Every replica is down or draining: retry in a moment.")

    def _choose_prefill(self, one: RoutedJob, request: RouteRequest, num_cached: int, now: float) -> None:
        """Chooses the prefill engine that computes the prompt, if that is worth a transfer."""
        if len(one.job.prompt) - num_cached < self._prefill_from_tokens or self._prefill_router is None:
            return
        with contextlib.suppress(NoReplica):
            # No output: the least wait and the longest cached prefix decide.
            decision = self._prefill_router.choose(replace(request, max_tokens=0), now)
            one.prefill_at = self._kv_addresses[decision.replica]
            self._num_prefilled += 1

    def _prefill_ended(self, one: RoutedJob) -> None:
        assert self._prefill_router is not None, "the prompt was routed"
        one.prefill_at = ""
        self._prefill_router.finished(one.route_id)

    def _end(self, one: RoutedJob, num_output_tokens: int) -> None:
        router = self._router_of(one.replica)
        assert router is not None, "the job was routed"
        one.is_finished = True
        if one.prefill_at:
            self._prefill_ended(one)
        router.finished(one.route_id, num_output_tokens)
        self._limiter.release(one.job.tenant, num_output_tokens)

    # ------------------------------------------------------------------ queries

    async def query(self, query: Query[T]) -> T:
        if len(self._replicas) == 1:
            return await self._replicas[0].query(query)
        assert self.model, "raises if there is no engine"
        up = {replica: one for replica, one in enumerate(self._replicas) if one.is_up}
        if (only := self._only_one(query, up)) is not None:
            return await only.query(query)
        found: T = combine(query, await self._ask(query, up))
        if isinstance(query, GetMetrics) and isinstance(found, list):
            found.extend(self._metrics())
        return found

    def _only_one(self, query: Query[object], up: dict[int, MessageClient]) -> MessageClient | None:
        """The engine that a query is for; None: all."""
        match query:
            case GetMonitor():
                return self._monitored(query.replica)
            case RecordTrace():
                return next(iter(up.values()))
            case StoreResponse():  # on one of them: reading asks all
                usable = [one for one in up.values() if not one.is_silent] or list(up.values())
                return usable[zlib.crc32(query.id.encode()) % len(usable)]
        return None

    def _monitored(self, number: int) -> MessageClient:
        if not 0 <= number < len(self._replicas):
            raise EngineFailed(f"replica is {number}: there are {len(self._replicas)}, from 0 on.")
        return self._replicas[number]

    async def _ask(self, query: Query[T], up: dict[int, MessageClient]) -> dict[int, T]:
        found = await asyncio.gather(*(one.query(query) for one in up.values()), return_exceptions=True)
        answers = dict(zip(up, found, strict=True))
        errors = {replica: one for replica, one in answers.items() if isinstance(one, BaseException)}
        dropped = next((errors for queries, errors in _DROPPED if isinstance(query, queries)), ())
        if len(errors) < len(answers):
            errors = {replica: error for replica, error in errors.items() if not isinstance(error, dropped)}
        for replica, error in errors.items():
            log.warning("engine %d: %s failed: %s", replica, type(query).__name__, error)
            raise error
        return {replica: one for replica, one in answers.items() if not isinstance(one, BaseException)}

    def _metrics(self) -> list[MetricFamily]:
        """Of this front end's router."""
        label = {"worker": self._name}
        return [
            MetricFamily(
                "router_decisions",
                "counter",
                "Requests routed to an engine, by reason.",
                [({**label, "reason": reason}, count) for reason, count in sorted(self._reasons.items())],
            ),
            counter("router_prefills", "Prompts sent to a prefill engine.", self._num_prefilled, label),
            counter(
                "router_retries", "Requests sent to another engine because theirs exited.", self._num_retried, label
            ),
            MetricFamily(
                "router_refused",
                "counter",
                "Requests refused because of a limit of their tenant, by tenant.",
                [({**label, "tenant": tenant}, count) for tenant, count in sorted(self._refused.items())],
            ),
        ]
