"""The loop around scheduler and executor: serial or overlapped.

Serial: plan, launch, wait, commit. Overlapped: pass N+1 is planned and launched before the loop waits for N, so the
device always has work queued while the host is busy. Nothing else differs; both produce the same tokens. `sync` plans
as overlapped does but synchronises with the device before each launch: a fault that disappears under it is a race. With
a pipeline of several stages, overlapped has a pass more in flight than there are stages.

For rows with a grammar, the tokens allowed next depend on the last token. A pass with such rows is launched up to its
logits; while the device computes them, the pass before is committed and the grammars advance by its tokens. Masks are
computed on a worker thread. Meanwhile this thread continues with everything that does not need them: detokenization,
the next plan, and the part of its launch that does not depend on earlier passes. Then the masks are uploaded, the
launched pass samples, and the next pass is launched behind it (delayed sampling). With speculative decoding, a row has
a mask for each of its drafts too: the pass begins with the drafts, so the host knows them before the masks are needed.

    device   sample N | forward N+1 ............................................ | sample N+1 | forward N+2
    worker                              | masks of N+1 ..................... |
    host     wait N, commit N, advance -^ text of N, plan N+2, prepare N+2   |-^ launch N+2, wait N+1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple, Protocol

from paceline.engine.executor import DelayedPending, Executor, Pending, Result
from paceline.engine.pooling import PooledStates
from paceline.sampling.types import Bits, Drafts, LogprobRun, Logprobs, Masks
from paceline.scheduler.plan import Plan, Updates
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.tracked_request import TrackedRequest


class Constraints(Protocol):
    """The tokens allowed next, for rows with a grammar. `sampled` are the requests of a pass's sampling rows."""

    def apply_to(self, sampled: Iterable[TrackedRequest]) -> bool:
        """Whether any of these rows has a grammar."""

    def masks(self, sampled: Sequence[TrackedRequest], buffer: Callable[[int, int], Bits], drafts: Drafts) -> Masks:
        """The masks of a pass; all passes before it are committed. Bits are written into `buffer(masks, words)`."""

    def start_masks(
        self, sampled: Sequence[TrackedRequest], buffer: Callable[[int, int], Bits], drafts: Drafts
    ) -> None:
        """As `masks`, on a worker thread. Until `wait_masks` returns only `apply_to` may be called."""

    def wait_masks(self) -> Masks:
        """The masks that were started."""

    def advance(self, updates: Updates) -> Sequence[tuple[TrackedRequest, str]]:
        """Consumes the tokens of a committed pass. Returns requests whose grammar failed, with the reason."""


class Trace(Protocol):
    """Receives what host and device did, on the loop's thread. Times are in the loop's clock."""

    def span(self, what: str, step: int, began: float, ended: float) -> None:
        """Host time for one pass: "plan", "launch" (in two parts if it was prepared), "wait", "commit", "masks" (for
        the pass behind it: starting them, later waiting for them) or "text"."""

    def passed(self, plan: Plan, result: Result) -> None:
        """A pass was waited for."""


class StepOutput(NamedTuple):
    """What one step of the loop committed."""

    step: int  # of the committed pass
    updates: Updates
    logprobs: Logprobs | None  # of `updates.tokens`, row by row
    prompt_logprobs: tuple[tuple[TrackedRequest, LogprobRun], ...]
    pooled: tuple[tuple[TrackedRequest, PooledStates], ...]
    grammar_failures: Sequence[tuple[TrackedRequest, str]]


