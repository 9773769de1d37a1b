"""Retraction (preemption): which running request gives its memory back when there is not enough.

Requests of background tenants first; then the lowest priority; then the cheapest to recompute per page that only it
owns; the newest among equals. No request is retracted more than MAX_RETRACTIONS times: after that it is protected, and
readmitted only when it fits at full length beside all protected requests that run. So these fit together, and whenever
memory is short there is an unprotected request to retract. The most senior request is spared as long as there is
another. A background request is not protected from foreground requests, and its retractions for them are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.request import Request
from paceline.scheduler.memory import Memory

MAX_RETRACTIONS = 2
MAX_RECOMPUTATIONS = 2  # not counted as retractions: KV that a request had read may contain NaN (Scheduler._fail)
_COST_DEPTH = 4096  # tokens of context at which recomputing a token costs twice as much


def is_protected(request: Request) -> bool:
    return request.retractions >= MAX_RETRACTIONS


def num_own_pages(request: Request, memory: Memory) -> int:
    """Pages that become available when `request` leaves: its private ones, and tree pages that only it has locked."""
    assert request.slot is not None, f"request {request.id} is not running"
    num_prefix_pages = memory.locked_nodes[request].depth // memory.page_size
    return int(memory.slots.num_pages[request.slot]) - num_prefix_pages + request.exclusive_pages


def choose_victim(running: Iterable[Request], memory: Memory, *, for_foreground: bool = False) -> Request | None:
    """The request to retract, or None if all are protected."""
    allowed = [request for request in running if not is_protected(request) or (for_foreground and request.background)]
    if not allowed:
        return None
    # Retracting one of several requests that share all their pages frees none, but retracting the last of them does.
    candidates = [request for request in allowed if num_own_pages(request, memory) > 0] or allowed
    senior = min(candidates, key=lambda request: request.seniority)

    def retract_order(request: Request) -> tuple[bool, int, bool, float, int]:
        assert request.slot is not None, "candidates are running"
        pages = max(1, num_own_pages(request, memory))
        computed = int(memory.slots.computed[request.slot])
        tokens = min(computed, pages * memory.page_size)
        middle = computed - tokens / 2
        cost = tokens * (1 + middle / _COST_DEPTH) / pages
        return (not request.background, request.priority, request is senior, cost, -request.seniority)

    return min(candidates, key=retract_order)
