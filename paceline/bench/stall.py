"""`paceline bench stall`: how long an attack of one tenant delays the tokens and requests of another.

    paceline bench stall                                                  starts a server on the virtual GPU
    paceline bench stall --url http://127.0.0.1:8000 --key K --hostile-key H      a running server with two tenants
    paceline bench stall --start "" --streams 4 --only logprobs           the rows with this word, on the default model

Streams run, and one request for one token after the other, all of one tenant. Another tenant sends the attacks of the
table `ATTACKS`. Each row compares the seconds of an attack with those just before it: the time between two events of a
stream, the time that a request for one token takes, and that of /health. A row passes if the longest gap and the
longest wait are at most `MAX_MORE_MS` longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import TypedDict
from urllib.parse import urlsplit

from paceline.bench.apis import APIS
from paceline.bench.serve import SseProtocol, StreamResult, post_bytes
from paceline.bench.target import model_card, started
from paceline.config import ConfigError

# 64 streams then load a slow core by less than half. What prompts that are accepted take of the device is bounded by
# `itl_target`: the rest is what the table is about.
DEFAULT_START = "--executor virtual --virtual-slowdown 8 --itl-target 0.015"
# The virtual GPU has no logits, and so no grammars. Slots and memory for more than the streams.
GRAMMAR_START = "--load random --shape tiny-qwen3 --max-running 128 --kv-tokens 524288 --threads 1"
MAX_MORE_MS = 50.0
_TENANTS = """
[[tenants]]
name = "other"
keys = ["other"]

