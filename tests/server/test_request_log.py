"""The log line of a request, and the inter-token latency, count the tokens that were sent."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from paceline.server.body_workers import BodyWorkers
from paceline.server.errors import ApiError
from paceline.server.limits import LONG_BODY_BYTES
from paceline.server.metrics import Histogram
from paceline.text.synthetic import synthetic_tokenizer
from tests.server.process import ServerProcess, serving
from tests.server.virtual import body, complete, connect, get, metric, virtual, wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with virtual("--log-level", "info", "--log-format", "json") as server:
        yield server


def line_of(server: ServerProcess, request_id: str) -> dict[str, Any]:
    """The log line of a response."""

    def find() -> dict[str, Any] | None:
        lines = (json.loads(line) for line in server.lines if '"message": "request"' in line)
        return next((line for line in lines if line["id"] == request_id), None)

    wait_until(lambda: find() is not None)
    found = find()
    assert found is not None
    return found


def test_a_stream_that_the_client_leaves_logs_the_tokens_sent(server: ServerProcess) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body([5], 30_000, stream=True), timeout=120
    ) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        for _ in range(20):
            next(lines)
    line = line_of(server, stream.headers["x-request-id"])
    assert line["end"] == "client disconnected" and 20 <= line["completion_tokens"] < 30_000


def test_a_response_without_streaming_that_the_client_leaves_logs_the_tokens_generated(server: ServerProcess) -> None:
    def running() -> list[dict[str, Any]]:
        return get(server, "/v1/requests").json()["data"]

    with connect(server) as one:
        data = json.dumps(body([9], 30_000, n=2)).encode()
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        wait_until(lambda: sum(request["output_tokens"] >= 20 for request in running()) == 2)
        request_id = running()[0]["id"].rsplit("-", 1)[0]
    line = line_of(server, request_id)
    assert line["end"] == "client disconnected" and 40 <= line["completion_tokens"] < 60_000


def test_an_aborted_stream_logs_its_tokens(server: ServerProcess) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body([6], 30_000, stream=True), timeout=120
    ) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        next(lines)
        request_id = stream.headers["x-request-id"]
        assert httpx.delete(f"{server.url}/v1/requests/{request_id}", timeout=120).status_code == 200
        rest = list(lines)
    assert '"code":"aborted"' in rest[-1]
    line = line_of(server, request_id)
    assert line["end"] == "aborted" and line["completion_tokens"] >= len(rest)


def test_inter_token_latency_counts_every_gap_of_streams_alone(server: ServerProcess) -> None:
    def count() -> float:
        return metric(server, "inter_token_latency_seconds_count")

    before = count()
    complete(server, [7], 50)
    assert count() == before
    httpx.post(f"{server.url}/v1/completions", json=body([7], 50, stream=True), timeout=120)
    assert count() == before + 49
    text = httpx.get(f"{server.url}/metrics", timeout=120).text
    assert "every gap of streamed requests" in text


def test_tokens_that_arrive_together_are_as_many_gaps() -> None:
    histogram = Histogram((0.1, 1.0))
    histogram.observe(0.05, 3)
    histogram.observe(2.0)
    assert histogram.state().counts == (3, 0, 1) and histogram.state().total == pytest.approx(2.15)


def test_a_stream_whose_engine_dies_logs_its_tokens(server: ServerProcess) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body([8], 30_000, stream=True), timeout=120
    ) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        next(lines)
        os.kill(server.children["engine"][0], signal.SIGKILL)
        rest = list(lines)
    assert '"code":"engine_failed"' in rest[-1]
    line = line_of(server, stream.headers["x-request-id"])
    assert line["end"] == "engine_failed" and line["completion_tokens"] >= len(rest)


def test_a_server_with_json_logs_writes_nothing_else() -> None:
    with virtual("--log-level", "info", "--log-format", "json") as server:
        complete(server, [5], 3)
        os.kill(server.children["engine"][0], signal.SIGKILL)  # what follows is logged, too
        wait_until(lambda: "exited unexpectedly" in server.output)
        server.signal(signal.SIGTERM)
    records = [json.loads(line) for line in server.lines]
    (ready,) = (one for one in records if one["message"] == "ready")
    assert ready["address"] == server.url and ready["model"].startswith("virtual")
    assert records[-1]["message"] == "stopped"
    assert all({"time", "level", "process", "message"} <= set(one) for one in records)


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (("/no/such/model",), "model is '/no/such/model', which does not exist", 75),
        (("--executor", "virtual", "--tp", "64", "--replicas", "1", "--router", "random"), "router is 'random'", 2),
        (("--port", "abc"), "Invalid value for '--port'", 2),
        (("--frobnicate",), "No such option: --frobnicate", 2),
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size is no option: here it is called --tp", 2),
        (("--max-connections", "0"), "max_connections is 0: must be at least 1.", 2),
        (("--config", "/no/such.toml"), "config is '/no/such.toml', which cannot be read", 75),
        (("one", "two"), "unexpected extra argument", 2),
    ],
)
def test_an_error_at_the_start_is_json_too(arguments: tuple[str, ...], message: str, status: int) -> None:
    assert_error_is_json(("--log-format", "json", *arguments), message, status)


def test_json_is_found_in_the_environment_and_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[server]\nlog_format = 'json'\n")
    message = "Invalid value for '--port'"
    assert_error_is_json(("--port", "abc"), message, 2, PACELINE_LOG_FORMAT="json")
    assert_error_is_json(("--port", "abc", f"--config={file}"), message, 2)
    assert_error_is_json(("--port", "abc"), message, 2, PACELINE_CONFIG=str(file))


def assert_error_is_json(arguments: tuple[str, ...], message: str, status: int, **variables: str) -> None:
    command = [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", *arguments]
    environment = {**os.environ, "PACELINE_MAX_RUNNIN": "3", **variables}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    warning, error = (json.loads(line) for line in ended.stderr.splitlines())
    assert ended.returncode == status and ended.stdout == ""
    assert warning["level"] == "warning" and warning["message"].startswith("PACELINE_MAX_RUNNIN is set")
    assert error["level"] == "error" and message in error["message"]


@pytest.mark.cluster
def test_ranks_and_their_ends_are_logged_as_json() -> None:
    tiny = ("--load", "random", "--shape", "tiny-llama", "--device", "cpu", "--threads", "1", "--kv-tokens", "4096")
    with serving(*tiny, "--tp", "2", "--log-level", "debug", "--log-format", "json") as server:
        server.signal(signal.SIGTERM)
    assert [json.loads(line) for line in server.lines][-1]["message"] == "stopped"
    with serving(*tiny, "--tp", "2", "--log-format", "json") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        (rank,) = (one for one in children if "paceline.engine.rank_process" in one.cmdline())
        rank.kill()
        wait_until(lambda: "exited unexpectedly" in server.output)
        server.signal(signal.SIGTERM)
    records = [json.loads(line) for line in server.lines]
    assert any("rank 1 of 2 ended unexpectedly (signal SIGKILL)" in one["message"] for one in records)


def test_child_processes_log_as_their_parent_does(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_PACELINE_LOGS", json.dumps(["info", "json", "front-end-1"]))
    workers = BodyWorkers(synthetic_tokenizer(300), 300)
    try:
        with pytest.raises(ApiError, match="Internal server error"):
            asyncio.run(workers.run(operator.neg, b"x" * (LONG_BODY_BYTES + 1)))
    finally:
        workers.close()
    (line,) = (json.loads(line) for line in capfd.readouterr().err.splitlines())
    assert line["process"] == "front-end-1: bodies" and "TypeError" in line["exception"]
    numbers = ["1", "2", "1000", "1001"]  # no file descriptors, so this rank cannot even read its setup
    rank = subprocess.run(
        [sys.executable, "-m", "paceline.engine.rank_process", *numbers], capture_output=True, text=True, check=False
    )
    (line,) = (json.loads(line) for line in rank.stderr.splitlines())
    assert line["process"] == "front-end-1: rank 1" and line["level"] == "critical" and rank.returncode == 1


def test_warnings_and_uncaught_exceptions_are_json() -> None:
    code = (
        "import threading, warnings\n"
        "from paceline.logs import set_up_logs\n"
        "set_up_logs('info', 'json', 'test')\n"
        "warnings.warn('beware')\n"
        "thread = threading.Thread(target=lambda: 1 / 0, name='one')\n"
        "thread.start(); thread.join()\n"
        "raise ValueError('two\\nlines')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    warned, in_thread, last = (json.loads(line) for line in ended.stderr.splitlines())
    assert ended.returncode == 1 and "beware" in warned["message"]
    assert "the thread one" in in_thread["message"] and "ZeroDivisionError" in in_thread["exception"]
    assert "two" in last["message"] and "ValueError" in last["exception"]
