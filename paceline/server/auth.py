"""API keys and the tenants they belong to."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence

from paceline.config import BATCH_SUFFIX, ConfigError, TenantConfig
from paceline.server.errors import ApiError

DEFAULT_TENANT = TenantConfig(name="default")


def batch_tenants(tenants: Sequence[TenantConfig]) -> list[TenantConfig]:
    """One background tenant for the batches of each tenant, with its weight and without its limits."""
    return [
        TenantConfig(name=batch_tenant(tenant.name), weight=tenant.weight, background=True)
        for tenant in (DEFAULT_TENANT, *tenants)
    ]


def batch_tenant(owner: str) -> str:
    """The tenant that the batches of `owner` run as."""
    return f"{owner}{BATCH_SUFFIX}"


def owner_of(tenant: str) -> str:
    return tenant.removesuffix(BATCH_SUFFIX)


class ApiKeys:
    """Finds the tenant of an API key. The time it takes reveals nothing about the keys."""

    def __init__(self, tenants: Iterable[TenantConfig], admin_key: str | None) -> None:
        self._tenants = [(_digest(key), tenant) for tenant in tenants for key in tenant.keys]
        self._admin = None if admin_key is None else _digest(admin_key)
        if any(digest == self._admin for digest, _ in self._tenants):
            raise ConfigError(
                "admin_key is also a key of a tenant: its requests would be the admin's; use another key."
            )

    @property
    def tenants(self) -> list[TenantConfig]:
        """Those with keys; one with several keys is there several times."""
        return [tenant for _, tenant in self._tenants]

    @property
    def is_required(self) -> bool:
        """Whether the configuration names keys. Without any, every request belongs to the default tenant."""
        return bool(self._tenants)

    def tenant(self, headers: Mapping[bytes, bytes]) -> TenantConfig:
        if not self._tenants:
            return DEFAULT_TENANT
        given = _digest(_api_key(headers))
        found = None
        for digest, tenant in self._tenants:  # no early exit: it would reveal the position of a key
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise _invalid_key(
                "Missing or invalid API key: send a valid one as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        return found

    def tenant_named(self, name: str) -> TenantConfig | None:
        if name == DEFAULT_TENANT.name:
            return DEFAULT_TENANT
        return next((tenant for _, tenant in self._tenants if tenant.name == name), None)

    def is_admin(self, headers: Mapping[bytes, bytes]) -> bool:
        return self._admin is not None and hmac.compare_digest(self._admin, _digest(_api_key(headers)))

    def check_admin(self, headers: Mapping[bytes, bytes]) -> None:
        if self._admin is None:
            raise ApiError(
                "This route needs an admin key, and the server has none: start it with `admin_key`.",
                status=403,
                kind="permission_error",
                code="no_admin_key",
            )
        if not self.is_admin(headers):
            raise _invalid_key("Missing or invalid admin key: send it as `Authorization: Bearer KEY`.")


def _invalid_key(message: str) -> ApiError:
    return ApiError(
        message,
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _digest(key: bytes | str) -> bytes:
    return hashlib.sha256(key if isinstance(key, bytes) else key.encode()).digest()


def _api_key(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
