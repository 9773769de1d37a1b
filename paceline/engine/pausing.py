"""Pausing: the engine launches no forward pass until it is resumed. Requests are still accepted and wait.

There are three ways to come to rest: running requests finish first (`wait`), are aborted (`abort`), or stop where they
are and continue later (`continue`). An operator and a weight update can pause at the same time; the engine runs again
when both have resumed it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum

from paceline.engine.output import Conflict
from paceline.request import FinishReason
from paceline.scheduler.scheduler import Scheduler

OPERATOR = "operator"  # who pauses by the admin route, or the Python interface


class PauseMode(StrEnum):
    WAIT = "wait"
    ABORT = "abort"
    CONTINUE = "continue"


class PauseControl:
    """Used on the engine's thread only; `is_paused` may be read from any thread."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._modes: dict[str, PauseMode] = {}  # by who paused
        self._waiting: list[tuple[str, Future[None]]] = []  # who paused, and is told when the engine is at rest
        self.is_paused = False

    @property
    def is_requested(self) -> bool:
        return bool(self._modes)

    @property
    def may_launch(self) -> bool:
        """Whether the loop may launch passes: no pause is requested, or running requests are to finish first."""
        return all(mode is PauseMode.WAIT for mode in self._modes.values())

    def pause(self, who: str, mode: PauseMode, at_rest: Future[None]) -> None:
        """Begins to pause. `at_rest` gets its result when no pass is in flight and none will be launched."""
        started = self._scheduler.started
        if mode is PauseMode.WAIT and started and not self.may_launch:
            raise Conflict(
                f"mode is 'wait' and the engine is paused with {len(started)} running requests, which cannot finish: "
                "resume it first, or choose mode abort or continue."
            )
        self._modes[who] = mode
        self._waiting.append((who, at_rest))
        self._scheduler.hold_new_requests(True)
        if mode is PauseMode.ABORT:
            for request in started:
                self._scheduler.finish(request.id, FinishReason.ABORT, self._clock())

    def resume(self, who: str) -> None:
        self._modes.pop(who, None)
        for waiter, at_rest in self._waiting:
            if waiter == who:
                at_rest.set_exception(Conflict("the engine was resumed before it was paused."))
        self._waiting = [entry for entry in self._waiting if entry[0] != who]
        if not self._modes:
            self.is_paused = False
            self._scheduler.hold_new_requests(False)

    def update(self) -> None:
        """After each step: the engine is paused once nothing is in flight and nothing may be launched."""
        if self._modes and not self._scheduler.num_in_flight and not (self.may_launch and self._scheduler.started):
            self.is_paused = True
            waiting, self._waiting = self._waiting, []
            for _, at_rest in waiting:
                at_rest.set_result(None)

    def fail(self, error: Exception) -> None:
        """The engine has failed: no pause will complete."""
        waiting, self._waiting = self._waiting, []
        for _, at_rest in waiting:
            at_rest.set_exception(error)
