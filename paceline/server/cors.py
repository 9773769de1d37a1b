"""Cross-origin resource sharing (CORS): which web pages may call the server from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.server.http import AsgiEvent, Scope, Send

_EXPOSED = (b"access-control-expose-headers", b"X-Request-Id, Retry-After")
_MAX_AGE = (b"access-control-max-age", b"600")  # seconds that a browser may keep the result of a preflight request
_ANY = "*"


class Cors:
    def __init__(self, origins: Sequence[str]) -> None:
        """`origins` are like `https://chat.example`; `*` allows all."""
        self._origins = frozenset(origin.encode() for origin in origins)
        self._allows_all = _ANY in origins

    def wrap(self, scope: Scope, send: Send) -> Send:
        """A `send` that adds the headers for the origin of this request to the response, errors included."""
        headers = self._headers(dict(scope["headers"]))

        async def send_with_headers(message: AsgiEvent) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        return send_with_headers if headers else send

    def preflight_headers(self, scope: Scope, methods: str) -> list[tuple[bytes, bytes]]:
        """Further headers of the response to a preflight request."""
        given = dict(scope["headers"])
        if not self._is_allowed(given) or b"access-control-request-method" not in given:
            return []
        found = [(b"access-control-allow-methods", methods.encode()), _MAX_AGE]
        if wanted := given.get(b"access-control-request-headers"):
            # Not `*`, which does not cover Authorization. Clients send headers of their own, such as X-Stainless-Lang.
            found.append((b"access-control-allow-headers", wanted))
        return found

    def _is_allowed(self, given: dict[bytes, bytes]) -> bool:
        origin = given.get(b"origin")
        return origin is not None and (self._allows_all or origin in self._origins)

    def _headers(self, given: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        if self._allows_all:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED] if b"origin" in given else []
        # Always: a cache must not serve the response for one origin to another.
        vary = [(b"vary", b"Origin")]
        if not self._is_allowed(given):
            return vary
        return [(b"access-control-allow-origin", given[b"origin"]), _EXPOSED, *vary]