[[tenants]]
name = "hostile"
keys = ["hostile"]
"""  # and the limits of a row
_SETTLE_S = 0.5
_WINDOW_S = 3.0  # before an attack; an attack that ends earlier is watched for as long
_MAX_ATTACK_S = 30.0  # its connections are closed then
_ATTACKER_NICE = 10  # it has a machine of its own elsewhere; here it shares the cores of what is measured
_PAUSE_S = 0.05  # between two requests for one token, or for /health
_START_S = 60.0
_TIMEOUT_S = 300.0
_MAX_CONTEXT = 8192  # where the server does not say
_FIRST_TOKEN, _LAST_TOKEN = 260, 500  # in the vocabulary of every model
_PROMPT_TOKENS, _OUTPUT_TOKENS = 16, 6000  # of a stream; another one follows it

MakeBody = Callable[[str, int], bytes]  # for a model name and the number of the request


def _one_token(model: str, number: int) -> bytes:
    return _completion(model, b'"a"', b',"max_tokens":1')


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    path: str
    make: MakeBody
    chunk_bytes: int = 0  # chunked transfer encoding, in chunks of this size
    count: int = 1  # sent at once, each on its own connection
    num_headers: int = 0  # additional ones, short
    leaves_after_s: float | None = None  # closes the connections then, without reading a response
    other: MakeBody = _one_token  # what the other tenant asks for
    start: str = DEFAULT_START  # options of the server, unless it is given
    limits: str = ""  # of the hostile tenant, in a server that is started


def _text(size: int) -> MakeBody:
    return lambda model, _: _completion(model, b'"%s"' % (b"a " * (size // 2)))


def _completion(model: str, prompt: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"%s","prompt":%s%s}' % (model.encode(), prompt, more)


def _field(name: str, value: bytes) -> MakeBody:
    return lambda model, _: _completion(model, b'"a"', b',"%s":%s' % (name.encode(), value))


def _chat(messages: bytes) -> MakeBody:
    return lambda model, _: b'{"model":"%s","messages":[%s]}' % (model.encode(), messages)


def _valid_chat(size: int) -> MakeBody:
    """A chat that fits into the context: such letters have about three characters per token. No two are alike."""

    def make(model: str, number: int) -> bytes:
        rng = random.Random(number)
        text = "".join(rng.choices("abc", k=size)).encode()
        return b'{"model":"%s","max_tokens":1,"messages":[{"role":"user","content":"%s"}]}' % (model.encode(), text)

    return make


def _schema(num_properties: int, *, is_shared: bool = False) -> MakeBody:
    """A JSON schema of optional properties, with names that no other request has unless it `is_shared`."""

    def make(model: str, number: int) -> bytes:
        name = "p" if is_shared else f"p{number}_"
        properties = {f"{name}{index}": {"type": "integer"} for index in range(num_properties)}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return _completion(model, b'"a"', b',"max_tokens":1,"guided_json":%s' % json.dumps(schema).encode())

    return make


def _list(item: bytes, size: int) -> bytes:
    return b"[" + (item + b",") * (size // (len(item) + 1) - 1) + item + b"]"


_MB = 1_000_000
_MESSAGE = b'{"role":"user","content":"a"}'
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
ATTACKS = (
    Attack("100 KB of text", _COMPLETIONS, _text(100_000)),
    Attack("1 MB of text", _COMPLETIONS, _text(_MB)),
    Attack("15 MB of text", _COMPLETIONS, _text(15 * _MB)),
    Attack("15 MB of text in a message", _CHAT, _chat(b'{"role":"user","content":"%s"}' % (b"a " * 7_500_000))),
    Attack("120 KB of messages", _CHAT, _chat(_list(_MESSAGE, 120_000)[1:-1])),
    Attack("15 MB of messages", _CHAT, _chat(_list(_MESSAGE, 15 * _MB)[1:-1])),
    Attack("120 KB of token ids", _COMPLETIONS, lambda model, _: _completion(model, _list(b"7", 120_000))),
    Attack("16 MB of token ids", _COMPLETIONS, lambda model, _: _completion(model, _list(b"7", 16 * _MB))),
    Attack("16 MB of token ids, embeddings", "/v1/embeddings",
            lambda model, _: b'{"model":"%s","input":%s}' % (model.encode(), _list(b"7", 16 * _MB))),
    Attack("120 KB of empty lists", _COMPLETIONS, lambda model, _: _completion(model, _list(b"[]", 120_000))),
    Attack("16 MB of empty lists", _COMPLETIONS, lambda model, _: _completion(model, _list(b"[]", 16 * _MB))),
    Attack("16 MB of deep JSON", _COMPLETIONS, lambda model, _: b"[" * (16 * _MB)),
    Attack("15 MB of stop strings", _COMPLETIONS, _field("stop", _list(b'"a"', 15 * _MB))),
    Attack("15 MB of bad words", _COMPLETIONS, _field("bad_words", b'["%s"]' % (b"a " * 7_500_000))),
    Attack("15 MB of JSON schema", _COMPLETIONS,
            _field("guided_json", b'{"enum":%s}' % _list(b'"a"', 15 * _MB))),
    Attack("15 MB field name", _COMPLETIONS, _field("a" * 15 * _MB, b"1")),
    Attack("n = 128, 256 tokens each", _COMPLETIONS,
            _field("n", b'128,"max_tokens":256,"ignore_eos":true')),
    Attack("/tokenize, 1 MB", "/tokenize", _text(_MB)),
    Attack("/detokenize, 1 MB", "/detokenize",
            lambda model, _: b'{"model":"%s","tokens":%s}' % (model.encode(), _list(b"700", _MB))),
    Attack("4,000 prompt tokens", _COMPLETIONS, lambda model, _: _completion(
        model, _list(b"8", 8000), b',"max_tokens":1,"stream":true')),
    # An error on the virtual GPU, which computes no logits.
    Attack("20 logprobs of 4,000 prompt tokens", _COMPLETIONS, lambda model, _: _completion(
        model, _list(b"7", 8000), b',"echo":true,"logprobs":20,"max_tokens":1,"stream":true')),
    Attack("1 MB in chunks of one byte", _COMPLETIONS, _text(_MB), chunk_bytes=1),
    Attack("16 times 100 KB in chunks of 16 bytes", _COMPLETIONS, _text(100_000), chunk_bytes=16, count=16),
    Attack("16 times 15 MB of text at once", _COMPLETIONS, _text(15 * _MB), count=16),
    Attack("64 times 126 KB of text", _COMPLETIONS, _text(126_000), count=64),
    Attack("64 times 126 KB of text, closed at once", _COMPLETIONS, _text(126_000), count=64, leaves_after_s=0.0),
    Attack("64 times 126 KB of text, max_requests = 1", _COMPLETIONS, _text(126_000), count=64,
           limits="max_requests = 1"),
    # Three such texts, by their length.
    Attack("64 times 126 KB of text, tokens_per_minute = 100000", _COMPLETIONS, _text(126_000), count=64,
           limits="tokens_per_minute = 100000"),
    Attack("100 valid chats of 82 KB", _CHAT, _valid_chat(82_000), count=100),
    Attack("20 times 5,000 headers", _COMPLETIONS, _one_token, count=20, num_headers=5000),
    Attack("300 times 5,000 headers", _COMPLETIONS, _one_token, count=300, num_headers=5000),
    Attack("6 abandoned schemas of 5,000 properties", _COMPLETIONS, _schema(5000), count=6, leaves_after_s=3.0,
           other=_schema(1), start=GRAMMAR_START),
    Attack("16 abandoned schemas of 5,000 properties", _COMPLETIONS, _schema(5000), count=16, leaves_after_s=3.0,
           other=_schema(1), start=GRAMMAR_START),
    Attack("32 requests of one schema of 450 properties", _COMPLETIONS, _schema(450, is_shared=True), count=32,
           other=_schema(1), start=GRAMMAR_START),
    Attack("32 requests of one schema of 1,000 properties", _COMPLETIONS, _schema(1000, is_shared=True), count=32,
           other=_schema(1), start=GRAMMAR_START),
)  # fmt: skip


def bench(
    *,
    url: str | None,
    start: str | None,
    streams: int,
    key: str | None,
    hostile_key: str | None = None,
    only: str = "",
) -> list[_Row]:
    """Measures `url`, or a server started with the options `start`, and prints a table of the attacks that have `only`
    in their name."""
    if url is not None and start is not None:
        raise ConfigError("url and start are both given: give one of them.")
    attacks = [attack for attack in ATTACKS if only in attack.name]
    if not attacks:
        names = ", ".join(attack.name for attack in ATTACKS)
        raise ConfigError(f"only is {only!r}, which no row has in its name: {names}.")
    if url is not None:
        return _run(_Target(url, key, key if hostile_key is None else hostile_key, streams), attacks)
    rows: list[_Row] = []
    servers = groupby(attacks, key=lambda attack: (attack.start if start is None else start, attack.limits))
    for (options, limits), group in servers:
        with _started(options, limits) as address:
            rows += _run(_Target(address, "other", "hostile", streams), list(group))
    return rows


@contextmanager
def _started(options: str, limits: str) -> Iterator[str]:
    """A server with two tenants."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tenants.toml"
        path.write_text(_TENANTS + limits)
        with started(f"{options} --config {shlex.quote(str(path))}") as url:
            yield url


