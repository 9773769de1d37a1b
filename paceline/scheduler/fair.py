"""Fairness between tenants: equal weighted service, whoever sends more or longer requests."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

from paceline.config import SchedulerConfig
from paceline.request import Request
from paceline.scheduler.aging import aged
from paceline.scheduler.orders import BaseOrder, DepthFirst, Order
from paceline.scheduler.prefix_tree import PrefixTree


class TenantState:
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


class Fair(BaseOrder):
    """Tenants by least service, in turns of a quantum; inside a tenant depth-first with a first-come lane.

    A tenant is served while its service is below the level. When no tenant with waiting requests is, the level
    rises to a quantum above the least served one: that is a deficit round robin in which everybody's deficit is
    `level - service`. Services only grow, so a heap whose entries are corrected when they surface is exact.
    """

    def __init__(self, tree: PrefixTree, config: SchedulerConfig) -> None:
        self._tree = tree
        self._config = config
        self.tenants: dict[str, TenantState] = {}
        self._created = 0
        self._level = 0.0
        self._left_at = 0.0  # service of the last tenant that went idle
        self._turn: TenantState | None = None
        self._backlogged: list[tuple[float, int, TenantState]] = []
        self._active: list[tuple[float, int, TenantState]] = []
        self._skipped: list[TenantState] = []
        self._asked: set[TenantState] = set()

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

    def _new_tenant(self, name: str) -> TenantState:
        if len(self.tenants) > 2048:
            self._forget_idle()
        config = self._config
        inner = DepthFirst(self._tree, lambda: self._tree.root.children.get(name))
        order = aged(inner, self._tree, config)
        tenant = TenantState(self._created, name, config.tenant_weights.get(name, 1.0), order)
        self._created += 1
        self.tenants[name] = tenant
        return tenant

    def _forget_idle(self) -> None:
        """Drops tenants whose record says nothing: idle, and behind where they would start anyway."""
        floor = self._least_active()
        self.tenants = {
            name: tenant for name, tenant in self.tenants.items() if tenant.is_active or tenant.service > floor
        }

    def _maybe_idle(self, tenant: TenantState) -> None:
        if not tenant.is_active:
            self._left_at = max(self._left_at, min(tenant.service, self._least_active(tenant.service)))

    def _least_served(self) -> TenantState | None:
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
