"""A thread beside the engine's, for calls that leave Python's lock to others while they work.

What costs is handing over: a thread that wants Python's lock gets it when its holder blocks, or after 5 ms. So `start`
blocks until the call has begun and goes on as soon as it lets go of the lock. Bare locks do that in two switches of
threads; a future in a pool would begin whenever the engine's thread blocks next, which is when it wants the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Worker:
    """One call at a time: `start`, then `wait`. Both on one thread, `close` on any, when nobody else is left."""

    def __init__(self, name: str) -> None:
        self._call: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._is_busy = False  # from `start` to `wait`
        # Each is passed on by releasing it: taken from the start, and taken again by whoever was waiting.
        self._asked, self._began, self._done = (threading.Lock() for _ in range(3))
        for lock in (self._asked, self._began, self._done):
            lock.acquire()
        # One that waits when the interpreter goes away must not keep it; one that works is waited for by `close`.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def start(self, call: Callable[[], None]) -> None:
        assert not self._is_busy, "a call was started before the one before was waited for"
        self._is_busy, self._call = True, call
        self._asked.release()
        self._began.acquire()

    def wait(self) -> None:
        """Blocks until the call has returned. What it raised is raised here."""
        assert self._is_busy, "no call was started"
        self._done.acquire()
        self._is_busy = False
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread, after the call that is under way."""
        self._call = None
        self._asked.release()
        self._thread.join()

    def _work(self) -> None:
        while True:
            self._asked.acquire()
            call, self._call = self._call, None
            if call is None:
                return
            self._began.release()
            try:
                call()
            except BaseException as error:  # a panic of llguidance is one; whoever waits must be told
                self._error = error
            del call  # it keeps requests' grammars alive; nothing may while the thread is idle
            self._done.release()
