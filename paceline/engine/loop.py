"""The loop around scheduler and executor: serial, or overlapped.

Serial: plan, launch, wait, commit. Overlapped: pass N+1 is planned and launched before N is waited for, so the
device always has work queued while the host thinks. Nothing else differs; both give the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.engine.executor import Executor, Pending
from paceline.scheduler.plan import Plan, Updates
from paceline.scheduler.scheduler import Scheduler


class Loop:
    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float], *, overlap: bool = True
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.overlap = overlap
        self._launched: deque[tuple[Plan, Pending]] = deque()

    def step(self) -> Updates | None:
        """Launches what can be launched and commits the oldest pass. None if there was nothing to commit."""
        # Overlapped, one pass is in flight when this begins and a second is launched behind it.
        depth = 2 if self.overlap else 1
        while len(self._launched) < depth:
            plan = self.scheduler.plan(self.clock())
            if plan is None:
                break
            self._launched.append((plan, self.executor.launch(plan)))
        if not self._launched:
            return None
        plan, pending = self._launched.popleft()
        result = pending.wait()
        return self.scheduler.commit(plan, result.tokens, self.clock(), result.device_s, result.counts)

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
