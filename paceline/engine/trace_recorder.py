"""A trace of a running engine: host lanes, device, scheduling decisions and the life of each request, for Perfetto.

A recorder is installed for a few seconds (`record_trace`). Without one, the loop and the journal do nothing extra.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from paceline.engine.executor import Result
from paceline.engine.output import Conflict
from paceline.engine.timeline import Timeline, TraceEvent, lane_names, span_event, trace_events
from paceline.request import InvalidRequest
from paceline.scheduler.journal import Event, EventKind
from paceline.scheduler.plan import Plan
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.tracked_request import Phase

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

MAX_TRACE_S = 60.0
_REQUESTS, _DECISIONS = 3, 4  # numbers of the processes in the trace, after host and device
_PIECE_EVENTS = 200  # encoded at a time: the engine's thread must not wait for the encoder
_recording = threading.Lock()
_sleep = time.sleep  # for tests


class PhaseMark(NamedTuple):
    """A request enters a phase."""

    time: float
    phase: str  # queue, prefill, decode or finished
    args: dict[str, object]


_PHASES = {Phase.WAITING: "queue", Phase.PREFILL: "prefill", Phase.DECODING: "decode"}


class TraceRecorder(Timeline):
    """A timeline with requests and decisions. Filled on the engine's thread only."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        super().__init__()
        self.began = now
        self.ended = now
        self.decisions: list[Event] = []
        self.marks: dict[str, list[PhaseMark]] = {}
        self._slots: dict[int, str] = {}
        for request in scheduler.requests.values():
            self.marks[request.id] = [PhaseMark(now, _PHASES[request.phase], {"prompt_tokens": len(request.prompt)})]
            if request.slot is not None:
                self._slots[request.slot] = request.id

    def note(self, event: Event) -> None:
        """A listener of the journal."""
        match event.kind:
            case EventKind.ADD:
                self._mark(event.request_id, event.time, "queue", {"prompt_tokens": event.detail[0]})
            case EventKind.ADMIT:
                args = {"cached_tokens": event.detail[0], "tokens_to_compute": event.detail[1]}
                self._mark(event.request_id, event.time, "prefill", args)
            case EventKind.RETRACT:
                self._mark(event.request_id, event.time, "queue", {"retracted_for": str(event.detail[0])})
            case EventKind.FINISH:
                args = {"finish_reason": str(event.detail[0]), "output_tokens": event.detail[1]}
                self._mark(event.request_id, event.time, "finished", args)
            case _:
                self.decisions.append(event)

    def passed(self, plan: Plan, result: Result) -> None:
        super().passed(plan, result)
        for join in plan.joins:
            self._slots[join.slot] = join.request_id
        for row in range(plan.num_decodes, plan.num_rows):
            request_id = self._slots.get(int(plan.slots[row]), "")
            # The last chunk of a prompt. The request may have ended, or been retracted, while the pass was in flight.
            if plan.samples[row] and (marks := self.marks.get(request_id)) and marks[-1].phase == "prefill":
                self._mark(request_id, self.passes[-1].waited, "decode", {})

    def _mark(self, request_id: str, now: float, phase: str, args: dict[str, object]) -> None:
        self.marks.setdefault(request_id, []).append(PhaseMark(now, phase, args))

    def events(self) -> Iterator[TraceEvent]:
        yield from trace_events([self], zero=self.began)
        yield from lane_names(_DECISIONS, "scheduler", ("decisions",))
        for event in self.decisions:
            at = round((event.time - self.began) * 1e6, 3)
            args = {"request": event.request_id, "detail": [str(item) for item in event.detail], "step": event.step}
            yield {"name": event.kind.value, "ph": "i", "s": "t", "pid": _DECISIONS, "tid": 0, "ts": at, "args": args}
        yield from self._request_events()

    def _request_events(self) -> Iterator[TraceEvent]:
        """One span per request with its phases inside. Requests that do not overlap share a lane."""
        lanes: list[tuple[float, int]] = []  # heap: when a lane becomes free, and its number
        ordered = sorted(self.marks.items(), key=lambda item: item[1][0].time)
        spans: list[TraceEvent] = []
        for request_id, marks in ordered:
            first = marks[0].time
            last = marks[-1].time if marks[-1].phase == "finished" else self.ended
            lane = heappop(lanes)[1] if lanes and lanes[0][0] <= first else len(lanes)
            heappush(lanes, (last, lane))
            args = {"id": request_id, **{key: value for mark in marks for key, value in mark.args.items()}}
            spans.append(span_event(_REQUESTS, lane, request_id, first, last, args, self.began))
            for mark, after in zip(marks, [*marks[1:], PhaseMark(last, "", {})], strict=True):
                if mark.phase != "finished":
                    args = {"id": request_id, **mark.args}
                    spans.append(span_event(_REQUESTS, lane, mark.phase, mark.time, after.time, args, self.began))
        yield from lane_names(_REQUESTS, "requests", tuple(f"lane {index}" for index in range(len(lanes))))
        yield from spans


def record_trace(engine: Engine, seconds: float) -> bytes:
    """Records for `seconds` and returns the trace as JSON in the trace event format. Blocks; any thread may call it."""
    if not 0 < seconds <= MAX_TRACE_S:
        raise InvalidRequest(f"seconds is {seconds:g}: give more than 0 and at most {MAX_TRACE_S:g}.")
    if not _recording.acquire(blocking=False):
        raise Conflict("another trace is being recorded: wait until it has ended.")
    try:
        recorder = engine.call(lambda scheduler: _install(engine, scheduler)).result()
        _sleep(seconds)
        engine.call(lambda scheduler: _remove(engine, scheduler, recorder)).result()
    finally:
        _recording.release()
    return b"".join(_encode(recorder))


def _install(engine: Engine, scheduler: Scheduler) -> TraceRecorder:
    if engine.loop.trace is not None:
        raise Conflict("this engine records a timeline of its own already.")
    recorder = TraceRecorder(scheduler, engine.clock())
    engine.loop.trace = recorder
    scheduler.journal.listeners.append(recorder.note)
    return recorder


def _remove(engine: Engine, scheduler: Scheduler, recorder: TraceRecorder) -> None:
    engine.loop.trace = None
    scheduler.journal.listeners.remove(recorder.note)
    recorder.ended = engine.clock()


def _encode(recorder: TraceRecorder) -> Iterator[bytes]:
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    events, separator = recorder.events(), b""
    while piece := list(islice(events, _PIECE_EVENTS)):
        yield separator + msgspec.json.encode(piece)[1:-1]
        separator = b",\n"
        time.sleep(0.0005)  # releases the GIL: else the engine's thread waits for it at every pass
    yield b"]}\n"
