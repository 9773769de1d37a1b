"""Retraction (preemption): which running request gives its memory back when there is not enough.

Requests of background tenants first; then the lowest priority; then the cheapest to recompute per page that only it
owns; the newest among equals. No request is retracted more than MAX_RETRACTIONS times: after that it is protected, and
readmitted only when it fits at full length beside all protected requests that run. So these fit together, and whenever
memory is short there is an unprotected request to retract. The most senior request is spared as long as there is
another. A background request is not protected from foreground requests, and its retractions for them are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.scheduler.memory import Memory
from paceline.scheduler.plan import Column
from paceline.scheduler.tracked_request import TrackedRequest

MAX_RETRACTIONS = 2
MAX_RECOMPUTATIONS = 2  # not counted as retractions: KV that a request had read may contain NaN (Scheduler._fail)
_COST_DEPTH = 4096  # tokens of context at which recomputing a token costs twice as much


def is_protected(request: TrackedRequest) -> bool:
    return request.retractions >= MAX_RETRACTIONS


def victims(rows: Column, memory: Memory, *, for_foreground: bool = False) -> Iterator[TrackedRequest]:
    """The requests in these slots in the order in which they are retracted, without those that are protected. Retract
    each before the next is asked for; others may be retracted in between, none may start."""
    tree, slots = memory.tree, memory.slots
    may_leave = ~slots.is_protected[rows]
    if for_foreground:
        may_leave |= slots.is_background[rows]
    rows = rows[may_leave]
    while len(rows):
        # One order for all, until a retraction changes more than what it takes away: step by step it would cost as
        # much as planning the pass does.
        senior, ordered = _order(rows, memory)
        for row in ordered:
            victim = slots.requests[row]
            if victim is None:
                continue
            num_exclusive = tree.num_exclusive_pages - victim.exclusive_pages
            yield victim
            if row == senior or tree.num_exclusive_pages != num_exclusive:
                break
        rows = np.array([row for row in rows.tolist() if slots.requests[row] is not None], np.int32)


def choose_victim(rows: Column, memory: Memory, *, for_foreground: bool = False) -> TrackedRequest | None:
    """The request to retract, or None if all are protected."""
    return next(victims(rows, memory, for_foreground=for_foreground), None)


def _order(rows: Column, memory: Memory) -> tuple[int, Iterator[int]]:
    """The slot of the most senior candidate, and all of them in order."""
    slots, size = memory.slots, memory.page_size
    # Pages that become available when a request leaves: its private ones, and tree pages that only it has locked.
    own_pages = slots.num_pages[rows] - slots.num_prefix_pages[rows] + slots.exclusive_pages[rows]
    # Retracting one of several requests that share all their pages frees none, but retracting the last of them does.
    if (own_pages > 0).any():
        rows, own_pages = rows[own_pages > 0], own_pages[own_pages > 0]
    seniority = slots.seniority[rows]
    senior = int(seniority.argmin())
    pages = np.maximum(own_pages, 1)
    computed = slots.computed[rows]
    tokens = np.minimum(computed, pages * size)
    cost = tokens * (1 + (computed - tokens / 2) / _COST_DEPTH) / pages
    keys = (-seniority, cost, np.arange(len(rows)) == senior)  # the last first

    def ordered() -> Iterator[int]:
        # Mostly a few are retracted: only those of the lowest priority are sorted, until they have left.
        is_background, priority = slots.is_background[rows], slots.priority[rows]
        for left in (np.flatnonzero(is_background), np.flatnonzero(~is_background)):
            while len(left):
                is_lowest = priority[left] == priority[left].min()
                lowest, left = left[is_lowest], left[~is_lowest]
                yield from rows[lowest[np.lexsort(tuple(key[lowest] for key in keys))]].tolist()

    return int(rows[senior]), ordered()
