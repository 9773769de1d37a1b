"""Batches in tests: an app with a folder and a runner, OpenAI's client, and input files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from openai import AsyncOpenAI
from openai.types import Batch

from paceline.server.app import App
from paceline.server.batches.runner import BatchRunner
from paceline.server.http import Receive, Scope, Send, send_json
from tests.server.serving import COMPLETIONS, TEXT

T = TypeVar("T")
AppCall = Callable[[Scope, Receive, Send], Awaitable[None]]


def line(custom_id: str, url: str = COMPLETIONS, body: Any = None, **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": TEXT if body is None else body} | changes


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def run_batches(
    app: App, use: Callable[[AsyncOpenAI], Awaitable[T]], *, call: AppCall | None = None, key: str = "none"
) -> T:
    """Runs `use` with a client, while batches run, their requests by `call` or the app itself."""

    async def main() -> T:
        assert app.state.batches is not None
        runner = BatchRunner(app.state, app.state.batches, app if call is None else call)
        task = asyncio.create_task(runner.run())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, timeout=300) as http:
            client = AsyncOpenAI(base_url="http://tiny/v1", api_key=key, max_retries=0, http_client=http)
            try:
                return await use(client)
            finally:
                await runner.stop()
                with suppress(asyncio.CancelledError):
                    await task

    return asyncio.run(main())


async def start(client: AsyncOpenAI, lines: Iterable[Any], endpoint: Any = COMPLETIONS, **fields: Any) -> Batch:
    file = await client.files.create(file=("requests.jsonl", jsonl(lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


async def wait_for(client: AsyncOpenAI, batch_id: str, *statuses: str) -> Batch:
    async with asyncio.timeout(120):
        while (batch := await client.batches.retrieve(batch_id)).status not in statuses:
            await asyncio.sleep(0.02)
    return batch


async def results(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(one) for one in (await client.files.content(file_id)).text.splitlines()]


async def all_results(client: AsyncOpenAI, batch: Batch) -> list[dict[str, Any]]:
    return [*await results(client, batch.output_file_id), *await results(client, batch.error_file_id)]


class ScriptedApp:
    """Answers requests of batches: at once, or those that `holds` names when `release` is set."""

    def __init__(self, holds: Callable[[dict[str, Any]], bool] = lambda body: False) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.holds, self.release = holds, asyncio.Event()
        self.in_flight = self.most_in_flight = 0
        self.errors: list[tuple[int, str]] = []  # status and code of the next responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.holds(body):
                await self.release.wait()
            else:
                await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
        if self.errors:
            status, code = self.errors.pop(0)
            await send_json(send, status, json.dumps({"error": {"message": "scripted", "code": code}}).encode())
            return
        await send_json(send, 200, json.dumps({"echo": body}).encode(), {"X-Request-Id": "req-1"})
