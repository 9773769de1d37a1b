"""The HTTP app: dispatches each call to its row of the route table (`routes.py`), or to the live page."""

from __future__ import annotations

from paceline.request import PacelineError
from paceline.server.cors import Cors
from paceline.server.errors import ApiError, api_error, unknown_route
from paceline.server.generation import GenerationHandler
from paceline.server.http import (
    AsgiEvent,
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    drain_before_close,
    send_error,
)
from paceline.server.live_page import LivePage
from paceline.server.page_guard import PageGuard
from paceline.server.routes import ROUTES
from paceline.server.routing import GenerationRoute, Route, make_router, methods_of
from paceline.server.state import ServerState


class App:
    """An ASGI app that serves one model."""

    def __init__(self, state: ServerState, *, is_local: bool = False) -> None:
        """`is_local`: only programs of this machine reach it."""
        self.state = state
        # By path alone, before any other dispatch: these routes carry the load.
        self._generating = {
            route.path: GenerationHandler(state, route) for route in ROUTES if isinstance(route, GenerationRoute)
        }
        self._router = make_router(state, [route for route in ROUTES if isinstance(route, Route)])
        self._live_page = LivePage(state) if state.config.live_page else None
        self._cors = Cors(state.config.allowed_origins) if state.config.allowed_origins else None
        names, is_open = state.config.allowed_host_names, is_local and not state.api_keys.is_required
        self._guard = PageGuard(state.config, ROUTES) if (names or is_open) and "*" not in names else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        receive, send = drain_before_close(receive, send)
        if self._cors is not None:
            send = self._cors.wrap(scope, send)
        if self._guard is not None:
            try:
                self._guard.check(scope)
            except ApiError as error:
                self.state.counters.responses["none", error.status] += 1
                await send_error(send, scope, error)
                return
        generating = self._generating.get(scope["path"])
        if scope["method"] == "OPTIONS":
            await self._send_options(scope, send)
            return
        if generating is not None:
            await generating(scope, receive, send)
            return

        async def count(message: AsgiEvent) -> None:
            if message["type"] == "http.response.start":
                # Labelled by the route's pattern: the number of patterns is bounded, that of paths is not.
                route = scope.get("route")
                self.state.counters.responses[route.path if route else "none", message["status"]] += 1
            await send(message)

        try:
            if self._live_page is not None and self._live_page.matches(scope):
                await self._serve_live_page(self._live_page, scope, count)
            else:
                await self._router(scope, receive, count)
        except ClientDisconnected:
            self.state.counters.disconnects += 1

    async def _send_options(self, scope: Scope, send: Send) -> None:
        """The methods of a path. Needs no key: browsers send none with a preflight request."""
        route, methods = methods_of(scope["path"], ROUTES)
        self.state.counters.responses[route or "none", 404 if route is None else 204] += 1
        if route is None:
            await send_error(send, scope, unknown_route(scope["method"], scope["path"]))
            return
        headers = [(b"allow", methods.encode())]
        if self._cors is not None:
            headers += self._cors.preflight_headers(scope, methods)
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def _serve_live_page(self, page: LivePage, scope: Scope, send: Send) -> None:
        try:
            await page.serve(scope, send)
        except PacelineError as error:
            await send_error(send, scope, api_error(error))
