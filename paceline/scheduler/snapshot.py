"""A snapshot of the scheduler state as JSON-compatible values, for the live page and the simulator page.

Read-only and bounded: however many requests wait and however large the tree is, a snapshot contains at most so many of
each, with the total. It contains token counts and no tokens.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import numpy as np

from paceline.scheduler.background import BackgroundPolicy, fair_tenants
from paceline.scheduler.explain import waiting_for
from paceline.scheduler.node import Node
from paceline.scheduler.policies import KeyPolicy
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.tracked_request import Phase, TrackedRequest

# Codes of the page map. A code >= OWNED: slot `code - OWNED` is the only one that uses the page
FREE, CACHED, SHARED, PINNED, OWNED = 0, 1, 2, 3, 4
# Bits of `page_uses`
WAITING, PREFILL, DECODING = 1, 2, 4
_MAX_MAPPED_PAGES = 8192  # a larger pool has no page map, only totals

Users = dict[Node, list[TrackedRequest]]  # tree nodes that running requests have locked


_COUNTERS = (
    "steps",
    "added",
    "refused",
    "admitted",
    "prompt_tokens",
    "hit_tokens",
    "computed_tokens",
    "decoded_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "retractions",
    "evicted_pages",
    "spilled_pages",
    "forgotten_pages",
    "fetched_tokens",
)


def snapshot(
    scheduler: Scheduler, now: float, *, max_requests: int = 100, max_nodes: int = 150, max_tenants: int = 50
) -> dict[str, Any]:
    config, tree = scheduler.config, scheduler.memory.tree
    # Every request with a slot, including those whose last pass is in flight, which have left the running set.
    running = [request for request in scheduler.memory.slots.requests if request is not None]
    running.sort(key=lambda request: request.seniority)
    waiting = [request for request in scheduler.requests.values() if request.phase is Phase.WAITING]
    phases = Counter[Phase](
        request.phase for request in scheduler.requests.values() if request.phase is not Phase.WAITING
    )
    phases.update({Phase.WAITING: len(waiting), Phase.FINISHED: sum(scheduler.counters.finished.values())})
    users = _users(scheduler, running)
    shared = _shared_prefixes(scheduler, users, running)
    order, first = _first_waiting(scheduler, waiting, max_requests)
    return {
        "time": now,
        "step": scheduler.step,
        "num_waiting": len(waiting),
        "num_running": len(running),
        "phases": {phase.value: phases[phase] for phase in Phase},
        "order": order,
        "waiting": [_waiting(scheduler, request, place, now) for place, request in enumerate(first, 1)],
        "reasons": _reasons(scheduler, waiting),
        "running": [_running(scheduler, request, shared, now) for request in running[:max_requests]],
        "shared": [{"tokens": node.depth, "ids": [one.id for one in users[node]]} for node in shared],
        "memory": _memory(scheduler, users),
        "host": _host(scheduler),
        "map": _page_map(scheduler, users, running) if config.num_pages <= _MAX_MAPPED_PAGES else None,
        "tree": _tree(tree.root, users, shared, max_nodes),
        "tenants": _tenants(scheduler, waiting, running)[:max_tenants],
        "counters": _counters(scheduler),
    }


def page_uses(scheduler: Scheduler) -> str:
    """Which pages the requests of each phase use: one byte of bits per page, in base64. The pages of a waiting request
    are those of its cached prefix."""
    memory, tree = scheduler.memory, scheduler.memory.tree
    uses = np.zeros(scheduler.config.num_pages, np.uint8)
    bits = {Phase.PREFILL: PREFILL, Phase.DECODING: DECODING}
    seen: set[Node] = set()
    for request in scheduler.requests.values():
        if request.slot is not None:
            uses[memory.slots.row(request.slot)] |= bits[request.phase]
        elif request.phase is Phase.WAITING:
            node: Node | None = tree.hit(tree.waiting_nodes[request], scheduler.step)
            while node is not None and node not in seen:
                seen.add(node)
                uses[node.pages] |= WAITING
                node = node.parent
    return base64.b64encode(uses.tobytes()).decode()


# ---------------------------------------------------------------------------------------------------- requests


def _first_waiting(
    scheduler: Scheduler, waiting: list[TrackedRequest], max_requests: int
) -> tuple[str, list[TrackedRequest]]:
    """The first waiting requests in order of admission, where the policy has a fixed order, else in order of arrival:
    policies that look at the cache or at service decide anew for each admission. Reserved and retracted requests are
    admitted before all others in any case."""
    admission, policy = scheduler.admission, scheduler.policy
    before = [*([] if admission.reserved is None else [admission.reserved]), *admission.retracted]
    parts = (policy.foreground, policy.background) if isinstance(policy, BackgroundPolicy) else (policy,)
    keyed = [part for part in parts if isinstance(part, KeyPolicy)]
    order, after = "arrival", waiting
    if len(keyed) == len(parts):
        order, after = "admission", [request for part in keyed for request in part.first(max_requests)]
    found = sorted(dict.fromkeys([*before, *after]), key=lambda request: request.background)
    return order, found[:max_requests]


def _waiting(scheduler: Scheduler, request: TrackedRequest, place: int, now: float) -> dict[str, object]:
    tree, host = scheduler.memory.tree, scheduler.memory.host
    node = tree.waiting_nodes[request]
    hit = tree.hit(node, scheduler.step)
    return {
        "id": request.id,
        "tenant": request.tenant,
        "place": place,
        "tokens": request.num_tokens,
        "cached": hit.depth,
        "on_host": 0 if host is None else host.tokens_below(hit, node),
        "waited": max(0.0, now - request.arrival),
        "retractions": request.retractions,
        "reason": waiting_for(request, scheduler.config, scheduler.memory, scheduler.admission).kind,
        "missing": request.num_missing_pages,
        "why": scheduler.explain(request.id),
    }


def _reasons(scheduler: Scheduler, waiting: list[TrackedRequest]) -> list[tuple[str, int, str]]:
    """What waiting requests wait for: kind, number of requests, and the clause if it is the same for all of them."""
    # It depends on these two fields only: the sentences are made once for each of their values, not for each request.
    alike = {(request.num_missing_pages, request.wait_reason): request for request in waiting}
    counts = Counter((request.num_missing_pages, request.wait_reason) for request in waiting)
    clauses: dict[str, Counter[str]] = {}
    for fields, request in alike.items():
        kind, clause = waiting_for(request, scheduler.config, scheduler.memory, scheduler.admission)
        clauses.setdefault(kind, Counter())[clause] += counts[fields]
    found = [
        (kind, sum(by_clause.values()), next(iter(by_clause)) if len(by_clause) == 1 else kind)
        for kind, by_clause in clauses.items()
    ]
    return sorted(found, key=lambda reason: (-reason[1], reason[0]))


def _running(scheduler: Scheduler, request: TrackedRequest, shared: dict[Node, int], now: float) -> dict[str, object]:
    assert request.slot is not None, f"request {request.id} is not running"
    slots = scheduler.memory.slots
    # Each token counts once: prompt = cached + fetched + computed + left. `slots.computed` counts cached and output
    # tokens too, and after a retraction less may be in memory than was cached at first.
    known = min(int(slots.computed[request.slot]), len(request.prompt))
    hits = min(request.num_cached, known)
    fetched = min(request.num_fetched, hits)
    return {
        "id": request.id,
        "tenant": request.tenant,
        "slot": request.slot,
        "phase": request.phase.value,
        "prompt": len(request.prompt),
        "cached": hits - fetched,
        "fetched": fetched,
        "computed": known - hits,
        "left": len(request.prompt) - known,
        "output": len(request.output),
        "max": request.max_tokens,
        "pages": int(slots.num_pages[request.slot]),
        "shared": _deepest(scheduler.memory.locked_nodes[request], shared),
        "age": max(0.0, now - request.arrival),
    }


# ---------------------------------------------------------------------------------------------------- shared prefixes


def _users(scheduler: Scheduler, running: list[TrackedRequest]) -> Users:
    users: Users = {}
    for request in running:
        node: Node | None = scheduler.memory.locked_nodes[request]
        while node is not None and node.parent is not None:
            users.setdefault(node, []).append(request)
            node = node.parent
    return users


def _shared_prefixes(scheduler: Scheduler, users: Users, running: list[TrackedRequest]) -> dict[Node, int]:
    """The ends of the prefixes that several running requests have in common, for each request the deepest one. They are
    numbered in order of creation, so that a prefix keeps its number while others come and go after it."""
    found: set[Node] = set()
    for request in running:
        node: Node | None = scheduler.memory.locked_nodes[request]
        while node is not None and len(users.get(node, ())) < 2:
            node = node.parent
        if node is not None and node.depth:
            found.add(node)
    return {node: number for number, node in enumerate(sorted(found, key=lambda node: node.seq))}


def _deepest(node: Node | None, shared: dict[Node, int]) -> int | None:
    """The number of the deepest shared prefix at or above `node`."""
    while node is not None and node not in shared:
        node = node.parent
    return None if node is None else shared[node]


# ---------------------------------------------------------------------------------------------------- memory


def _memory(scheduler: Scheduler, users: Users) -> dict[str, int]:
    """Pages by use; the kinds add up to all pages."""
    memory, pages = scheduler.memory, scheduler.config.num_pages
    free, cached, locked = memory.pool.num_free, memory.tree.num_evictable_pages, memory.tree.num_locked_pages
    single = sum(len(node.pages) for node, requests in users.items() if len(requests) == 1)
    shared = sum(len(node.pages) for node, requests in users.items() if len(requests) > 1)
    return {
        "pages": pages,
        "free": free,
        "cached": cached,
        "shared": shared,
        "pinned": locked - single - shared,  # and used by no running request
        "owned": pages - free - cached - locked + single,
    }


def _host(scheduler: Scheduler) -> dict[str, int] | None:
    """Host memory behind the KV cache; None if there is none."""
    host = scheduler.memory.host
    if host is None:
        return None
    return {"pages": host.pool.num_pages, "used": host.num_pages_used, "from_token": host.from_token}


def _page_map(scheduler: Scheduler, users: Users, running: list[TrackedRequest]) -> str:
    """One 16-bit code per page, in base64."""
    memory = scheduler.memory
    codes = np.zeros(scheduler.config.num_pages, "<u2")
    for node in memory.tree.nodes():
        requests = users.get(node, [])
        if len(requests) == 1 and requests[0].slot is not None:
            codes[node.pages] = OWNED + requests[0].slot
        else:
            codes[node.pages] = SHARED if requests else PINNED if node.locks else CACHED
    for request in running:
        assert request.slot is not None, f"request {request.id} is not running"
        row, num_prefix_pages = memory.slots.row(request.slot), int(memory.slots.num_prefix_pages[request.slot])
        codes[row[num_prefix_pages:]] = OWNED + request.slot
    return base64.b64encode(codes.tobytes()).decode()


def _tree(root: Node, users: Users, shared: dict[Node, int], max_nodes: int) -> dict[str, object]:
    """The top of the tree, breadth first: nodes as [parent, tokens, state, running, waiting, shared prefix].

    Parents come before their children. `state` is locked, pinned, cached, host or ghost; `shared prefix` is the number
    of the shared prefix that ends here, if one does. The most used children of a node come first.
    """
    nodes: list[list[object]] = []
    level: list[tuple[Node, int | None]] = [(root, None)]
    left_out = 0
    while level:
        below: list[tuple[Node, int | None]] = []
        for node, parent in level:
            if len(nodes) >= max_nodes:
                left_out += 1
                continue
            num_users = len(users.get(node, ()))
            state = _node_state(node, num_users)
            nodes.append([parent, len(node.key) // 4, state, num_users, node.num_waiting, shared.get(node)])
            index = len(nodes) - 1
            children = sorted(
                node.children.values(), key=lambda child: (-child.locks, -child.num_waiting, child.sibling_order)
            )
            below += [(child, index) for child in children]
        level = below
    return {"nodes": nodes, "left_out": left_out}


def _node_state(node: Node, num_users: int) -> str:
    if not node.resident:
        return "host" if len(node.host_pages) else "ghost"
    return "locked" if num_users else "pinned" if node.locks else "cached"


# ---------------------------------------------------------------------------------------------------- tenants, counters


def _tenants(
    scheduler: Scheduler, waiting: list[TrackedRequest], running: list[TrackedRequest]
) -> list[dict[str, object]]:
    waits, runs = Counter(one.tenant for one in waiting), Counter(one.tenant for one in running)
    service = {name: tenant.service for name, tenant in fair_tenants(scheduler.policy).items()}
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


def _counters(scheduler: Scheduler) -> dict[str, object]:
    counters = scheduler.counters
    found: dict[str, object] = {name: getattr(counters, name) for name in _COUNTERS}
    found["finished"] = {reason.value: count for reason, count in counters.finished.items() if count}
    return found
