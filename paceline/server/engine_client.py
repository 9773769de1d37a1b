"""The interface between HTTP and the engine: jobs in, output deltas out.

The HTTP code knows the engine through `EngineClient` alone. There are two implementations: `RemoteClient`, whose engine
is another process, and `LocalClient`, its reference implementation in this process. Only data crosses the interface.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from paceline.engine.job import Job
from paceline.engine.output import EngineFailed, OutputDelta
from paceline.server.queries import Query

T = TypeVar("T")

OnAborted = Callable[[int, OutputDelta], None]
ABORT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model the engine has loaded."""

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
    clips_max_tokens: bool = False  # a larger max_tokens is lowered, not refused
    page_size: int = 16  # of the KV cache
    has_adapters: bool = False  # LoRA adapters, from its start


class EngineGone(EngineFailed):
    """The engine process has exited; another one is started."""


class EngineSilent(EngineFailed):
    """The engine process does not answer."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What is known of an engine without asking it."""

    role: str  # both, prefill or decode
    failure: str | None  # why it cannot generate now; None: it can
    is_loading: bool = False
    paused: bool = False
    num_passes: int = 0


class EngineClient(Protocol):
    @property
    def engines(self) -> Sequence[EngineState]:
        """All engines, at once: one that hangs delays nothing."""

    @property
    def model(self) -> ServedModel:
        """Raises EngineFailed while there is no engine."""

    @property
    def loading(self) -> bool:
        """Whether there is no engine because it is still loading."""

    def stream(
        self, jobs: Sequence[Job], on_aborted: OnAborted | None = None
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Yields the output of all jobs as it arrives, each delta with its job's index. Raises if a job is refused.
        Leaving the iteration early, for any reason, aborts the jobs that have not finished. `on_aborted` is called with
        what else they have produced, before the iteration is left; `ABORT_TIMEOUT_S` limits the wait for it."""

    async def query(self, query: Query[T]) -> T: ...

    async def close(self) -> None:
        """Aborts running requests and closes the engine."""
