"""A simulation frame by frame: a scheduler snapshot per forward pass, and the decisions between two of them."""

from __future__ import annotations

from typing import Any

from paceline.config import SchedulerConfig
from paceline.scheduler import Scheduler
from paceline.scheduler.journal import Event, EventKind
from paceline.scheduler.plan import Plan
from paceline.scheduler.snapshot import snapshot
from paceline.simulator.profile import Profile
from paceline.simulator.run import simulate
from paceline.simulator.workloads import Arrival

MOST_FRAMES = 1500  # the page shows the beginning of a run; `sim run` is for long ones

_SENTENCES = {
    EventKind.ADD: "arrives with {0} prompt tokens and max_tokens {1}",
    EventKind.REFUSE: "is refused: {0}",
    EventKind.ADMIT: "is admitted: {0} tokens cached, {1} to compute",
    EventKind.WAIT: "waits for {0}",
    EventKind.EVICT: "{0} pages of cached prefixes are evicted",
    EventKind.RETRACT: "is retracted for {0}; {1} pages become free or evictable",
    EventKind.DUPLICATE: "computed {0} pages that another request computed too; one copy is kept",
    EventKind.RESERVE: "was overtaken max_overtakes times: freed memory is reserved for it",
    EventKind.FINISH: "finishes by {0} after {1} tokens",
}


def sentence(event: Event) -> str:
    """A decision in words, without the request id."""
    return _SENTENCES[event.kind].format(*event.detail) if event.kind in _SENTENCES else str(event.kind)


class FrameRecorder:
    """An observer that records a frame per forward pass."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.lanes: list[list[float]] = []  # step, decodes, prompt tokens, host start and end, device start and end
        self.events: list[list[Any]] = []  # frame, time, kind, request, sentence
        self._listening = False

    def launched(self, plan: Plan, host: tuple[float, float], device: tuple[float, float]) -> None:
        self.lanes.append([plan.step, plan.num_decodes, plan.num_prefill_tokens, *host, *device])

    def committed(self, scheduler: Scheduler, now: float) -> None:
        if not self._listening:
            # Decisions before the first frame are in the journal already.
            for event in scheduler.journal.events:
                self._note(event)
            scheduler.journal.listeners.append(self._note)
            self._listening = True
        self.frames.append(snapshot(scheduler, now))

    def _note(self, event: Event) -> None:
        self.events.append([len(self.frames), event.time, str(event.kind), event.request_id, sentence(event)])


def record_frames(
    arrivals: list[Arrival], config: SchedulerConfig, profile: Profile, *, overlap: bool
) -> dict[str, Any]:
    """Everything the page draws of a run, as JSON values."""
    recorder = FrameRecorder()
    run = simulate(arrivals, config, profile, overlap=overlap, observer=recorder, max_passes=MOST_FRAMES)
    return {
        "policy": config.policy,
        "summary": run.summary(),
        "journal": run.journal,
        "cut": run.passes >= MOST_FRAMES,
        "page_size": config.page_size,
        "max_running": config.max_running,
        "frames": recorder.frames,
        "lanes": recorder.lanes,
        "events": recorder.events,
    }
