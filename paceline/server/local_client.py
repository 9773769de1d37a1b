"""An engine in this process behind the door: the plain twin of the one in a process of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.server.engine_client import Question, ServedModel
from paceline.server.engine_queries import EngineQueries, served_by


class LocalClient:
    loading = False

    def __init__(self, engine: Engine, name: str = "local", stall_s: float = math.inf) -> None:
        self._engine = engine
        self._side = EngineQueries(engine, stall_s)
        self.served: ServedModel = served_by(engine, name)

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

    async def ask(self, question: Question) -> Any:
        return await asyncio.wrap_future(self._side.ask(question))

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)

    async def _pump(self, index: int, job: Job, queue: asyncio.Queue[tuple[int, OutputDelta | Exception]]) -> None:
        try:
            deltas = cast("AsyncGenerator[OutputDelta, None]", self._engine.stream(job))
            async with aclosing(deltas) as opened:
                async for piece in opened:
                    queue.put_nowait((index, piece))
        except Exception as error:
            queue.put_nowait((index, error))
