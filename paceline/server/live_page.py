"""The live page at `/`: its files, and the state of the engine from `engine/monitor.py`. Read-only."""

from __future__ import annotations

import math
import time
from urllib.parse import parse_qs

import msgspec

from paceline.server.errors import ApiError
from paceline.server.http import Scope, Send
from paceline.server.queries import GetMonitor
from paceline.server.state import ServerState
from paceline.web import SECURITY, WebFile, web_file

_MAX_AGE_S = 0.9  # the state is cached this long, so the number of viewers does not load the engine


class LivePage:
    """Serves `/` to browsers, and everything below `/live/`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._cached: dict[int, tuple[float, bytes]] = {}  # by replica: when, and the state

    def matches(self, scope: Scope) -> bool:
        """Whether this is a browser requesting the page, or the page requesting its files or data."""
        if scope["type"] != "http" or scope["method"] != "GET":
            return False
        accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
        return scope["path"].startswith("/live/") or (scope["path"] == "/" and b"text/html" in accept)

    async def serve(self, scope: Scope, send: Send) -> None:
        path = scope["path"]
        if path == "/live/state":
            # The files are public. The data covers the requests of all tenants, so with API keys it is for admins.
            if self._state.api_keys.is_required:
                self._state.api_keys.check_admin(dict(scope["headers"]))
            await _send(send, 200, WebFile(await self._engine_state(scope["query_string"]), "application/json"))
            return
        file = web_file("live.html" if path == "/" else path.removeprefix("/live/"))
        if file is None:
            await _send(send, 404, WebFile(b"Not found.\n", "text/plain; charset=utf-8"))
        else:
            await _send(send, 200, file)

    async def _engine_state(self, query: bytes) -> bytes:
        """Of the replica that the page's address names (`/?replica=1`), else of the first."""
        count = self._state.config.replicas
        given = parse_qs(query.decode("latin-1")).get("replica", ["0"])[-1]
        if not given.isdecimal() or len(given) > 3 or int(given) >= count:
            raise ApiError(f"replica is {given[:20]!r}: give a number from 0 to {count - 1}.", param="replica")
        replica = int(given)
        cached_at, state = self._cached.get(replica, (-math.inf, b""))
        if time.monotonic() - cached_at >= _MAX_AGE_S:
            found = await self._state.client.query(GetMonitor(replica))
            device = self._state.client.model.device
            if count > 1:
                device = f"replica {replica} of {count}, {device}"
            state = msgspec.json.encode({"model": self._state.model_name, "device": device, **found})
            self._cached[replica] = (time.monotonic(), state)
        return state


async def _send(send: Send, status: int, file: WebFile) -> None:
    headers = [
        (b"content-type", file.type.encode()),
        (b"content-length", str(len(file.body)).encode()),
        *SECURITY,
        (b"cache-control", b"no-cache"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": file.body})
