"""What all handlers of one front end share."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.config import ServerConfig
from paceline.engine.output import LoadedAdapter
from paceline.server.auth import ApiKeys
from paceline.server.batches.store import BatchStore
from paceline.server.body_workers import BodyWorkers
from paceline.server.engine_client import EngineClient, ServedModel
from paceline.server.errors import ApiError, missing_parameter, unknown_model
from paceline.server.metrics import ServerCounters
from paceline.server.queries import GetAdapters
from paceline.server.rate_limiter import RateLimiter
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger("paceline.server")
T = TypeVar("T")
_ADAPTERS_AGE_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class RequestContext:
    """What a request is checked against. A value: long bodies are handled in another process."""

    tokenizer: Tokenizer
    config: ServerConfig
    model_name: str
    model: ServedModel
    adapters: tuple[str, ...] = ()  # names of loaded LoRA adapters

    def model_of(self, name: str) -> str:
        """The model that a request names; without a name the served one, if there is no other."""
        if not name and self.adapters:
            raise missing_parameter("model", f"this server has {', '.join([self.model_name, *self.adapters])}")
        self.check_model(name or None)
        return name or self.model_name

    def check_model(self, name: str | None) -> None:
        """Raises unless `name` is the served model or an adapter, or is not given."""
        if name is not None and name != self.model_name and name not in self.adapters:
            raise unknown_model(name, self.model_name, self.adapters)


@dataclass(slots=True, kw_only=True, eq=False)
class ServerState:
    client: EngineClient
    tokenizer: Tokenizer
    workers: BodyWorkers
    config: ServerConfig
    model_name: str
    api_keys: ApiKeys
    batches: BatchStore | None = None  # files and batches; None: the routes are disabled
    counters: ServerCounters = field(default_factory=ServerCounters)
    worker: str = "front-end-0"
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # new requests are refused
    shutting_down: bool = False  # the same, until the process exits
    on_draining: Callable[[bool], None] = lambda _: None  # notifies the other front ends
    # LoRA adapters, by name, as the engine last reported them. It is asked about names that are not here, and refuses
    # those that are gone, so this may be out of date.
    adapters: Mapping[str, LoadedAdapter] = field(default_factory=dict)
    # Limits of tenants before a prompt is tokenized, and for prompts that are refused then. The engine process counts
    # what it accepts, for all front ends together.
    limiter: RateLimiter = field(init=False)
    _asked: float = -math.inf
    _refresh: asyncio.Task[None] | None = None
    _next_refresh: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.limiter = RateLimiter(self.api_keys.tenants)

    async def refresh_adapters(self) -> bool:
        """Asks the engine for its adapters, if there can be any. Returns whether they have changed.

        One query at a time: all that are needed while it runs are the next one. Requests with wrong names, however
        many, keep an engine from nothing."""
        if self.config.lora_folder is None and not self.client.model.has_adapters:
            return False
        before = self.adapters
        if self._next_refresh is None:
            self._next_refresh = asyncio.create_task(self._refresh_adapters(self._refresh))
            self._next_refresh.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self._next_refresh)
        return self.adapters != before

    async def _refresh_adapters(self, running: asyncio.Task[None] | None) -> None:
        if running is not None:
            await asyncio.wait([running])
        self._refresh, self._next_refresh, self._asked = self._next_refresh, None, time.monotonic()
        try:
            self.adapters = {one.name: one for one in await self.client.query(GetAdapters())}
        finally:
            self._refresh = None

    async def run_checked(
        self, function: Callable[..., T], body: bytes | bytearray, *args: object, tenant: str | None
    ) -> T:
        """`function(body, *args, context)` off the event loop. A model that is not known may be an adapter that another
        front end has loaded."""
        try:
            return await self.workers.run(function, body, *args, self.context, tenant=tenant)
        except ApiError as error:
            if error.code != "model_not_found" or not await self.refresh_adapters():
                raise
        return await self.workers.run(function, body, *args, self.context, tenant=tenant)

    async def find_adapter(self, name: str | None) -> LoadedAdapter | None:
        """The adapter that a request names as its model. Its version decides only where the request is routed: it may
        be a second old."""
        found = None if name is None else self.adapters.get(name)
        if found is not None and time.monotonic() - self._asked > _ADAPTERS_AGE_S:
            await self.refresh_adapters()
            found = self.adapters.get(found.name, found)
        return found

    def set_draining(self, draining: bool) -> None:
        if draining != self.draining:
            self.draining = draining
            level = logging.INFO if self.shutting_down else logging.WARNING  # the operator knows of a shutdown
            if draining:
                log.log(level, "draining: new requests are refused, %d in progress", self.counters.in_progress)
            else:
                log.log(level, "not draining any more: new requests are accepted")

    @property
    def context(self) -> RequestContext:
        """Raises EngineFailed while there is no engine."""
        return RequestContext(self.tokenizer, self.config, self.model_name, self.client.model, tuple(self.adapters))
