"""`paceline bench stall`: how long one request delays the tokens of others.

    paceline bench stall                                                  starts a server on the virtual GPU
    paceline bench stall --url http://127.0.0.1:8000                      a running server
    paceline bench stall --start "" --streams 4 --only logprobs           the rows with this word, on the default model

Streams run while hostile requests arrive, one kind after the other: large bodies, many token ids, deep JSON. For each,
the table has the longest time between two events of any stream and the longest response time of /health. The first row
is without a hostile request: what the machine itself does.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from paceline.bench.apis import APIS
from paceline.bench.serve import SseProtocol, StreamResult, post_bytes
from paceline.bench.target import served_model, started
from paceline.config import ConfigError

DEFAULT_START = "--executor virtual --virtual-slowdown 8"  # 64 streams then load a slow core by less than half
_SETTLE_S = 0.5
_IDLE_S = 3.0  # without a hostile request
_START_S = 60.0
_TIMEOUT_S = 300.0
_PROMPT_TOKENS, _OUTPUT_TOKENS = 16, 6000  # of a stream


@dataclass(frozen=True, slots=True)
class Hostile:
    name: str
    path: str
    make: Callable[[str], bytes]  # the body, for a model name
    chunk_bytes: int = 0  # chunked transfer encoding, in chunks of this size
    count: int = 1  # sent at once


def _text(size: int) -> Callable[[str], bytes]:
    return lambda model: _completion(model, b'"%s"' % (b"a " * (size // 2)))


def _completion(model: str, prompt: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"%s","prompt":%s%s}' % (model.encode(), prompt, more)


def _field(name: str, value: bytes) -> Callable[[str], bytes]:
    return lambda model: _completion(model, b'"a"', b',"%s":%s' % (name.encode(), value))


def _chat(messages: bytes) -> Callable[[str], bytes]:
    return lambda model: b'{"model":"%s","messages":[%s]}' % (model.encode(), messages)


def _list(item: bytes, size: int) -> bytes:
    return b"[" + (item + b",") * (size // (len(item) + 1) - 1) + item + b"]"


_MB = 1_000_000
_MESSAGE = b'{"role":"user","content":"a"}'
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
CASES = (
    Hostile("100 KB of text", _COMPLETIONS, _text(100_000)),
    Hostile("1 MB of text", _COMPLETIONS, _text(_MB)),
    Hostile("15 MB of text", _COMPLETIONS, _text(15 * _MB)),
    Hostile("15 MB of text in a message", _CHAT, _chat(b'{"role":"user","content":"%s"}' % (b"a " * 7_500_000))),
    Hostile("120 KB of messages", _CHAT, _chat(_list(_MESSAGE, 120_000)[1:-1])),
    Hostile("15 MB of messages", _CHAT, _chat(_list(_MESSAGE, 15 * _MB)[1:-1])),
    Hostile("120 KB of token ids", _COMPLETIONS, lambda model: _completion(model, _list(b"7", 120_000))),
    Hostile("16 MB of token ids", _COMPLETIONS, lambda model: _completion(model, _list(b"7", 16 * _MB))),
    Hostile("16 MB of token ids, embeddings", "/v1/embeddings",
            lambda model: b'{"model":"%s","input":%s}' % (model.encode(), _list(b"7", 16 * _MB))),
    Hostile("120 KB of empty lists", _COMPLETIONS, lambda model: _completion(model, _list(b"[]", 120_000))),
    Hostile("16 MB of empty lists", _COMPLETIONS, lambda model: _completion(model, _list(b"[]", 16 * _MB))),
    Hostile("16 MB of deep JSON", _COMPLETIONS, lambda model: b"[" * (16 * _MB)),
    Hostile("15 MB of stop strings", _COMPLETIONS, _field("stop", _list(b'"a"', 15 * _MB))),
    Hostile("15 MB of bad words", _COMPLETIONS, _field("bad_words", b'["%s"]' % (b"a " * 7_500_000))),
    Hostile("15 MB of JSON schema", _COMPLETIONS,
            _field("guided_json", b'{"enum":%s}' % _list(b'"a"', 15 * _MB))),
    Hostile("15 MB field name", _COMPLETIONS, _field("a" * 15 * _MB, b"1")),
    Hostile("n = 128, 256 tokens each", _COMPLETIONS,
            _field("n", b'128,"max_tokens":256,"ignore_eos":true')),
    Hostile("/tokenize, 1 MB", "/tokenize", _text(_MB)),
    Hostile("/detokenize, 1 MB", "/detokenize",
            lambda model: b'{"model":"%s","tokens":%s}' % (model.encode(), _list(b"700", _MB))),
    Hostile("4,000 prompt tokens", _COMPLETIONS, lambda model: _completion(
        model, _list(b"8", 8000), b',"max_tokens":1,"stream":true')),
    # An error on the virtual GPU, which computes no logits.
    Hostile("20 logprobs of 4,000 prompt tokens", _COMPLETIONS, lambda model: _completion(
        model, _list(b"7", 8000), b',"echo":true,"logprobs":20,"max_tokens":1,"stream":true')),
    Hostile("1 MB in chunks of one byte", _COMPLETIONS, _text(_MB), chunk_bytes=1),
    Hostile("16 times 100 KB in chunks of 16 bytes", _COMPLETIONS, _text(100_000), chunk_bytes=16, count=16),
    Hostile("16 times 15 MB of text at once", _COMPLETIONS, _text(15 * _MB), count=16),
)  # fmt: skip


def bench(*, url: str | None, start: str | None, streams: int, key: str | None, only: str = "") -> list[dict[str, Any]]:
    """Measures `url`, or a server started with the options `start`, and prints a table of the cases that have `only` in
    their name."""
    if url is not None and start is not None:
        raise ConfigError("url and start are both given: give one of them.")
    cases = [case for case in CASES if only in case.name]
    if not cases:
        raise ConfigError(f"only is {only!r}, which no row has in its name: {', '.join(case.name for case in CASES)}.")
    if url is not None:
        return _run(url, streams, key, cases)
    with started(DEFAULT_START if start is None else start) as address:
        return _run(address, streams, key, cases)


def _run(url: str, streams: int, key: str | None, cases: Sequence[Hostile]) -> list[dict[str, Any]]:
    model = served_model(url, key)
    sys.setswitchinterval(0.0002)  # the threads that send must not delay the streams' event loop in this process
    print("| request | status | response s | longest gap ms | longest /health ms |\n|---|---|---|---|---|", flush=True)
    rows = []
    for case in (None, *cases):
        row = asyncio.run(_measure(url, model, case, streams, key))
        rows.append(row)
        print(
            f"| {row['request']} | {row['status']} | {row['response_s']:.1f} | {row['gap_ms']:.0f} | "
            f"{row['health_ms']:.0f} |",
            flush=True,
        )
    print(json.dumps({"rows": rows, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}))
    return rows


async def _measure(url: str, model: str, case: Hostile | None, streams: int, key: str | None) -> dict[str, Any]:
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    requests = [] if case is None else [_raw(url, case, model, key)] * case.count
    results = [StreamResult(_PROMPT_TOKENS) for _ in range(streams)]
    rng, transports = random.Random(0), []
    for result in results:
        prompt = [rng.randint(300, 10_000) for _ in range(_PROMPT_TOKENS)]
        body = {"model": model, "prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
        make = partial(SseProtocol, APIS["completions"], post_bytes(url, _COMPLETIONS, body, key), result, None)
        transports.append((await loop.create_connection(make, host, port))[0])
    deadline = time.monotonic() + _START_S
    while not all(result.times for result in results):
        if time.monotonic() > deadline or any(result.error for result in results):
            why = next((result.error or "" for result in results if result.error), "no token in time")
            raise ConfigError(f"{streams} streams of {_OUTPUT_TOKENS} tokens do not run at once: {why[:200]}")
        await asyncio.sleep(0.02)
    await asyncio.sleep(_SETTLE_S)
    began, times = time.monotonic(), [0.0]
    polling = asyncio.create_task(_poll_health(host, port, times))
    if case is None:
        await asyncio.sleep(_IDLE_S)
        statuses = ["-"]
    else:
        # In threads: sending and receiving release the GIL, so this client's own event loop is not delayed.
        statuses = await asyncio.gather(*(asyncio.to_thread(_send, host, port, request) for request in requests))
    ended = time.monotonic()
    await asyncio.sleep(_SETTLE_S)
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    now = time.monotonic()
    gaps = [
        later - earlier
        for result in results
        for earlier, later in zip(result.times, [*result.times[1:], result.ended or now], strict=True)
        if later >= began
    ]
    if error := next((result.error for result in results if result.error), None):
        raise ConfigError(f"a stream failed: {error[:200]}")
    for transport in transports:
        transport.abort()
    return {
        "request": "none" if case is None else case.name,
        "status": ", ".join(sorted(set(statuses))),
        "response_s": ended - began,
        "gap_ms": max(gaps) * 1e3,
        "health_ms": max(times) * 1e3,
    }


async def _poll_health(host: str, port: int, times: list[float]) -> None:
    while True:
        began = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
            await reader.read()
            writer.close()
        finally:  # also when the measurement ends before the response
            times.append(time.monotonic() - began)
        await asyncio.sleep(0.05)


def _raw(url: str, case: Hostile, model: str, key: str | None) -> bytes:
    parts, body = urlsplit(url), case.make(model)
    size = case.chunk_bytes
    length = "Transfer-Encoding: chunked" if size else f"Content-Length: {len(body)}"
    if size:
        pieces = [body[index : index + size] for index in range(0, len(body), size)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {parts.path}{case.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}Connection: close\r\n"
    return f"{head}Content-Type: application/json\r\n{length}\r\n\r\n".encode() + body


def _send(host: str, port: int, request: bytes) -> str:
    """Sends a request and reads its response; returns the status."""
    with socket.create_connection((host, port), timeout=_TIMEOUT_S) as one:
        try:
            one.sendall(request)
            status = one.recv(12).decode("ascii", "replace")[9:]
            while one.recv(1 << 20):
                pass
        except ConnectionError:
            return "connection reset"
    return status or "connection closed"
