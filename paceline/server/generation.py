"""Serves the routes that generate, as plain ASGI: request to jobs, output to a response or a stream.

The first output decides the status: a request that the engine refuses gets an error status, also with `stream: true`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec

from paceline.config import TenantConfig
from paceline.engine.job import Job
from paceline.engine.output import LoadedAdapter, OutputDelta, TokenUsage
from paceline.request import Refused
from paceline.server.apis.dialects import dialect_of
from paceline.server.auth import batch_tenant
from paceline.server.engine_client import ServedModel
from paceline.server.errors import ApiError, api_error, draining, method_not_allowed, shutting_down
from paceline.server.http import (
    ClientDisconnected,
    EventStream,
    Receive,
    Scope,
    Send,
    cancel_on_disconnect,
    read_body,
    send_error,
    send_json,
)
from paceline.server.limits import BODY_BYTES_PER_TOKEN, MAX_DEADLINE_MS, MAX_PRIORITY
from paceline.server.parsing import parse
from paceline.server.prompts import check_cache_salt, too_long
from paceline.server.request_log import RequestLog
from paceline.server.request_types import GenerationRequest, ScheduledRequest
from paceline.server.response import ResponseBuilder, finish_reason_of, total_usage
from paceline.server.routing import GenerationRoute, MakeBuilder
from paceline.server.state import RequestContext, ServerState
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger("paceline.server")


class GenerationHandler:
    """An ASGI app for one generating route."""

    def __init__(self, state: ServerState, route: GenerationRoute) -> None:
        self._state, self._route, self._dialect = state, route, dialect_of(route.path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, entry = self._state, RequestLog(self._route.path)
        try:
            if scope["method"] != self._route.method:
                raise method_not_allowed(scope["method"], f"{self._route.method}, OPTIONS")
            headers = dict(scope["headers"])
            # A request of a batch has the tenant of the batch, not a key.
            owner: TenantConfig | None = scope.get("batch_tenant")
            tenant = state.api_keys.tenant(headers) if owner is None else owner
            entry.tenant = tenant.name if owner is None else batch_tenant(owner.name)
            if state.shutting_down:
                raise shutting_down()
            if state.draining:
                raise draining()
            body = await read_body(receive, headers, state.config)
            await cancel_on_disconnect(receive, self._handle(body, tenant, entry, headers, scope, send))
        except ClientDisconnected:
            state.counters.disconnects += 1
            entry.end = "client disconnected"
        except Exception as error:
            known = api_error(error)
            entry.status, entry.end = known.status, known.code or "error"
            await send_error(send, scope, known)
        if entry.status is not None:
            state.counters.responses[entry.route, entry.status] += 1
        if not log.isEnabledFor(logging.INFO):
            return
        if state.config.log_prompts:
            await state.workers.run_in_thread(_log, entry, state.tokenizer, tenant=entry.tenant)
        else:
            _log(entry, None)

    async def _handle(
        self,
        body: bytearray,
        tenant: TenantConfig,
        entry: RequestLog,
        headers: dict[bytes, bytes],
        scope: Scope,
        send: Send,
    ) -> None:
        state = self._state
        response = await self._build(body, tenant, entry)
        _check_length(response, state.context.model)
        entry.set_response(response)
        adapter = await state.find_adapter(response.request.model)
        jobs = self._jobs(response, tenant, entry.tenant, headers, adapter)
        state.counters.in_progress += 1
        try:
            respond = self._stream if response.request.stream else self._respond
            await respond(response, jobs, entry, scope, send)
        finally:
            state.counters.in_progress -= 1
            state.limiter.charge(entry.tenant, entry.num_output_tokens)

    # ------------------------------------------------------------------ request to jobs

    async def _build(self, body: bytearray, tenant: TenantConfig, entry: RequestLog) -> ResponseBuilder:
        """The response, within the limits of its tenant. A body that is refused keeps the charge for its length."""
        state, route, estimate = self._state, self._route, len(body) // BODY_BYTES_PER_TOKEN

        def charge(num_bytes: int) -> None:
            nonlocal estimate
            estimate += num_bytes // BODY_BYTES_PER_TOKEN
            state.limiter.charge(entry.tenant, num_bytes // BODY_BYTES_PER_TOKEN)

        try:
            state.limiter.acquire(entry.tenant, estimate, time.monotonic())
        except Refused:
            state.counters.refused[entry.tenant] += 1
            raise
        try:
            arguments = (route.builder, route.request, route.path)
            response = await state.run_checked(build_response, body, *arguments, tenant=entry.tenant)
            response = await response.prepare(state, tenant.name, charge)
        finally:
            state.limiter.release(entry.tenant)
        state.limiter.charge(entry.tenant, sum(len(job.prompt) for job in response.jobs) - estimate)
        return response

    def _jobs(
        self,
        response: ResponseBuilder,
        tenant: TenantConfig,
        scheduled_as: str,
        headers: dict[bytes, bytes],
        adapter: LoadedAdapter | None,
    ) -> Sequence[Job]:
        """The response's jobs with the tenant, priority, deadline, cache salt and adapter of the request."""
        request = response.request
        priority, salt = request.priority or 0, request.cache_salt or ""
        if priority > tenant.max_priority:
            raise ApiError(
                f"priority is {priority}: give at most {tenant.max_priority}, the max_priority of tenant "
                f"{tenant.name}.",
                param="priority",
                code="invalid_value",
            )
        if abs(priority) > MAX_PRIORITY:
            raise ApiError(f"priority is {priority}: give -{MAX_PRIORITY} to {MAX_PRIORITY}.", param="priority")
        check_cache_salt(salt)
        timeout_s = _timeout_s(request, headers)
        queue_timeout_s = _seconds("queue_timeout_ms", request.queue_timeout_ms)
        running_timeout_s = _seconds("running_timeout_ms", request.running_timeout_ms)
        return [
            replace(
                job,
                tenant=scheduled_as,
                priority=priority,
                timeout_s=timeout_s,
                queue_timeout_s=queue_timeout_s,
                running_timeout_s=running_timeout_s,
                cache_salt=salt,
                adapter="" if adapter is None else adapter.name,
                adapter_version="" if adapter is None else adapter.adapter,
                # Logprobs arrive with their tokens: those of a whole output would take long to decode.
                stream=bool(request.stream) or job.params.logprobs is not None,
            )
            for job in response.jobs
        ]

    # ------------------------------------------------------------------ output to response

    async def _respond(
        self, response: ResponseBuilder, jobs: Sequence[Job], entry: RequestLog, _: Scope, send: Send
    ) -> None:
        outputs: list[list[OutputDelta]] = [[] for _ in jobs]
        usages: dict[int, TokenUsage] = {}
        # The output of a job that is not streamed is one delta at its end, or when it is aborted.
        async with aclosing(self._state.client.stream(jobs, entry.add_output)) as stream:
            async for index, output in stream:
                entry.add_output(index, output)
                outputs[index].append(output)
                if finish_reason_of(output) is not None:
                    usages |= {index: output.usage} if output.usage else {}
        usage = total_usage(usages, response.jobs_per_prompt)
        body = await self._state.workers.run_in_thread(response.final_body, outputs, usage, tenant=entry.tenant)
        await response.finish(self._state)
        entry.status = 200
        await send_json(send, 200, body, {"X-Request-Id": entry.id})

    async def _stream(
        self, response: ResponseBuilder, jobs: Sequence[Job], entry: RequestLog, scope: Scope, send: Send
    ) -> None:
        events = EventStream(send, scope, [(b"x-request-id", entry.id.encode())], self._dialect)
        usages: dict[int, TokenUsage] = {}
        try:
            async with aclosing(self._state.client.stream(jobs)) as stream:
                async for index, output in stream:
                    entry.add_output(index, output)
                    reason = finish_reason_of(output)
                    if not events.started:
                        entry.status = 200
                        for chunk in response.first_chunks():
                            await events.send_event(chunk)
                    chunks = response.chunks(index, output, reason)
                    if response.is_slow(index, output):
                        chunks = await self._state.workers.run_in_thread(list, chunks, tenant=entry.tenant)
                    for chunk in chunks:
                        await events.send_event(chunk)
                    if reason is not None:
                        usages |= {index: output.usage} if output.usage else {}
            last_chunks = list(response.last_chunks(total_usage(usages, response.jobs_per_prompt)))
            await response.finish(self._state)  # before the client learns that the response is complete
            entry.status = 200
            for chunk in last_chunks:
                await events.send_event(chunk)
            await events.end()
        except Exception as error:
            if not events.started:
                raise
            known = api_error(error)
            entry.end = known.code or "error"
            await events.send_event(response.error_chunk(known) or self._dialect.render(known))
        await events.close()


