"""`paceline bench serve` against servers that cannot be measured."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

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
    assert "paceline: no request was completed; the first error: HTTP/1.0 500" in result.stderr


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
