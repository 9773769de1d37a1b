"""In which order waiting requests are admitted.

An order is asked for one candidate at a time (`next`) and told what became of it, so its cost per step depends on
how many requests are admitted and never on how many wait. Nothing is sorted or matched again while it waits:
orders that look at the cache walk the prefix tree, whose counts and ranks are kept up to date as things change.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import Protocol

from paceline.config import SchedulerConfig
from paceline.request import Request
from paceline.scheduler.prefix_tree import Node, PrefixTree


class Order(Protocol):
    def add(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None:
        """The request was admitted or has ended. Called once `request.queued` is false."""

    def next(self, now: float) -> Request | None:
        """The best candidate that is not set aside in this step."""

    def admitted(self, request: Request, num_tokens: int, now: float) -> None:
        """`request` was admitted and has `num_tokens` to compute."""

    def charge(self, tenant: str, num_tokens: float) -> None:
        """Tokens were computed for a tenant, counted in prompt tokens."""

    def running_ended(self, request: Request) -> None:
        """A running request gave its slot back."""

    def restore(self) -> None:
        """The step is planned: what was set aside counts again."""


class _Order:
    """What most orders need not care about."""

    def remove(self, request: Request) -> None:
        pass

    def admitted(self, request: Request, num_tokens: int, now: float) -> None:
        pass

    def charge(self, tenant: str, num_tokens: float) -> None:
        pass

    def running_ended(self, request: Request) -> None:
        pass

    def restore(self) -> None:
        pass


class Lane:
    """First come, first served, for requests that better-cached ones have overtaken for too long.

    While somebody is overdue the lane earns `share` of the tokens admitted beside it; as soon as that pays for the
    oldest one, it goes next. So a request waits for what was there before it, plus a bounded part of what came
    later: later arrivals alone can never push it back for ever.
    """

    def __init__(self, tree: PrefixTree, max_wait: float, share: float) -> None:
        self._tree = tree
        self._max_wait = max_wait
        self._share = share
        self._queue: deque[Request] = deque()
        self.credit = 0.0

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def next(self, now: float) -> Request | None:
        head = self._overdue(now)
        if head is None or head.set_aside or self._is_hidden(head):
            return None
        return head if self.credit >= self._cost(head) else None

    def admitted(self, request: Request, num_tokens: int, now: float) -> None:
        """Called while `request` still stands in the queue."""
        head = self._overdue(now)
        if head is None:
            self.credit = 0.0  # nobody is overdue: nothing is saved up for a later rush
        elif head is request:
            self.credit = max(0.0, self.credit - num_tokens)
        else:
            self.credit += self._share * num_tokens

    def _overdue(self, now: float) -> Request | None:
        queue = self._queue
        while queue and not queue[0].queued:
            queue.popleft()
        return queue[0] if queue and now - queue[0].arrival >= self._max_wait else None

    def _cost(self, request: Request) -> int:
        assert request.node is not None, f"request {request.id} is queued but not in the tree"
        return request.num_tokens - self._tree.hit(request.node).depth

    def _is_hidden(self, request: Request) -> bool:
        node = request.node
        while node is not None:
            if node.hidden:
                return True
            node = node.parent
        return False


class KeyOrder(_Order):
    """By a key that is fixed on arrival; the oldest first among equals."""

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, Request]] = []
        self._skipped: list[tuple[float, int, Request]] = []

    def add(self, request: Request) -> None:
        heappush(self._heap, (self._key(request), request.number, request))

    def next(self, now: float) -> Request | None:
        heap = self._heap
        while heap:
            request = heap[0][2]
            if not request.queued:
                heappop(heap)
            elif request.set_aside:
                self._skipped.append(heappop(heap))
            else:
                return request
        return None

    def restore(self) -> None:
        for entry in self._skipped:
            heappush(self._heap, entry)
        self._skipped.clear()


class ResponseRatio(_Order):
    """Highest response ratio next: (waited + service) / service.

    Requests of similar service share a class with one service time; inside a class the oldest has the highest
    ratio, so only the heads of some forty classes are compared.
    """

    def __init__(self, service: Callable[[Request], float]) -> None:
        self._service = service
        self._classes: dict[int, KeyOrder] = {}

    def add(self, request: Request) -> None:
        number = round(2 * math.log2(max(1.0, self._service(request))))
        if number not in self._classes:
            self._classes[number] = KeyOrder(lambda request: request.number)
        self._classes[number].add(request)

    def next(self, now: float) -> Request | None:
        best: tuple[float, int] | None = None
        chosen = None
        for number, members in self._classes.items():
            head = members.next(now)
            if head is not None:
                rank = (-(now - head.arrival) / 2 ** (number / 2), head.number)
                if best is None or rank < best:
                    best, chosen = rank, head
        return chosen

    def restore(self) -> None:
        for members in self._classes.values():
            members.restore()


class DepthFirst(_Order):
    """Depth-first over cached and waiting prompts: a cluster that shares a prefix runs together.

    The cursor stays where the last request was admitted. Next is another one at that node, else one below the
    nearest ancestor with waiters, through its best child: a resident one, else the one most wait below.
    """

    def __init__(self, tree: PrefixTree, top: Callable[[], Node | None]) -> None:
        self._tree = tree
        self._top = top
        self._cursor: Node = tree.root

    def add(self, request: Request) -> None:
        pass

    def next(self, now: float) -> Request | None:
        top = self._top()
        if top is None or not top.num_waiting:
            return None
        node = self._visible_cursor(top)
        while not node.num_waiting:
            assert node.parent is not None, "the top has waiters"
            node = node.parent
        while True:
            request = self._tree.first_waiter(node)
            if request is not None:
                return request
            child = self._tree.first_visible_child(node)
            assert child is not None, f"{node.num_waiting} requests wait below a node, and none is found"
            node = child

    def admitted(self, request: Request, num_tokens: int, now: float) -> None:
        # Only an admission moves the cursor. One that was tried and did not fit must not draw it away from the
        # cluster that is being served.
        assert request.node is not None, f"request {request.id} is admitted and does not wait"
        self._cursor = request.node

    def _visible_cursor(self, top: Node) -> Node:
        node = self._cursor
        while not node.is_alive:
            assert node.parent is not None, "the root is alive"
            node = node.parent
        start, below_top = node, False
        current: Node | None = node
        while current is not None:
            if current.hidden:
                assert current.parent is not None, "the root is never hidden"
                start = current.parent
            below_top = below_top or current is top
            current = current.parent
        return start if below_top else top


class LongestPrefix(_Order):
    """Deepest cached prefix first; among equals the cluster most wait for, then the oldest."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._skipped: list[tuple[int, int, Node]] = []

    def add(self, request: Request) -> None:
        pass

    def next(self, now: float) -> Request | None:
        tree = self._tree
        while tree.frontier:
            node = tree.frontier[0][2]
            if node.born == tree.step:
                self._skipped.append(heappop(tree.frontier))
            elif not node.is_alive or not node.resident or node.num_waiting <= node.num_waiting_resident:
                heappop(tree.frontier)
            else:
                break
        else:
            return None
        while True:
            request = tree.first_waiter(node)
            if request is not None:
                return request
            child = tree.first_visible_child(node)
            assert child is not None, f"{node.num_waiting} requests wait below a node, and none is found"
            node = child

    def restore(self) -> None:
        for entry in self._skipped:
            heappush(self._tree.frontier, entry)
        self._skipped.clear()