def build_response(
    body: bytes | bytearray,
    builder: MakeBuilder,
    kind: type[msgspec.Struct],
    path: str,
    context: RequestContext,
) -> ResponseBuilder:
    """Runs off the event loop, for long bodies in another process."""
    request = parse(body, kind, dialect_of(path).fields)
    if isinstance(request, GenerationRequest) and request.stream_options is not None and not request.stream:
        raise ApiError(
            "stream_options is given and stream is not true: omit it, or set stream.", param="stream_options"
        )
    assert isinstance(request, ScheduledRequest), "what generating routes accept"
    request.model = context.model_of(request.model)
    return builder(context, request)


def _check_length(response: ResponseBuilder, model: ServedModel) -> None:
    # The engine checks it too. But with several prompts the first may already be streaming by then, too late for the
    # error to be a status.
    limit = model.max_tokens
    for index, job in enumerate(response.jobs):
        which = response.prompt_name(index // response.jobs_per_prompt)
        num_tokens, max_tokens = len(job.prompt), job.params.max_tokens
        if num_tokens + (max_tokens != 0) > limit:
            raise too_long(which, str(num_tokens), limit, response.prompt_field)
        if max_tokens and num_tokens + max_tokens > limit and not model.clips_max_tokens:
            name = "max_tokens"
            if getattr(response.request, "max_completion_tokens", None) is not None:
                name = "max_completion_tokens"
            raise ApiError(
                f"{name} is {max_tokens} and {which[0].lower()}{which[1:]} has {num_tokens} tokens: this model's "
                f"maximum context length is {limit} tokens, for both together; lower {name} or shorten the prompt.",
                param=name,
                code="context_length_exceeded",
            )


def _log(entry: RequestLog, tokenizer: Tokenizer | None) -> None:
    log.info("request", extra={"fields": entry.fields(tokenizer)})


def _timeout_s(request: ScheduledRequest, headers: dict[bytes, bytes]) -> float | None:
    """The request's deadline, from `deadline_ms` or else from the header `X-Deadline-Ms`; both are checked."""
    from_header = None
    if b"x-deadline-ms" in headers:
        try:
            from_header = float(headers[b"x-deadline-ms"])
        except ValueError:
            from_header = float("nan")
    header_s, field_s = _seconds("X-Deadline-Ms", from_header), _seconds("deadline_ms", request.deadline_ms)
    return header_s if field_s is None else field_s


def _seconds(name: str, milliseconds: float | None) -> float | None:
    if milliseconds is not None and not 0 < milliseconds <= MAX_DEADLINE_MS:
        raise ApiError(
            f"{name} is {milliseconds:g}: give milliseconds, more than 0 and at most {MAX_DEADLINE_MS:g}.",
            param=name,
            code="invalid_value",
        )
    return None if milliseconds is None else milliseconds / 1e3
