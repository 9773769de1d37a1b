"""The loop around scheduler and executor: serial, or overlapped.

Serial: plan, launch, wait, commit. Overlapped: pass N+1 is planned and launched before N is waited for, so the
device always has work queued while the host thinks. Nothing else differs; both give the same tokens. `sync` plans as
overlapped but lets the device come to rest before each launch: a fault that goes away under it is a race.

Rows that obey a grammar may only say what follows from their last token. A pass with such rows is launched up to its
logits; while the device computes them, the pass before is committed and the grammars take its tokens. Their masks are
computed on a thread beside this one, which meanwhile goes on as far as it can without them: text, the next plan, and
what of its launch needs no pass before it. Then the masks go up, the tokens of the launched pass are chosen, and the
next one is launched behind it:

    device   sample N | forward N+1 ............................................ | sample N+1 | forward N+2
    worker                              | masks of N+1 ..................... |
    host     wait N, commit N, advance -^ text of N, plan N+2, prepare N+2   |-^ launch N+2, wait N+1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Protocol, cast

from paceline.engine.executor import DelayedPending, Executor, MaskedExecutor, Pending, Result
from paceline.request import Request
from paceline.sampling.types import Bits, LogprobRun, Logprobs, Masks
from paceline.scheduler.plan import Plan, Updates
from paceline.scheduler.scheduler import Scheduler


class Constraints(Protocol):
    """What rows may say, for those that obey a grammar."""

    def apply_to(self, plan: Plan) -> bool:
        """Whether some row of this pass does."""

    def masks(self, plan: Plan, room: Callable[[int, int], Bits]) -> Masks:
        """All passes before this one are committed. Bits are written into `room(rows, words)`."""

    def start_masks(self, plan: Plan, room: Callable[[int, int], Bits]) -> None:
        """As `masks`, beside this thread: `wait_masks` comes before anything else is asked than `apply_to`."""

    def wait_masks(self) -> Masks:
        """Those that were started."""

    def advance(self, updates: Updates) -> None:
        """These tokens have come."""


class Trace(Protocol):
    """Is told what the host did and what came of it, on the loop's thread. Times are the loop's clock's."""

    def span(self, what: str, step: int, began: float, ended: float) -> None:
        """The host's time for one pass: "plan", "launch" (in two parts where one is prepared), "wait", "commit",
        "masks" (what came of it, for the pass behind it: starting them, and later waiting for them) or "text"."""

    def passed(self, plan: Plan, result: Result) -> None:
        """A pass was waited for."""


@dataclass(slots=True, eq=False)
class _Launched:
    plan: Plan
    pending: Pending
    delayed: DelayedPending | None = None  # until its tokens can be chosen
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
        constraints: Constraints | None = None,
    ) -> None:
        """With `constraints`, the executor must be one that masks."""
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.overlap = overlap
        self.sync = sync
        self.trace = trace
        self.constraints = constraints
        self.last_step = -1  # the last pass that was committed
        # What the last step told of the tokens in its updates, row by row, and of prompts; whoever reads it takes it.
        self.logprobs: Logprobs | None = None
        self.prompt_logprobs: tuple[tuple[Request, LogprobRun], ...] = ()
        self._launched: deque[_Launched] = deque()
        self._masking: _Launched | None = None  # the pass whose masks are being computed
        self._awaited: Plan | None = None

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
            if self._masking is not None and not self.sync:
                self._prepare(plan)
            self._choose()
            if self.sync:
                for one in self._launched:
                    one.result = one.result or self._wait(one)
            began = self.clock()
            self._launched.append(self._launch(plan))
            if self.trace is not None:
                self.trace.span("launch", plan.step, began, self.clock())
        self._choose()  # there was nothing to plan
        if not self._launched:
            return None
        one = self._launched.popleft()
        self._awaited = one.plan
        result = one.result or self._wait(one)
        self._awaited = None
        now = self.clock()
        updates = self.scheduler.commit(one.plan, result.tokens, now, result.device_s, result.counts)
        self.last_step = one.plan.step
        self.logprobs = None if result.logprobs is None else _kept(result.logprobs, one.plan, updates)
        self.prompt_logprobs = tuple((one.plan.requests[run.row], run) for run in result.prompt_logprobs)
        if self.trace is not None:
            self.trace.span("commit", one.plan.step, now, self.clock())
        if self.constraints is not None:
            began = self.clock()
            self.constraints.advance(updates)
            behind = self._launched[0] if self._launched else None
            if behind is not None and behind.delayed is not None:
                self.constraints.start_masks(behind.plan, behind.delayed.mask_buffer)
                self._masking = behind
                if self.trace is not None:
                    self.trace.span("masks", one.plan.step, began, self.clock())
        return updates

    def _prepare(self, plan: Plan) -> None:
        began = self.clock()
        cast(MaskedExecutor, self.executor).prepare(plan)
        if self.trace is not None:
            self.trace.span("launch", plan.step, began, self.clock())

    def _launch(self, plan: Plan) -> _Launched:
        if self.constraints is None or not self.constraints.apply_to(plan):
            return _Launched(plan, self.executor.launch(plan))
        pending = cast(MaskedExecutor, self.executor).launch_delayed(plan)
        if not self._launched:
            # Nothing is in flight before it: what its rows may say is known.
            pending.sample(self.constraints.masks(plan, pending.mask_buffer))
            return _Launched(plan, pending)
        return _Launched(plan, pending, delayed=pending)

    def _choose(self) -> None:
        """Has the tokens chosen of the pass whose masks are being computed, if there is one."""
        if (one := self._masking) is None:
            return
        began = self.clock()
        assert self.constraints is not None and one.delayed is not None, "masks are started for a pass that waits"
        one.delayed.sample(self.constraints.wait_masks())
        one.delayed = self._masking = None
        if self.trace is not None:
            self.trace.span("masks", self.last_step, began, self.clock())

    def _wait(self, one: _Launched) -> Result:
        began = self.clock()
        result = one.pending.wait()
        if self.trace is not None:
            self.trace.span("wait", one.plan.step, began, self.clock())
            self.trace.passed(one.plan, result)
        return result

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


def _kept(told: Logprobs, plan: Plan, updates: Updates) -> Logprobs:
    """Without the rows whose tokens were discarded."""
    if not updates.num_discarded:
        return told
    rows = {id(request): row for row, request in enumerate(compress(plan.requests, plan.samples))}
    return told.of_rows([rows[id(request)] for request in updates.requests])
