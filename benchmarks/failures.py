"""What does a fault cost? Stops, kills and cuts off each process of each role under load, on one machine without a GPU.

    python benchmarks/failures.py                # prints a Markdown table; ten minutes
    python benchmarks/failures.py replicas tp    # some of the servers only

Clients stream short completions without a pause, each on a connection of its own. A request is lost if its stream ends
with an error or breaks off, and refused if it gets an error instead of a stream. Where a process for long bodies or for
grammars is the victim, every request needs it. A link is cut by a proxy that forwards nothing any more and closes
nothing, as a network does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil

CLIENTS, BASELINE_S, MAX_S = 12, 6.0, 120.0
STOP_S = 20.0  # of what nobody restarts, and of a link
VIRTUAL = ("--executor", "virtual", "--virtual-slowdown", "15")
TINY = ("--load", "random", "--shape", "tiny-llama", "--device", "cpu", "--threads", "1", "--kv-tokens", "16384")
PREFILL = (*TINY, "--prefill-from-tokens", "32", "--host-kv-tokens", "16384")
SERVERS: dict[str, tuple[str, ...]] = {
    "one engine": VIRTUAL,
    "replicas": (*VIRTUAL, "--replicas", "3", "--workers", "2"),
    "tp": (*TINY, "--tp", "2"),
    "pp": (*TINY, "--pp", "2"),
    "prefill-replicas": (*PREFILL, "--replicas", "3", "--prefill-replicas", "1"),
    "bodies": VIRTUAL,
    "grammars": TINY,
}
ROLES = {
    "one engine": ("engine", "front end", "supervisor"),
    "replicas": ("engine", "front end"),
    "tp": ("rank 0", "rank 1"),
    "pp": ("stage 0", "stage 1"),
    "prefill-replicas": ("prefill engine", "decode engine"),
    "bodies": ("process for long bodies",),
    "grammars": ("process for grammars",),
}
_number = itertools.count()
# What makes every request of a role need its process: a body of more than 4 KB, and a grammar that no other one has.
NEEDS: dict[str, Callable[[], dict[str, Any]]] = {
    "process for long bodies": lambda: {"metadata": {"padding": "x" * 5000}},
    "process for grammars": lambda: {"guided_regex": f"(a|b){{0,9}}{next(_number)}", "ignore_eos": False},
}


@dataclass
class Server:
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(next(match[1] for line in self.lines if (match := re.search(r"http://[\d.]+:(\d+)", line))))

    def pids(self, module: str) -> list[int]:
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if module in " ".join(one.cmdline()):
                    found.append(one.pid)
        return found

    def of_role(self, role: str) -> list[int]:
        match role:
            case "supervisor":
                return [self.process.pid]
            case "front end":
                return self.pids("server.front_end")
            case "rank 1" | "stage 1":
                return self.pids("engine.rank_process")
            case "process for long bodies":
                return self.pids("server.body_workers")
            case "process for grammars":
                # It forks a child for each trial.
                found = self.pids("sampling.grammar_trials")
                return [one for one in found if psutil.Process(one).ppid() not in found]
            case "prefill engine" | "decode engine":
                engines = self.pids("server.engine_process")
                return [one for one in engines if _listens_for_kv(one) == (role == "prefill engine")]
            case _:
                return self.pids("server.engine_process")

    def get(self, path: str) -> dict[str, Any]:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
                found: dict[str, Any] = json.load(response)
        except HTTPError as error:
            found = json.load(error)
        return found

    def metric(self, name: str) -> float:
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as response:
            text = response.read().decode()
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"paceline_{name}"))

    def is_whole(self) -> bool:
        try:
            counts = self.get("/ready").get("engines", {})
        except OSError:
            return False
        return bool(counts) and all(one["up"] == one["total"] for one in counts.values())


def _listens_for_kv(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("/kv-" in str(one.laddr) for one in psutil.Process(pid).net_connections("unix") if one.status)
    return False


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", "--log-level", "warning", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    server = Server(process)

    def collect() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line)

    threading.Thread(target=collect, daemon=True).start()
    try:
        while not any("Ctrl-C" in line for line in server.lines):
            assert process.poll() is None, f"it exited: {''.join(server.lines)}"
            time.sleep(0.1)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.wait()


# ---------------------------------------------------------------------- load


@dataclass
class Done:
    began: float
    ended: float
    outcome: str  # ok, lost or refused


class Load:
    """Clients on an event loop of their own."""

    def __init__(self, port: int, more: Callable[[], dict[str, Any]] = dict) -> None:
        """`more`: fields of each request."""
        self.port, self.more, self.done, self.open = port, more, list[Done](), set[float]()
        self._stopping = False
        self._rng = random.Random(0)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        while not self._stopping:
            began = time.monotonic()
            self.open.add(began)
            try:
                outcome = await asyncio.wait_for(self._request(), MAX_S)
            except TimeoutError:
                outcome = "lost"
            except (OSError, asyncio.IncompleteReadError):
                outcome = "refused"
            self.open.discard(began)
            self.done.append(Done(began, time.monotonic(), outcome))
            if outcome != "ok":
                await asyncio.sleep(0.2)

    async def _request(self) -> str:
        prompt = [self._rng.randrange(3, 500) for _ in range(64)]
        body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": True, "model": "m", **self.more()}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close"]
            head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""])
            writer.write(head.encode() + data)
            raw = b""
            while piece := await reader.read(65536):
                raw += piece
                if b"data: [DONE]" in raw[-4096:]:
                    return "ok"
            return "lost" if b"data: " in raw.partition(b'"error"')[0] else "refused"
        finally:
            writer.close()


# ---------------------------------------------------------------------- faults


def measure(
    server: Server,
    fault: Callable[[], None],
    is_whole: Callable[[], bool],
    label: str,
    more: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Prints a row of the table. `fault` returns when it is over, if somebody must end it."""
    load = Load(server.port, more)
    time.sleep(BASELINE_S)
    usual = sorted(one.ended - one.began for one in load.done) or [BASELINE_S]
    slow_s = 1.0 + 2 * usual[int(0.9 * (len(usual) - 1))]
    at, num_open, whole_s = time.monotonic(), len(load.open), None
    fault()
    while time.monotonic() - at < MAX_S:
        if server.process.poll() is not None:
            break
        if is_whole():
            whole_s = time.monotonic() - at
            break
        time.sleep(0.1)
    time.sleep(3.0)
    load.stop()
    after = [one for one in load.done if one.ended >= at]
    count = {name: sum(one.outcome == name for one in after) for name in ("lost", "refused")}
    disturbed = [one.ended - at for one in after if one.outcome != "ok" or one.ended - one.began > slow_s]
    seconds = "ended" if server.process.poll() is not None else f"{max(disturbed, default=0.0):.1f}"
    whole = "-" if whole_s is None else f"{whole_s:.1f}"
    print(f"| {label} | {num_open} | {count['lost']} | {count['refused']} | {seconds} | {whole} |", flush=True)


