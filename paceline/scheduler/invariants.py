"""What must always hold. Slow and plain on purpose: everything is counted again from scratch.

The tests call `check` after every step; a server asks `Scheduler.check_idle` now and then when nothing runs.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from paceline.request import Phase
from paceline.scheduler.eviction import is_evictable_leaf
from paceline.scheduler.node import Node
from paceline.scheduler.prefix_tree import TOKEN_BYTES

if TYPE_CHECKING:
    from paceline.scheduler.scheduler import Scheduler


class BrokenInvariant(AssertionError):
    """The scheduler's books do not add up."""


def find_faults(scheduler: Scheduler) -> list[str]:
    """Everything that is wrong, a sentence each."""
    return [*_pages(scheduler), *_rows(scheduler), *_tree(scheduler), *_host(scheduler), *_queues(scheduler)]


def check(scheduler: Scheduler) -> None:
    """Raises BrokenInvariant, naming everything that is wrong, if anything is."""
    faults = find_faults(scheduler)
    if faults:
        raise BrokenInvariant("; ".join(faults))


def _pages(scheduler: Scheduler) -> list[str]:
    """Every page has exactly one owner: free, the tree, or one row."""
    memory = scheduler.memory
    owners = [memory.pool.free_pages()]
    owners += [node.pages for node in memory.tree.nodes()]
    for request in memory.slots.requests:
        if request is not None and request.slot is not None and request.held is not None:
            owners.append(memory.slots.row(request.slot)[request.held.depth // memory.page_size :])
    counts = np.bincount(np.concatenate(owners), minlength=memory.pool.num_pages)
    faults = []
    if (counts > 1).any():
        faults.append(f"pages with several owners: {np.flatnonzero(counts > 1).tolist()[:8]}")
    if (counts == 0).any():
        faults.append(f"pages with no owner: {np.flatnonzero(counts == 0).tolist()[:8]}")
    return faults


def _rows(scheduler: Scheduler) -> list[str]:
    """A row begins with the tree's pages of what it holds, and reaches as far as it has computed."""
    memory, faults = scheduler.memory, []
    for slot, request in enumerate(memory.slots.requests):
        if request is None:
            continue
        if request.slot != slot or request.held is None:
            faults.append(f"slot {slot} and request {request.id} disagree")
            continue
        held = request.held.depth // memory.page_size
        if not np.array_equal(memory.slots.row(slot)[:held], memory.tree.path_pages(request.held)):
            faults.append(f"the row of request {request.id} does not read the pages it holds")
        if memory.pages_for(int(memory.slots.computed[slot])) > memory.slots.num_pages[slot]:
            faults.append(f"the row of request {request.id} is shorter than what it has computed")
        if _path_key(request.held) != request.key[: request.held.depth * TOKEN_BYTES]:
            faults.append(f"request {request.id} holds the pages of another prompt")
    running = scheduler.admission.running
    if len({id(request) for request in running}) != len(running):
        faults.append("a request runs twice")
    for request in running:
        if request.slot is None or memory.slots.requests[request.slot] is not request:
            faults.append(f"request {request.id} runs without a slot")
    promised = sum(memory.full_pages(request) for request in memory.slots.requests if request is not None)
    if promised != memory.num_promised_pages:
        faults.append(f"{memory.num_promised_pages} pages are counted as promised, {promised} are")
    taken = sum(request is not None for request in memory.slots.requests)
    if taken + memory.slots.num_free != len(memory.slots.requests):
        faults.append(f"{taken} slots taken and {memory.slots.num_free} free do not make {len(memory.slots.requests)}")
    return faults


def _path_key(node: Node | None) -> bytes:
    parts = []
    while node is not None:
        parts.append(node.key)
        node = node.parent
    return b"".join(reversed(parts))


def _tree(scheduler: Scheduler) -> list[str]:
    """Locks, counts and residency, counted again."""
    tree, faults = scheduler.memory.tree, []
    holders = [request.held for request in scheduler.memory.slots.requests if request is not None]
    holders += [pin.node for pin in scheduler.memory.pins.values()]
    locks = _count_up(holders)
    waiting = _count_up([request.node for request in scheduler.requests.values()])
    num_pages = num_locked = 0
    leaves = tree.leaves.nodes()
    for node in tree.nodes():
        where = f"the node ending at token {node.depth}"
        if node.locks != locks[id(node)]:
            faults.append(f"{where} has {node.locks} locks and {locks[id(node)]} holders")
        if node.num_waiting != waiting[id(node)]:
            faults.append(f"{where} counts {node.num_waiting} waiting requests of {waiting[id(node)]}")
        if node.hidden:
            faults.append(f"{where} is still hidden after the step")
        num_pages += len(node.pages)
        num_locked += len(node.pages) if node.locks else 0
        resident = [child for child in node.children.values() if child.resident]
        if len(resident) != node.num_resident_children:
            faults.append(f"{where} counts {node.num_resident_children} resident children of {len(resident)}")
        if node.num_waiting_resident != sum(child.num_waiting for child in resident):
            faults.append(f"{where} miscounts who waits below resident children")
        for name, child in node.children.items():
            if child.parent is not node or child.name != name:
                faults.append(f"{where} and a child disagree")
            if child.resident and not node.resident:
                faults.append(f"{where} is a ghost with a resident child")
            if child.depth != node.depth + len(child.key) // TOKEN_BYTES:
                faults.append(f"{where} has a child of the wrong depth")
        if len(node.pages) != (len(node.key) // tree.page_bytes if node.resident else 0):
            faults.append(f"{where} has {len(node.pages)} pages for {len(node.key) // tree.page_bytes}")
        if is_evictable_leaf(node) and id(node) not in leaves:
            faults.append(f"{where} could be evicted and would never be found")
        if not node.resident and not node.num_waiting and not len(node.hosts) and not node.children:
            faults.append(f"{where} is a ghost that nobody waits for")
    if (num_pages, num_locked) != (tree.num_pages, tree.num_locked_pages):
        faults.append(
            f"the tree counts {tree.num_pages} pages, {tree.num_locked_pages} locked: it has {num_pages}, {num_locked}"
        )
    return faults


def _host(scheduler: Scheduler) -> list[str]:
    """Every host page is free or one node's, and every such node can be found to be forgotten."""
    host, tree, faults = scheduler.memory.host, scheduler.memory.tree, []
    owners = [node for node in tree.nodes() if len(node.hosts)]
    if host is None:
        return ["there are host pages and no host memory"] if owners else []
    pages = np.concatenate([host.pool.free_pages(), *(node.hosts for node in owners)])
    counts = np.bincount(pages, minlength=host.pool.num_pages)
    if (counts != 1).any():
        faults.append(f"host pages with no owner or several: {np.flatnonzero(counts != 1).tolist()[:8]}")
    found = host.nodes()
    for node in owners:
        where = f"the node ending at token {node.depth}"
        if len(node.hosts) != len(node.key) // tree.page_bytes:
            faults.append(f"{where} has {len(node.hosts)} host pages for {len(node.key) // tree.page_bytes}")
        if id(node) not in found:
            faults.append(f"{where} has host pages that would never be forgotten")
    return faults


def _count_up(nodes: list[Node | None]) -> Counter[int]:
    """How many of `nodes` are at or below each node."""
    counts: Counter[int] = Counter()
    for node in nodes:
        while node is not None:
            counts[id(node)] += 1
            node = node.parent
    return counts


def _queues(scheduler: Scheduler) -> list[str]:
    """Waiting requests stand in the tree and in exactly one queue; nobody else does."""
    admission, faults = scheduler.admission, []
    waiting = [request for request in scheduler.requests.values() if request.phase is Phase.WAITING]
    for request in scheduler.requests.values():
        in_tree = request.node is not None and request.node.is_alive
        if in_tree != (request.phase is Phase.WAITING):
            faults.append(f"request {request.id} is {request.phase.value} and its place in the tree does not fit that")
        if (request.phase is Phase.WAITING) != (request.queued or request in admission.returning):
            faults.append(f"request {request.id} is {request.phase.value} and its place in the queue does not fit that")
        if request.set_aside:
            faults.append(f"request {request.id} is still set aside after the step")
        if request.retractions > 2:
            faults.append(f"request {request.id} was retracted {request.retractions} times")
    if len(waiting) != admission.num_waiting:
        faults.append(f"{admission.num_waiting} requests are counted as waiting, {len(waiting)} are")
    if sum(request.num_tokens for request in waiting) != admission.num_waiting_tokens:
        faults.append("the waiting prompt tokens are miscounted")
    if admission.reserved is not None and admission.reserved not in waiting:
        faults.append("memory is kept for a request that does not wait")
    return faults
