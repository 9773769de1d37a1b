"""The app on a tiny random model, and a client that calls it without a socket."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from paceline.config import ServerConfig, TenantConfig
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.server.app import App
from paceline.server.auth import ApiKeys
from paceline.server.batches.store import BatchStore
from paceline.server.body_workers import BodyWorkers
from paceline.server.local_client import LocalClient
from paceline.server.state import ServerState

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "temperature": 0, "max_tokens": 6}
TEXT = {"model": "tiny", "prompt": "once upon a time", "temperature": 0, "max_tokens": 6}


def tiny_engine(**options: Any) -> Engine:
    return build_engine(load="random", shape="tiny-qwen3", threads=1, **{"kv_tokens": 8192, **options})


OPEN_WORKERS: list[BodyWorkers] = []  # of the apps made; closed after each file


def make_app(
    engine: Engine,
    *,
    name: str = "tiny",
    tenants: Sequence[TenantConfig] = (),
    watchdog_s: float = math.inf,
    is_local: bool = False,
    **config: Any,
) -> App:
    settings = ServerConfig(**config)
    workers = BodyWorkers(engine.tokenizer, engine.tokenizer.vocab_size)
    OPEN_WORKERS.append(workers)
    return App(
        ServerState(
            client=LocalClient(engine, name, watchdog_s),
            tokenizer=engine.tokenizer,
            workers=workers,
            config=settings,
            model_name=name,
            api_keys=ApiKeys(tenants, settings.admin_key),
            batches=None if settings.batch_folder is None else BatchStore(settings),
        ),
        is_local=is_local,
    )


class Caller:
    """Every call runs on its own event loop, like separate clients."""

    def __init__(self, app: App) -> None:
        self.app = app

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def call(client: httpx.AsyncClient) -> httpx.Response:
            return await client.request(method, path, **options)

        return self.run(call)

    def post(self, path: str, body: Any = None, **changes: Any) -> httpx.Response:
        return self.request("POST", path, json={**(body or {}), **changes})

    def ok(self, path: str, body: Any, **changes: Any) -> dict[str, Any]:
        response = self.post(path, body, **changes)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: Any, **changes: Any) -> list[Any]:
        """The data of a stream's events: decoded JSON, and `[DONE]`."""
        response = self.post(path, body, stream=True, **changes)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.text.split("\n\n")
        assert blocks.pop() == "", "an event ends with an empty line"
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks), response.text
        return [data if data == "[DONE]" else json.loads(data) for data in (b.removeprefix("data: ") for b in blocks)]

    def run(self, use: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=300) as client:
                return await use(client)

        return asyncio.run(main())
