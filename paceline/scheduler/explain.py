"""`explain`: one sentence about what a request is doing, or why it waits and what must happen first."""

from __future__ import annotations

from paceline.config import SchedulerConfig
from paceline.request import Phase, Request
from paceline.scheduler.admission import Admission
from paceline.scheduler.memory import Memory


def explain(request: Request, config: SchedulerConfig, memory: Memory, admission: Admission) -> str:
    """Of a request that has not finished."""
    if request.phase is Phase.DECODING or (request.slot is None and request.phase is not Phase.WAITING):
        return f"Request {request.id} is decoding: {len(request.output)} of at most {request.max_tokens} tokens."
    if request.slot is not None:
        planned = int(memory.slots.computed[request.slot])
        fetched = f", {request.num_fetched} of them fetched from host memory" if request.num_fetched else ""
        return (
            f"Request {request.id} is prefilling: {planned} of {request.num_tokens} prompt tokens are planned{fetched}."
        )
    reason = request.wait_reason
    if admission.holds_new and not request.was_admitted:
        reason = "the engine to resume: it is paused"
    elif not memory.slots.num_free:
        reason = f"one of {config.max_running} slots (max_running), all in use: a running request must finish first"
    elif request.num_missing_pages:
        reason = f"{request.num_missing_pages} more pages of KV memory: running requests must finish first"
    if request.retractions:
        times = "once" if request.retractions == 1 else "twice"
        reason += f"; it was retracted {times} and is readmitted before new requests"
    if admission.reserved is request:
        reason += "; no other request may overtake it"
    elif admission.reserved is not None:
        reason += f"; freed memory is reserved for request {admission.reserved.id}"
    else:
        others = admission.num_waiting - 1
        reason += f"; {others} other {'request waits' if others == 1 else 'requests wait'}, policy {config.policy}"
    return f"Request {request.id} waits for {reason}."
