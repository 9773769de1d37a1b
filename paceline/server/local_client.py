"""The interface to an engine in this process: the reference implementation of `RemoteClient`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar, cast

from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.server.engine_client import ABORT_TIMEOUT_S, EngineState, OnAborted, ServedModel
from paceline.server.engine_queries import EngineQueries, served_model
from paceline.server.queries import Query

T = TypeVar("T")


class LocalClient:
    loading = False

    def __init__(self, engine: Engine, name: str = "local", watchdog_s: float = math.inf) -> None:
        self._engine = engine
        self._queries = EngineQueries(engine, watchdog_s)
        self.model: ServedModel = served_model(engine, name)

    @property
    def engines(self) -> Sequence[EngineState]:
        health = self._queries.health()
        return [EngineState("both", health.failure, paused=health.paused, num_passes=health.num_passes)]

    async def stream(
        self, jobs: Sequence[Job], on_aborted: OnAborted | None = None
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        queue: asyncio.Queue[tuple[int, OutputDelta | Exception]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._run(index, job, queue)) for index, job in enumerate(jobs)]
        try:
            num_unfinished = len(jobs)
            while num_unfinished:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                num_unfinished -= item.finish_reason is not None
                yield index, item
        finally:
            running = [task for task in tasks if not task.done()]
            if running and on_aborted is not None:
                for job in jobs:
                    self._engine.abort(job.id)
                await asyncio.wait(running, timeout=ABORT_TIMEOUT_S)
                while not queue.empty():
                    index, item = queue.get_nowait()
                    if isinstance(item, OutputDelta):
                        on_aborted(index, item)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # their errors are in the queue

    async def query(self, query: Query[T]) -> T:
        return await asyncio.wrap_future(self._queries.execute(query))

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)

    async def _run(self, index: int, job: Job, queue: asyncio.Queue[tuple[int, OutputDelta | Exception]]) -> None:
        try:
            outputs = cast("AsyncGenerator[OutputDelta, None]", self._engine.stream(job))
            async with aclosing(outputs) as opened:
                async for output in opened:
                    queue.put_nowait((index, output))
        except Exception as error:
            queue.put_nowait((index, error))
