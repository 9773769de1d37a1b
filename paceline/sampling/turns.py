"""Threads whose work is shared out in turns: tenants one after the other, and never two tasks of one tenant at a time.

So the next task of a tenant waits for that tenant's own tasks, and for one task of each other tenant at most.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Calls `run` with each task, which must not raise. Methods can be called on any thread."""

    def __init__(self, run: Callable[[T], None], num_threads: int, name: str) -> None:
        self._run, self._num_threads, self._name = run, num_threads, name
        self._changed = threading.Condition()  # guards all below
        self._waiting: dict[str, deque[T]] = {}  # by tenant; a tenant without tasks has no entry
        self._ready: deque[str] = deque()  # tenants with tasks and without a thread, in the order of their turns
        self._busy: set[str] = set()  # tenants whose task runs
        self._num_started = 0
        self._closing = False

    def add(self, tenant: str, task: T) -> None:
        with self._changed:
            if tenant not in self._waiting:
                self._waiting[tenant] = deque()
                if tenant not in self._busy:
                    self._ready.append(tenant)
            self._waiting[tenant].append(task)
            if self._num_started < min(self._num_threads, len(self._busy) + len(self._ready)):
                self._num_started += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._changed.notify()

    def close(self) -> None:
        """Waiting tasks never run. Does not wait for the running ones."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._closing)
                if self._closing:
                    return
                tenant = self._ready.popleft()
                tasks = self._waiting[tenant]
                task = tasks.popleft()
                if not tasks:
                    del self._waiting[tenant]
                self._busy.add(tenant)
            self._run(task)
            del task  # an idle thread must keep nothing alive
            with self._changed:
                self._busy.remove(tenant)
                if tenant in self._waiting:
                    self._ready.append(tenant)
                    self._changed.notify()
