"""Who leaves when memory runs out.

Lowest priority first; then whoever costs least to compute again per page that only it owns; the newest among
equals. Nobody is retracted more than twice: a request that comes back for the second time is admitted only when
everything running and itself would fit at full length, so whenever memory is short, somebody who came later and is
not protected can be found. The most senior one is spared as long as there is another.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.request import Request
from paceline.scheduler.slots import Slots

MOST_RETRACTIONS = 2
_DEPTH_THAT_DOUBLES = 4096  # tokens of context after which computing a token again costs twice as much


def is_protected(request: Request) -> bool:
    return request.retractions >= MOST_RETRACTIONS


def num_own_pages(request: Request, slots: Slots, page_size: int) -> int:
    """Pages that come free when `request` leaves: its private ones, and tree pages it alone has locked."""
    assert request.slot is not None and request.held is not None, f"request {request.id} is not running"
    return int(slots.num_pages[request.slot]) - request.held.depth // page_size + request.sole_pages


def choose_victim(running: Iterable[Request], slots: Slots, page_size: int) -> Request | None:
    """The request to retract, or None if everybody is protected."""
    allowed = [request for request in running if not is_protected(request)]
    if not allowed:
        return None
    # Requests that share all they have free nothing one by one, but do once the last of them has gone.
    candidates = [request for request in allowed if num_own_pages(request, slots, page_size) > 0] or allowed
    senior = min(candidates, key=lambda request: request.seniority)

    def order(request: Request) -> tuple[int, bool, float, int]:
        assert request.slot is not None, "candidates are running"
        pages = max(1, num_own_pages(request, slots, page_size))
        computed = int(slots.computed[request.slot])
        tokens = min(computed, pages * page_size)
        middle = computed - tokens / 2
        cost = tokens * (1 + middle / _DEPTH_THAT_DOUBLES) / pages
        return (request.priority, request is senior, cost, -request.seniority)

    return min(candidates, key=order)
