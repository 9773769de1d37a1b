"""What the host and the device did when: for figures, and as a trace that opens in Perfetto or chrome://tracing.

The host's spans come from the loop's clock. A device tells only how long a pass took and how long it was idle before;
chained, these give the passes' places among each other, and the moment at which a result was there fixes the chain: no
pass ends after it was waited for. So the device's lane is exact in itself, and off against the host's by the time a
result takes to arrive (microseconds).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.engine.executor import Result
from paceline.scheduler.plan import Plan

HOST_LANES = ("plan", "launch", "wait", "commit", "masks", "text")


class TimelineSpan(NamedTuple):
    what: str
    step: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass. `device_s` and `idle_s` (of the device, before the pass) are 0 where nobody measures them."""

    step: int
    num_decodes: int
    num_prompts: int  # rows with prompt tokens
    num_tokens: int
    num_sampled: int
    context_tokens: int  # KV positions that decode rows read
    pairs: int  # of a token and a position it attends to
    device_s: float
    idle_s: float
    launched: float
    waited: float

    @property
    def name(self) -> str:
        decodes = [f"{self.num_decodes} decodes"] if self.num_decodes else []
        prompts = [f"{self.num_prompts} prompts, {self.num_tokens - self.num_decodes} tokens"]
        return " + ".join(decodes + (prompts if self.num_prompts else []))


class Timeline:
    """A `Trace` that remembers everything. Filled on the engine's thread alone.

    The device's idle time before the first pass that it sees is nobody's fault and counts as none.
    """

    def __init__(self) -> None:
        self.spans: list[TimelineSpan] = []
        self.passes: list[Pass] = []

    def span(self, what: str, step: int, began: float, ended: float) -> None:
        self.spans.append(TimelineSpan(what, step, began, ended))

    def passed(self, plan: Plan, result: Result) -> None:
        count = plan.num_decodes
        context = pairs = plan.num_context_tokens
        if plan.num_rows > count:
            starts, lengths = plan.starts[count:].astype(np.int64), plan.lengths[count:].astype(np.int64)
            context -= int(starts.sum() + lengths.sum())
            pairs = context + int((lengths * starts + lengths * (lengths + 1) // 2).sum())
        # Two passes are in flight at most, so this one's launch is among the last few spans.
        launched = next((s.began for s in reversed(self.spans) if s.what == "launch" and s.step == plan.step), None)
        waited = self.spans[-1].ended
        self.passes.append(
            Pass(
                step=plan.step,
                num_decodes=count,
                num_prompts=plan.num_rows - count,
                num_tokens=plan.num_tokens,
                num_sampled=int(np.count_nonzero(plan.samples)),
                context_tokens=context,
                pairs=pairs,
                device_s=result.device_s or 0.0,
                idle_s=(result.idle_s or 0.0) if self.passes else 0.0,
                launched=waited if launched is None else launched,
                waited=waited,
            )
        )

    def host_s(self, *lanes: str) -> float:
        """Seconds in these lanes."""
        return sum(span.ended - span.began for span in self.spans if span.what in lanes)

    def device_spans(self) -> list[tuple[float, float]]:
        """From when to when each pass ran, by the host's clock."""
        found: list[tuple[float, float]] = []
        chain: list[Pass] = []
        for one in self.passes:
            if chain and one.launched >= chain[-1].waited:  # the device had come to rest: a new chain
                found += _placed(chain)
                chain = []
            chain.append(one)
        return found + _placed(chain)


def _placed(chain: list[Pass]) -> list[tuple[float, float]]:
    """Passes that followed each other without the host waiting for the device to come to rest."""
    at, spans = 0.0, []
    for number, one in enumerate(chain):
        began = at + (one.idle_s if number else 0.0)
        at = began + one.device_s
        spans.append((began, at))
    zero = min((one.waited - ended for one, (_, ended) in zip(chain, spans, strict=True)), default=0.0)
    return [(zero + began, zero + ended) for began, ended in spans]


def trace_events(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """As the trace event format has it: times in microseconds since the first span."""
    zero = min((span.began for timeline in timelines for span in timeline.spans), default=0.0)

    def event(process: int, thread: int, name: str, began: float, ended: float, args: Any) -> dict[str, Any]:
        # Both ends are rounded, not the duration: neighbours that touch must not come to overlap.
        at, until = round((began - zero) * 1e6, 3), round((ended - zero) * 1e6, 3)
        duration = round(max(until - at, 0.0), 3)
        return {"name": name, "ph": "X", "pid": process, "tid": thread, "ts": at, "dur": duration, "args": args}

    events = _names(1, "host", HOST_LANES) + _names(2, "device", ("passes",))
    for timeline in timelines:
        for what, step, began, ended in timeline.spans:
            events.append(event(1, HOST_LANES.index(what), f"{what} {step}", began, ended, {"step": step}))
        for one, (began, ended) in zip(timeline.passes, timeline.device_spans(), strict=True):
            args = {
                "step": one.step, "rows": one.num_decodes + one.num_prompts, "tokens": one.num_tokens,
                "context_tokens": one.context_tokens, "idle_before_us": round(one.idle_s * 1e6, 1),
            }  # fmt: skip
            events.append(event(2, 0, one.name, began, ended, args))
    return events


def write_trace(path: Path, timelines: Sequence[Timeline]) -> None:
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events(timelines)}), encoding="utf-8")


def _names(process: int, name: str, threads: tuple[str, ...]) -> list[dict[str, Any]]:
    def named(what: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": args}

    events = [named("process_name", 0, {"name": name}), named("process_sort_index", 0, {"sort_index": process})]
    for index, thread in enumerate(threads):
        events.append(named("thread_name", index, {"name": thread}))
        events.append(named("thread_sort_index", index, {"sort_index": index}))
    return events
