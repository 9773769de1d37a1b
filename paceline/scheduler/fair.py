"""Fair scheduling between tenants: equal weighted service, however many or long requests a tenant sends."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

from paceline.config import SchedulerConfig
from paceline.scheduler.aging import with_aging
from paceline.scheduler.now import Now
from paceline.scheduler.policies import BasePolicy, DepthFirstPolicy, Policy
from paceline.scheduler.prefix_tree import PrefixTree
from paceline.scheduler.tracked_request import TrackedRequest

_MAX_IDLE = 2048  # tenants that are kept without looking for idle ones


class TenantState:
    """The service a tenant has received: charged tokens divided by its weight. Equal service is fair."""

    __slots__ = ("index", "name", "num_running", "num_waiting", "policy", "service", "weight")

    def __init__(self, index: int, name: str, weight: float, policy: Policy) -> None:
        self.index = index
        self.name = name
        self.weight = weight
        self.policy = policy
        self.service = 0.0
        self.num_waiting = 0
        self.num_running = 0

    @property
    def is_active(self) -> bool:
        return self.num_waiting > 0 or self.num_running > 0


class FairPolicy(BasePolicy):
    """The least served tenant first, in turns of a quantum; within a tenant depth-first with aging.

    A tenant is served while its service is below the level. When no tenant with waiting requests is, the level rises to
    a quantum above the least served one. That is a deficit round robin in which each tenant's deficit is
    `level - service`. Service only grows, so a heap whose entries are corrected when they reach the top is exact.
    """

    def __init__(self, tree: PrefixTree, config: SchedulerConfig) -> None:
        self._tree = tree
        self._config = config
        self.tenants: dict[str, TenantState] = {}
        self._created = 0
        self._most_tenants = _MAX_IDLE
        self._level = 0.0
        self._idle_service = 0.0  # of the last tenant that became idle
        self._active_weight = 0.0
        self._turn: TenantState | None = None
        self._backlogged: list[tuple[float, int, TenantState]] = []
        self._active: list[tuple[float, int, TenantState]] = []
        self._skipped: dict[TenantState, None] = {}  # all of whose requests are skipped or hidden
        self._asked: set[TenantState] = set()

    def add(self, request: TrackedRequest) -> None:
        tenant = self.tenants.get(request.tenant) or self._new_tenant(request.tenant)
        self._activate(tenant)
        if not tenant.num_waiting:
            heappush(self._backlogged, (tenant.service, tenant.index, tenant))
        tenant.num_waiting += 1
        tenant.policy.add(request)

    def remove(self, request: TrackedRequest) -> None:
        tenant = self.tenants[request.tenant]
        tenant.num_waiting -= 1
        tenant.policy.remove(request)
        self._maybe_idle(tenant)

    def next(self, now: Now) -> TrackedRequest | None:
        while True:
            tenant = self._turn
            if tenant is None or not tenant.num_waiting or tenant.service >= self._level:
                tenant = self._turn = self._least_served()
                if tenant is None:
                    return None
                if tenant.service >= self._level:
                    self._level = tenant.service + self._config.fair_quantum
            self._asked.add(tenant)
            request = tenant.policy.next(now)
            if request is not None:
                return request
            # All its requests are skipped or hidden in this step: the look-ahead continues with other tenants.
            self._skipped[tenant] = None
            self._turn = None

    def on_admitted(self, request: TrackedRequest, num_tokens: int, now: Now) -> None:
        tenant = self.tenants.get(request.tenant) or self._new_tenant(request.tenant)
        self._activate(tenant)  # if a retracted request is all that it has
        tenant.num_running += 1
        if request.queued:
            tenant.policy.on_admitted(request, num_tokens, now)

    def on_released(self, request: TrackedRequest) -> None:
        tenant = self.tenants[request.tenant]
        tenant.num_running -= 1
        self._maybe_idle(tenant)

    def on_served(self, request: TrackedRequest, seconds: float) -> None:
        self.tenants[request.tenant].policy.on_served(request, seconds)

    def charge(self, tenant: str, num_tokens: float) -> None:
        state = self.tenants[tenant]
        state.service += num_tokens / state.weight

    def end_step(self) -> None:
        for tenant in self._asked:
            tenant.policy.end_step()
        self._asked.clear()
        for tenant in self._skipped:
            if tenant.num_waiting:
                heappush(self._backlogged, (tenant.service, tenant.index, tenant))
        self._skipped.clear()

    def _new_tenant(self, name: str) -> TenantState:
        if len(self.tenants) > self._most_tenants:
            self._forget_idle()
        config = self._config
        inner = DepthFirstPolicy(self._tree, lambda: self._tree.root.children.get(name))
        weight = config.tenant_weights.get(name, 1.0)
        policy = with_aging(inner, self._tree, config, lambda: weight / max(weight, self._active_weight))
        tenant = TenantState(self._created, name, weight, policy)
        self._created += 1
        self.tenants[name] = tenant
        return tenant

    def _forget_idle(self) -> None:
        """Drops tenants whose state has no effect: idle, and with less service than they would start with anyway."""
        floor = self._least_active()
        self.tenants = {
            name: tenant for name, tenant in self.tenants.items() if tenant.is_active or tenant.service > floor
        }
        # Looking at all of them again is paid for by as many new ones.
        self._most_tenants = max(_MAX_IDLE, 2 * len(self.tenants))

    def _activate(self, tenant: TenantState) -> None:
        if not tenant.is_active:
            # Idle time earns no credit: a returning tenant starts level with the least served active one.
            tenant.service = max(tenant.service, self._least_active())
            heappush(self._active, (tenant.service, tenant.index, tenant))
            self._active_weight += tenant.weight

    def _maybe_idle(self, tenant: TenantState) -> None:
        if not tenant.is_active:
            self._active_weight -= tenant.weight
            self._idle_service = max(self._idle_service, min(tenant.service, self._least_active(tenant.service)))

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
        """The least service of any active tenant; if none is, `otherwise` or that of the last one that became idle."""
        heap = self._active
        while heap:
            service, _, tenant = heap[0]
            if not tenant.is_active or self.tenants.get(tenant.name) is not tenant:
                heappop(heap)
            elif tenant.service > service:
                heapreplace(heap, (tenant.service, tenant.index, tenant))
            else:
                return service
        return self._idle_service if otherwise is None else otherwise
