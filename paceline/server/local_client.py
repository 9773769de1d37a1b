"""An engine in this process behind the door: the plain twin of the one in a process of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

from paceline.engine.engine import Engine
from paceline.engine.output import OutputDelta
from paceline.server.engine_client import Job, ServedModel
from paceline.server.engine_queries import EngineQueries, served_model
from paceline.server.queries import EngineQuery


class LocalClient:
    loading = False

    def __init__(self, engine: Engine, name: str = "local", stall_s: float = math.inf) -> None:
        self._engine = engine
        self._queries = EngineQueries(engine, stall_s)
        self.model: ServedModel = served_model(engine, name)

    async def stream(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        queue: asyncio.Queue[tuple[int, OutputDelta | Exception]] = asyncio.Queue()
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

    async def query(self, query: EngineQuery) -> Any:
        return await asyncio.wrap_future(self._queries.execute(query))

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)

    async def _pump(self, index: int, job: Job, queue: asyncio.Queue[tuple[int, OutputDelta | Exception]]) -> None:
        try:
            pieces = self._engine.stream(
                job.prompt, job.params, request_id=job.id, tenant=job.tenant, priority=job.priority,
                timeout=job.timeout_s, cache_salt=job.cache_salt, pooling=job.pooling,
            )  # fmt: skip
            async with aclosing(cast("AsyncGenerator[OutputDelta, None]", pieces)) as opened:
                async for piece in opened:
                    queue.put_nowait((index, piece))
        except Exception as error:
            queue.put_nowait((index, error))
