"""A snapshot of the scheduler state as JSON-compatible values, for the live page and the simulator page.

Read-only and bounded: however many requests wait and however large the tree is, a snapshot contains at most so many of
each, with the total. It contains token counts and no tokens.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import numpy as np

from paceline.request import Phase, Request
from paceline.scheduler.explain import waiting_for
from paceline.scheduler.fair import FairPolicy
from paceline.scheduler.node import Node
from paceline.scheduler.scheduler import Scheduler

# Codes of the page map. A code >= OWNED: the page belongs to slot `code - OWNED` alone
FREE, CACHED, SHARED, OWNED = 0, 1, 2, 3
_MAX_MAPPED_PAGES = 8192  # a larger pool has no page map, only totals


_COUNTERS = (
    "steps",
    "added",
    "refused",
    "admitted",
    "prompt_tokens",
    "hit_tokens",
    "computed_tokens",
    "decoded_tokens",
    "retractions",
    "evicted_pages",
    "spilled_pages",
    "fetched_tokens",
)


def snapshot(
    scheduler: Scheduler, now: float, *, max_requests: int = 100, max_nodes: int = 150, max_tenants: int = 50
) -> dict[str, Any]:
    config, memory, tree = scheduler.config, scheduler.memory, scheduler.memory.tree
    # Every request with a slot, including those whose last pass is in flight, which have left the running set.
    running = [request for request in memory.slots.requests if request is not None]
    waiting = [request for request in scheduler.requests.values() if request.phase is Phase.WAITING]
    free, evictable, locked = memory.pool.num_free, tree.num_evictable_pages, tree.num_locked_pages
    running.sort(key=lambda request: request.seniority)
    exclusive = sum(request.exclusive_pages for request in running)
    return {
        "time": now,
        "step": scheduler.step,
        "num_waiting": len(waiting),
        "num_running": len(running),
        "waiting": [_waiting(scheduler, request, now) for request in waiting[:max_requests]],
        "reasons": Counter(waiting_for(request, config, memory).kind for request in waiting).most_common(),
        "running": [_running(scheduler, request, now) for request in running[:max_requests]],
        "memory": {
            "pages": config.num_pages,
            "free": free,
            "cached": evictable,
            "shared": locked - exclusive,
            "owned": config.num_pages - free - evictable - locked + exclusive,
        },
        "map": _page_map(scheduler, running) if config.num_pages <= _MAX_MAPPED_PAGES else None,
        "tree": _tree(tree.root, max_nodes, config.page_size),
        "tenants": _tenants(scheduler, waiting, running)[:max_tenants],
        "counters": _counters(scheduler),
    }


def _waiting(scheduler: Scheduler, request: Request, now: float) -> dict[str, Any]:
    tree = scheduler.memory.tree
    return {
        "id": request.id,
        "tenant": request.tenant,
        "tokens": request.num_tokens,
        "cached": tree.hit(tree.waiting_nodes[request], scheduler.step).depth,
        "waited": max(0.0, now - request.arrival),
        "retractions": request.retractions,
        "why": scheduler.explain(request.id),
    }


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
    """One 16-bit code per page, in base64."""
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
        row, num_prefix_pages = memory.slots.row(request.slot), int(memory.slots.num_prefix_pages[request.slot])
        codes[row[num_prefix_pages:]] = OWNED + request.slot
    return base64.b64encode(codes.tobytes()).decode()


def _tree(root: Node, max_nodes: int, page_size: int) -> dict[str, Any]:
    """The top of the tree, breadth first: nodes as [parent, tokens, state, sharers, waiting, name].

    Parents come before their children; `state` is cached, locked or ghost. The most used children of a node come first.
    """
    nodes: list[list[Any]] = []
    level: list[tuple[Node, int]] = [(root, -1)]
    left_out = 0
    while level:
        below: list[tuple[Node, int]] = []
        for node, parent in level:
            if len(nodes) >= max_nodes:
                left_out += 1
                continue
            state = "ghost" if not node.resident else "locked" if node.locks else "cached"
            name = node.name if isinstance(node.name, str) else ""
            nodes.append([parent, len(node.key) // 4, state, node.locks, node.num_waiting, name])
            index = len(nodes) - 1
            children = sorted(
                node.children.values(), key=lambda child: (-child.locks, -child.num_waiting, child.sibling_order)
            )
            below += [(child, index) for child in children]
        level = below
    return {"nodes": nodes, "left_out": left_out, "page_size": page_size}


def _tenants(scheduler: Scheduler, waiting: list[Request], running: list[Request]) -> list[dict[str, Any]]:
    waits, runs = Counter(one.tenant for one in waiting), Counter(one.tenant for one in running)
    policy = scheduler.policy
    tenants = policy.tenants if isinstance(policy, FairPolicy) else {}
    service = {name: tenant.service for name, tenant in tenants.items()}
    names = sorted({*waits, *runs, *service}, key=lambda name: (-service.get(name, 0.0), name))
    weights = scheduler.config.tenant_weights
    return [
        {
            "name": name,
            "waiting": waits[name],
            "running": runs[name],
            "weight": weights.get(name, 1.0),
            "service": service.get(name),
        }
        for name in names
    ]


def _counters(scheduler: Scheduler) -> dict[str, Any]:
    counters = scheduler.counters
    found: dict[str, Any] = {name: getattr(counters, name) for name in _COUNTERS}
    found["finished"] = {reason.value: count for reason, count in counters.finished.items() if count}
    return found
