"""The HTTP app: which route does what.

The two routes that generate are plain ASGI (`asgi.py`), the others Starlette. An answer's status is decided by its
first piece: a request the engine refuses gets its error as a status, also when it asked for a stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline import __version__
from paceline.config import ServerConfig
from paceline.engine.output import Piece, Usage
from paceline.server.answer import Answer, finish_reason_of, total_usage
from paceline.server.asgi import (
    ClientGone,
    EventStream,
    Receive,
    Scope,
    Send,
    read_body,
    send_error,
    send_json,
    unless_gone,
)
from paceline.server.chat import ChatAnswer
from paceline.server.client import EngineClient
from paceline.server.completions import CompletionAnswer
from paceline.server.errors import ApiError, api_error, unknown_model
from paceline.server.types import ChatRequest, CompletionRequest, GenerationRequest, Model, ModelList, read_request
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger("paceline.server")
_LONG_BODY = 32_768  # bytes from which reading and tokenising would hold up other clients' tokens


class App:
    """An ASGI app that serves one model."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, config: ServerConfig, *, name: str, max_tokens: int
    ) -> None:
        """`max_tokens`: of a prompt and its output together, by the model's context and the engine's memory."""
        self._client, self._tokenizer, self._config, self._name = client, tokenizer, config, name
        self._max_tokens = max_tokens
        self._model = Model(name, int(time.time()), max_tokens)
        self._generating: dict[str, Callable[[bytes], Answer]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
        }
        self._plain = Starlette(
            routes=[
                Route("/", self._root),
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._one_model),
            ],
            exception_handlers={HTTPException: _http_error, ApiError: _plain_error, Exception: _plain_error},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = self._generating.get(scope["path"]) if scope["type"] == "http" else None
        if read is None:
            await self._plain(scope, receive, send)
        else:
            await self._generate(read, scope, receive, send)

    # ------------------------------------------------------------------ generating

    async def _generate(self, read: Callable[[bytes], Answer], scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] != "POST":
                raise _wrong_method(scope["method"], "POST")
            body = await read_body(receive, self._config.max_body_bytes)
            answer = await asyncio.to_thread(read, body) if len(body) > _LONG_BODY else read(body)
            self._check_fits(answer)
            respond = self._stream if answer.request.stream else self._whole
            await unless_gone(receive, respond(answer, send))
        except ClientGone:
            log.debug("%s: the client went away", scope["path"])
        except Exception as error:
            await send_error(send, _answer_to(error))

    def _chat(self, body: bytes) -> Answer:
        request = read_request(body, ChatRequest)
        self._check_model(request)
        return ChatAnswer(request, self._tokenizer)

    def _completion(self, body: bytes) -> Answer:
        request = read_request(body, CompletionRequest)
        self._check_model(request)
        return CompletionAnswer(request, self._tokenizer, self._config.max_prompts)

    def _check_model(self, request: GenerationRequest) -> None:
        if request.model != self._name:
            raise unknown_model(request.model, self._name)

    def _check_fits(self, answer: Answer) -> None:
        # The engine would refuse it too. But of several prompts the first may be streaming by then, and the error
        # would come too late to be a status.
        for index, job in enumerate(answer.jobs):
            most = 1 if job.params.max_tokens is None else job.params.max_tokens
            if len(job.prompt) + most > self._max_tokens:
                which = f"prompt[{index // answer.jobs_per_prompt}]"
                if len(answer.jobs) == answer.jobs_per_prompt:
                    which = "the prompt"
                raise ApiError(
                    f"{which} has {len(job.prompt)} tokens and max_tokens is {job.params.max_tokens or 'not given'}: "
                    f"together they may be {self._max_tokens}; shorten the prompt or lower max_tokens.",
                    param=answer.prompt_field, code="context_length_exceeded",
                )  # fmt: skip

    async def _whole(self, answer: Answer, send: Send) -> None:
        parts: list[list[Piece]] = [[] for _ in answer.jobs]
        usages: dict[int, Usage] = {}
        async with aclosing(self._client.stream(answer.jobs)) as pieces:
            async for index, piece in pieces:
                parts[index].append(piece)
                if finish_reason_of(piece) is not None and piece.usage is not None:
                    usages[index] = piece.usage
        body = answer.whole(parts, total_usage(usages, answer.jobs_per_prompt))
        await send_json(send, 200, body)

    async def _stream(self, answer: Answer, send: Send) -> None:
        stream = EventStream(send)
        usages: dict[int, Usage] = {}
        try:
            async with aclosing(self._client.stream(answer.jobs)) as pieces:
                async for index, piece in pieces:
                    reason = finish_reason_of(piece)
                    if not stream.started:
                        for chunk in answer.opening():
                            await stream.event(chunk)
                    for chunk in answer.chunks(index, piece, reason):
                        await stream.event(chunk)
                    if reason is not None and piece.usage is not None:
                        usages[index] = piece.usage
        except Exception as error:
            if not stream.started:
                raise
            await stream.event(_answer_to(error).body())
        else:
            if answer.request.include_usage:
                await stream.event(answer.usage_chunk(total_usage(usages, answer.jobs_per_prompt)))
            await stream.event(b"[DONE]")
        await stream.end()

    # ------------------------------------------------------------------ the rest

    async def _root(self, _: Request) -> Response:
        return _json(
            {"paceline": __version__, "model": self._name, "routes": [*self._generating, "/v1/models", "/health"]}
        )

    async def _health(self, _: Request) -> Response:
        stats = await self._client.stats()
        status = "ok" if stats.failure is None else "failed"
        return _json({"status": status, "model": self._name, **msgspec.to_builtins(stats)},
                     200 if stats.failure is None else 503)  # fmt: skip

    async def _models(self, _: Request) -> Response:
        return _json(ModelList([self._model]))

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._name:
            raise unknown_model(name, self._name)
        return _json(self._model)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _answer_to(error: Exception) -> ApiError:
    known = api_error(error)
    if known.status == 500:
        log.error("a request failed", exc_info=error)
    return known


def _wrong_method(method: str, allowed: str) -> ApiError:
    return ApiError(f"method is {method}: use {allowed}.", status=405, code="method_not_allowed",
                    headers={"Allow": allowed})  # fmt: skip


async def _plain_error(_: Request, error: Exception) -> Response:
    known = _answer_to(error)
    return Response(known.body(), known.status, known.headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for nothing else"
    if error.status_code == 405:
        return await _plain_error(request, _wrong_method(request.method, (error.headers or {}).get("Allow", "GET")))
    message = error.detail
    if error.status_code == 404:
        message = f"{request.url.path} is no route of this server: see / for those it has."
    return await _plain_error(request, ApiError(message, status=error.status_code, code="not_found"))
