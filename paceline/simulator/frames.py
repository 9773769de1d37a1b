"""A simulation frame by frame: a scheduler snapshot per forward pass, and the decisions between two of them.

A frame is the state after a pass was committed. It contains every request that had arrived by then, and everything that
the scheduler decided by then, which with overlap includes the plan of the next pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from paceline.config import SchedulerConfig
from paceline.engine.executor import Result
from paceline.request import Refused
from paceline.scheduler import Scheduler
from paceline.scheduler.journal import Event, EventKind
from paceline.scheduler.plan import Plan
from paceline.scheduler.snapshot import page_uses, snapshot
from paceline.simulator.profile import Profile
from paceline.simulator.run import simulate
from paceline.simulator.workloads import Arrival

MOST_FRAMES = 1500  # the page shows the beginning of a run; `sim run` is for long ones

_SENTENCES = {
    EventKind.ADD: "arrives with {0} prompt tokens and max_tokens {1}",
    EventKind.REFUSE: "is refused: {0}",
    EventKind.ADMIT: "is admitted: {0} tokens cached, {1} to compute",
    EventKind.WAIT: "waits for {0}",
    EventKind.EVICT: "cached pages evicted: {0}",
    EventKind.RECEIVE: "pages of another engine are in host memory: {0}",
    EventKind.SPILL: "evicted pages copied to host memory: {0}; older pages dropped there: {1}",
    EventKind.FETCH: "fetches {0} tokens from host memory",
    EventKind.RETRACT: "is retracted for {0}; {1} pages become free or evictable",
    EventKind.DUPLICATE: "computed {0} pages that another request computed too; one copy is kept",
    EventKind.RESERVE: "does not fit: freed memory is reserved for it",
    EventKind.FINISH: "finishes by {0} after {1} tokens",
}


def sentence(event: Event) -> str:
    """A decision in words, without the request id."""
    return _SENTENCES[event.kind].format(*event.detail) if event.kind in _SENTENCES else str(event.kind)


class FrameRecorder:
    """An observer that records a frame per forward pass, after one of the time before the first pass."""

    def __init__(self, arrivals: list[Arrival], config: SchedulerConfig) -> None:
        self._arrivals = {one.id: one for one in arrivals}
        self._weights, self._output_weight = config.tenant_weights, config.output_weight
        self._tenants = sorted({one.tenant for one in arrivals})
        self._slots: dict[int, str] = {}  # tenant of the request in each slot
        self._service: defaultdict[str, float] = defaultdict(
            float
        )  # weighted tokens, as policy fair counts them, under any policy
        self._finished: Counter[str] = Counter()
        self._waits: defaultdict[str, dict[str, float]] = defaultdict(dict)  # of admitted requests, by tenant
        self._listening = False
        # Step, decodes, prompt tokens, host start and end, device start and end, drafts verified and accepted
        self.lanes: list[list[float]] = []
        self.events: list[list[object]] = []  # frame, time, kind, request, sentence
        self.frames = [self._frame(_before_the_first_pass(arrivals, config), 0.0)]

    def launched(self, plan: Plan, result: Result, host: tuple[float, float], device: tuple[float, float]) -> None:
        drafts = (result.num_drafted, result.num_accepted)
        self.lanes.append([plan.step, plan.num_decodes, plan.num_prefill_tokens, *host, *device, *drafts])
        for join in plan.joins:
            self._slots[join.slot] = self._arrivals[join.request_id].tenant
        outputs = [1] * plan.num_decodes if result.counts is None else result.counts.tolist()
        for row, (slot, length) in enumerate(zip(plan.slots.tolist(), plan.lengths.tolist(), strict=True)):
            weighted = self._output_weight * outputs[row] if row < plan.num_decodes else length
            self._service[self._slots[slot]] += weighted

    def committed(self, scheduler: Scheduler, now: float) -> None:
        if not self._listening:
            # Decisions before the first commit are in the journal already.
            for event in scheduler.journal.events:
                self._note(event)
            scheduler.journal.listeners.append(self._note)
            self._listening = True
        self.frames.append(self._frame(scheduler, now))

    def ordered_events(self) -> list[list[object]]:
        """Decisions in order of time. A request is added between two passes, at the time of its arrival, so its event
        is written after those of the commit that it preceded."""
        return sorted(self.events, key=lambda event: (event[0], event[1]))

    def _frame(self, scheduler: Scheduler, now: float) -> dict[str, object]:
        frame = snapshot(scheduler, now)
        active = {one["name"]: one for one in frame["tenants"]}
        frame["tenants"] = [self._tenant(name, active.get(name, {})) for name in self._tenants]
        return {**frame, "uses": page_uses(scheduler)}

    def _tenant(self, name: str, active: Mapping[str, object]) -> dict[str, object]:
        weight, waits = self._weights.get(name, 1.0), list(self._waits[name].values())
        return {
            "name": name,
            "waiting": active.get("waiting", 0),
            "running": active.get("running", 0),
            "finished": self._finished[name],
            "weight": weight,
            "service": self._service[name] / weight,
            "wait": float(np.mean(waits)) if waits else None,
        }

    def _note(self, event: Event) -> None:
        # What arrives at time 0 is in the first frame, which no commit precedes.
        is_arrival = event.kind in (EventKind.ADD, EventKind.REFUSE)
        frame = 0 if is_arrival and event.time <= 0.0 else len(self.frames)
        self.events.append([frame, event.time, str(event.kind), event.request_id, sentence(event)])
        if event.kind in (EventKind.ADMIT, EventKind.FINISH):
            arrival = self._arrivals[event.request_id]
            if event.kind is EventKind.FINISH:
                self._finished[arrival.tenant] += 1
            else:  # a retracted request is admitted again; its wait is that of the first time
                self._waits[arrival.tenant].setdefault(arrival.id, event.time - arrival.at)


def _before_the_first_pass(arrivals: list[Arrival], config: SchedulerConfig) -> Scheduler:
    scheduler = Scheduler(config)
    for one in arrivals:
        if one.at <= 0.0:
            with suppress(Refused):  # the simulation reports it
                scheduler.add(one.request(), one.at)
    return scheduler


def record_frames(
    arrivals: list[Arrival],
    config: SchedulerConfig,
    profile: Profile,
    *,
    overlap: bool,
    acceptance: float | None = None,
) -> dict[str, object]:
    """Everything the page draws of a run, as JSON values."""
    recorder = FrameRecorder(arrivals, config)
    run = simulate(
        arrivals,
        config,
        profile,
        overlap=overlap,
        acceptance=acceptance,
        observer=recorder,
        max_passes=MOST_FRAMES,
    )
    summary = run.summary()
    return {
        "policy": config.policy,
        "batching": config.batching,
        "overlap": overlap,
        "summary": summary,
        "journal": run.journal,
        "cut": summary["finished"] + summary["refused"] < len(arrivals),
        "page_size": config.page_size,
        "chunk_tokens": config.chunk_tokens,
        "prefix_cache": config.prefix_cache,
        "frames": recorder.frames,
        "lanes": recorder.lanes,
        "events": recorder.ordered_events(),
    }
