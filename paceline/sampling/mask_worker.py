"""A thread that computes masks while the engine's thread continues, for calls that release the GIL.

The cost is in the hand-over: a thread that waits for the GIL gets it when its holder blocks, or after 5 ms. So `start`
blocks until the call has begun, and returns as soon as the call releases the GIL. Bare locks do that in two thread
switches; a future in a pool would begin when the engine's thread blocks next, which is when it needs the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class MaskWorker:
    """Runs one call at a time: `start`, then `wait`, on the same thread. `close` can be called on any thread, last."""

    def __init__(self, name: str) -> None:
        self._call: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._is_busy = False  # from `start` to `wait`
        # Each lock is a signal: acquired from the start, released to signal, acquired again by the waiting thread.
        self._asked, self._began, self._done = (threading.Lock() for _ in range(3))
        for lock in (self._asked, self._began, self._done):
            lock.acquire()
        # A daemon, so that an idle thread does not keep the interpreter alive; `close` waits for a running call.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def start(self, call: Callable[[], None]) -> None:
        assert not self._is_busy, "a call was started before the previous one was waited for"
        self._is_busy, self._call = True, call
        self._asked.release()
        self._began.acquire()

    def wait(self) -> None:
        """Blocks until the call has returned. Raises what the call raised."""
        assert self._is_busy, "no call was started"
        self._done.acquire()
        self._is_busy = False
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread after the running call."""
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
            except BaseException as error:  # includes a panic of llguidance; `wait` raises it
                self._error = error
            del call  # an idle thread must not keep the grammars of requests alive
            self._done.release()