class Aging(_Order):
    """Another order, with a first-come lane for those it has kept waiting."""

    def __init__(self, inner: Order, lane: Lane) -> None:
        self._inner = inner
        self._lane = lane

    def add(self, request: Request) -> None:
        self._lane.add(request)
        self._inner.add(request)

    def next(self, now: float) -> Request | None:
        return self._lane.next(now) or self._inner.next(now)

    def admitted(self, request: Request, num_tokens: int, now: float) -> None:
        self._lane.admitted(request, num_tokens, now)
        # Depth-first, the whole cluster of an overdue request follows it: honouring age costs one prefix, not one
        # a pick. The resident cluster it left half-served is what it returns to.
        self._inner.admitted(request, num_tokens, now)

    def restore(self) -> None:
        self._inner.restore()


class Tenant:
    """One tenant's share. `service` counts charged tokens divided by the weight: equal service is fair."""

    __slots__ = ("index", "name", "num_running", "num_waiting", "order", "service", "weight")

    def __init__(self, index: int, name: str, weight: float, order: Order) -> None:
        self.index = index
        self.name = name
        self.weight = weight
        self.order = order
        self.service = 0.0
        self.num_waiting = 0
        self.num_running = 0

    @property
    def is_active(self) -> bool:
        return self.num_waiting > 0 or self.num_running > 0


