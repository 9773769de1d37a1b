"""Plain ASGI for the routes that generate: request bodies, responses, streams of events.

`cancel_on_disconnect` detects a client that disconnects, whatever its response is waiting for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, TypeVar

from starlette import types

from paceline.config import ServerConfig
from paceline.server.apis.dialects import Dialect, dialect_of
from paceline.server.errors import ApiError
from paceline.server.fields import short

if TYPE_CHECKING:
    from paceline.server.connection import Connection

T = TypeVar("T")
Scope = types.Scope
AsgiEvent = types.Message
Receive = types.Receive
Send = types.Send

_CLOSE = {"Connection": "close"}
_MAX_DRAIN_BYTES, _MAX_DRAIN_S, _MAX_DRAIN_IDLE_S = 1 << 26, 30.0, 1.0  # of a body that is not used
_JSON = (b"content-type", b"application/json")
_UNBUFFERED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class ClientDisconnected(Exception):
    """The client closed the connection, so there is no response to send."""


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], config: ServerConfig) -> bytearray:
    # Before the first `receive`, which tells a client with `Expect: 100-continue` to send the body.
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            f"Content-Encoding is {short(coding)}: send the body uncompressed.",
            status=415,
            code="unsupported_content_encoding",
            headers=_CLOSE,
        )
    if int(headers.get(b"content-length", 0)) > config.max_body_bytes:
        raise _body_too_large(config.max_body_bytes)
    try:
        async with asyncio.timeout(config.body_s):
            return await _read_body(receive, config.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            f"The request body did not arrive within {config.body_s:g} seconds: send it faster.",
            status=408,
            code="body_too_slow",
            headers=_CLOSE,
        ) from None


async def _read_body(receive: Receive, max_bytes: int) -> bytearray:
    body = bytearray()  # not a list of pieces: joining many megabytes would delay other streams
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientDisconnected
        body += event.get("body", b"")
        if len(body) > max_bytes:
            raise _body_too_large(max_bytes)
        if not event.get("more_body", False):
            return body


def _body_too_large(max_bytes: int) -> ApiError:
    return ApiError(
        f"The request body is longer than {max_bytes} bytes: send less, or raise the server's max_body_bytes.",
        status=413,
        code="body_too_large",
        headers=_CLOSE,
    )


def drain_before_close(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Reads the rest of the body, up to a limit, before a response with `Connection: close` closes the connection. A
    client that is still sending would otherwise get a reset connection and no response."""
    unread, closes = True, False

    async def tracked_receive() -> AsgiEvent:
        nonlocal unread
        event = await receive()
        unread = event["type"] == "http.request" and event.get("more_body", False)
        return event

    async def draining_send(message: AsgiEvent) -> None:
        nonlocal closes
        if message["type"] == "http.response.start":
            closes = (b"connection", b"close") in message["headers"]
        elif closes and unread and not message.get("more_body", False):
            await send({**message, "more_body": True})  # the whole response; only the end is held back
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_MAX_DRAIN_S):
                    num_bytes = 0
                    while unread and num_bytes < _MAX_DRAIN_BYTES:
                        event = await asyncio.wait_for(tracked_receive(), _MAX_DRAIN_IDLE_S)
                        num_bytes += len(event.get("body", b""))
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    return tracked_receive, draining_send


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    extra = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *extra]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, scope: Scope, error: ApiError) -> None:
    await send_json(send, error.status, dialect_of(scope["path"]).render(error), error.headers)


class EventStream:
    """Events, framed as the dialect does. Nothing is sent before the first one, so an error before it can still set the
    status."""

    def __init__(self, send: Send, scope: Scope, headers: list[tuple[bytes, bytes]], dialect: Dialect) -> None:
        kind = (b"content-type", f"{dialect.stream_type}; charset=utf-8".encode())
        self._send, self._headers, self._dialect = send, [kind, *_UNBUFFERED, *headers], dialect
        self.started = False
        # Chunks are written directly to the connection where there is one: it halves the cost of a token.
        self._connection: Connection | None = None
        if scope.get("http_version") == "1.1":
            self._connection = scope.get("state", {}).get("connection")

    async def send_event(self, event: bytes) -> None:
        await self._write(self._dialect.frame(event))

    async def end(self) -> None:
        """After the last event of a complete response."""
        if self._dialect.end:
            await self._write(self._dialect.end)

    async def _write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        if self._connection is None:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        elif not self._connection.write_chunk(data):
            await self._connection.drain()

    async def close(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


async def cancel_on_disconnect(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Returns what `work` does; if the client disconnects first, cancels it and raises ClientDisconnected.

    The body must have been read.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        # Awaited, so that everything they hold is released on return; the result was taken above.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
