"""A server on the virtual GPU, and clients that know its output."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from paceline.engine.virtual.build import VOCAB_SIZE, virtual_tokens
from paceline.text.synthetic import synthetic_tokenizer
from tests.server.process import ServerProcess, serving

TOKENS = virtual_tokens()
TOKENIZER = synthetic_tokenizer(VOCAB_SIZE)


def expected_text(prompt: list[int], num_tokens: int) -> str:
    """The virtual model's output for `prompt`, with ignore_eos."""
    return TOKENIZER.decode(TOKENS.answer(np.array(prompt, np.int32), num_tokens), at_start=False)


def body(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "virtual", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


@contextmanager
def virtual(*arguments: str) -> Iterator[ServerProcess]:
    # A test that the machine does not schedule for ten seconds is not a slow client.
    patient = ("--header-s", "300")
    hosts = ("--allowed-hosts", "x")  # of requests that tests write byte by byte
    with serving("--executor", "virtual", "--log-level", "warning", *patient, *hosts, *arguments) as server:
        yield server


def get(server: ServerProcess, path: str, key: str | None = None) -> httpx.Response:
    return httpx.get(server.url + path, timeout=240, headers={"Authorization": f"Bearer {key}"} if key else {})


def complete(server: ServerProcess, prompt: list[int], max_tokens: int, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body(prompt, max_tokens, **more), timeout=300)


def metric(server: ServerProcess, name: str, key: str | None = None, **labels: str) -> float:
    """The sum of a metric over the labels that are not named."""
    found = 0.0
    for family in text_string_to_metric_families(get(server, "/metrics", key).text):
        for sample in family.samples:
            if sample.name == f"paceline_{name}" and labels.items() <= sample.labels.items():
                found += sample.value
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 240, why: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true in time: {why()}"
        time.sleep(0.02)


def assert_nothing_is_left(server: ServerProcess) -> None:
    """No open request, no page in use, and consistent scheduler state."""
    wait_until(lambda: metric(server, "num_requests_open") == metric(server, "http_requests_in_progress") == 0)
    health = get(server, "/health").json()
    assert health["num_running"] == health["num_waiting"] == 0
    assert health["kv_tokens_free"] == health["kv_tokens"]
    assert get(server, "/v1/requests").json()["data"] == []
    assert metric(server, "scheduler_state_repairs_total") == 0


async def open_stream(
    server: ServerProcess, payload: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a streaming request."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({**payload, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


def events(raw: bytes) -> list[Any]:
    """The data of a stream's events, from the raw bytes: lengths of HTTP chunks are skipped."""
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line.startswith(b"data: ")]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def text_of(found: list[Any]) -> str:
    return "".join(choice["text"] for event in found if event != b"[DONE]" for choice in event.get("choices", ()))


def connect(server: ServerProcess) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)
