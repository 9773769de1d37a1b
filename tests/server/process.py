"""`paceline serve` as a child process, started the way a user starts it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

_START_S = 120  # generous: the machine may be busy


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return next(match[0] for line in self.lines if (match := re.search(r"http://[\d.]+:\d+", line)))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def children(self) -> dict[str, list[int]]:
        """Process ids by role: engine and front_end."""
        found: dict[str, list[int]] = {"engine": [], "front_end": []}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                for role, module in (("engine", "paceline.server.engine_process"), ("front_end", "server.front_end")):
                    if module in line:
                        found[role].append(process.pid)
        return found

    def signal(self, number: int) -> float:
        """Sends a signal and waits for the exit. Returns the seconds it took."""
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(120)
        return time.monotonic() - began


@contextmanager
def serving(*arguments: str, prefix: tuple[str, ...] = ()) -> Iterator[ServerProcess]:
    """A server on a free port, ready for requests; killed at the end if it is still running. `prefix` is a command that
    starts it."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "paceline.cli", "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = ServerProcess(process)
    reader = threading.Thread(target=_read, args=(server,), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + _START_S
        while not any("Ctrl-C" in line or '"message": "ready"' in line for line in server.lines):
            assert process.poll() is None, f"it exited with {process.returncode}: {server.output}"
            assert time.monotonic() < deadline, f"it did not start: {server.output}"
            time.sleep(0.02)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


def _read(server: ServerProcess) -> None:
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.lines.append(line)
