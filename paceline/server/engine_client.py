"""The one door between HTTP and the engine: jobs go in as token ids and parameters, pieces come out.

The app knows nothing of an engine but this protocol. Two things keep it: `RemoteClient`, whose engine is another
process, and `LocalClient`, its plain twin. All that goes through is data.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.server.metrics import MetricFamily


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind the door."""

    name: str
    family: str
    num_parameters: int
    dtype: str
    device: str
    vocab_size: int
    context_tokens: int
    max_tokens: int  # of a prompt and its output together, by context and memory
    max_running: int
    kv_tokens: int
    host_kv_tokens: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine is doing now, and what it has done since it started."""

    num_running: int = 0
    num_waiting: int = 0
    num_finished: Mapping[str, int] = field(default_factory=dict)  # by reason
    kv_tokens: int = 0
    kv_tokens_free: int = 0  # empty, or a cached prefix that nobody is using
    host_kv_tokens: int = 0
    host_kv_tokens_free: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """Whether tokens can be made. Answered at once, whatever the engine is busy with."""

    failure: str | None = None  # why not
    num_passes: int = 0  # so far
    idle: bool = True


@dataclass(frozen=True, slots=True)
class RequestState:
    """One request that has not ended."""

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


# What may be asked, and of which type the answer is.
class _Question(msgspec.Struct, frozen=True, tag=True):
    pass


class GetHealth(_Question, frozen=True):
    pass


class GetStats(_Question, frozen=True):
    pass


class GetRequests(_Question, frozen=True):
    """Of one tenant, or of all; with an id, those that belong to that answer."""

    tenant: str | None = None
    id: str | None = None
    limit: int = 1000


class AbortRequests(_Question, frozen=True):
    """Those that belong to the answer of this id. Answers how many there were."""

    id: str
    tenant: str | None = None


class GetMetrics(_Question, frozen=True):
    pass


class GetLive(_Question, frozen=True):
    """What the live page draws: see `live.py`."""


class FlushCache(_Question, frozen=True):
    """Answers how many tokens of KV memory came free."""


class GetPins(_Question, frozen=True):
    pass


class PinPrefix(_Question, frozen=True):
    """Answers how many tokens are pinned."""

    name: str
    prompt: list[int]
    expires_in_s: float | None = None
    tenant: str = "default"
    cache_salt: str = ""


class UnpinPrefix(_Question, frozen=True):
    name: str


Question = (
    GetHealth
    | GetStats
    | GetRequests
    | AbortRequests
    | GetMetrics
    | GetLive
    | FlushCache
    | GetPins
    | PinPrefix
    | UnpinPrefix
)
ANSWERS: dict[type, Any] = {
    GetHealth: Health,
    GetStats: EngineStats,
    GetRequests: list[RequestState],
    AbortRequests: int,
    GetMetrics: list[MetricFamily],
    GetLive: dict[str, Any],
    FlushCache: int,
    GetPins: list[PinState],
    PinPrefix: int,
    UnpinPrefix: None,
}


class EngineClient(Protocol):
    @property
    def served(self) -> ServedModel:
        """Raises EngineFailed while there is none."""

    @property
    def loading(self) -> bool:
        """Whether there is none because it is still being loaded."""

    def stream(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """The pieces of all jobs as they come, each with its job's place in `jobs`. Raises when one is refused.
        Leaving the iteration early, in whatever way, aborts what has not ended."""

    async def ask(self, question: Question) -> Any: ...

    async def close(self) -> None:
        """Aborts what is running and ends the engine."""


def answer_of(request_id: str) -> str:
    """The answer that a request belongs to: `cmpl-1f-0` is a part of `cmpl-1f`."""
    return request_id.rpartition("-")[0] if request_id.count("-") == 2 else request_id
