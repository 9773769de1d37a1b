"""`explain`: one sentence about what a request is doing, or why it waits and what must happen first."""

from __future__ import annotations

from typing import NamedTuple

from paceline.config import SchedulerConfig
from paceline.scheduler.admission import Admission
from paceline.scheduler.memory import Memory
from paceline.scheduler.tracked_request import Phase, TrackedRequest


class WaitingFor(NamedTuple):
    """What a waiting request waits for. Both texts continue 'it waits for …'."""

    kind: str  # requests are counted by it
    clause: str  # with its values, and what must happen first


def waiting_for(request: TrackedRequest, config: SchedulerConfig, memory: Memory, admission: Admission) -> WaitingFor:
    """The one answer for the sentence of a request, its row on the pages and the counts above the rows. What keeps
    every request out comes first: while it lasts, no request is tried, and what was last found about one is old."""
    num_free = memory.slots.num_free
    if admission.holds_new and not request.was_admitted:
        return WaitingFor("the engine to resume", "the engine to resume: it is paused")
    if config.batching == "static" and num_free < config.max_running:
        return WaitingFor(
            "the batch to finish", "the batch to finish: batching is static, all of its requests must end"
        )
    if request.background and admission.foreground_waits:
        others = "requests of other tenants"
        return WaitingFor(others, f"{others}: as a background request it is admitted only while none of them waits")
    if not num_free:
        slots = f"one of {config.max_running} slots (max_running), all in use: a running request must finish first"
        return WaitingFor("a free slot", slots)
    if request.num_missing_pages:
        pages = f"{request.num_missing_pages} more {'page' if request.num_missing_pages == 1 else 'pages'}"
        return WaitingFor("memory", f"{pages} of KV memory: running requests must finish first")
    return WaitingFor(request.wait_reason, request.wait_reason)


def explain(request: TrackedRequest, config: SchedulerConfig, memory: Memory, admission: Admission) -> str:
    """Of a request that has not finished."""
    if request.phase is Phase.DECODING or (request.slot is None and request.phase is not Phase.WAITING):
        return f"Request {request.id} is decoding: {len(request.output)} of at most {request.max_tokens} tokens."
    if request.slot is not None:
        planned = int(memory.slots.computed[request.slot])
        fetched = f", {request.num_fetched} of them fetched from host memory" if request.num_fetched else ""
        return (
            f"Request {request.id} is prefilling: {planned} of {request.num_tokens} prompt tokens are planned{fetched}."
        )
    reason = waiting_for(request, config, memory, admission).clause
    if request.retractions:
        times = "once" if request.retractions == 1 else "twice"
        reason += f"; it was retracted {times} and is tried before new requests"
    if admission.reserved is request:
        reason += "; freed memory is reserved for it"
    elif admission.reserved is not None:
        reason += f"; freed memory is reserved for request {admission.reserved.id}"
    else:
        others = admission.num_waiting - 1
        reason += f"; {others} other {'request waits' if others == 1 else 'requests wait'}, policy {config.policy}"
    return f"Request {request.id} waits for {reason}."
