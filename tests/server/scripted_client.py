"""An app whose model writes a given text, for tests of formats that a random model never produces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import httpx2

from paceline.config import TenantConfig
from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.output import OutputDelta, Timings, TokenUsage
from paceline.request import FinishReason
from paceline.server.local_client import LocalClient
from tests.server.serving import Caller, make_app

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


class ScriptedClient(LocalClient):
    """Writes `text` in pieces of `size` characters, then finishes or raises. Keeps the jobs it was given."""

    text, size, reason = "", 5, FinishReason.STOP
    error: Exception | None = None

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "tiny")
        self.jobs: list[Job] = []

    async def stream(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        self.jobs += jobs
        for index, job in enumerate(jobs):
            pieces = [self.text[start : start + self.size] for start in range(0, len(self.text), self.size)]
            for piece in pieces:
                yield index, OutputDelta(piece, (7,))
            if self.error is not None:
                raise self.error
            usage = TokenUsage(len(job.prompt), 4, len(pieces))
            yield index, OutputDelta("", (), self.reason, usage, Timings(0.25, 0.75, 1.75, 0))


class ScriptedCaller(Caller):
    def __init__(self, engine: Engine, tenants: Sequence[TenantConfig] = (), **config: object) -> None:
        super().__init__(make_app(engine, tenants=tenants, **config))
        self.client = ScriptedClient(engine)
        self.app.state.client = self.client

    def prompt(self) -> str:
        """The text of the last prompt."""
        return self.app.state.tokenizer.decode(self.client.jobs[-1].prompt.tolist(), skip_special=False)


def run_package(caller: Caller, use: Callable[[Any], Awaitable[Any]], package: type, **options: Any) -> Any:
    """Calls the app with the asynchronous client of Anthropic's or OpenAI's package."""

    async def main() -> Any:
        transport = httpx2.ASGITransport(caller.app, raise_app_exceptions=False)
        async with (
            httpx2.AsyncClient(transport=transport, timeout=300) as http,
            package(**options, max_retries=0, http_client=http) as client,
        ):
            return await use(client)

    return asyncio.run(main())
