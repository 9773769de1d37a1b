"""What all handlers of one front end share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.config import ServerConfig
from paceline.server.auth import ApiKeys
from paceline.server.batches.store import BatchStore
from paceline.server.body_workers import BodyWorkers
from paceline.server.engine_client import EngineClient, ServedModel
from paceline.server.errors import unknown_model
from paceline.server.metrics import ServerCounters
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger("paceline.server")


@dataclass(frozen=True, slots=True, eq=False)
class RequestContext:
    """What a request is checked against. A value: long bodies are handled in another process."""

    tokenizer: Tokenizer
    config: ServerConfig
    model_name: str
    model: ServedModel

    def check_model(self, name: str | None) -> None:
        """Raises unless `name` is the served model, or is not given."""
        if name is not None and name != self.model_name:
            raise unknown_model(name, self.model_name)


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
        return RequestContext(self.tokenizer, self.config, self.model_name, self.client.model)
