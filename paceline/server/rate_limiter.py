"""Per-tenant limits: concurrent requests and tokens per minute.

The engine process counts for all front ends. Each front end counts too, before it tokenizes: a prompt that is refused
has been work, and the engine never hears of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import TenantConfig
from paceline.request import Refused


@dataclass(slots=True)
class _TenantUsage:
    num_requests: int = 0
    tokens: float = 0.0  # left in the bucket; negative after a request that took more than was left
    updated: float = 0.0


class RateLimiter:
    """A token bucket and a request count per tenant. Output tokens are charged when a request finishes."""

    def __init__(self, tenants: Sequence[TenantConfig]) -> None:
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._usage: dict[str, _TenantUsage] = {}
        self._lock = threading.Lock()

    def acquire(self, name: str, num_prompt_tokens: int, now: float) -> None:
        """Counts a request, or raises Refused. Every acquired request must be released once."""
        tenant = self._tenants.get(name)
        with self._lock:
            usage = self._usage.get(name)
            if usage is None:
                tokens = tenant.tokens_per_minute if tenant is not None else None
                usage = self._usage[name] = _TenantUsage(tokens=tokens or 0, updated=now)
            if tenant is not None and tenant.max_requests is not None and usage.num_requests >= tenant.max_requests:
                raise Refused(
                    f"Tenant {name} has {usage.num_requests} concurrent requests, its max_requests: "
                    "retry when one has finished.",
                    retry=True,
                )
            if tenant is not None and tenant.tokens_per_minute is not None:
                rate = tenant.tokens_per_minute / 60
                usage.tokens = min(tenant.tokens_per_minute, usage.tokens + (now - usage.updated) * rate)
                usage.updated = now
                if usage.tokens <= 0:
                    raise Refused(
                        f"Tenant {name} has used its {tenant.tokens_per_minute} tokens_per_minute: retry later.",
                        retry=True,
                        retry_after_s=(1 - usage.tokens) / rate,
                    )
                usage.tokens -= num_prompt_tokens
            usage.num_requests += 1

    def charge(self, name: str, num_tokens: float) -> None:
        """Takes tokens, or gives back if negative, that were not known when the request was acquired."""
        with self._lock:
            usage = self._usage.get(name)
            if usage is not None:
                usage.tokens -= num_tokens

    def release(self, name: str, num_output_tokens: int = 0) -> None:
        with self._lock:
            usage = self._usage[name]
            usage.num_requests -= 1
            usage.tokens -= num_output_tokens
            if not usage.num_requests and name not in self._tenants:
                del self._usage[name]
