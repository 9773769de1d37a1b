"""The HTTP app: the routes that generate, as plain ASGI; the others are Starlette's (`plain.py`).

An answer's status is decided by its first piece: a request the engine refuses gets its error as a status, also when
it asked for a stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from paceline.config import ServerConfig, TenantConfig
from paceline.engine.job import Job
from paceline.engine.output import OutputDelta, TokenUsage
from paceline.request import Tokens
from paceline.server.chat import ChatResponse
from paceline.server.completions import CompletionResponse
from paceline.server.embeddings import EmbeddingResponse
from paceline.server.engine_client import EngineClient
from paceline.server.errors import ApiError, answer_to, shutting_down, unknown_model, wrong_method
from paceline.server.handlers import Handlers
from paceline.server.http import (
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
from paceline.server.limits import Keys
from paceline.server.metrics import ServerCounters
from paceline.server.response import ResponseBuilder, finish_reason_of, total_usage
from paceline.server.types import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
    read_request,
    read_struct,
)
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger("paceline.server")
_LONG_BODY = 32_768  # bytes from which reading and tokenising would hold up other clients' tokens
MAX_SALT_CHARACTERS = 256


class App:
    """An ASGI app that serves one model."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        config: ServerConfig,
        *,
        name: str,
        keys: Keys | None = None,
        tally: ServerCounters | None = None,
        worker: str = "front-end-0",
        tell: Callable[..., None] | None = None,
    ) -> None:
        """`tell` takes what concerns the other front ends too; without one this is the only one."""
        self._client, self._tokenizer, self._config, self._name = client, tokenizer, config, name
        self._keys = keys or Keys((), config.admin_key)
        self._tally = tally or ServerCounters()
        self.draining = False  # new requests are refused
        self._generating: dict[str, Callable[[bytes], ResponseBuilder]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/embeddings": self._embedding,
        }
        self._plain = Handlers(self, client, tokenizer, config, name, self._keys, self._tally, worker, tell)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = self._generating.get(scope["path"]) if scope["type"] == "http" else None
        if read is None:
            await self._plain(scope, receive, send)
        else:
            await self._generate(read, scope, receive, send)

    # ------------------------------------------------------------------ before there is an answer

    async def _generate(
        self, read: Callable[[bytes], ResponseBuilder], scope: Scope, receive: Receive, send: Send
    ) -> None:
        record = _Record(scope["path"])
        try:
            if scope["method"] != "POST":
                raise wrong_method(scope["method"], "POST")
            headers = dict(scope["headers"])
            tenant = self._keys.tenant(headers)
            record.tenant = tenant.name
            if self.draining:
                raise shutting_down()
            body = await read_body(receive, self._config.max_body_bytes, self._config.body_s)
            answer = await asyncio.to_thread(read, body) if len(body) > _LONG_BODY else read(body)
            record.begin(answer)
            jobs = self._jobs(answer, tenant, headers)
            self._tally.streams += 1
            try:
                respond = self._stream if answer.request.stream else self._whole
                await unless_gone(receive, respond(answer, jobs, record, scope, send))
            finally:
                self._tally.streams -= 1
        except ClientGone:
            self._tally.disconnects += 1
            record.end = "the client went away"
        except Exception as error:
            known = answer_to(error)
            record.status, record.end = known.status, known.code or "error"
            await send_error(send, known)
        if record.status is not None:
            self._tally.responses[record.route, record.status] += 1
        if log.isEnabledFor(logging.INFO):
            log.info("request", extra={"fields": record.fields(self._tokenizer if self._config.log_prompts else None)})

    def _chat(self, body: bytes) -> ResponseBuilder:
        request = read_request(body, ChatRequest)
        self._check_model(request)
        return ChatResponse(request, self._tokenizer)

    def _completion(self, body: bytes) -> ResponseBuilder:
        request = read_request(body, CompletionRequest)
        self._check_model(request)
        return CompletionResponse(request, self._tokenizer, self._config.max_prompts)

    def _embedding(self, body: bytes) -> ResponseBuilder:
        request = read_struct(body, EmbeddingRequest)
        self._check_model(request)
        return EmbeddingResponse(request, self._tokenizer, self._config.max_prompts)

    def _check_model(self, request: GenerationRequest | EmbeddingRequest) -> None:
        if request.model != self._name:
            raise unknown_model(request.model, self._name)

    def _jobs(self, answer: ResponseBuilder, tenant: TenantConfig, headers: dict[bytes, bytes]) -> Sequence[Job]:
        """The answer's jobs, on this tenant's account and terms."""
        request = answer.request
        priority, salt = request.priority or 0, request.cache_salt or ""
        if priority > tenant.max_priority:
            raise ApiError(f"priority is {priority}: {tenant.max_priority} is the highest for tenant {tenant.name}.",
                           param="priority", code="invalid_value")  # fmt: skip
        if abs(priority) >= 2**31:
            raise ApiError(f"priority is {priority}: give a number of 32 bits.", param="priority")
        if len(salt) > MAX_SALT_CHARACTERS:
            raise ApiError(f"cache_salt has {len(salt)} characters: give at most {MAX_SALT_CHARACTERS}.",
                           param="cache_salt", code="invalid_value")  # fmt: skip
        timeout = _timeout(request, headers)
        self._check_fits(answer)
        return [
            replace(
                job,
                tenant=tenant.name,
                priority=priority,
                timeout_s=timeout,
                cache_salt=salt,
                stream=bool(request.stream),
            )
            for job in answer.jobs
        ]

    def _check_fits(self, answer: ResponseBuilder) -> None:
        # The engine would refuse it too. But of several prompts the first may be streaming by then, and the error
        # would come too late to be a status.
        most_tokens = self._client.served.max_tokens
        for index, job in enumerate(answer.jobs):
            most = 1 if job.params.max_tokens is None else job.params.max_tokens
            if len(job.prompt) + most > most_tokens:
                which = f"prompt[{index // answer.jobs_per_prompt}]"
                if len(answer.jobs) == answer.jobs_per_prompt:
                    which = "the prompt"
                raise ApiError(
                    f"{which} has {len(job.prompt)} tokens and max_tokens is {job.params.max_tokens or 'not given'}: "
                    f"together they may be {most_tokens}; shorten the prompt or lower max_tokens.",
                    param=answer.prompt_field, code="context_length_exceeded",
                )  # fmt: skip

    # ------------------------------------------------------------------ answers

    async def _whole(self, answer: ResponseBuilder, jobs: Sequence[Job], record: _Record, _: Scope, send: Send) -> None:
        parts: list[list[OutputDelta]] = [[] for _ in jobs]
        usages: dict[int, TokenUsage] = {}
        async with aclosing(self._client.stream(jobs)) as pieces:
            async for index, piece in pieces:
                parts[index].append(piece)
                if finish_reason_of(piece) is not None:
                    usages |= {index: piece.usage} if piece.usage else {}
                    record.take(piece)
        body = answer.whole(parts, total_usage(usages, answer.jobs_per_prompt))
        record.status = 200
        await send_json(send, 200, body, {"X-Request-Id": record.id})

    async def _stream(
        self, answer: ResponseBuilder, jobs: Sequence[Job], record: _Record, scope: Scope, send: Send
    ) -> None:
        stream = EventStream(send, scope, [(b"x-request-id", record.id.encode())])
        usages: dict[int, TokenUsage] = {}
        try:
            async with aclosing(self._client.stream(jobs)) as pieces:
                async for index, piece in pieces:
                    reason = finish_reason_of(piece)
                    if not stream.started:
                        record.status = 200
                        for chunk in answer.opening():
                            await stream.event(chunk)
                    for chunk in answer.chunks(index, piece, reason):
                        await stream.event(chunk)
                    if reason is not None:
                        usages |= {index: piece.usage} if piece.usage else {}
                        record.take(piece)
        except Exception as error:
            if not stream.started:
                raise
            known = answer_to(error)
            record.end = known.code or "error"
            await stream.event(known.body())
        else:
            if answer.request.include_usage:
                await stream.event(answer.usage_chunk(total_usage(usages, answer.jobs_per_prompt)))
            await stream.event(b"[DONE]")
        await stream.end()


