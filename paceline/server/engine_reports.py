"""Reports of an engine process to the routers in the front ends: load, and changes of the prefix cache.

A router reads them in order, so everything is sent by the engine's thread. While the engine works, a report is sent
every 20 ms; a thread asks for one every second, so that the router can tell an idle engine from one that is stuck.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from paceline.cluster.held_pages import HeldPages, PageChanges
from paceline.cluster.kv_events import KvEventLog
from paceline.cluster.load import load_of
from paceline.engine.engine import Engine
from paceline.engine.output import EngineFailed
from paceline.scheduler import Scheduler
from paceline.server.messages import ReplicaReport

_BUSY_INTERVAL_S = 0.02
_IDLE_INTERVAL_S = 1.0


class ReplicaReporter:
    def __init__(self, engine: Engine, address: str, send: Callable[[str, ReplicaReport], None]) -> None:
        """`send` sends to a front end, `address` names this engine."""
        self._engine, self._address, self._send = engine, address, send
        self._log = KvEventLog(engine.scheduler.config.page_size)
        self._held = HeldPages()
        self._num_received: dict[str, int] = {}  # by front end; written by the listening thread
        self._front_ends: set[str] = set()  # that get reports; used by the engine's thread
        self._reported = 0.0
        threading.Thread(target=self._report_idle, name="paceline-report", daemon=True).start()

    # ------------------------------------------------------------------ listening thread

    def received(self, front_end: str) -> None:
        """A job of this front end was received."""
        if front_end in self._num_received:
            self._num_received[front_end] += 1

    def subscribe(self, front_end: str) -> None:
        """Reports everything that is cached to a front end, and from then on what changes."""

        def begin(scheduler: Scheduler) -> None:
            if not self._front_ends:
                scheduler.listen(self._log)
            self._report(scheduler)
            self._front_ends.add(front_end)
            self._send_to(front_end, scheduler, self._held.everything())

        self._num_received[front_end] = 0
        self._call(begin)

    def unsubscribe(self, front_end: str) -> None:
        if self._num_received.pop(front_end, None) is not None:
            self._call(lambda _: self._front_ends.discard(front_end))

    def _report_idle(self) -> None:
        while True:
            time.sleep(_IDLE_INTERVAL_S)
            if self._num_received:
                self._call(self._report)

    def _call(self, function: Callable[[Scheduler], None]) -> None:
        with contextlib.suppress(EngineFailed):  # the process is about to exit, and front ends are told
            self._engine.call(function)

    # ------------------------------------------------------------------ engine's thread

    def after_step(self) -> None:
        scheduler = self._engine.scheduler
        is_due = time.monotonic() - self._reported >= _BUSY_INTERVAL_S or not scheduler.has_work
        if self._front_ends and is_due:
            self._report(scheduler)

    def _report(self, scheduler: Scheduler) -> None:
        self._reported = time.monotonic()
        changes = self._held.changes(self._log.take())
        for front_end in self._front_ends:
            self._send_to(front_end, scheduler, changes)

    def _send_to(self, front_end: str, scheduler: Scheduler, changes: PageChanges) -> None:
        num_received = self._num_received.get(front_end, 0)
        self._send(front_end, ReplicaReport(self._address, load_of(scheduler), num_received, changes))
