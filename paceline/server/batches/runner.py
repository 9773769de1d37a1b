"""Runs batches: one process at a time, the one that holds `runner.lock` of the folder.

The lock ends with its process, and another front end or server that uses the folder takes over. One batch of each
tenant runs at a time, the oldest first, as a background tenant of its own: the scheduler divides what others leave
among the tenants.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Awaitable, Callable

from paceline.server.batches.objects import StoredBatch
from paceline.server.batches.running_batch import RunningBatch
from paceline.server.batches.store import BatchStore
from paceline.server.http import Receive, Scope, Send
from paceline.server.limits import MAX_BATCH_LINES_IN_FLIGHT
from paceline.server.state import ServerState

log = logging.getLogger("paceline.server")
_POLL_S = 0.2  # for a new batch, a cancelled one, or the lock
_RESCAN_S = 10.0  # even if the folder seems unchanged
_SWEEP_S = 60.0  # between two removals of expired files
_RETRY_S = 10.0  # after a disk error


class BatchRunner:
    def __init__(
        self, state: ServerState, store: BatchStore, call: Callable[[Scope, Receive, Send], Awaitable[None]]
    ) -> None:
        """`call` is the app."""
        self._state, self._store, self._call = state, store, call
        self._running: dict[str, tuple[StoredBatch, RunningBatch, asyncio.Task[None]]] = {}  # by id
        self._not_before: dict[str, float] = {}  # batches that failed because of the server
        self._loop: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until `stop`."""
        self._loop = asyncio.create_task(self._run_with_lock())
        try:
            await asyncio.wait({self._loop})
        finally:
            await self.stop()
        if not self._loop.cancelled():
            self._loop.result()

    async def _run_with_lock(self) -> None:
        path = self._store.root / "runner.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _try_lock(descriptor):
                await asyncio.sleep(_POLL_S)
            await self._run_batches()
        finally:
            tasks = [task for _, _, task in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            os.close(descriptor)

    async def stop(self) -> None:
        """Lines in flight are aborted; they run again after the next start."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    async def _run_batches(self) -> None:
        seen, scanned, swept = 0, -_RESCAN_S, -_SWEEP_S
        while True:
            now = time.monotonic()
            try:
                changed = os.stat(self._store.root / "batches").st_mtime_ns
                if changed != seen or now - scanned >= _RESCAN_S:
                    seen, scanned = changed, now
                    self._start(await asyncio.to_thread(self._store.batches, None))
                if now - swept >= _SWEEP_S:
                    swept = now
                    await asyncio.to_thread(self._store.remove_expired)
            except OSError as error:
                log.error("batch_folder cannot be used, trying again in %g s: %s", _RETRY_S, error)
                await asyncio.sleep(_RETRY_S)
            await asyncio.sleep(_POLL_S)

    def _start(self, known: list[StoredBatch]) -> None:
        tenants = {stored.tenant for stored, _, _ in self._running.values()}
        for stored in known:
            batch = stored.batch
            if batch.is_finished or self._not_before.get(batch.id, 0.0) > time.monotonic():
                continue
            if batch.id in self._running:
                if batch.status == "cancelling":
                    self._running[batch.id][1].cancelled.set()
                continue
            ends_now = batch.status == "cancelling" or batch.expires_at <= time.time()
            if stored.tenant in tenants and not ends_now:
                continue
            tenants.add(stored.tenant)
            running = RunningBatch(stored, self._store, self._state, self._call, self._max_in_flight)
            task = asyncio.create_task(self._run(running))
            self._running[batch.id] = stored, running, task
        self._state.counters.batches_running = len(self._running)

    def _max_in_flight(self) -> int:
        """Of each batch."""
        return max(1, MAX_BATCH_LINES_IN_FLIGHT // max(1, len(self._running)))

    async def _run(self, running: RunningBatch) -> None:
        batch_id = running.batch.id
        try:
            await running.run()
            self._not_before.pop(batch_id, None)
        except Exception as error:  # of the disk, or our own: the other batches go on, and this one is tried again
            self._not_before[batch_id] = time.monotonic() + _RETRY_S
            log.error("batch %s is interrupted and continues in %g s", batch_id, _RETRY_S, exc_info=error)
        finally:
            del self._running[batch_id]
            self._state.counters.batches_running = len(self._running)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
