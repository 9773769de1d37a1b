"""A server on the virtual GPU, and clients that know what it must say."""

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
from tests.server.process import Served, serving

TOKENS = virtual_tokens()
TOKENIZER = synthetic_tokenizer(VOCAB_SIZE)


def expected_text(prompt: list[int], num_tokens: int) -> str:
    """What the virtual model says after `prompt`, its end ignored."""
    return TOKENIZER.decode(TOKENS.answer(np.array(prompt, np.int32), num_tokens), at_start=False)


def body(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "virtual", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


@contextmanager
def virtual(*arguments: str) -> Iterator[Served]:
    with serving("--executor", "virtual", "--log-level", "warning", *arguments) as served:
        yield served


def get(served: Served, path: str, key: str | None = None) -> httpx.Response:
    return httpx.get(served.url + path, timeout=30, headers={"Authorization": f"Bearer {key}"} if key else {})


def complete(served: Served, prompt: list[int], max_tokens: int, **more: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/completions", json=body(prompt, max_tokens, **more), timeout=60)


def metric(served: Served, name: str, **labels: str) -> float:
    """The sum of a metric over the labels that are not named."""
    found = 0.0
    for family in text_string_to_metric_families(get(served, "/metrics").text):
        for sample in family.samples:
            if sample.name == f"paceline_{name}" and labels.items() <= sample.labels.items():
                found += sample.value
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 30, why: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it did not happen in time: {why()}"
        time.sleep(0.02)


def assert_nothing_is_left(served: Served) -> None:
    """No request, no page, no entry in any map, and the books add up."""
    wait_until(lambda: metric(served, "num_requests_open") == metric(served, "http_requests_in_progress") == 0)
    health = get(served, "/health").json()
    assert health["num_running"] == health["num_waiting"] == 0
    assert health["kv_tokens_free"] == health["kv_tokens"]
    assert get(served, "/v1/requests").json()["data"] == []
    assert metric(served, "repairs_total") == 0


async def open_stream(served: Served, asked: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream that has begun: its first event has come."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({**asked, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


def events(raw: bytes) -> list[Any]:
    """The data of a stream's events, as they stand on the wire: the chunks' own lengths are skipped."""
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line.startswith(b"data: ")]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def text_of(found: list[Any]) -> str:
    return "".join(choice["text"] for event in found if event != b"[DONE]" for choice in event.get("choices", ()))


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)
