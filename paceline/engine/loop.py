"""The loop around scheduler and executor: serial, or overlapped.

Serial: plan, launch, wait, commit. Overlapped: pass N+1 is planned and launched before N is waited for, so the
device always has work queued while the host thinks. Nothing else differs; both give the same tokens. `sync` plans as
overlapped but lets the device come to rest before each launch: a fault that goes away under it is a race.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from paceline.engine.executor import Executor, Pending, Result
from paceline.scheduler.plan import Plan, Updates
from paceline.scheduler.scheduler import Scheduler


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
        trace: Callable[[str, int, float], None] | None = None,
    ) -> None:
        """`trace` is told of every "launch" and "commit", with the plan's step and the time."""
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.overlap = overlap
        self.sync = sync
        self.trace = trace
        self._launched: deque[_Launched] = deque()
        self._awaited: Plan | None = None

    def step(self) -> Updates | None:
        """Launches what can be launched and commits the oldest pass. None if there was nothing to commit."""
        # Overlapped, one pass is in flight when this begins and a second is launched behind it.
        depth = 2 if self.overlap else 1
        while len(self._launched) < depth:
            plan = self.scheduler.plan(self.clock())
            if plan is None:
                break
            if self.sync:
                for one in self._launched:
                    one.result = one.result or one.pending.wait()
            self._launched.append(_Launched(plan, self.executor.launch(plan)))
            if self.trace is not None:
                self.trace("launch", plan.step, self.clock())
        if not self._launched:
            return None
        one = self._launched.popleft()
        self._awaited = one.plan
        result = one.result or one.pending.wait()
        self._awaited = None
        now = self.clock()
        if self.trace is not None:
            self.trace("commit", one.plan.step, now)
        return self.scheduler.commit(one.plan, result.tokens, now, result.device_s, result.counts)

    @property
    def oldest_plan(self) -> Plan | None:
        """What is in flight, or waited for: None if nothing is. May be asked from any thread."""
        return self._awaited

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
