"""The scheduler at one moment, as plain values that fit into JSON: what the pages draw.

Read-only, and bounded: however many requests wait and however large the tree is, a snapshot has at most so many of each
and says how many there are in all. It holds no tokens, only how many there are.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.request import Phase, Request
from paceline.scheduler.explain import explain
from paceline.scheduler.fair import Fair
from paceline.scheduler.node import Node

if TYPE_CHECKING:
    from paceline.scheduler.scheduler import Scheduler

# What a page is, as drawn: from OWNED on it belongs to the slot `code - OWNED` alone
FREE, CACHED, SHARED, OWNED = 0, 1, 2, 3
_MOST_MAPPED_PAGES = 8192  # of a larger pool only the sums are given


def snapshot(
    scheduler: Scheduler, now: float, *, most_requests: int = 100, most_nodes: int = 150, most_tenants: int = 50
) -> dict[str, Any]:
    config, memory, tree = scheduler.config, scheduler.memory, scheduler.memory.tree
    # Everyone with a slot: also those whose last pass is under way, which admission counts no more.
    running = [request for request in memory.slots.requests if request is not None]
    waiting = [request for request in scheduler.requests.values() if request.phase is Phase.WAITING]
    free, evictable, locked = memory.pool.num_free, tree.num_evictable_pages, tree.num_locked_pages
    running.sort(key=lambda request: request.seniority)
    sole = sum(request.sole_pages for request in running)
    return {
        "time": now,
        "step": tree.step,
        "num_waiting": len(waiting),
        "num_running": len(running),
        "waiting": [_waiting(scheduler, request, now) for request in waiting[:most_requests]],
        "reasons": Counter(_reason(scheduler, request) for request in waiting).most_common(8),
        "running": [_running(scheduler, request, now) for request in running[:most_requests]],
        "memory": {
            "pages": config.num_pages,
            "free": free,
            "cached": evictable,
            "shared": locked - sole,
            "owned": config.num_pages - free - evictable - locked + sole,
        },
        "map": _page_map(scheduler, running) if config.num_pages <= _MOST_MAPPED_PAGES else None,
        "tree": _tree(tree.root, most_nodes, config.page_size),
        "tenants": _tenants(scheduler, waiting, running)[:most_tenants],
        "counters": _counters(scheduler),
    }


def _waiting(scheduler: Scheduler, request: Request, now: float) -> dict[str, Any]:
    assert request.node is not None, f"request {request.id} does not wait in the tree"
    return {
        "id": request.id,
        "tenant": request.tenant,
        "tokens": request.num_tokens,
        "cached": scheduler.memory.tree.hit(request.node).depth,
        "waited": max(0.0, now - request.arrival),
        "retractions": request.retractions,
        "why": explain(scheduler, request.id),
    }


def _reason(scheduler: Scheduler, request: Request) -> str:
    if request.waits_for_pages:
        return "memory"
    return "a free slot" if not scheduler.memory.slots.num_free else request.waits_for


def _running(scheduler: Scheduler, request: Request, now: float) -> dict[str, Any]:
    assert request.slot is not None, f"request {request.id} is not running"
    slots = scheduler.memory.slots
    return {
        "id": request.id,
        "tenant": request.tenant,
        "slot": request.slot,
        "phase": request.phase.value,
        "prompt": len(request.prompt),
        "cached": request.num_cached,
        "computed": int(slots.computed[request.slot]),
        "output": len(request.output),
        "max": request.max_tokens,
        "pages": int(slots.num_pages[request.slot]),
        "age": max(0.0, now - request.arrival),
    }


def _page_map(scheduler: Scheduler, running: list[Request]) -> str:
    """One 16-bit code for each page, in base64."""
    memory = scheduler.memory
    codes = np.zeros(scheduler.config.num_pages, "<u2")
    for node in memory.tree.nodes():
        if node.locks == 0:
            codes[node.pages] = CACHED
        elif node.locks == 1 and node.holder is not None and node.holder.slot is not None:
            codes[node.pages] = OWNED + node.holder.slot
        else:
            codes[node.pages] = SHARED
    for request in running:
        assert request.slot is not None, f"request {request.id} is not running"
        row, held = memory.slots.row(request.slot), int(memory.slots.held_pages[request.slot])
        codes[row[held:]] = OWNED + request.slot
    return base64.b64encode(codes.tobytes()).decode()


def _tree(root: Node, most_nodes: int, page_size: int) -> dict[str, Any]:
    """The largest part of the tree, breadth first: nodes as [parent, tokens, state, sharers, waiting, name].

    Parents come before their children; state is resident, locked or ghost. Of each node's children those with the most
    users come first.
    """
    nodes: list[list[Any]] = []
    level: list[tuple[Node, int]] = [(root, -1)]
    left_out = 0
    while level:
        below: list[tuple[Node, int]] = []
        for node, parent in level:
            if len(nodes) >= most_nodes:
                left_out += 1
                continue
            state = "ghost" if not node.resident else "locked" if node.locks else "cached"
            name = node.name if isinstance(node.name, str) else ""
            nodes.append([parent, len(node.key) // 4, state, node.locks, node.num_waiting, name])
            index = len(nodes) - 1
            children = sorted(node.children.values(), key=lambda child: (-child.locks, -child.num_waiting, child.order))
            below += [(child, index) for child in children]
        level = below
    return {"nodes": nodes, "left_out": left_out, "page_size": page_size}


def _tenants(scheduler: Scheduler, waiting: list[Request], running: list[Request]) -> list[dict[str, Any]]:
    waits, runs = Counter(one.tenant for one in waiting), Counter(one.tenant for one in running)
    order = scheduler.order
    service = {name: tenant.service for name, tenant in order.tenants.items()} if isinstance(order, Fair) else {}
    names = sorted({*waits, *runs, *service}, key=lambda name: (-service.get(name, 0.0), name))
    weights = scheduler.config.tenant_weights
    return [
        {"name": name, "waiting": waits[name], "running": runs[name], "weight": weights.get(name, 1.0),
         "service": service.get(name)}
        for name in names
    ]  # fmt: skip


def _counters(scheduler: Scheduler) -> dict[str, Any]:
    counters = scheduler.counters
    names = (
        "steps", "added", "refused", "admitted", "prompt_tokens", "hit_tokens", "computed_tokens", "decoded_tokens",
        "retractions", "evicted_pages", "spilled_pages", "fetched_tokens",
    )  # fmt: skip
    found: dict[str, Any] = {name: getattr(counters, name) for name in names}
    found["finished"] = {reason.value: count for reason, count in counters.finished.items() if count}
    return found