@dataclass(slots=True, eq=False)
class _Launched:
    plan: Plan
    requests: tuple[TrackedRequest, ...]  # of the plan's rows
    pending: Pending
    delayed: DelayedPending | None = None  # until its sampling is launched
    result: Result | None = None

    @property
    def sampled(self) -> list[TrackedRequest]:
        return list(compress(self.requests, self.plan.samples))


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
        """`constraints` requires an executor that computes logits."""
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.overlap = overlap
        self.sync = sync
        self.trace = trace
        self.constraints = constraints
        self._launched: deque[_Launched] = deque()
        self._masking: _Launched | None = None  # the pass whose masks are being computed
        self._committed = -1  # step of the last committed pass
        self._awaited: Plan | None = None

    def step(self, *, launch: bool = True) -> StepOutput | None:
        """Launches what can be launched and commits the oldest pass. None if there was nothing to commit.
        `launch=False` only commits: after a few steps no pass is in flight."""
        # Overlapped, one pass (of each stage) is in flight when this begins and another is launched behind it.
        depth = (self.scheduler.max_in_flight if self.overlap else 1) if launch else 0
        while len(self._launched) < depth:
            began = self.clock()
            plan = self.scheduler.plan(began)
            if plan is None:
                break
            if self.trace is not None:
                self.trace.span("plan", plan.step, began, self.clock())
            if self._masking is not None and not self.sync:
                self._prepare(plan)
            self._sample_delayed()
            if self.sync:
                for one in self._launched:
                    one.result = one.result or self._wait(one)
            began = self.clock()
            self._launched.append(self._launch(plan))
            if self.trace is not None:
                self.trace.span("launch", plan.step, began, self.clock())
        self._sample_delayed()  # there was nothing to plan
        if not self._launched:
            return None
        one = self._launched.popleft()
        self._awaited = one.plan
        result = one.result or self._wait(one)
        self._awaited = None
        return self._commit(one, result)

    def _commit(self, one: _Launched, result: Result) -> StepOutput:
        plan, now = one.plan, self.clock()
        updates = self.scheduler.commit(plan, result.tokens, now, result.device_s, result.counts, result.num_drafts)
        self._committed = plan.step
        if self.trace is not None:
            self.trace.span("commit", plan.step, now, self.clock())
        failures: Sequence[tuple[TrackedRequest, str]] = ()
        if self.constraints is not None:
            began = self.clock()
            failures = self.constraints.advance(updates)
            # Only the pass launched last can be delayed. What it waits for is the oldest pass, which was this one: as
            # many passes as there are stages are between two passes with the same rows.
            behind = self._launched[-1] if self._launched else None
            if behind is not None and behind.delayed is not None:
                delayed = behind.delayed
                self.constraints.start_masks(behind.sampled, delayed.mask_buffer, delayed.drafts())
                self._masking = behind
                if self.trace is not None:
                    self.trace.span("masks", plan.step, began, self.clock())
        return StepOutput(
            plan.step,
            updates,
            None if result.logprobs is None else _without(result.logprobs, updates.discarded),
            tuple((one.requests[run.row], run) for run in result.prompt_logprobs),
            tuple((one.requests[states.row], states) for states in result.pooled),
            failures,
        )

    def _prepare(self, plan: Plan) -> None:
        began = self.clock()
        self.executor.prepare(plan)
        if self.trace is not None:
            self.trace.span("launch", plan.step, began, self.clock())

    def _launch(self, plan: Plan) -> _Launched:
        requests = self.scheduler.requests_of(plan)
        if self.constraints is None or not self.constraints.apply_to(compress(requests, plan.samples)):
            return _Launched(plan, requests, self.executor.launch(plan))
        pending = self.executor.launch_delayed(plan)
        launched = _Launched(plan, requests, pending)
        is_pipeline = self.scheduler.config.num_stages > 1
        if self._launched and (not is_pipeline or self._samples_again(launched.sampled)):
            launched.delayed = pending
        else:
            # No pass in flight before it has one of its rows, so the allowed tokens are known.
            pending.sample(self.constraints.masks(launched.sampled, pending.mask_buffer, pending.drafts()))
        return launched

    def _samples_again(self, sampled: Iterable[TrackedRequest]) -> bool:
        """Whether a pass in flight samples for one of these requests."""
        wanted = set(sampled)
        return any(not wanted.isdisjoint(one.sampled) for one in self._launched)

    def _sample_delayed(self) -> None:
        """Launches the sampling of the pass whose masks are being computed, if there is one."""
        if (one := self._masking) is None:
            return
        began = self.clock()
        assert self.constraints is not None and one.delayed is not None, "masks are started for a delayed pass"
        one.delayed.sample(self.constraints.wait_masks())
        one.delayed = self._masking = None
        if self.trace is not None:
            self.trace.span("masks", self._committed, began, self.clock())

    def _wait(self, one: _Launched) -> Result:
        began = self.clock()
        result = one.pending.wait()
        if self.trace is not None:
            self.trace.span("wait", one.plan.step, began, self.clock())
            self.trace.passed(one.plan, result)
        return result

    @property
    def awaited_plan(self) -> Plan | None:
        """The plan of the pass that the loop is waiting for, if it is. May be read from any thread."""
        return self._awaited

    def drain(self) -> int:
        """Steps until all requests have finished. Returns how many passes were committed."""
        steps = 0
        while self.scheduler.has_work:
            output = self.step()
            assert output is not None or not self.scheduler.has_work, (
                f"{len(self.scheduler.requests)} requests are left and none can run: "
                + "; ".join(self.scheduler.explain(request_id) for request_id in list(self.scheduler.requests)[:3])
            )
            steps += 1
        return steps


def _without(logprobs: Logprobs, discarded: frozenset[int]) -> Logprobs:
    """Without the rows whose tokens were discarded."""
    if not discarded:
        return logprobs
    return logprobs.of_rows([row for row in range(len(logprobs.chosen)) if row not in discarded])
