"""VirtualReplica: one virtual GPU with the real scheduler and loop, and a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from paceline.config import SchedulerConfig
from paceline.engine.executor import Executor, Pending, Result
from paceline.engine.loop import Loop, StepOutput
from paceline.engine.virtual.drafts import DraftVerifier
from paceline.engine.virtual.executor import HostLink, VirtualClock, VirtualExecutor
from paceline.request import Refused
from paceline.scheduler import Scheduler
from paceline.scheduler.plan import Plan
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.simulator.drafts import ArrivalDrafts
from paceline.simulator.profile import Profile, ProfileTiming
from paceline.simulator.workloads import Arrival, Tokens


class _ScriptedTokens:
    """The tokens that the virtual GPU samples: the outputs of the arrivals, by request and position."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._outputs: dict[str, Tokens] = {one.id: one.output for one in arrivals}
        self._slots: dict[int, tuple[Tokens, int]] = {}  # slot -> output, number of prompt tokens

    def __call__(self, plan: Plan) -> Tokens:
        for join in plan.joins:
            self._slots[join.slot] = self._outputs[join.request_id], join.num_prompt_tokens
        found = []
        positions = plan.starts + plan.lengths
        for row in np.flatnonzero(plan.samples).tolist():
            output, num_prompt_tokens = self._slots[int(plan.slots[row])]
            index = int(positions[row]) - num_prompt_tokens
            # With overlap, a pass may be in flight for a request that has just finished; its token is discarded.
            found.append(output[index] if index < len(output) else 0)
        return np.array(found, np.int32)


class Observer(Protocol):
    """Follows a simulation pass by pass."""

    def launched(self, plan: Plan, result: Result, host: tuple[float, float], device: tuple[float, float]) -> None:
        """A pass was launched; what it will produce, start and end of its host work and of its device time."""

    def committed(self, scheduler: Scheduler, now: float) -> None:
        """The oldest pass was committed."""


class _ObservedExecutor(Executor):
    """A virtual executor that reports launches to an observer."""

    def __init__(self, executor: VirtualExecutor, clock: VirtualClock, observer: Observer) -> None:
        self._executor, self._clock, self._observer = executor, clock, observer

    def launch(self, plan: Plan) -> Pending:
        began = self._clock.now
        pending = self._executor.launch(plan)
        self._observer.launched(plan, pending.result, (began, self._clock.now), self._executor.span)
        return pending


class VirtualReplica:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        config: SchedulerConfig,
        profile: Profile,
        overlap: bool,
        acceptance: float | None,
        observer: Observer | None,
    ) -> None:
        """`arrivals` are all that may come."""
        self.clock = VirtualClock()
        self.timing = ProfileTiming(profile, self.clock)
        link = HostLink(profile.swap_page_s(config.page_size)) if config.num_host_pages else None
        size = config.max_running
        drafts = DraftVerifier(size, ArrivalDrafts(arrivals, size, acceptance)) if config.draft_tokens else None
        tokens = _ScriptedTokens(arrivals)
        self.executor = VirtualExecutor(self.clock, self.timing, tokens, self.timing.launching, link, drafts)
        self.scheduler = Scheduler(config)
        executor = self.executor if observer is None else _ObservedExecutor(self.executor, self.clock, observer)
        self._loop = Loop(self.scheduler, executor, self.clock, overlap=overlap)
        self.requests: list[TrackedRequest] = []
        self.refused: list[str] = []

    def add(self, arrival: Arrival) -> bool:
        """Returns whether the request was accepted."""
        if not self.scheduler.has_work:
            self.clock.advance_to(arrival.at)
        request = arrival.request()
        try:
            self.requests.append(self.scheduler.add(request, arrival.at))
        except Refused:
            self.refused.append(arrival.id)
            return False
        return True

    def step(self) -> StepOutput:
        output = self._loop.step()
        assert output is not None, f"{len(self.scheduler.requests)} requests are left and none can run"
        self.timing.ended(output.updates.finished)
        return output
