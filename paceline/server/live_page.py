"""The live page at `/`: its files, and what `engine/monitor.py` says of the engine. Read-only."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from paceline.web import SECURITY, WebFile, web_file

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_FRESH_S = 0.9  # however many look, the engine is asked once in so many seconds


class LivePage:
    """An ASGI handler for `/` and what lies below `/live/`."""

    def __init__(self, ask: Callable[[], Awaitable[dict[str, Any]]], name: str) -> None:
        """`ask` gets `Live.state()` from wherever the engine is; `name` is the model's."""
        self._ask, self._name = ask, name
        self._answer = b""
        self._answered = float("-inf")

    def takes(self, scope: MutableMapping[str, Any]) -> bool:
        """Whether this is a browser that asks for the page, or the page for its parts."""
        if scope["type"] != "http" or scope["method"] != "GET":
            return False
        wants = next((value for name, value in scope["headers"] if name == b"accept"), b"")
        return scope["path"].startswith("/live/") or (scope["path"] == "/" and b"text/html" in wants)

    async def __call__(self, scope: MutableMapping[str, Any], receive: object, send: Send) -> None:
        path = scope["path"]
        if path == "/live/state":
            await _send(send, 200, WebFile(await self._state(), "application/json"))
            return
        file = web_file("live.html" if path == "/" else path.removeprefix("/live/"))
        if file is None:
            await _send(send, 404, WebFile(b"There is nothing here.\n", "text/plain; charset=utf-8"))
        else:
            await _send(send, 200, file)

    async def _state(self) -> bytes:
        if time.monotonic() - self._answered >= _FRESH_S:
            self._answer = msgspec.json.encode({"model": self._name, **await self._ask()})
            self._answered = time.monotonic()
        return self._answer


async def _send(send: Send, status: int, file: WebFile) -> None:
    headers = [(b"content-type", file.type.encode()), (b"content-length", str(len(file.body)).encode()), *SECURITY,
               (b"cache-control", b"no-cache")]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": file.body})
