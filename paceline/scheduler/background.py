"""Background tenants: their requests are admitted only while no request of another tenant waits, under any policy.

A foreground request that cannot be admitted in this step, hidden or short of memory, still waits. Background requests
have no bound on their waiting time, so they do not age. Among themselves they follow the same policy as the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.scheduler.fair import FairPolicy, TenantState
from paceline.scheduler.now import Now
from paceline.scheduler.policies import Policy
from paceline.scheduler.prefix_tree import PrefixTree
from paceline.scheduler.tracked_request import TrackedRequest


class BackgroundPolicy:
    """Two instances of a policy: one for foreground tenants, one for background tenants."""

    def __init__(
        self, tree: PrefixTree, foreground: Policy, background: Policy, names: Iterable[str], *, walks_tree: bool
    ) -> None:
        """`walks_tree`: the policy finds requests in the whole tree, not in a queue or below a tenant of its own."""
        self._tree = tree
        self._walks_tree = walks_tree
        self.foreground = foreground
        self.background = background
        self._names = frozenset(names)
        self._is_hidden = False  # what waits for the background tenants, for the rest of this step

    def add(self, request: TrackedRequest) -> None:
        self._of(request).add(request)

    def remove(self, request: TrackedRequest) -> None:
        self._of(request).remove(request)

    def next(self, now: Now) -> TrackedRequest | None:
        if not self._tree.num_foreground:
            return None if self._is_hidden else self.background.next(now)
        if self._walks_tree and not self._is_hidden:
            self._is_hidden = True
            for name in self._names:
                if (top := self._tree.root.children.get(name)) is not None:
                    self._tree.hide(top)
        return self.foreground.next(now)

    def on_admitted(self, request: TrackedRequest, num_tokens: int, now: Now) -> None:
        self._of(request).on_admitted(request, num_tokens, now)

    def charge(self, tenant: str, num_tokens: float) -> None:
        (self.background if tenant in self._names else self.foreground).charge(tenant, num_tokens)

    def on_released(self, request: TrackedRequest) -> None:
        self._of(request).on_released(request)

    def on_served(self, request: TrackedRequest, seconds: float) -> None:
        self._of(request).on_served(request, seconds)

    def end_step(self) -> None:
        self._is_hidden = False
        self.foreground.end_step()
        self.background.end_step()

    def _of(self, request: TrackedRequest) -> Policy:
        return self.background if request.background else self.foreground


def fair_tenants(policy: Policy) -> Mapping[str, TenantState]:
    """The tenants with their service, by name; empty unless the policy is fair."""
    if isinstance(policy, BackgroundPolicy):
        return {**fair_tenants(policy.foreground), **fair_tenants(policy.background)}
    return policy.tenants if isinstance(policy, FairPolicy) else {}
