"""Who may ask, and for how much: API keys, the tenants behind them, and what each may have at once."""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.config import TenantConfig
from paceline.request import Refused
from paceline.server.errors import ApiError

ANYBODY = TenantConfig(name="default")


class Keys:
    """Finds the tenant behind an API key, in a time that tells nothing about the keys."""

    def __init__(self, tenants: Iterable[TenantConfig], admin_key: str | None) -> None:
        self._tenants = [(_digest(key), tenant) for tenant in tenants for key in tenant.keys]
        self._admin = None if admin_key is None else _digest(admin_key)

    @property
    def exist(self) -> bool:
        return bool(self._tenants)

    def tenant(self, headers: Mapping[bytes, bytes]) -> TenantConfig:
        """Who is asking. Without any keys in the configuration everybody may, as one tenant."""
        if not self._tenants:
            return ANYBODY
        given = _digest(_bearer(headers))
        found = None
        for digest, tenant in self._tenants:  # all of them, always
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise ApiError("the API key is missing or unknown: send a valid one as Authorization: Bearer KEY.",
                           status=401, kind="authentication_error", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
        return found

    def is_admin(self, headers: Mapping[bytes, bytes]) -> bool:
        return self._admin is not None and hmac.compare_digest(self._admin, _digest(_bearer(headers)))

    def check_admin(self, headers: Mapping[bytes, bytes]) -> None:
        if self._admin is None:
            raise ApiError("this server has no admin_key, so nobody may do this: start it with one.", status=403,
                           kind="permission_error", code="no_admin_key")  # fmt: skip
        if not self.is_admin(headers):
            raise ApiError("the admin key is missing or wrong: send it as Authorization: Bearer KEY.", status=401,
                           kind="authentication_error", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})  # fmt: skip


def _digest(key: bytes | str) -> bytes:
    return hashlib.sha256(key if isinstance(key, bytes) else key.encode()).digest()


def _bearer(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


@dataclass(slots=True)
class _Use:
    num_requests: int = 0
    tokens: float = 0.0  # that may still be used; below zero: used ahead
    since: float = 0.0


class Gate:
    """What each tenant has at once and has had of late, for all front ends together."""

    def __init__(self, tenants: Sequence[TenantConfig]) -> None:
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._uses: dict[str, _Use] = {}
        self._lock = threading.Lock()

    def enter(self, name: str, num_prompt_tokens: int, now: float) -> None:
        """Counts a request in, or raises Refused; whoever is in must leave once."""
        tenant = self._tenants.get(name)
        with self._lock:
            use = self._uses.get(name)
            if use is None:
                most = tenant.tokens_per_minute if tenant is not None else None
                use = self._uses[name] = _Use(tokens=most or 0, since=now)
            if tenant is not None and tenant.max_requests is not None and use.num_requests >= tenant.max_requests:
                raise Refused(
                    f"tenant {name} has {use.num_requests} requests here already (its max_requests): let one end.",
                    retry=True,
                )
            if tenant is not None and tenant.tokens_per_minute is not None:
                rate = tenant.tokens_per_minute / 60
                use.tokens = min(tenant.tokens_per_minute, use.tokens + (now - use.since) * rate)
                use.since = now
                if use.tokens <= 0:
                    raise Refused(
                        f"tenant {name} has had its {tenant.tokens_per_minute} tokens_per_minute: wait a while.",
                        retry=True, retry_after_s=(1 - use.tokens) / rate,
                    )  # fmt: skip
                use.tokens -= num_prompt_tokens
            use.num_requests += 1

    def leave(self, name: str, num_output_tokens: int = 0) -> None:
        with self._lock:
            use = self._uses[name]
            use.num_requests -= 1
            use.tokens -= num_output_tokens
            if not use.num_requests and name not in self._tenants:
                del self._uses[name]
