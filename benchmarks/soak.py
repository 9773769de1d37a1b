"""Does a server stay correct under load and faults? A soak test on the virtual GPU, with every token checked.

    python benchmarks/soak.py --minutes 20

Clients stream and check every text, disconnect, read too slowly, send invalid requests. In the first half engine and
front ends are killed every few seconds; in the second half none is, so that memory growth can be measured. At the end
no request and no KV may be left. Prints progress, then one JSON object and a verdict.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from paceline.engine.virtual.build import VOCAB_SIZE, virtual_tokens
from paceline.text.synthetic import synthetic_tokenizer

TOKENS = virtual_tokens()
TOKENIZER = synthetic_tokenizer(VOCAB_SIZE)
CLIENTS = 24
SLOWDOWN = 15  # of the virtual GPU: this machine may be busy with other work


def expected(prompt: list[int], num_tokens: int) -> str:
    return TOKENIZER.decode(TOKENS.answer(np.array(prompt, np.int32), num_tokens), at_start=False)


class Wrong(AssertionError):
    """A token was lost, repeated or changed, or a stream ended without an end marker."""


class Soak:
    def __init__(self, host: str, port: int, seed: int) -> None:
        self.host, self.port = host, port
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.num_tokens = 0
        self.killed_at = -1e9  # when a process was last killed: its clients may be disconnected for a while
        self.killing = False

    async def client(self, until: float) -> None:
        while time.monotonic() < until:
            kind = self.rng.choices(("stream", "whole", "leave", "slow", "bad", "deadline"), (50, 20, 20, 1, 6, 3))[0]
            try:
                await asyncio.wait_for(self.one(kind), 120)
                self.counts[kind] += 1
            except (ConnectionError, asyncio.IncompleteReadError):
                # Connections may break only when a front end was killed.
                if time.monotonic() - self.killed_at > 20:
                    raise
                self.counts["disconnected by a kill"] += 1
                await asyncio.sleep(0.1)

    async def one(self, kind: str) -> None:
        prompt = [self.rng.randint(300, 340)] * self.rng.randint(1, 200)
        count = self.rng.randint(1, 400)
        body: dict[str, Any] = {
            "model": "virtual",
            "prompt": prompt,
            "max_tokens": count,
            "ignore_eos": True,
            "stream": kind != "whole",
        }
        if kind == "bad":
            body |= self.rng.choice(({"max_tokens": -1}, {"model": "x"}, {"prompt": ""}, {"colour": 1}))
        if kind == "deadline":
            body |= {"deadline_ms": 200, "max_tokens": 20_000}
        if kind == "slow":
            body |= {"max_tokens": 20_000}
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            data = json.dumps(body).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            writer.write(head.encode() + data)
            if kind == "leave":
                await asyncio.sleep(self.rng.random() * 0.3)
                return
            if kind == "slow":
                await asyncio.sleep(5)  # longer than slow_reader_s
                return
            self.check(kind, await reader.read(), prompt, body["max_tokens"])
        finally:
            writer.transport.abort() if self.rng.random() < 0.5 else writer.close()

    @staticmethod
    def is_prefix(raw: bytes, prompt: list[int], count: int) -> bool:
        return expected(prompt, count).startswith(response_text(raw))

    def check(self, kind: str, raw: bytes, prompt: list[int], count: int) -> None:
        if not raw:
            raise ConnectionError("the response is empty")
        status = int(raw[9:12])
        chunked = b"transfer-encoding: chunked" in raw[:400].lower()
        if chunked and not raw.endswith(b"0\r\n\r\n") and not self.is_prefix(raw, prompt, count):
            raise Wrong(f"disconnected, and wrong before that: {raw[-300:]!r}")
        if chunked and not raw.endswith(b"0\r\n\r\n"):
            raise ConnectionError("disconnected")
        if status == 503:
            self.counts["503"] += 1
            if time.monotonic() - self.killed_at > 20:
                raise Wrong(f"503 without a kill: {raw[-300:]!r}")
            return
        if kind == "bad":
            if not 400 <= status < 500:
                raise Wrong(f"a bad request got {raw[:300]!r}")
            return
        if kind == "deadline":
            killed = time.monotonic() - self.killed_at < 20 and b'"code":"engine_failed"' in raw
            if not killed and (status not in (200, 408) or b'"code":"deadline"' not in raw):
                raise Wrong(f"a deadline passed and the response is: {raw[:200]!r} … {raw[-300:]!r}")
            return
        if status != 200:
            raise Wrong(raw[:400].decode("utf-8", "replace"))
        text, wanted = response_text(raw), expected(prompt, count)
        ended = kind == "whole" or b"data: [DONE]" in raw[-64:]
        if ended and text == wanted:
            self.num_tokens += count
        elif not ended and time.monotonic() - self.killed_at < 20 and wanted.startswith(text):
            self.counts["ended by a kill"] += 1
        else:
            raise Wrong(f"{kind}: wanted {wanted[:80]!r}…, got {text[:80]!r}…, ended {ended}, {raw[-200:]!r}")


def response_text(raw: bytes) -> str:
    return "".join(json.loads(f'"{part}"') for part in re.findall(r'"text":"((?:[^"\\]|\\.)*)"', raw.decode()))


def rss(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def children(pid: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"engine": [], "front_end": []}
    for child in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split():
        try:
            with open(f"/proc/{child}/cmdline", encoding="ascii") as file:
                line = file.read()
        except OSError:
            continue
        for role in found:
            if f"paceline.server.{role}" in line:
                found[role].append(int(child))
    return found


async def inject(soak: Soak, pid: int, until: float) -> None:
    """Kills a process every few seconds."""
    while time.monotonic() < until - 25:
        await asyncio.sleep(soak.rng.uniform(4, 8))
        role = soak.rng.choice(("engine", "front_end"))
        victims = children(pid)[role]
        if victims:
            soak.killed_at = time.monotonic()
            os.kill(soak.rng.choice(victims), signal.SIGKILL)
            soak.counts[f"killed {role}"] += 1
            # Before the next kill, the disconnected clients get errors and new ones are served.
            await asyncio.sleep(3)


async def watch(url: str, pid: int, begins: float, until: float, samples: dict[int, list[int]]) -> None:
    await asyncio.sleep(max(0.0, begins - time.monotonic()))
    # Fill bounded caches first, so that they do not count as growth: the bytes of every token, in every front end.
    body = json.dumps({"tokens": list(range(VOCAB_SIZE))}).encode()
    for _ in range(16):
        await asyncio.to_thread(lambda: urlopen(Request(f"{url}/detokenize", body), timeout=60).close())
    while time.monotonic() < until:
        for one in [pid, *(child for group in children(pid).values() for child in group)]:
            samples.setdefault(one, []).append(rss(one))
        await asyncio.sleep(1)


async def run(process: subprocess.Popen[str], url: str, minutes: float, seed: int) -> dict[str, Any]:
    host, port = url.removeprefix("http://").split(":")
    soak = Soak(host, int(port), seed)
    began = time.monotonic()
    half, end = began + minutes * 30, began + minutes * 60
    calm = half + minutes * 6  # a fifth of the second half to warm up
    samples: dict[int, list[int]] = {}
    tasks = [asyncio.create_task(soak.client(end)) for _ in range(CLIENTS)]
    tasks += [
        asyncio.create_task(inject(soak, process.pid, half)),
        asyncio.create_task(watch(url, process.pid, calm, end, samples)),
    ]
    last = began
    while time.monotonic() < end:
        done, _ = await asyncio.wait(tasks, timeout=30, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if time.monotonic() - last > 29:
            last = time.monotonic()
            print(f"{last - began:.0f} s: {soak.num_tokens} tokens checked, {dict(soak.counts)}", flush=True)
    await asyncio.gather(*tasks)
    await asyncio.sleep(4)
    names = {pid: role for role, pids in children(process.pid).items() for pid in pids} | {process.pid: "supervisor"}
    growth = {}
    for pid, values in samples.items():
        fifth = max(1, len(values) // 5)
        first, final = sorted(values[:fifth])[fifth // 2], sorted(values[-fifth:])[fifth // 2]
        growth[f"{names.get(pid, 'gone')} {pid}"] = {"mb": round(final / 1e6, 1), "growth": round(final / first - 1, 4)}
    with urlopen(f"{url}/health", timeout=30) as response:
        health = json.load(response)
    with urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    metric = {name: float(value) for name, value in re.findall(r"^paceline_(\w+) ([\d.e+-]+)$", text, re.MULTILINE)}
    left = {
        "leaked_tokens": health["kv_tokens"] - health["kv_tokens_free"],
        "running": health["num_running"],
        "waiting": health["num_waiting"],
        "open": metric["num_requests_open"],
        "repairs": metric["scheduler_state_repairs_total"],
    }
    return {
        "minutes": minutes,
        "tokens_checked": soak.num_tokens,
        "counts": dict(soak.counts),
        "left": left,
        "memory": growth,
        "load_average": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="A server under load and faults, every token checked.")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    command = [sys.executable, "-m", "paceline.cli", "serve", "--executor", "virtual", "--port", "0"]
    command += ["--workers", "2", "--log-level", "error", "--slow-reader-s", "2", "--kv-tokens", "40000"]
    command += ["--journal-events", "1000", "--virtual-slowdown", str(SLOWDOWN)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "stdout is a pipe"
    try:
        url = ""
        for line in process.stdout:
            url = next(iter(re.findall(r"http://[\d.]+:\d+", line)), url)
            if "Ctrl-C" in line:
                break
        found = asyncio.run(run(process, url, given.minutes, given.seed))
    finally:
        process.terminate()
        process.wait(30)
    print(json.dumps(found))
    flat = all(one["growth"] < 0.02 for one in found["memory"].values())
    whole = not any(found["left"].values())
    print(
        "PASS" if flat and whole else "FAIL",
        "memory is flat," if flat else "memory grew,",
        f"left over: {found['left']}",
    )
    return 0 if flat and whole else 1


if __name__ == "__main__":
    sys.exit(main())
