"""The virtual GPU: it charges a step-time model to a virtual clock and computes nothing.

The scheduler behind it is the real one, so a run shows what the real one would decide on such a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from paceline.engine.executor import Result
from paceline.scheduler.plan import Plan
from paceline.scheduler.step_time import StepTime

# One H200 with a 0.6B model in bfloat16: weights read once a pass, KV at 4.2 TB/s, prefill at half the matrix rate.
SMALL_MODEL_H200 = StepTime(
    base=0.9e-3, per_prefill_token=3.0e-6, per_decode=2.0e-6, per_context_token=114_688 / 4.2e12
)


class PassTime(Protocol):
    """How long passes take; asked once for each, in order."""

    def of(self, plan: Plan) -> float: ...


class VirtualClock:
    """Time that passes only when somebody says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"time cannot run backwards by {-seconds} seconds"
        self.now += seconds

    def advance_to(self, time: float) -> None:
        self.now = max(self.now, time)


class _VirtualPending:
    def __init__(self, clock: VirtualClock, ends: float, result: Result) -> None:
        self._clock = clock
        self._ends = ends
        self._result = result

    def wait(self) -> Result:
        self._clock.advance_to(self._ends)
        return self._result


class VirtualExecutor:
    """Passes take what `step_time` says and run one after the other, whatever the host does meanwhile."""

    def __init__(
        self,
        clock: VirtualClock,
        step_time: PassTime = SMALL_MODEL_H200,
        tokens: Callable[[Plan], np.ndarray] | None = None,
    ) -> None:
        self._clock = clock
        self._step_time = step_time
        self._tokens = tokens
        self._idle_from = 0.0
        self.busy_s = 0.0
        self.span = (0.0, 0.0)  # from when to when the last launched pass runs

    def launch(self, plan: Plan) -> _VirtualPending:
        seconds = self._step_time.of(plan)
        starts = max(self._idle_from, self._clock.now)
        idle_s = starts - self._idle_from
        self._idle_from = starts + seconds
        self.busy_s += seconds
        self.span = (starts, self._idle_from)
        count = int(np.count_nonzero(plan.samples))
        tokens = np.zeros(count, np.int32) if self._tokens is None else self._tokens(plan)
        return _VirtualPending(self._clock, self._idle_from, Result(tokens, seconds, idle_s=idle_s))
