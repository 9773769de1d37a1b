"""What all handlers of one front end share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.config import ServerConfig
from paceline.server.auth import ApiKeys
from paceline.server.engine_client import EngineClient
from paceline.server.errors import unknown_model
from paceline.server.metrics import ServerCounters
from paceline.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True, eq=False)
class ServerState:
    client: EngineClient
    tokenizer: Tokenizer
    config: ServerConfig
    model_name: str
    api_keys: ApiKeys
    counters: ServerCounters = field(default_factory=ServerCounters)
    worker: str = "front-end-0"
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # new requests are refused
    on_draining: Callable[[bool], None] = lambda _: None  # notifies the other front ends

    def check_model(self, name: str | None) -> None:
        """Raises unless `name` is the served model, or is not given."""
        if name is not None and name != self.model_name:
            raise unknown_model(name, self.model_name)
