"""Threads that tenants use in turns."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from paceline.server.errors import shutting_down

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _TenantCall:
    tenant: str | None
    function: Callable[[], object]
    result: Future[Any]


class FairThreads:
    """The next call is one of the waiting tenant that has used the least time: a tenant with many calls, or with slow
    ones, delays those of another by no more than what has begun. A call that is cancelled while it waits never runs."""

    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        max_per_tenant: int | None = None,
        initializer: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A thread is started when a call finds none idle, and runs `initializer` first, which must not raise. With
        `max_per_tenant` a tenant leaves the other threads to the others."""
        self._num_threads, self._name, self._clock = num_threads, name, clock
        self._max_per_tenant, self._initializer = max_per_tenant or num_threads, initializer
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._waiting: dict[str | None, deque[_TenantCall]] = {}  # by tenant
        self._running: Counter[str | None] = Counter()  # calls, by tenant
        # Seconds that each tenant has used. One that comes back after a pause begins where the last one that was served
        # did: it saves up no time.
        self._used_s = defaultdict[str | None, float](float)
        self._served_s = 0.0
        self._is_closed = False

    def start(self) -> None:
        """Starts a thread before the first call."""
        with self._changed:
            self._start_thread()

    def submit(self, tenant: str | None, function: Callable[[], T]) -> Future[T]:
        call = _TenantCall(tenant, function, Future())
        with self._changed:
            if self._is_closed:
                raise shutting_down()
            if tenant not in self._waiting:
                self._waiting[tenant] = deque()
                if not self._running[tenant]:
                    self._used_s[tenant] = max(self._used_s[tenant], self._served_s)
            self._waiting[tenant].append(call)
            self._use_threads()
        call.result.add_done_callback(partial(self._forget, tenant))
        return call.result

    def _forget(self, tenant: str | None, result: Future[object]) -> None:
        """Releases a call that was cancelled, and with it a body, at once."""
        if not result.cancelled():
            return
        with self._changed:
            calls = self._waiting.get(tenant, deque[_TenantCall]())
            for call in calls:
                if call.result is result:
                    calls.remove(call)
                    break
            if not calls:
                self._waiting.pop(tenant, None)

    def close(self) -> None:
        """Calls that wait fail; `join` waits for those that run."""
        with self._changed:
            self._is_closed = True
            waiting = [call for calls in self._waiting.values() for call in calls]
            self._waiting.clear()
            self._changed.notify_all()
        for call in waiting:
            if call.result.set_running_or_notify_cancel():
                call.result.set_exception(shutting_down())

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
        self._threads[-1].start()

    def _use_threads(self) -> None:
        """Wakes or starts a thread if there is a call for it."""
        if self._next_tenants():
            if self._running.total() < len(self._threads):
                self._changed.notify()
            elif len(self._threads) < self._num_threads:
                self._start_thread()

    def _next_tenants(self) -> list[str | None]:
        return [tenant for tenant in self._waiting if self._running[tenant] < self._max_per_tenant]

    def _run(self) -> None:
        self._initializer()
        while (call := self._take()) is not None:
            self._execute(call)
            del call  # and with it a body, while this thread waits

    def _take(self) -> _TenantCall | None:
        """The next call, or None when the threads are closed."""
        with self._changed:
            while not (tenants := self._next_tenants()):
                if self._is_closed:
                    return None
                self._changed.wait()
            tenant = min(tenants, key=self._used_s.__getitem__)
            calls = self._waiting[tenant]
            call = calls.popleft()
            if not calls:
                del self._waiting[tenant]
            self._served_s = max(self._served_s, self._used_s[tenant])
            self._running[tenant] += 1
            self._use_threads()
            return call

    def _execute(self, call: _TenantCall) -> None:
        if not call.result.set_running_or_notify_cancel():
            self._end(call, 0.0)
            return
        began = self._clock()
        try:
            result = call.function()
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            self._end(call, self._clock() - began)
            call.result.set_exception(error)
        else:
            self._end(call, self._clock() - began)
            call.result.set_result(result)

    def _end(self, call: _TenantCall, seconds: float) -> None:
        """Before the caller knows: its next call finds this thread idle."""
        with self._changed:
            self._running[call.tenant] -= 1
            self._used_s[call.tenant] += seconds
