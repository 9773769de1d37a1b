"""The one door between HTTP and the engine.

The app knows nothing of an engine but this protocol: jobs go in as token ids and parameters, pieces come out. All of
it could be sent through a socket, so the engine may move into a process of its own without the app noticing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol, cast

from paceline.engine.engine import Engine
from paceline.engine.output import Piece
from paceline.request import SamplingParams
from paceline.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to be continued."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Stats:
    """What the engine is doing now, and what it has done since it started."""

    failure: str | None = None  # why it serves no more, if that is so; then nothing else is known
    num_running: int = 0
    num_waiting: int = 0
    num_finished: Mapping[str, int] = field(default_factory=dict)  # by reason
    kv_tokens: int = 0
    kv_tokens_free: int = 0  # empty, or a cached prefix that nobody is using


class EngineClient(Protocol):
    def stream(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces of all jobs as they come, each with its job's place in `jobs`. Raises when one is refused.
        Leaving the iteration early, in whatever way, aborts what has not ended."""

    async def stats(self) -> Stats: ...

    async def close(self) -> None:
        """Aborts what is running and ends the engine."""


class LocalClient:
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def stream(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Piece], None]:
        if len(jobs) == 1:  # nearly always: no tasks and no second queue
            async with aclosing(self._one(jobs[0])) as pieces:
                async for piece in pieces:
                    yield 0, piece
            return
        queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(index, job, queue)) for index, job in enumerate(jobs)]
        try:
            num_left = len(jobs)
            while num_left:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                num_left -= item.finish_reason is not None
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # what they had to say is in the queue

    async def stats(self) -> Stats:
        failure = self._engine.failure
        if failure is not None:
            return Stats(failure=f"{type(failure).__name__}: {failure}")
        return await asyncio.wrap_future(self._engine.ask(_stats))

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)

    def _one(self, job: Job) -> AsyncGenerator[Piece, None]:
        pieces = self._engine.stream(job.prompt, job.params, request_id=job.id)
        return cast("AsyncGenerator[Piece, None]", pieces)  # it says less of itself: that it can be iterated

    async def _pump(self, index: int, job: Job, queue: asyncio.Queue[tuple[int, Piece | Exception]]) -> None:
        try:
            async with aclosing(self._one(job)) as pieces:
                async for piece in pieces:
                    queue.put_nowait((index, piece))
        except Exception as error:
            queue.put_nowait((index, error))


def _stats(scheduler: Scheduler) -> Stats:
    page_size = scheduler.config.page_size
    return Stats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_finished={reason.value: count for reason, count in scheduler.counters.finished.items()},
        kv_tokens=scheduler.config.num_pages * page_size,
        kv_tokens_free=scheduler.memory.num_available_pages * page_size,
    )