def run(name: str) -> None:
    roles, faults = ROLES[name], (signal.SIGSTOP, signal.SIGKILL)
    with serving(*SERVERS[name], "--served-name", "m") as server:
        for role in roles:
            for number in faults:
                victims = server.of_role(role)
                victim, count = victims[-1], len(victims)
                label = f"`{' '.join(SERVERS[name][len(VIRTUAL if 'virtual' in SERVERS[name] else TINY) :]) or '-'}`"

                def fault(victim: int = victim, number: int = number, role: str = role) -> None:
                    os.kill(victim, number)
                    if role == "supervisor" and number == signal.SIGSTOP:
                        time.sleep(STOP_S)
                        os.kill(victim, signal.SIGCONT)

                def is_whole(victim: int = victim, number: int = number, role: str = role, count: int = count) -> bool:
                    if role == "supervisor":
                        return number == signal.SIGSTOP and server.is_whole()
                    now = server.of_role(role)
                    return victim not in now and len(now) == count and server.is_whole()

                measure(
                    server, fault, is_whole, f"{label} | {role} | {signal.Signals(number).name}", NEEDS.get(role, dict)
                )


class Link:
    """A proxy between a decode server and a prefill server. While it is cut, nothing is forwarded or closed."""

    def __init__(self, port: int) -> None:
        self._to, self._whole = port, threading.Event()
        self._whole.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def _accept(self) -> None:
        while True:
            near, _ = self._listening.accept()
            self._whole.wait()
            with contextlib.suppress(OSError):
                far = socket.create_connection(("127.0.0.1", self._to))
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._whole.wait()
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def run_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    link, token = Link(port), ("--kv-token", "secret", "--served-name", "m")
    listen, peers = ("--kv-listen", f"tcp://127.0.0.1:{port}"), ("--prefill-peers", f"tcp://127.0.0.1:{link.port}")
    with (
        serving(*PREFILL, *token, "--role", "prefill", *listen) as prefill,
        serving(*PREFILL, *token, "--role", "decode", *peers) as server,
    ):

        def cut() -> None:
            link.cut()
            time.sleep(STOP_S)
            link.mend()

        def stop() -> None:
            os.kill(prefill.process.pid, signal.SIGSTOP)
            engine = prefill.of_role("engine")[0]
            os.kill(engine, signal.SIGSTOP)
            time.sleep(STOP_S)
            os.kill(engine, signal.SIGCONT)
            os.kill(prefill.process.pid, signal.SIGCONT)

        for fault, name in ((cut, f"cut for {STOP_S:g} s"), (stop, f"peer stopped for {STOP_S:g} s")):
            ended: list[float] = []

            def begin(fault: Callable[[], None] = fault, ended: list[float] = ended) -> None:
                fault()
                ended.append(server.metric("kv_transfers_total"))

            def is_whole(ended: list[float] = ended) -> bool:
                return server.metric("kv_transfers_total") > ended[0]

            measure(server, begin, is_whole, f"`--role decode` | link to the prefill server | {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", choices=[*SERVERS, "link", []], help="default: all")
    names = parser.parse_args().servers or [*SERVERS, "link"]
    print("| options | process | fault | open | lost | refused | disturbed for s | full strength after s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        if name == "link":
            run_link()
        else:
            run(name)


if __name__ == "__main__":
    main()
