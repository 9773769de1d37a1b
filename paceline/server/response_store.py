"""Stored responses of `/v1/responses`, for `previous_response_id` and `GET`.

The store is in the engine process, so that all front ends see the same. It is bounded for each tenant, so that one
cannot displace what another has stored.
"""

from __future__ import annotations

from collections import OrderedDict


class ResponseStore:
    """Used by one thread."""

    def __init__(self) -> None:
        self._tenants: dict[str, OrderedDict[str, bytes]] = {}  # the least recently used first

    def put(self, tenant: str, response_id: str, data: bytes, *, max_responses: int, max_bytes: int) -> None:
        """Stores a response, unless it is too large, and drops the least recently used ones beyond the bounds."""
        if len(data) > max_bytes:
            return
        stored = self._tenants.setdefault(tenant, OrderedDict())
        stored[response_id] = data
        size = sum(map(len, stored.values()))
        while len(stored) > max_responses or size > max_bytes:
            size -= len(stored.popitem(last=False)[1])

    def get(self, response_id: str, tenant: str | None) -> bytes | None:
        """A response of `tenant`, or of any tenant if None."""
        for stored in self._of(tenant):
            if response_id in stored:
                stored.move_to_end(response_id)
                return stored[response_id]
        return None

    def delete(self, response_id: str, tenant: str | None) -> bool:
        return any(stored.pop(response_id, None) is not None for stored in self._of(tenant))

    def _of(self, tenant: str | None) -> list[OrderedDict[str, bytes]]:
        return [stored for name, stored in self._tenants.items() if tenant in (None, name)]