class Fair(_Order):
    """Tenants by least service, in turns of a quantum; inside a tenant depth-first with a first-come lane.

    A tenant is served while its service is below the level. When no tenant with waiting requests is, the level
    rises to a quantum above the least served one: that is a deficit round robin in which everybody's deficit is
    `level - service`. Services only grow, so a heap whose entries are corrected when they surface is exact.
    """

    def __init__(self, tree: PrefixTree, config: SchedulerConfig) -> None:
        self._tree = tree
        self._config = config
        self.tenants: dict[str, Tenant] = {}
        self._created = 0
        self._level = 0.0
        self._left_at = 0.0  # service of the last tenant that went idle
        self._turn: Tenant | None = None
        self._backlogged: list[tuple[float, int, Tenant]] = []
        self._active: list[tuple[float, int, Tenant]] = []
        self._skipped: list[Tenant] = []
        self._asked: set[Tenant] = set()

    def add(self, request: Request) -> None:
        tenant = self.tenants.get(request.tenant) or self._new_tenant(request.tenant)
        if not tenant.is_active:
            # Idleness earns nothing: whoever comes back starts level with the least served active tenant.
            tenant.service = max(tenant.service, self._least_active())
            heappush(self._active, (tenant.service, tenant.index, tenant))
        if not tenant.num_waiting:
            heappush(self._backlogged, (tenant.service, tenant.index, tenant))
        tenant.num_waiting += 1
        tenant.order.add(request)

    def remove(self, request: Request) -> None:
        tenant = self.tenants[request.tenant]
        tenant.num_waiting -= 1
        tenant.order.remove(request)
        self._maybe_idle(tenant)

    def next(self, now: float) -> Request | None:
        while True:
            tenant = self._turn
            if tenant is None or not tenant.num_waiting or tenant.service >= self._level:
                tenant = self._turn = self._least_served()
                if tenant is None:
                    return None
                if tenant.service >= self._level:
                    self._level = tenant.service + self._config.fair_quantum
            self._asked.add(tenant)
            request = tenant.order.next(now)
            if request is not None:
                return request
            # All of it is set aside or hidden in this step: the look-ahead goes on to other tenants.
            self._skipped.append(tenant)
            self._turn = None

    def admitted(self, request: Request, num_tokens: int, now: float) -> None:
        tenant = self.tenants.get(request.tenant) or self._new_tenant(request.tenant)
        if not tenant.is_active:  # a retracted request of a tenant that nothing else is known of
            tenant.service = max(tenant.service, self._least_active())
            heappush(self._active, (tenant.service, tenant.index, tenant))
        tenant.num_running += 1
        if request.queued:
            tenant.order.admitted(request, num_tokens, now)

    def running_ended(self, request: Request) -> None:
        tenant = self.tenants[request.tenant]
        tenant.num_running -= 1
        self._maybe_idle(tenant)

    def charge(self, tenant: str, num_tokens: float) -> None:
        record = self.tenants[tenant]
        record.service += num_tokens / record.weight

    def restore(self) -> None:
        for tenant in self._asked:
            tenant.order.restore()
        self._asked.clear()
        for tenant in self._skipped:
            if tenant.num_waiting:
                heappush(self._backlogged, (tenant.service, tenant.index, tenant))
        self._skipped.clear()

    def _new_tenant(self, name: str) -> Tenant:
        if len(self.tenants) > 2048:
            self._forget_idle()
        config = self._config
        inner = DepthFirst(self._tree, lambda: self._tree.root.children.get(name))
        order = aged(inner, self._tree, config)
        tenant = Tenant(self._created, name, config.tenant_weights.get(name, 1.0), order)
        self._created += 1
        self.tenants[name] = tenant
        return tenant

    def _forget_idle(self) -> None:
        """Drops tenants whose record says nothing: idle, and behind where they would start anyway."""
        floor = self._least_active()
        self.tenants = {
            name: tenant for name, tenant in self.tenants.items() if tenant.is_active or tenant.service > floor
        }

    def _maybe_idle(self, tenant: Tenant) -> None:
        if not tenant.is_active:
            self._left_at = max(self._left_at, min(tenant.service, self._least_active(tenant.service)))

    def _least_served(self) -> Tenant | None:
        skipped = self._skipped
        heap = self._backlogged
        while heap:
            service, _, tenant = heap[0]
            if not tenant.num_waiting or tenant in skipped or self.tenants.get(tenant.name) is not tenant:
                heappop(heap)
            elif tenant.service > service:
                heapreplace(heap, (tenant.service, tenant.index, tenant))
            else:
                return tenant
        return None

    def _least_active(self, otherwise: float | None = None) -> float:
        """The least service of any active tenant, or where the last one left."""
        heap = self._active
        while heap:
            service, _, tenant = heap[0]
            if not tenant.is_active or self.tenants.get(tenant.name) is not tenant:
                heappop(heap)
            elif tenant.service > service:
                heapreplace(heap, (tenant.service, tenant.index, tenant))
            else:
                return service
        return self._left_at if otherwise is None else otherwise