class _Target:
    """The server that is measured."""

    def __init__(self, url: str, key: str | None, hostile_key: str | None, streams: int) -> None:
        parts = urlsplit(url)
        self.url, self.host, self.port = url, parts.hostname or "127.0.0.1", parts.port or 80
        self.key, self.hostile_key, self.streams = key, hostile_key, streams
        card = model_card(url, key)
        self.model: str = card["id"]
        # Other servers call it this too, or nothing.
        self.output_tokens = min(_OUTPUT_TOKENS, card.get("max_model_len", _MAX_CONTEXT) - _PROMPT_TOKENS)

    def request(self, attack: Attack, number: int) -> bytes:
        body = attack.make(self.model, number)
        size = attack.chunk_bytes
        lines = [f"Content-Length: {len(body)}"]
        if size:
            pieces = [body[index : index + size] for index in range(0, len(body), size)]
            body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
            lines = ["Transfer-Encoding: chunked"]
        lines += ["a:"] * attack.num_headers
        return self._raw("POST", attack.path, self.hostile_key, lines, body)

    def other_request(self, attack: Attack, number: int) -> bytes:
        body = attack.other(self.model, number)
        return self._raw("POST", _COMPLETIONS, self.key, [f"Content-Length: {len(body)}"], body)

    def health_request(self) -> bytes:
        return self._raw("GET", "/health", None, [], b"")

    def _raw(self, method: str, path: str, key: str | None, lines: Sequence[str], body: bytes) -> bytes:
        parts = urlsplit(self.url)
        head = [f"{method} {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        head += [f"Authorization: Bearer {key}"] if key else []
        head += ["Content-Type: application/json"] if body else []
        return "\r\n".join([*head, *lines, "", ""]).encode() + body


@dataclass(frozen=True, slots=True)
class _Measured:
    """What the other tenant saw in one window of time, in seconds."""

    gaps: Sequence[float]
    waits: Sequence[float]  # of requests for one token
    health: Sequence[float]

    def milliseconds(self) -> dict[str, float]:
        return {
            "median_gap": statistics.median(self.gaps) * 1e3,
            "p99_gap": sorted(self.gaps)[int(0.99 * (len(self.gaps) - 1))] * 1e3,
            "longest_gap": max(self.gaps) * 1e3,
            "median_wait": statistics.median(self.waits) * 1e3,
            "longest_wait": max(self.waits) * 1e3,
            "longest_health": max(self.health) * 1e3,
        }


class _Row(TypedDict):
    attack: str
    status: str
    attack_s: float
    before_ms: dict[str, float]
    during_ms: dict[str, float]
    passes: bool


def _run(target: _Target, attacks: Sequence[Attack]) -> list[_Row]:
    columns = "median gap | p99 gap | longest gap | median wait | longest wait | longest /health"
    print("Milliseconds before -> during the attack (difference). wait: of another tenant's request for one token.\n")
    print(f"| attack | status | attack s | {columns} | +{MAX_MORE_MS:g} ms |\n{'|---' * 10}|", flush=True)
    rows: list[_Row] = []
    for attack in attacks:
        row = asyncio.run(_measure(target, attack))
        rows.append(row)
        before, during = row["before_ms"], row["during_ms"]
        cells = [f"{before[name]:.0f} -> {during[name]:.0f} ({during[name] - before[name]:+.0f})" for name in before]
        cells += ["passes" if row["passes"] else "FAILS"]
        print(f"| {' | '.join([attack.name, row['status'], format(row['attack_s'], '.1f'), *cells])} |", flush=True)
    print(f"\n{sum(row['passes'] for row in rows)} of {len(rows)} rows pass.\n")
    print(json.dumps({"rows": rows, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}))
    return rows


async def _measure(target: _Target, attack: Attack) -> _Row:
    known = dict[bytes, bytes]()  # equal requests take memory once
    requests = [known.setdefault(one, one) for one in (target.request(attack, index) for index in range(attack.count))]
    with _attacker(_Barrage(target.host, target.port, requests, attack.leaves_after_s)) as attacker:
        return await _measure_beside(target, attack, attacker)


async def _measure_beside(target: _Target, attack: Attack, attacker: Connection) -> _Row:
    loop = asyncio.get_running_loop()
    results: list[StreamResult] = []
    streaming = [asyncio.create_task(_stream(target, results, seed)) for seed in range(target.streams)]
    await _wait_for_first_tokens(target, results)

    before = await _watch(target, attack, results, asyncio.sleep(_WINDOW_S), first_number=1_000)
    statuses, attack_s = list[str](), 0.0

    async def send() -> None:
        nonlocal attack_s
        attacker.send(True)
        found, attack_s = await loop.run_in_executor(None, attacker.recv)
        statuses.extend(found)
        # Work that clients abandoned may go on.
        await asyncio.sleep(_WINDOW_S if attack.leaves_after_s is not None else max(0.0, _WINDOW_S - attack_s))

    during = await _watch(target, attack, results, send(), first_number=100_000)
    if error := next((result.error for result in results if result.error), None):
        raise ConfigError(f"a stream failed: {error[:200]}")
    for task in streaming:
        task.cancel()
    await asyncio.gather(*streaming, return_exceptions=True)
    quiet, loud = before.milliseconds(), during.milliseconds()
    return {
        "attack": attack.name,
        "status": ", ".join(sorted(set(statuses))),
        "attack_s": attack_s,
        "before_ms": quiet,
        "during_ms": loud,
        "passes": all(loud[name] - quiet[name] <= MAX_MORE_MS for name in ("longest_gap", "longest_wait")),
    }


async def _stream(target: _Target, results: list[StreamResult], seed: int) -> None:
    """One stream after the other."""
    loop, rng = asyncio.get_running_loop(), random.Random(seed)
    while True:
        prompt = [rng.randint(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(_PROMPT_TOKENS)]
        fixed = {"max_tokens": target.output_tokens, "ignore_eos": True, "stream": True}
        request = post_bytes(target.url, _COMPLETIONS, {"model": target.model, "prompt": prompt, **fixed}, target.key)
        results.append(StreamResult(_PROMPT_TOKENS))
        make = partial(SseProtocol, APIS["completions"], request, results[-1], None)
        transport, protocol = await loop.create_connection(make, target.host, target.port)
        try:
            await protocol.done
        finally:
            transport.abort()
        if results[-1].error:
            return


async def _wait_for_first_tokens(target: _Target, results: Sequence[StreamResult]) -> None:
    deadline = time.monotonic() + _START_S
    while len(results) < target.streams or not all(result.times for result in results):
        error = next((result.error for result in results if result.error), None)
        if time.monotonic() > deadline or error:
            raise ConfigError(f"{target.streams} streams do not run at once: {(error or 'no token in time')[:200]}")
        await asyncio.sleep(0.02)
    await asyncio.sleep(_SETTLE_S)


async def _watch(
    target: _Target, attack: Attack, results: Sequence[StreamResult], work: Awaitable[None], *, first_number: int
) -> _Measured:
    """What the other tenant sees until `work` is done and its last request has its response."""
    began, waits, health, is_over = time.monotonic(), list[float](), list[float](), asyncio.Event()

    async def repeat(make: Callable[[int], bytes], times: list[float]) -> None:
        number = first_number
        while not is_over.is_set():
            times.append(await _timed(target, make(number), is_checked=times is waits))
            number += 1
            await asyncio.sleep(_PAUSE_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(repeat(partial(target.other_request, attack), waits))
        tasks.create_task(repeat(lambda _: target.health_request(), health))
        try:
            await work
        finally:
            is_over.set()
    now = time.monotonic()
    gaps = [
        later - earlier
        for result in results
        for earlier, later in pairwise([*result.times, result.ended or now])
        if later >= began
    ]
    return _Measured(gaps, waits, health)


async def _timed(target: _Target, request: bytes, *, is_checked: bool) -> float:
    """The seconds that a request takes."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(target.host, target.port)
            writer.write(request)
            response = await reader.read(-1)
            writer.close()
    except (TimeoutError, ConnectionError) as error:
        raise ConfigError(f"a request beside the attack failed: {error or 'timeout'}") from None
    if is_checked and not response.startswith(b"HTTP/1.1 200"):
        raise ConfigError(f"a request beside the attack was refused: {response[:300].decode('utf-8', 'replace')}")
    return time.monotonic() - began


@dataclass(frozen=True, slots=True)
class _Barrage:
    """What an attack sends: each request at once on its own connection."""

    host: str
    port: int
    requests: Sequence[bytes]
    leaves_after_s: float | None


@contextmanager
def _attacker(sent: _Barrage) -> Iterator[Connection]:
    """A process that attacks when it is told to, and then sends the statuses and the seconds: threads in this one would
    delay the measured streams."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_attack, args=(sent, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()  # it is ready
        yield ours
    finally:
        process.terminate()
        process.join()
        ours.close()


def _attack(sent: _Barrage, pipe: Connection) -> None:
    os.nice(_ATTACKER_NICE)
    begin, deadlines = Event(), list[float]()

    def send(request: bytes) -> str:
        begin.wait()
        return _send(sent, request, deadlines[0])

    with ThreadPoolExecutor(len(sent.requests)) as threads:
        sending = [threads.submit(send, request) for request in sent.requests]
        pipe.send(True)
        pipe.recv()
        began = time.monotonic()
        deadlines.append(began + _MAX_ATTACK_S)
        begin.set()
        statuses = [one.result() for one in sending]
    pipe.send((statuses, time.monotonic() - began))


def _send(sent: _Barrage, request: bytes, deadline: float) -> str:
    """Sends a request and reads its response, or leaves; returns the status."""
    with socket.create_connection((sent.host, sent.port), timeout=_TIMEOUT_S) as one:
        try:
            one.settimeout(max(0.01, deadline - time.monotonic()))
            one.sendall(request)
            if sent.leaves_after_s is not None:
                time.sleep(sent.leaves_after_s)
                return "left"
            one.settimeout(max(0.01, deadline - time.monotonic()))
            status = one.recv(12).decode("ascii", "replace")[9:]
            while one.recv(1 << 20):
                pass
        except TimeoutError:
            return "left"
        except ConnectionError:
            return "connection reset"
    return status or "connection closed"
