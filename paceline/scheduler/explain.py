"""Why is it waiting? One sentence about one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.request import Phase

if TYPE_CHECKING:
    from paceline.scheduler.scheduler import Scheduler


def explain(scheduler: Scheduler, request_id: str) -> str:
    """What this request is doing, and what would have to happen for it to go on."""
    request = scheduler.requests.get(request_id)
    if request is None:
        return f"Request {request_id} is not here: it has finished or never came."
    if request.phase is Phase.DECODING or (request.slot is None and request.phase is not Phase.WAITING):
        return f"Request {request_id} is decoding: {len(request.output)} of at most {request.max_tokens} tokens."
    if request.slot is not None:
        done = int(scheduler.memory.slots.computed[request.slot])
        fetched = f", {request.num_fetched} of them come from host memory" if request.num_fetched else ""
        return (
            f"Request {request_id} is computing its prompt: {done} of {request.num_tokens} tokens are planned{fetched}."
        )
    reason = request.waits_for
    if not scheduler.memory.slots.num_free:
        reason = f"one of {scheduler.config.max_running} slots, all taken: a running request has to end"
    elif request.waits_for_pages:
        reason = f"{request.waits_for_pages} more pages of memory: running requests have to end first"
    if request.retractions:
        times = "once" if request.retractions == 1 else "twice"
        reason += f"; it was retracted {times} and goes before new requests"
    reserved = scheduler.admission.reserved
    if reserved is request:
        reason += "; nothing passes it any more"
    elif reserved is not None:
        reason += f"; memory that comes free is kept for request {reserved.id}"
    else:
        others = scheduler.num_waiting - 1
        reason += f"; {others} {'other waits' if others == 1 else 'others wait'}, order {scheduler.config.policy}"
    return f"Request {request_id} waits for {reason}."
