"""The loop around scheduler and executor: serial, or overlapped.

Serial: plan, launch, wait, commit. Overlapped: pass N+1 is planned and launched before N is waited for, so the
device always has work queued while the host thinks. Nothing else differs; both give the same tokens. `sync` plans as
overlapped but lets the device come to rest before each launch: a fault that goes away under it is a race.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.engine.executor import Executor, Pending, Result
from paceline.scheduler.plan import Plan, Updates
from paceline.scheduler.scheduler import Scheduler


class Trace(Protocol):
    """Is told what the host did and what came of it, on the loop's thread. Times are the loop's clock's."""

    def span(self, what: str, step: int, began: float, ended: float) -> None:
        """The host's time for one pass: "plan", "launch", "wait", "commit" or "text"."""

    def passed(self, plan: Plan, result: Result) -> None:
        """A pass was waited for."""


@dataclass(slots=True, eq=False)
class _Launched:
    plan: Plan
    pending: Pending
    result: Result | None = None


class Loop:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        *,
        overlap: bool = True,
        sync: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.overlap = overlap
        self.sync = sync
        self.trace = trace
        self.last_step = -1  # the last pass that was committed
        self._launched: deque[_Launched] = deque()

    def step(self) -> Updates | None:
        """Launches what can be launched and commits the oldest pass. None if there was nothing to commit."""
        # Overlapped, one pass is in flight when this begins and a second is launched behind it.
        depth = 2 if self.overlap else 1
        while len(self._launched) < depth:
            began = self.clock()
            plan = self.scheduler.plan(began)
            if plan is None:
                break
            if self.trace is not None:
                self.trace.span("plan", plan.step, began, self.clock())
            if self.sync:
                for one in self._launched:
                    one.result = one.result or self._wait(one)
            began = self.clock()
            self._launched.append(_Launched(plan, self.executor.launch(plan)))
            if self.trace is not None:
                self.trace.span("launch", plan.step, began, self.clock())
        if not self._launched:
            return None
        one = self._launched.popleft()
        result = one.result or self._wait(one)
        now = self.clock()
        updates = self.scheduler.commit(one.plan, result.tokens, now, result.device_s, result.counts)
        self.last_step = one.plan.step
        if self.trace is not None:
            self.trace.span("commit", one.plan.step, now, self.clock())
        return updates

    def _wait(self, one: _Launched) -> Result:
        began = self.clock()
        result = one.pending.wait()
        if self.trace is not None:
            self.trace.span("wait", one.plan.step, began, self.clock())
            self.trace.passed(one.plan, result)
        return result

    def drain(self) -> int:
        """Steps until nothing is left to do. Returns how many passes were committed."""
        steps = 0
        while self.scheduler.has_work:
            updates = self.step()
            assert updates is not None or not self.scheduler.has_work, (
                f"{len(self.scheduler.requests)} requests are left and none can run: "
                + "; ".join(self.scheduler.explain(request_id) for request_id in list(self.scheduler.requests)[:3])
            )
            steps += 1
        return steps
