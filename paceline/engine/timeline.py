"""A timeline of host and device activity: for figures, and as a trace for Perfetto or chrome://tracing.

Host spans come from the loop's clock. The device reports only how long each pass took and how long it was idle before.
Chaining these gives the passes' positions relative to each other; the time at which a result was available anchors the
chain, since no pass ends after it was waited for. The device lane is therefore exact in itself, and offset against the
host lanes by the latency of a result (microseconds).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.engine.executor import Result
from paceline.scheduler.plan import Plan

TraceEvent = dict[str, object]
HOST_LANES = ("plan", "launch", "wait", "commit", "masks", "text")


class TimelineSpan(NamedTuple):
    what: str
    step: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass. `idle_s` (of the device, before the pass) is 0 where it is not measured."""

    step: int
    num_decodes: int
    num_prompts: int  # prefill rows
    num_tokens: int  # that were fed, drafts included
    num_sampled: int  # tokens whose logits were computed
    context_tokens: int  # KV positions that decode rows read
    pairs: int  # pairs of a token and a position it attends to
    device_s: float
    idle_s: float
    launched: float
    waited: float
    slow_launch: str | None = None
    num_drafted: int = 0  # drafts that were verified (speculative decoding)
    num_accepted: int = 0

    @property
    def name(self) -> str:
        decodes = [f"{self.num_decodes} decode rows"] if self.num_decodes else []
        drafts = [f"{self.num_drafted} drafts, {self.num_accepted} accepted"] if self.num_drafted else []
        num_prompt_tokens = self.num_tokens - self.num_decodes - self.num_drafted
        prompts = [f"{self.num_prompts} prefill rows, {num_prompt_tokens} tokens"] if self.num_prompts else []
        return " + ".join(decodes + drafts + prompts)


class Timeline:
    """A `Trace` that keeps everything. Filled on the engine's thread only.

    Device idle time before the first pass is not counted.
    """

    def __init__(self) -> None:
        self.spans: list[TimelineSpan] = []
        self.passes: list[Pass] = []

    def span(self, what: str, step: int, began: float, ended: float) -> None:
        self.spans.append(TimelineSpan(what, step, began, ended))

    def passed(self, plan: Plan, result: Result) -> None:
        count, num_drafted = plan.num_decodes, result.num_drafted
        context = pairs = plan.num_context_tokens
        if plan.num_rows > count:
            starts, lengths = plan.starts[count:].astype(np.int64), plan.lengths[count:].astype(np.int64)
            context -= int(starts.sum() + lengths.sum())
            pairs = context + int((lengths * starts + lengths * (lengths + 1) // 2).sum())
        # At most two passes are in flight, so this pass's launch is among the last few spans.
        launched = next((s.began for s in reversed(self.spans) if s.what == "launch" and s.step == plan.step), None)
        waited = self.spans[-1].ended
        self.passes.append(
            Pass(
                step=plan.step,
                num_decodes=count,
                num_prompts=plan.num_rows - count,
                num_tokens=count + num_drafted + plan.num_prefill_tokens,
                num_sampled=int(np.count_nonzero(plan.samples)) + num_drafted,
                context_tokens=context,
                pairs=pairs,
                device_s=result.device_s,
                idle_s=(result.idle_s or 0.0) if self.passes else 0.0,
                launched=waited if launched is None else launched,
                waited=waited,
                slow_launch=result.slow_launch,
                num_drafted=num_drafted,
                num_accepted=result.num_accepted,
            )
        )

    def host_s(self, *lanes: str) -> float:
        """Total seconds in these lanes."""
        return sum(span.ended - span.began for span in self.spans if span.what in lanes)

    def device_spans(self) -> list[tuple[float, float]]:
        """Start and end of each pass on the device, in the host's clock."""
        found: list[tuple[float, float]] = []
        chain: list[Pass] = []
        for one in self.passes:
            if chain and one.launched >= chain[-1].waited:  # the device was idle: a new chain begins
                found += _placed(chain)
                chain = []
            chain.append(one)
        return found + _placed(chain)


def _placed(chain: list[Pass]) -> list[tuple[float, float]]:
    """Anchors a chain of passes between which the device was never drained."""
    at, spans = 0.0, []
    for number, one in enumerate(chain):
        began = at + (one.idle_s if number else 0.0)
        at = began + one.device_s
        spans.append((began, at))
    zero = min((one.waited - ended for one, (_, ended) in zip(chain, spans, strict=True)), default=0.0)
    return [(zero + began, zero + ended) for began, ended in spans]


def trace_events(timelines: Sequence[Timeline], zero: float | None = None) -> Iterator[TraceEvent]:
    """Events in the trace event format, in microseconds since `zero`, by default the first span."""
    if zero is None:
        zero = min((span.began for timeline in timelines for span in timeline.spans), default=0.0)
    yield from lane_names(1, "host", HOST_LANES)
    yield from lane_names(2, "device", ("passes",))
    for timeline in timelines:
        for what, step, began, ended in timeline.spans:
            yield span_event(1, HOST_LANES.index(what), f"{what} {step}", began, ended, {"step": step}, zero)
        for one, (began, ended) in zip(timeline.passes, timeline.device_spans(), strict=True):
            args: dict[str, object] = {
                "step": one.step, "rows": one.num_decodes + one.num_prompts, "tokens": one.num_tokens,
                "context_tokens": one.context_tokens, "idle_before_us": round(one.idle_s * 1e6, 1),
            }  # fmt: skip
            if one.num_drafted:
                args |= {"drafted_tokens": one.num_drafted, "accepted_tokens": one.num_accepted}
            if one.slow_launch is not None:
                args["slow_launch"] = one.slow_launch
            yield span_event(2, 0, one.name, began, ended, args, zero)


def span_event(
    process: int, thread: int, name: str, began: float, ended: float, args: dict[str, object], zero: float
) -> TraceEvent:
    """A span, cut off at `zero`: a pass may have begun before."""
    # Both ends are rounded, not the duration: adjacent spans must not overlap.
    at, until = round(max(began - zero, 0.0) * 1e6, 3), round(max(ended - zero, 0.0) * 1e6, 3)
    duration = round(max(until - at, 0.0), 3)
    return {"name": name, "ph": "X", "pid": process, "tid": thread, "ts": at, "dur": duration, "args": args}


def write_trace(path: Path, timelines: Sequence[Timeline]) -> None:
    path.write_text(
        json.dumps({"displayTimeUnit": "ms", "traceEvents": list(trace_events(timelines))}), encoding="utf-8"
    )


def lane_names(process: int, name: str, threads: tuple[str, ...]) -> list[TraceEvent]:
    """Names a process and its threads, in this order."""

    def named(what: str, thread: int, args: dict[str, object]) -> dict[str, object]:
        return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": args}

    events = [named("process_name", 0, {"name": name}), named("process_sort_index", 0, {"sort_index": process})]
    for index, thread in enumerate(threads):
        events.append(named("thread_name", index, {"name": thread}))
        events.append(named("thread_sort_index", index, {"sort_index": index}))
    return events
