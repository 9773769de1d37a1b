"""The invariants of the scheduler state. Slow and simple on purpose: everything is counted again from scratch.

The tests call `check` after every step; a server calls `Scheduler.check_idle` now and then when it is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from paceline.scheduler.admission import Admission
from paceline.scheduler.eviction import is_evictable_leaf
from paceline.scheduler.memory import Memory
from paceline.scheduler.node import Node
from paceline.scheduler.prefix_tree import TOKEN_BYTES
from paceline.scheduler.retraction import MAX_RECOMPUTATIONS, MAX_RETRACTIONS, is_protected
from paceline.scheduler.running_set import RunningSet
from paceline.scheduler.tracked_request import Phase, TrackedRequest


class SchedulerState(Protocol):
    """What the checks read of a `Scheduler`, which imports this module."""

    @property
    def requests(self) -> Mapping[str, TrackedRequest]: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def running(self) -> RunningSet: ...

    @property
    def admission(self) -> Admission: ...

    @property
    def sampled_in_flight(self) -> list[tuple[TrackedRequest, ...]]: ...


class BrokenInvariant(AssertionError):
    """The scheduler state is inconsistent."""


def find_faults(state: SchedulerState) -> list[str]:
    """Every violated invariant, one sentence each."""
    checks = (_pages, _rows, _running, _adapters, _tree, _host, _queues)
    return [fault for check_part in checks for fault in check_part(state)]


def check(state: SchedulerState) -> None:
    """Raises BrokenInvariant with every violated invariant, if there is any."""
    faults = find_faults(state)
    if faults:
        raise BrokenInvariant("; ".join(faults))


def _pages(state: SchedulerState) -> list[str]:
    """Every page has exactly one owner: the pool, the tree, or one row."""
    memory = state.memory
    owners = [memory.pool.free_pages()]
    owners += [node.pages for node in memory.tree.nodes()]
    for request, node in memory.locked_nodes.items():
        if request.slot is not None:
            owners.append(memory.slots.row(request.slot)[node.depth // memory.page_size :])
    counts = np.bincount(np.concatenate(owners), minlength=memory.pool.num_pages)
    faults = []
    if (counts > 1).any():
        faults.append(f"pages with several owners: {np.flatnonzero(counts > 1).tolist()[:8]}")
    if (counts == 0).any():
        faults.append(f"pages with no owner: {np.flatnonzero(counts == 0).tolist()[:8]}")
    return faults


def _rows(state: SchedulerState) -> list[str]:
    """A row begins with the tree pages of its locked prefix, and is as long as what it has computed."""
    memory, faults = state.memory, []
    for slot, request in enumerate(memory.slots.requests):
        if request is None:
            continue
        node = memory.locked_nodes.get(request)
        if request.slot != slot or node is None:
            faults.append(f"slot {slot} and request {request.id} disagree")
            continue
        num_prefix_pages = node.depth // memory.page_size
        if not np.array_equal(memory.slots.row(slot)[:num_prefix_pages], memory.tree.path_pages(node)):
            faults.append(f"the row of request {request.id} does not read the pages of its locked prefix")
        ahead = min(memory.slots.computed[slot] + memory.slots.ahead[slot], memory.slots.max_lengths[slot] - 1)
        if memory.pages_for(int(max(memory.slots.computed[slot], ahead))) > memory.slots.num_pages[slot]:
            faults.append(f"the row of request {request.id} is shorter than what it has computed")
        if _path_key(node) != request.key[: node.depth * TOKEN_BYTES]:
            faults.append(f"request {request.id} has locked the prefix of another prompt")
    promised = sum(memory.full_pages(request) for request in memory.slots.requests if request is not None)
    if promised != memory.num_promised_pages:
        faults.append(f"{memory.num_promised_pages} pages are counted as promised, {promised} are")
    taken = sum(request is not None for request in memory.slots.requests)
    if taken + memory.slots.num_free != len(memory.slots.requests):
        faults.append(f"{taken} slots taken and {memory.slots.num_free} free do not make {len(memory.slots.requests)}")
    if len(memory.locked_nodes) != taken:
        faults.append(f"{len(memory.locked_nodes)} requests have locked a prefix, {taken} have a slot")
    return faults


def _running(state: SchedulerState) -> list[str]:
    """Every running request is in the running set once and has a slot; what the set caches is up to date."""
    slots, running, faults = state.memory.slots, state.running, []
    if len({id(request) for request in running.requests}) != len(running):
        faults.append("a request runs twice")
    for request in running.requests:
        if request.slot is None or slots.requests[request.slot] is not request:
            faults.append(f"request {request.id} runs without a slot")
            continue
        if slots.exclusive_pages[request.slot] != request.exclusive_pages:
            faults.append(f"the column has another number of exclusive pages than request {request.id}")
        if slots.is_protected[request.slot] != is_protected(request):
            faults.append(f"the column says otherwise than request {request.id} whether it is protected")
        if slots.is_prefill[request.slot] == running.is_decoding(request):
            faults.append(f"request {request.id} prefills and decodes, or neither")
    if running.decode_slots.tolist() != [request.slot for request in running.decoding]:
        faults.append("the cached slots of decoding requests are out of date")
    if running.decodes_by_tenant != Counter(request.tenant for request in running.decoding):
        faults.append("the decoding requests of a tenant are miscounted")
    in_flight = Counter(request.id for sampled in state.sampled_in_flight for request in sampled)
    faults += [f"request {one} samples in {count} passes in flight" for one, count in in_flight.items() if count > 2]
    return faults


def _adapters(state: SchedulerState) -> list[str]:
    """Every adapter of a running request has a slot, and is counted for each of them."""
    adapters, faults = state.memory.adapters, state.memory.adapters.faults()
    users = Counter(request.adapter for request in state.memory.slots.requests if request is not None)
    del users[""]
    if users != adapters.num_users:
        faults.append(
            f"adapters are counted as in use by {dict(adapters.num_users)} requests, they are by {dict(users)}"
        )
    return faults


def _path_key(node: Node | None) -> bytes:
    parts = []
    while node is not None:
        parts.append(node.key)
        node = node.parent
    return b"".join(reversed(parts))


def _tree(state: SchedulerState) -> list[str]:
    """Locks, waiting requests and residency, counted again."""
    tree, faults = state.memory.tree, []
    memory = state.memory
    locks = _count_up(
        [*memory.locked_nodes.values(), *(pin.node for pin in memory.pins.values()), *memory.holds.values()]
    )
    waiting = _count_up(tree.waiting_nodes.values())
    num_pages = num_locked = 0
    leaves = tree.leaves.node_ids()
    for node in tree.nodes():
        if node.locks != locks[id(node)]:
            faults.append(f"{_where(node)} has {node.locks} locks and {locks[id(node)]} holders")
        if node.num_waiting != waiting[id(node)]:
            faults.append(f"{_where(node)} counts {node.num_waiting} waiting requests, there are {waiting[id(node)]}")
        if node.hidden:
            faults.append(f"{_where(node)} is still hidden after the step")
        num_pages += len(node.pages)
        num_locked += len(node.pages) if node.locks else 0
        resident = [child for child in node.children.values() if child.resident]
        if len(resident) != node.num_resident_children:
            faults.append(
                f"{_where(node)} counts {node.num_resident_children} resident children, there are {len(resident)}"
            )
        if node.num_waiting_resident != sum(child.num_waiting for child in resident):
            faults.append(f"{_where(node)} miscounts the requests that wait below resident children")
        for name, child in node.children.items():
            if child.parent is not node or child.name != name:
                faults.append(f"{_where(node)} and a child disagree")
            if child.resident and not node.resident:
                faults.append(f"{_where(node)} is a ghost with a resident child")
            if child.depth != node.depth + len(child.key) // TOKEN_BYTES:
                faults.append(f"{_where(node)} has a child of the wrong depth")
        if len(node.pages) != (len(node.key) // tree.page_bytes if node.resident else 0):
            faults.append(f"{_where(node)} has {len(node.pages)} pages for {len(node.key) // tree.page_bytes}")
        if is_evictable_leaf(node) and id(node) not in leaves:
            faults.append(f"{_where(node)} is evictable and not in the eviction heap")
        if not node.resident and not node.num_waiting and not len(node.host_pages) and not node.children:
            faults.append(f"{_where(node)} is a ghost that no request waits for")
    if (num_pages, num_locked) != (tree.num_pages, tree.num_locked_pages):
        faults.append(
            f"the tree counts {tree.num_pages} pages, {tree.num_locked_pages} of them locked; there are {num_pages}, "
            f"{num_locked} of them locked"
        )
    return faults


def _host(state: SchedulerState) -> list[str]:
    """Every host page is free, reserved or belongs to one node, and every such node can be forgotten."""
    host, tree, faults = state.memory.host, state.memory.tree, []
    owners = [node for node in tree.nodes() if len(node.host_pages)]
    if host is None:
        return ["nodes have host pages and there is no host memory"] if owners else []
    reserved = [one.pages for one in host.reserved.values()]
    pages = np.concatenate([host.pool.free_pages(), *reserved, *(node.host_pages for node in owners)])
    counts = np.bincount(pages, minlength=host.pool.num_pages)
    if (counts != 1).any():
        faults.append(f"host pages with no owner or several: {np.flatnonzero(counts != 1).tolist()[:8]}")
    tracked = host.node_ids()
    for node in owners:
        if len(node.host_pages) != len(node.key) // tree.page_bytes:
            faults.append(
                f"{_where(node)} has {len(node.host_pages)} host pages for {len(node.key) // tree.page_bytes}"
            )
        if id(node) not in tracked:
            faults.append(f"{_where(node)} has host pages and is not in the heap of the host tier")
    return faults


def _where(node: Node) -> str:
    return f"the node ending at token {node.depth}"


def _count_up(nodes: Iterable[Node]) -> Counter[int]:
    """Number of `nodes` at or below each node, by id()."""
    counts: Counter[int] = Counter()
    for node in nodes:
        current: Node | None = node
        while current is not None:
            counts[id(current)] += 1
            current = current.parent
    return counts


def _queues(state: SchedulerState) -> list[str]:
    """Waiting requests are in the tree and in exactly one queue; no other request is."""
    admission, waiting_nodes, faults = state.admission, state.memory.tree.waiting_nodes, []
    waiting = [request for request in state.requests.values() if request.phase is Phase.WAITING]
    for request in state.requests.values():
        in_tree = request in waiting_nodes and waiting_nodes[request].is_alive
        if in_tree != (request.phase is Phase.WAITING):
            faults.append(f"request {request.id} is {request.phase.value}, and in_tree is {in_tree}")
        in_queue = request.queued or request in admission.retracted
        if in_queue != (request.phase is Phase.WAITING):
            faults.append(f"request {request.id} is {request.phase.value}, and in_queue is {in_queue}")
        if request.skipped:
            faults.append(f"request {request.id} is still skipped after the step")
        if not request.num_fetched <= request.num_cached <= len(request.prompt):
            faults.append(f"request {request.id} counts {request.num_cached} of {len(request.prompt)} as cached")
        if request.retractions > MAX_RETRACTIONS:
            faults.append(f"request {request.id} was retracted {request.retractions} times")
        if request.recomputations > MAX_RECOMPUTATIONS:
            faults.append(f"request {request.id} was computed again {request.recomputations} times")
    if len(waiting) != admission.num_waiting:
        faults.append(f"{admission.num_waiting} requests are counted as waiting, {len(waiting)} are")
    if len(waiting_nodes) != len(waiting):
        faults.append(f"{len(waiting_nodes)} requests wait in the tree, {len(waiting)} are waiting")
    if sum(request.num_tokens for request in waiting) != admission.num_waiting_tokens:
        faults.append("the waiting prompt tokens are miscounted")
    if admission.reserved is not None and admission.reserved not in waiting:
        faults.append("memory is reserved for a request that does not wait")
    return faults
