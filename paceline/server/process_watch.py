"""Kills a child process that hangs while another thread waits for its reply.

Wall time cannot tell a process that hangs from one that a busy machine does not run. A process that works uses CPU
time, however little it gets: one that uses none for several checks is stopped or waits for what never comes, and one
that uses far more than any work needs is in a loop.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

log = logging.getLogger("paceline.server")

CHECK_S = 0.5
MAX_IDLE_CHECKS = 20  # without CPU time; counted, since this process or the machine may have been stopped itself
MAX_CPU_S = 300.0  # for one reply, of all its threads
MAX_UNKNOWN_CHECKS = 1200  # where the CPU time of another process cannot be read


@dataclass(slots=True)
class _Busy:
    process: subprocess.Popen[bytes]
    began_s: float | None  # its CPU time; None: it cannot be read
    used_s: float | None
    num_idle: int = 0  # checks


class ProcessWatch:
    def __init__(self, purpose: str) -> None:
        self._purpose = purpose  # completes "the process", in the log
        self._lock = threading.Lock()
        self._busy: dict[int, _Busy] = {}  # by process id
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None  # started with the first reply that is waited for

    @contextlib.contextmanager
    def busy(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """While the caller waits for what this process must do."""
        used_s = cpu_s(process.pid)
        with self._lock:
            self._busy[process.pid] = _Busy(process, used_s, used_s)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-process-watch", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            # Before the caller may reap it: no other process can have its id while it is here.
            with self._lock:
                del self._busy[process.pid]

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(CHECK_S):
            with self._lock:
                for one in self._busy.values():
                    if why := _check(one):
                        log.error("the process %s (%d) %s: it is ended", self._purpose, one.process.pid, why)
                        one.process.kill()


def cpu_s(pid: int) -> float | None:
    """The CPU time of another process, of all its threads. None: this system does not tell."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), which Python does not have
    except (OSError, OverflowError, AttributeError):
        return None


def _check(one: _Busy) -> str:
    """Counts one more check. Returns why the process must be ended, or nothing."""
    used_s = cpu_s(one.process.pid)
    one.num_idle = 0 if used_s is not None and used_s != one.used_s else one.num_idle + 1
    one.used_s = used_s
    most = MAX_UNKNOWN_CHECKS if used_s is None else MAX_IDLE_CHECKS
    if one.num_idle == most:
        return f"has not responded for {most * CHECK_S:g} s"
    if used_s is not None and one.began_s is not None and used_s - one.began_s > MAX_CPU_S:
        return f"has used {MAX_CPU_S:g} s of CPU time for one request"
    return ""