class _Record:
    """What the log says of a request."""

    def __init__(self, route: str) -> None:
        self.route = route
        self.id = ""
        self.tenant = ""
        self.status: int | None = None
        self.end = ""
        self._began = time.monotonic()
        self._prompts: list[Tokens] = []
        self._num_tokens = 0
        self._first_token_s: float | None = None
        self._queue_s: float | None = None

    def begin(self, answer: ResponseBuilder) -> None:
        self.id = answer.id
        self._prompts = [job.prompt for job in answer.jobs]

    def take(self, piece: OutputDelta) -> None:
        """The last of one of its jobs."""
        self.end = piece.finish_reason or ""
        if piece.usage is not None:
            self._num_tokens += piece.usage.completion_tokens
        if piece.timings is not None:
            self._first_token_s, self._queue_s = piece.timings.first_token_s, piece.timings.admitted_s

    def fields(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "id": self.id, "route": self.route, "tenant": self.tenant, "status": self.status, "end": str(self.end),
            "prompt_tokens": sum(map(len, self._prompts)), "completion_tokens": self._num_tokens,
            "queue_ms": _ms(self._queue_s), "first_token_ms": _ms(self._first_token_s),
            "total_ms": _ms(time.monotonic() - self._began),
        }  # fmt: skip
        if tokenizer is not None:
            found["prompts"] = [tokenizer.decode(prompt.tolist(), skip_special=False) for prompt in self._prompts]
        return {name: value for name, value in found.items() if value not in (None, "")}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def _timeout(request: GenerationRequest | EmbeddingRequest, headers: dict[bytes, bytes]) -> float | None:
    given: float | None = request.deadline_ms
    name = "deadline_ms"
    if given is None and b"x-deadline-ms" in headers:
        name, text = "X-Deadline-Ms", headers[b"x-deadline-ms"]
        try:
            given = float(text)
        except ValueError:
            given = float("nan")
    if given is None:
        return None
    if not 0 < given <= 1e10:
        raise ApiError(f"{name} is {given:g}: give milliseconds, more than 0.", param=name, code="invalid_value")
    return given / 1e3
