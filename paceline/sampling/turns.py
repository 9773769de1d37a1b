"""Threads whose work is shared out in turns: tenants one after the other, and few tasks of one tenant at a time.

So the next task of a tenant waits for that tenant's own tasks, and for one task of each other tenant at most.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Calls `run` with each task, which must not raise. Methods can be called on any thread."""

    def __init__(self, run: Callable[[T], None], num_threads: int, name: str, *, max_per_tenant: int = 1) -> None:
        """`max_per_tenant`: tasks of one tenant that run at a time; it may be set later."""
        self.max_per_tenant = max_per_tenant
        self._run, self._num_threads, self._name = run, num_threads, name
        self._changed = threading.Condition()  # guards all below
        self._waiting: dict[str, deque[T]] = {}  # by tenant; a tenant without tasks has no entry
        self._ready: deque[str] = deque()  # tenants with tasks that may have a thread, in the order of their turns
        self._busy = Counter[str]()  # tasks that run, by tenant
        self._num_started = 0
        self._closing = False

    def add(self, tenant: str, task: T) -> None:
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(task)
            self._make_ready(tenant)

    def close(self) -> None:
        """Waiting tasks never run. Does not wait for the running ones."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()

    def _make_ready(self, tenant: str) -> None:
        """Gives the tenant a turn, if it has a task for one. With the lock."""
        if tenant not in self._waiting or tenant in self._ready or self._busy[tenant] >= self.max_per_tenant:
            return
        self._ready.append(tenant)
        if self._num_started < min(self._num_threads, self._busy.total() + len(self._ready)):
            self._num_started += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._changed.notify()

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
                self._busy[tenant] += 1
                self._make_ready(tenant)
            self._run(task)
            del task  # an idle thread must keep nothing alive
            with self._changed:
                self._busy[tenant] -= 1
                if not self._busy[tenant]:
                    del self._busy[tenant]
                self._make_ready(tenant)
