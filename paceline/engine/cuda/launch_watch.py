"""Finds launches that take so long that running requests wait for them, and says why.

A launch takes a millisecond or two. It takes longer if something is done for the first time, which all happens before
the first request if nothing goes wrong, or if the host has no time for it.
"""

from __future__ import annotations

import gc
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from paceline.kernels._triton import Kernel

log = logging.getLogger("paceline.engine")

SLOW_LAUNCH_S = 0.05
_NOTABLE_S = 0.005  # launches that take longer may have allocated memory; asking for it takes too long for all of them
CAUSES = {
    "compile": "a kernel was compiled",
    "capture": "a CUDA graph was captured",
    "allocation": "device memory was allocated",
    "library load": "a library loaded a kernel",
    "host pause": "the process was not running or collected garbage",
}


class _Spent(NamedTuple):
    """Clocks and counts when a launch begins."""

    now: float
    cpu_s: float  # of this thread
    major_faults: int  # of this thread: pages that were read from disk
    compile_s: float
    capture_s: float
    collect_s: float


class LaunchWatch:
    """Measures launches on the engine's thread."""

    def __init__(self, capture_s: Callable[[], float], reserved_bytes: Callable[[], int]) -> None:
        """capture_s: host time of graph captures so far; reserved_bytes: device memory that was allocated so far."""
        self.slow: Counter[str] = Counter()  # launches of more than SLOW_LAUNCH_S, by cause
        self.longest_s = 0.0
        self._capture_s, self._reserved_bytes = capture_s, reserved_bytes
        self._reserved = reserved_bytes()
        self._collect_s = self._collect_began = 0.0
        gc.callbacks.append(self._collects)

    def close(self) -> None:
        gc.callbacks.remove(self._collects)

    def begin(self) -> _Spent:
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return _Spent(
            time.perf_counter(),
            usage.ru_utime + usage.ru_stime,
            usage.ru_majflt,
            Kernel.compile_s,
            self._capture_s(),
            self._collect_s,
        )

    def end(self, before: _Spent, what: str, *, is_device_busy: bool = False) -> str | None:
        """The cause, if the launch of `what` was slow, which is also logged and counted. is_device_busy: with the pass
        before it, so nobody waited for this launch; with many kernels, it has waited for room in the device's queue."""
        if is_device_busy:
            return None
        seconds = time.perf_counter() - before.now
        self.longest_s = max(self.longest_s, seconds)
        if seconds < SLOW_LAUNCH_S:
            if seconds > _NOTABLE_S:
                self._reserved = self._reserved_bytes()
            return None
        cause = self._cause(before, seconds)
        self.slow[cause] += 1
        log.warning("launch of %s took %.0f ms: %s", what, seconds * 1e3, CAUSES[cause])
        return cause

    def _cause(self, before: _Spent, seconds: float) -> str:
        now, reserved = self.begin(), self._reserved_bytes()
        grown, self._reserved = reserved > self._reserved, reserved
        known = {
            "compile": now.compile_s - before.compile_s,
            "capture": now.capture_s - before.capture_s,
            "host pause": now.collect_s - before.collect_s,
        }
        largest = max(known, key=lambda cause: known[cause])
        if known[largest] > seconds / 2:
            return largest
        if grown:
            return "allocation"
        is_loading = now.cpu_s - before.cpu_s > seconds / 2 or now.major_faults > before.major_faults
        return "library load" if is_loading else "host pause"

    def _collects(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collect_began = time.perf_counter()
        else:
            self._collect_s += time.perf_counter() - self._collect_began
