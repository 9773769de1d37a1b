"""The routes that do not generate: what is served, how it is, what it is doing, what an operator may do about it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline import __version__
from paceline.config import ServerConfig
from paceline.engine.output import EngineFailed
from paceline.request import InvalidRequest, PacelineError
from paceline.server.engine_client import (
    AbortRequests,
    EngineClient,
    FlushCache,
    GetHealth,
    GetLive,
    GetMetrics,
    GetPins,
    GetRequests,
    GetStats,
    Health,
    PinPrefix,
    RequestState,
    UnpinPrefix,
)
from paceline.server.errors import ApiError, answer_to, unknown_model, wrong_method
from paceline.server.fields import check_message_fields
from paceline.server.http import ClientGone, Receive, Scope, Send, read_body, send_error
from paceline.server.limits import Keys
from paceline.server.live_page import LivePage
from paceline.server.metrics import ServerCounters, render
from paceline.server.openapi import document
from paceline.server.types import CacheAction, DetokenizeRequest, ModelCard, ModelList, TokenizeRequest, read_struct
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.server.app import App

_STATS_S = 1.0  # how long /health waits for numbers; that there are none is no reason to fail


class Handlers:
    def __init__(
        self,
        app: App,
        client: EngineClient,
        tokenizer: Tokenizer,
        config: ServerConfig,
        name: str,
        keys: Keys,
        tally: ServerCounters,
        worker: str,
        tell: Callable[..., None] | None,
    ) -> None:
        self._app, self._client, self._tokenizer, self._config = app, client, tokenizer, config
        self._name, self._keys, self._tally, self._worker, self._tell = name, keys, tally, worker, tell
        self._created = int(time.time())
        self._page = LivePage(self._live, name) if config.live_page else None
        self._starlette = Starlette(
            routes=[
                Route("/", self._root),
                Route("/openapi.json", self._openapi),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._for_tenants(self._models)),
                Route("/v1/models/{name:path}", self._for_tenants(self._one_model)),
                Route("/tokenize", self._for_tenants(self._tokenize), methods=["POST"]),
                Route("/detokenize", self._for_tenants(self._detokenize), methods=["POST"]),
                Route("/v1/requests", self._for_tenants(self._requests)),
                Route("/v1/requests/{id}", self._for_tenants(self._one_request), methods=["GET", "DELETE"]),
                Route("/admin/cache", self._for_admins(self._cache), methods=["GET", "POST"]),
                Route("/admin/drain", self._for_admins(self._drain), methods=["GET", "POST", "DELETE"]),
            ],
            exception_handlers={HTTPException: _http_error, ApiError: _error, PacelineError: _error, Exception: _error},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Any) -> None:
            if message["type"] == "http.response.start":
                # By the route's pattern: there are few of those, and clients can make up any number of paths.
                route = scope.get("route")
                self._tally.responses[route.path if route else "none", message["status"]] += 1
            await send(message)

        try:
            if self._page is not None and self._page.takes(scope):
                await self._show(scope, receive, count)
            else:
                await self._starlette(scope, receive, count)
        except ClientGone:
            self._tally.disconnects += 1

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The live page. Its files are anybody's; what it shows is everybody's requests, so where there are keys it is
        for the admin."""
        assert self._page is not None, "there is a page to show"
        try:
            if scope["path"] == "/live/state" and self._keys.exist:
                self._keys.check_admin(dict(scope["headers"]))
            await self._page(scope, receive, send)
        except (ApiError, PacelineError) as error:
            await send_error(send, answer_to(error))

    async def _live(self) -> dict[str, Any]:
        found = await self._client.ask(GetLive())
        return {"device": self._client.served.device, **found}

    def _for_tenants(self, answer: Callable[[Request, str | None], Awaitable[Response]]) -> Any:
        """Says whose requests it may be about: a tenant's own; everybody's for an admin, or where there are no keys."""

        async def checked(request: Request) -> Response:
            headers = dict(request.headers.raw)
            if self._keys.is_admin(headers):
                return await answer(request, None)
            tenant = self._keys.tenant(headers)
            return await answer(request, tenant.name if tenant.keys else None)

        return checked

    def _for_admins(self, answer: Callable[[Request], Awaitable[Response]]) -> Any:
        async def checked(request: Request) -> Response:
            self._keys.check_admin(dict(request.headers.raw))
            return await answer(request)

        return checked

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        body = await read_body(request.receive, self._config.max_body_bytes, self._config.body_s)
        return read_struct(body, kind)

    # ------------------------------------------------------------------ what is served

    async def _root(self, _: Request) -> Response:
        plain = [route.path for route in self._starlette.routes if isinstance(route, Route)]
        routes = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", *plain]
        return _json({"paceline": __version__, "model": self._name, "routes": routes})

    async def _openapi(self, _: Request) -> Response:
        return _json(document(self._name, self._keys.exist))

    async def _models(self, _: Request, __: str | None) -> Response:
        return _json(ModelList([self._model()]))

    async def _one_model(self, request: Request, _: str | None) -> Response:
        name = request.path_params["name"]
        if name != self._name:
            raise unknown_model(name, self._name)
        return _json(self._model())

    def _model(self) -> ModelCard:
        return ModelCard(self._name, self._created, self._client.served.max_tokens)

    async def _tokenize(self, request: Request, _: str | None) -> Response:
        asked: TokenizeRequest = await self._body(request, TokenizeRequest)
        if asked.model not in (None, self._name):
            raise unknown_model(asked.model or "", self._name)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError("prompt and messages are both given, or neither: give one of them.", param="prompt")

        def encode() -> list[int]:
            if asked.messages is not None:
                return self._tokenizer.encode_chat(check_message_fields(asked.messages))
            return self._tokenizer.encode(asked.prompt or "", add_special=asked.add_special_tokens)

        tokens = await asyncio.to_thread(encode)
        found = {"count": len(tokens), "max_model_len": self._client.served.max_tokens, "tokens": tokens}
        return _json(found)

    async def _detokenize(self, request: Request, _: str | None) -> Response:
        asked: DetokenizeRequest = await self._body(request, DetokenizeRequest)
        if asked.model not in (None, self._name):
            raise unknown_model(asked.model or "", self._name)
        wrong = next((token for token in asked.tokens if not 0 <= token < self._tokenizer.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"tokens has {wrong}: give ids from 0 to {self._tokenizer.vocab_size - 1}.")
        text = await asyncio.to_thread(self._tokenizer.decode, asked.tokens, skip_special=False)
        return _json({"prompt": text})

    # ------------------------------------------------------------------ how it is

    async def _health(self, _: Request) -> Response:
        """Alive: a process that loads or drains is, one that makes no progress is not."""
        report: dict[str, Any] = {"status": "ok", "model": self._name, "failure": None}
        try:
            assert self._client.served
        except EngineFailed as error:
            loading = self._client.loading
            report |= {"status": "loading" if loading else "no engine", "failure": str(error)}
            return _json(report, 200 if loading else 503)
        try:
            health: Health = await self._client.ask(GetHealth())
        except EngineFailed as error:
            health = Health(str(error))
        report["num_passes"] = health.num_passes
        if health.failure is not None:
            return _json({**report, "status": "failed", "failure": health.failure}, 503)
        try:
            stats = await asyncio.wait_for(self._client.ask(GetStats()), _STATS_S)
        except (EngineFailed, TimeoutError):
            return _json(report)
        return _json({**report, **msgspec.to_builtins(stats)})

    async def _ready(self, _: Request) -> Response:
        """Whether a request sent now would be answered: the engine has made a token, goes on, and nobody drains."""
        why = None
        try:
            assert self._client.served
            health: Health = await self._client.ask(GetHealth())
            why = health.failure
        except EngineFailed as error:
            why = str(error)
        if why is None and self._app.draining:
            why = "the server is draining: send requests to another one."
        return _json({"ready": why is None, "why": why}, 200 if why is None else 503)

    async def _metrics(self, _: Request) -> Response:
        try:
            families, up = await self._client.ask(GetMetrics()), True
        except EngineFailed:
            families, up = [], False
        text = render([*families, *self._tally.families(self._worker)], engine_up=up)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # ------------------------------------------------------------------ what it is doing

    async def _requests(self, _: Request, tenant: str | None) -> Response:
        found: list[RequestState] = await self._client.ask(GetRequests(tenant=tenant))
        return _json({"object": "list", "data": found})

    async def _one_request(self, request: Request, tenant: str | None) -> Response:
        request_id = request.path_params["id"]
        if request.method == "DELETE":
            count = await self._client.ask(AbortRequests(id=request_id, tenant=tenant))
            if count:
                return _json({"id": request_id, "object": "request.deleted", "deleted": True})
        else:
            found: list[RequestState] = await self._client.ask(GetRequests(tenant=tenant, id=request_id))
            if found:
                return _json({"id": request_id, "object": "request", "parts": found})
        raise ApiError(f"request {request_id!r} is not here: it has ended, or never came.", status=404,
                       code="request_not_found")  # fmt: skip

    # ------------------------------------------------------------------ for operators

    async def _cache(self, request: Request) -> Response:
        if request.method == "POST":
            return _json(await self._change_cache(await self._body(request, CacheAction)))
        stats = await self._client.ask(GetStats())
        pins = await self._client.ask(GetPins())
        return _json({"kv_tokens": stats.kv_tokens, "kv_tokens_free": stats.kv_tokens_free,
                      "host_kv_tokens": stats.host_kv_tokens, "host_kv_tokens_free": stats.host_kv_tokens_free,
                      "pins": pins})  # fmt: skip

    async def _change_cache(self, asked: CacheAction) -> dict[str, Any]:
        if asked.action == "flush":
            return {"flushed_tokens": await self._client.ask(FlushCache())}
        if asked.name is None:
            raise ApiError(f"name is missing: say what to {asked.action}.", param="name", code="missing_parameter")
        if asked.action == "unpin":
            await self._client.ask(UnpinPrefix(name=asked.name))
            return {"unpinned": asked.name}
        if asked.prompt is None:
            raise ApiError("prompt is missing: give the text or the token ids to pin.", param="prompt",
                           code="missing_parameter")  # fmt: skip
        prompt = self._tokenizer.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        if not prompt or not all(0 <= token < self._tokenizer.vocab_size for token in prompt):
            raise ApiError("prompt has no tokens, or ids that the model does not know: give others.", param="prompt")
        if asked.expires_in_s is not None and not asked.expires_in_s > 0:
            raise ApiError(f"expires_in_s is {asked.expires_in_s:g}: give seconds, more than 0.", param="expires_in_s")
        num_tokens = await self._client.ask(
            PinPrefix(name=asked.name, prompt=prompt, expires_in_s=asked.expires_in_s, tenant=asked.tenant,
                      cache_salt=asked.cache_salt)
        )  # fmt: skip
        return {"pinned": asked.name, "num_tokens": num_tokens}

    async def _drain(self, request: Request) -> Response:
        if request.method != "GET":
            self._app.draining = request.method == "POST"
            if self._tell is not None:
                self._tell(draining=self._app.draining)
        return _json({"draining": self._app.draining, "requests_in_progress": self._tally.streams})


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _error(_: Request, error: Exception) -> Response:
    known = answer_to(error)
    return Response(known.body(), known.status, known.headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for nothing else"
    if error.status_code == 405:
        return await _error(request, wrong_method(request.method, (error.headers or {}).get("Allow", "GET")))
    message = error.detail
    if error.status_code == 404:
        message = f"{request.url.path} is no route of this server: see / for those it has."
    return await _error(request, ApiError(message, status=error.status_code, code="not_found"))
