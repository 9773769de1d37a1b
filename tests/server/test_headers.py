"""Headers and trailers of hostile requests: how many there may be, and which lines are refused."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence

import pytest

from paceline.config import ServerConfig
from paceline.server.connection import listen
from paceline.server.http import AsgiEvent, Receive, Scope, Send
from paceline.server.metrics import ServerCounters

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
CLOSE = b"Connection: close\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, except at /health, then answers."""
    event: AsgiEvent = {"more_body": scope["path"] != "/health"}
    while event.get("more_body", False):
        event = await receive()
        if event["type"] == "http.disconnect":
            return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def exchange(parts: Sequence[bytes], **options: int) -> bytes:
    """What a server sends until it closes the connection. Each part is sent when the server has read the one before."""

    async def run() -> bytes:
        listening, counters = socket.create_server(("127.0.0.1", 0)), ServerCounters()
        server = await listen(app, ServerConfig(**options), listening, counters)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        try:
            for part in parts:
                writer.write(part)
                for _ in range(5):
                    await asyncio.sleep(0)
            return await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()
            await writer.wait_closed()
            while counters.connections:
                await asyncio.sleep(0.001)
            server.close()

    return asyncio.run(run())


def statuses(found: bytes) -> list[int]:
    return [int(part[:3]) for part in found.split(b"HTTP/1.1 ")[1:]]


def error_of(found: bytes) -> tuple[int, str, str]:
    """Status, code and message of the last response, after which the server closed the connection."""
    head, _, body = found[found.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    return int(head[9:12]), error["code"], error["message"]


def lines(count: int) -> bytes:
    return b"".join(b"X-%d: y\r\n" % index for index in range(count))


def byte_by_byte(data: bytes) -> list[bytes]:
    return [data[index : index + 1] for index in range(len(data))]


def test_a_hundred_headers_are_accepted() -> None:
    assert statuses(exchange([GET + lines(98) + CLOSE])) == [200]
    assert statuses(exchange(byte_by_byte(GET + lines(98) + CLOSE))) == [200]


@pytest.mark.parametrize("parts", ["at once", "byte by byte"])
def test_more_headers_are_431_before_the_last_of_them_arrives(parts: str) -> None:
    data = GET + lines(100)  # and no end
    status, code, message = error_of(exchange([data] if parts == "at once" else byte_by_byte(data)))
    assert (status, code) == (431, "too_many_headers")
    assert message == "The request has more than 100 headers: send fewer, or raise the server's max_headers."


def test_max_headers_raises_the_limit() -> None:
    assert statuses(exchange([GET + lines(198) + CLOSE], max_headers=200)) == [200]
    assert error_of(exchange([GET + lines(200) + CLOSE], max_headers=200))[0] == 431


def test_headers_of_a_pipelined_request_are_counted_apart() -> None:
    full = GET + lines(99) + b"\r\n"
    assert statuses(exchange([full + full + GET + CLOSE])) == [200, 200, 200]
    assert statuses(exchange([full + GET + lines(100) + CLOSE])) == [200, 431]
    skipped = POST + b"Content-Length: 2\r\n\r\n{}" + GET + lines(100) + CLOSE
    assert statuses(exchange([skipped])) == [200, 431]


@pytest.mark.parametrize("parts", ["at once", "byte by byte"])
def test_trailers_are_counted_too(parts: str) -> None:
    for count, expected in ((100, [200, 200]), (102, [431])):
        data = CHUNKED + lines(count) + b"\r\n" + GET + CLOSE
        assert statuses(exchange([data] if parts == "at once" else byte_by_byte(data))) == expected


def test_a_chunked_body_without_trailers_does_not_count_the_next_request() -> None:
    full = GET + lines(99) + b"\r\n"
    assert statuses(exchange([CHUNKED + b"\r\n" + full + GET + CLOSE])) == [200, 200, 200]


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (GET + b"X-A: b\nX-C: d\r\n" + CLOSE, "ends in LF without CR"),
        (b"GET /health HTTP/1.1\nHost: x\n\n", "ends in LF without CR"),
        (GET + b"\nGET /hidden HTTP/1.1\r\nHost: x\r\n\r\n", "ends in LF without CR"),
        (GET + b"X-A: b\r\n c\r\n" + CLOSE, "continues the one before (obs-fold)"),
        (GET + b"Transfer-Encoding:\r\n\tchunked\r\n" + CLOSE, "continues the one before (obs-fold)"),
        (CHUNKED + b"X-A: b\nX-C: d\r\n\r\n", "ends in LF without CR"),
        (CHUNKED + b"X-A: b\r\n c\r\n\r\n", "continues the one before (obs-fold)"),
        (POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "given with Content-Length"),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", "given with Content-Length"),
        (b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "given in HTTP/1.0"),
    ],
)
def test_what_proxies_read_differently_is_refused_and_closes_the_connection(head: bytes, why: str) -> None:
    pipelined = GET + CLOSE
    for parts in ([head + pipelined], [*byte_by_byte(head), pipelined]):
        found = exchange(parts)
        status, code, message = error_of(found)
        assert (status, code) == (400, "invalid_http") and why in message
        assert statuses(found) == [400]  # the request behind it is not answered


def test_a_response_that_the_app_sends_after_the_refusal_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    assert statuses(exchange([head + lines(102) + b"\r\n" + GET + CLOSE])) == [431]
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_line_ends_in_a_body_are_data() -> None:
    text = b"{}\n \n\n" + b"\n" * 200
    assert statuses(exchange([POST + b"Content-Length: %d\r\n\r\n" % len(text) + text + GET + CLOSE])) == [200, 200]
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
    assert statuses(exchange([POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + GET + CLOSE])) == [200, 200]
