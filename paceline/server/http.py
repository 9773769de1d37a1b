"""HTTP without a framework, for the routes where every token counts: bodies, answers, server-sent events.

A client that goes away is noticed by `unless_gone` whatever the answer is waiting for, and cancels it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from paceline.server.errors import ApiError

if TYPE_CHECKING:
    from paceline.server.connection import Connection

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

_JSON = (b"content-type", b"application/json")
_SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no")]  # fmt: skip


class ClientGone(Exception):
    """The client closed the connection: there is nobody left to answer."""


async def read_body(receive: Receive, max_bytes: int, seconds: float) -> bytes:
    """The whole body, if it comes in time and is not too long."""
    try:
        async with asyncio.timeout(seconds):
            return await _read_body(receive, max_bytes)
    except TimeoutError:
        raise ApiError(f"the body was not there after {seconds:g} seconds: send it quicker.", status=408,
                       code="body_too_slow", headers={"Connection": "close"}) from None  # fmt: skip


async def _read_body(receive: Receive, max_bytes: int) -> bytes:
    pieces, size = [], 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientGone
        piece = event.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise ApiError(
                f"the body has more than {max_bytes} bytes: send less, or raise the server's max_body_bytes.",
                status=413, code="body_too_large", headers={"Connection": "close"},
            )  # fmt: skip
        pieces.append(piece)
        if not event.get("more_body", False):
            return b"".join(pieces)


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    more = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *more]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    await send_json(send, error.status, error.body(), error.headers)


class EventStream:
    """Server-sent events. Nothing is sent before the first one, so that until then the answer may still be an error
    with a status of its own. The data is JSON, in which a newline is always escaped."""

    def __init__(self, send: Send, scope: Scope, headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._headers = send, _SSE + headers
        self.started = False
        # Straight to the socket, where there is one and bodies come in chunks: half of what a token costs.
        self._connection: Connection | None = None
        if scope.get("http_version") == "1.1":
            self._connection = scope.get("state", {}).get("connection")

    async def event(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        if self._connection is None:
            await self._send({"type": "http.response.body", "body": b"data: %b\n\n" % data, "more_body": True})
        elif not self._connection.write_chunk(b"data: %b\n\n" % data):
            await self._connection.drain()

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does `work`; if the client goes away first, cancels it and raises ClientGone. The body was read already."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        # Their ends are awaited, so that what they hold is given back when this returns; the result was taken above.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
