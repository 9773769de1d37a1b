"""What a row of the route table is, and how the rows become handlers of HTTP calls.

A `Route` returns one response, through Starlette. A `GenerationRoute` is served by the engine and may stream; it is
plain ASGI (`generation.py`), to keep the cost of a token low.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.routing import compile_path

from paceline.request import PacelineError, Refused
from paceline.server.apis.dialects import dialect_of
from paceline.server.errors import ApiError, api_error, method_not_allowed, unknown_route
from paceline.server.http import ClientDisconnected, cancel_on_disconnect, read_body
from paceline.server.limits import BODY_BYTES_PER_TOKEN
from paceline.server.parsing import convert, parse
from paceline.server.response import ResponseBuilder
from paceline.server.state import RequestContext, ServerState

T = TypeVar("T")


class Access(Enum):
    """Who may call a route."""

    PUBLIC = "everyone"
    METRICS = "admin key, with API keys"  # everyone with `public_metrics`, or if the server has no API keys
    TENANT = "API key"  # and admins; everyone if the server has no API keys
    ADMIN = "admin key"


# From the decoded body of a route, whose type is that of the route.
Prepare = Callable[[RequestContext, Any], object]
MakeBuilder = Callable[[RequestContext, Any], ResponseBuilder]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call, as a handler sees it."""

    state: ServerState
    path_params: Mapping[str, str]
    body: Any  # decoded into the route's request type, or what `prepare` made of it; None if the route has none
    query: Any  # the query parameters, decoded into the route's query type; None if it has none
    tenant: str | None  # the tenant whose data is visible; None: all tenants' (admins, or no API keys)
    http: HttpRequest  # for a body that the handler reads itself


@dataclass(frozen=True, slots=True)
class Route:
    """One HTTP method of one path."""

    method: str
    path: str
    access: Access
    handler: Callable[[Call], Awaitable[Response]]
    summary: str
    request: type[msgspec.Struct] | None = None
    responses: tuple[type, ...] = ()  # types of the JSON body; none: the body is text
    error_statuses: tuple[int, ...] = ()  # statuses other than 200 with a body of the same type
    # Runs off the event loop and makes `Call.body` from the decoded body: tokenizing, for example. Long bodies are
    # decoded in another process, so what it returns is picklable and short.
    prepare: Prepare | None = None
    query: type[msgspec.Struct] | None = None  # the query parameters; others are refused then
    form: type[msgspec.Struct] | None = None  # the parts of a multipart body, which the handler reads itself
    binary: bool = False  # the response body is neither JSON nor text


@dataclass(frozen=True, slots=True)
class GenerationRoute:
    """A route whose response the engine generates. The method is POST."""

    path: str
    builder: MakeBuilder  # picklable, and so is its result: see body_workers.py
    summary: str
    request: type[msgspec.Struct]
    responses: tuple[type[msgspec.Struct], ...]
    streams: bool = True
    method: str = "POST"
    access: Access = Access.TENANT


AnyRoute = Route | GenerationRoute


def methods_of(path: str, routes: Iterable[AnyRoute]) -> tuple[str | None, str]:
    """The route that serves `path`, None if none does, and its methods as in the header Allow."""
    found: dict[str, list[str]] = {}
    for route in routes:
        if compile_path(route.path)[0].match(path):
            found.setdefault(route.path, []).append(route.method)
    for route_path, methods in found.items():
        more = ["HEAD"] if "GET" in methods else []
        return route_path, ", ".join([*sorted([*methods, *more]), "OPTIONS"])
    return None, ""


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def make_router(state: ServerState, routes: Iterable[Route]) -> Starlette:
    """An ASGI app for `routes`."""
    by_path: dict[str, dict[str, Route]] = {}
    for route in routes:
        by_path.setdefault(route.path, {})[route.method] = route
    return Starlette(
        routes=[
            StarletteRoute(path, _endpoint(state, methods), methods=list(methods)) for path, methods in by_path.items()
        ],
        exception_handlers={
            HTTPException: _on_http_exception,
            ApiError: _on_error,
            PacelineError: _on_error,
            Exception: _on_error,
        },
    )


def _endpoint(state: ServerState, methods: Mapping[str, Route]) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(request: HttpRequest) -> Response:
        route = methods["GET" if request.method == "HEAD" else request.method]
        tenant = _check_access(state, route.access, dict(request.headers.raw))
        body = None
        if route.request is not None:
            data = await read_body(request.receive, dict(request.headers.raw), state.config)
            arguments = (route.request, route.path, route.prepare)
            if route.prepare is None:  # it works without an engine
                work = state.workers.run(_decode, data, *arguments, None, tenant=tenant)
            else:
                work = _within_limits(
                    state, len(data), tenant, state.run_checked(_decode, data, *arguments, tenant=tenant)
                )
            body = await cancel_on_disconnect(request.receive, work)
        query = None if route.query is None else convert(dict(request.query_params), route.query, strict=False)
        return await route.handler(Call(state, request.path_params, body, query, tenant, request))

    return endpoint


async def _within_limits(
    state: ServerState, num_bytes: int, tenant: str | None, work: Coroutine[object, object, T]
) -> T:
    """Work that tokenizes counts against the limits of its tenant, as a prompt of the same length does."""
    if tenant is None:
        return await work
    try:
        state.limiter.acquire(tenant, num_bytes // BODY_BYTES_PER_TOKEN, time.monotonic())
    except Refused:
        work.close()
        state.counters.refused[tenant] += 1
        raise
    try:
        return await work
    finally:
        state.limiter.release(tenant)


def _decode(
    data: bytes | bytearray,
    kind: type[msgspec.Struct],
    path: str,
    prepare: Prepare | None,
    context: RequestContext | None,
) -> object:
    found = parse(data or b"{}", kind, dialect_of(path).fields)
    return found if prepare is None or context is None else prepare(context, found)


def _check_access(state: ServerState, access: Access, headers: dict[bytes, bytes]) -> str | None:
    """Raises if the call is not allowed. Returns the tenant whose data is visible, None for all."""
    keys = state.api_keys
    needs_admin = access is Access.METRICS and keys.is_required and not state.config.public_metrics
    if access is Access.ADMIN or needs_admin:
        keys.check_admin(headers)
    elif access is Access.TENANT and not keys.is_admin(headers):
        tenant = keys.tenant(headers)
        return tenant.name if tenant.keys else None
    return None


async def _on_error(request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, ClientDisconnected):
        raise error  # the app counts it
    known = api_error(error)
    body = dialect_of(request.url.path, request.headers).render(known)
    return Response(body, known.status, known.headers, media_type="application/json")


async def _on_http_exception(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTPException alone"
    if error.status_code == 405:
        allowed = sorted((error.headers or {}).get("Allow", "GET").split(", "))
        return await _on_error(request, method_not_allowed(request.method, ", ".join([*allowed, "OPTIONS"])))
    if error.status_code == 404:
        return await _on_error(request, unknown_route(request.method, request.url.path))
    return await _on_error(request, ApiError(error.detail, status=error.status_code))
