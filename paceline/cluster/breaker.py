"""CircuitBreaker: when a peer that has failed is tried again. Plain Python: no I/O, and the time is an argument.

closed ──failed──▶ open ──after a delay: one trial──▶ closed, or open for twice as long
"""

from __future__ import annotations

FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0


class CircuitBreaker:
    def __init__(self) -> None:
        self._retry_at: float | None = None  # None: closed
        self._delay = FIRST_DELAY_S
        self._on_trial = False

    @property
    def is_closed(self) -> bool:
        return self._retry_at is None

    def may_begin(self, now: float) -> bool:
        """Whether the peer may be used: it works, or it is time for a trial and none is in progress."""
        return self._retry_at is None or (now >= self._retry_at and not self._on_trial)

    def begin(self, now: float) -> bool:
        """As `may_begin`. If the peer is open this is the trial: it must succeed, fail or be abandoned."""
        allowed = self.may_begin(now)
        self._on_trial = self._on_trial or (allowed and not self.is_closed)
        return allowed

    def abandoned(self) -> None:
        """The trial has ended and says nothing about the peer."""
        self._on_trial = False

    def succeeded(self) -> None:
        self._retry_at, self._delay, self._on_trial = None, FIRST_DELAY_S, False

    def failed(self, now: float, *, for_long: bool = False) -> None:
        """What was begun before the peer was open may fail after that: it does not count again. `for_long`: the fault
        does not go away by itself."""
        if self.is_closed or self._on_trial or for_long:
            self._delay = MAX_DELAY_S if for_long else self._delay
            self._retry_at, self._delay = now + self._delay, min(2 * self._delay, MAX_DELAY_S)
        self._on_trial = False