def aged(inner: Order, tree: PrefixTree, config: SchedulerConfig) -> Order:
    """`inner` with its first-come lane. At either end of max_wait there is only one of the two."""
    if config.max_wait == 0:
        return KeyOrder(lambda request: request.number)
    if math.isinf(config.max_wait):
        return inner
    return Aging(inner, Lane(tree, config.max_wait, config.lane_share))


def make_order(tree: PrefixTree, config: SchedulerConfig) -> Order:
    """The order `config.policy` names. Aging applies where requests could otherwise be overtaken for ever; under
    `priority` that is what the caller asked for, and `fcfs` and `hrrn` age by themselves."""
    shuffle = random.Random(config.seed)

    def expected(request: Request) -> float:
        return request.expected_tokens if request.expected_tokens is not None else request.max_tokens

    match config.policy:
        case "fair":
            return Fair(tree, config)
        case "fcfs":
            return KeyOrder(lambda request: request.number)
        case "priority":
            return KeyOrder(lambda request: -request.priority)
        case "hrrn":
            return ResponseRatio(lambda request: len(request.prompt) + config.output_weight * expected(request))
    inner: Order
    match config.policy:
        case "lpm":
            inner = LongestPrefix(tree)
        case "dfs":
            inner = DepthFirst(tree, lambda: tree.root)
        case "sjf":
            inner = KeyOrder(expected)
        case "lof":
            inner = KeyOrder(lambda request: -expected(request))
        case "random":
            inner = KeyOrder(lambda request: shuffle.random())
        case other:
            raise AssertionError(f"policy {other} passed the config and has no order")
    return aged(inner, tree, config)
