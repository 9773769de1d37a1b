"""`paceline bench serve`: every streaming API, and servers that cannot be measured."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from paceline.bench.apis import APIS
from paceline.bench.serve import SseProtocol, StreamResult
from paceline.cli import app

MODELS = b'{"data": [{"id": "m"}]}'


@contextmanager
def answering(status: int, body: bytes, posted: int = 500) -> Iterator[str]:
    """The URL of a server that answers every GET with this, and every POST with status `posted`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(status, body)

        def do_POST(self) -> None:
            self._answer(posted, b"{}")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def bench(url: str, *more: str) -> Any:
    return CliRunner().invoke(app, ["bench", "serve", "--url", url, "--count", "2", "--repeats", "1", *more])


def test_a_dead_server_is_one_line_and_exit_status_1() -> None:
    with answering(200, MODELS) as url:
        pass  # the port is closed again
    result = bench(url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"paceline: {url}/v1/models does not respond (")
    assert "Connection refused" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b"{}", "responds with status 401: give --key."),
        (404, b"{}", "responds with status 404: give the URL of a server with OpenAI's API, without /v1."),
        (200, b"<html>", "responds, but not with a list of models: check the URL."),
        (200, b'{"data": []}', "responds, but not with a list of models: check the URL."),
        (200, b"[]", "responds, but not with a list of models: check the URL."),
    ],
)
def test_a_server_without_models_is_one_line_and_exit_status_1(status: int, body: bytes, message: str) -> None:
    with answering(status, body) as url:
        result = bench(f"{url}/")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"paceline: {url}/v1/models {message}\n"


def test_a_server_that_completes_no_request_is_exit_status_1() -> None:
    with answering(200, MODELS) as url:
        result = bench(url)
    assert result.exit_code == 1
    assert "0 completed, 2 failed" in result.stdout
    assert "paceline: no request of completions was completed; the first error: HTTP/1.0 500" in result.stderr


@pytest.mark.parametrize("url", ["localhost:8000", "https://localhost:8000", "http://", "ftp://host"])
def test_a_wrong_url_is_exit_status_2(url: str) -> None:
    result = bench(url)
    assert result.exit_code == 2
    assert result.stderr == (
        f"paceline: url is {url!r}: expected http:// with host and port, such as http://127.0.0.1:8000.\n"
    )


def test_offline_without_start_is_refused_before_anything_runs() -> None:
    result = bench("http://127.0.0.1:9", "--offline")
    assert (result.exit_code, result.stdout) == (2, "") and "--offline needs --start" in result.stderr


def test_every_streaming_api_is_measured_in_turns() -> None:
    """The tokens of all APIs are counted, by what each reports as its usage."""
    options = ["--start", "--executor virtual --virtual-tokens clock", "--api", "all"]
    result = CliRunner().invoke(
        app, ["bench", "serve", *options, "--count", "3", "--output", "5", "--repeats", "1"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for name, line in zip(APIS, lines, strict=False):
        assert line.startswith(f"{name}, streams run 0: ") and "3 completed, 0 failed" in line
        assert re.search(r", [1-9]\d* tokens/s", line), "none lost"
    found = json.loads(lines[-1])
    assert list(found["apis"]) == list(APIS) and found["total_output_tokens"] == found["events"] == 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api", "grpc"], "api is 'grpc': choose from all, completions, chat, "),
        (["--api", "all", "--late"], "late needs the API completions"),
        (["--api", "chat", "--api", "messages", "--offline"], "offline is compared with one API"),
    ],
)
def test_apis_that_cannot_be_measured_are_refused(options: list[str], message: str) -> None:
    result = bench("http://127.0.0.1:9", *options)
    assert (result.exit_code, result.stdout) == (2, "") and message in result.stderr


@pytest.mark.parametrize(
    ("name", "stream"),
    [
        ("chat", b'data: {"choices":[{"finish_reason":null}]}\n\ndata: {"error":{"message":"no"}}\n\n'),
        ("messages", b'event: error\ndata: {"type":"error","error":{"message":"no"}}\n\n'),
        ("responses", b'event: response.failed\ndata: {"response":{"usage":null,"error":{"message":"no"}}}\n\n'),
        ("ollama-chat", b'{"message":{},"done":false}\n{"error":"no"}\n'),
    ],
)
def test_a_stream_that_fails_is_counted_as_failed(name: str, stream: bytes) -> None:
    async def read(pieces: list[bytes]) -> StreamResult:
        result = StreamResult(1)
        protocol = SseProtocol(APIS[name], b"", result, None)
        protocol.connection_made(Mock())
        for piece in pieces:
            protocol.data_received(piece)
        assert protocol.done.done()
        return result

    head = b"HTTP/1.1 200 OK\r\n\r\n"
    for pieces in ([head + stream], [head, *(stream[index : index + 1] for index in range(len(stream)))]):
        error = asyncio.run(read(pieces)).error
        assert error is not None and '"no"' in error
