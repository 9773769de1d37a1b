"""`/admin/`: cache, drain, pause and resume, weights, trace."""

from __future__ import annotations

from starlette.responses import Response

from paceline.server.errors import ApiError, missing_parameter
from paceline.server.limits import DEFAULT_FLUSH_TIMEOUT_S, MAX_FLUSH_TIMEOUT_S, MAX_WEIGHT_VERSION_CHARACTERS
from paceline.server.prompts import check_cache_salt, encode_prompt
from paceline.server.queries import (
    FlushCache,
    FlushWhenIdle,
    GetPins,
    GetStats,
    PauseEngine,
    PinPrefix,
    RecordTrace,
    ResumeEngine,
    UnpinPrefix,
    UpdateWeights,
)
from paceline.server.request_types import CacheAction, PauseRequest, TraceRequest, WeightsRequest
from paceline.server.response_types import (
    CacheFlushed,
    CacheState,
    DrainState,
    PauseState,
    PrefixPinned,
    PrefixUnpinned,
    WeightsState,
)
from paceline.server.routing import Call, json_response
from paceline.server.state import RequestContext


async def get_cache(call: Call) -> Response:
    stats = await call.state.client.query(GetStats())
    return json_response(
        CacheState(
            kv_tokens=stats.kv_tokens,
            kv_tokens_free=stats.kv_tokens_free,
            host_kv_tokens=stats.host_kv_tokens,
            host_kv_tokens_free=stats.host_kv_tokens_free,
            pins=await call.state.client.query(GetPins()),
        )
    )


async def change_cache(call: Call) -> Response:
    client, body = call.state.client, call.body
    assert isinstance(body, CacheAction), "the route's request type"
    check_cache_salt(body.cache_salt)
    if body.action == "flush":
        return json_response(CacheFlushed(await client.query(_flush_query(body))))
    if body.name is None:
        raise missing_parameter("name", f"name the pin to {body.action}")
    if body.action == "unpin":
        await client.query(UnpinPrefix(name=body.name))
        return json_response(PrefixUnpinned(body.name))
    return json_response(PrefixPinned(body.name, await client.query(_pin_query(body, body.name))))


def _flush_query(body: CacheAction) -> FlushCache | FlushWhenIdle:
    timeout_s = DEFAULT_FLUSH_TIMEOUT_S if body.timeout_s is None else body.timeout_s
    if not 0 < timeout_s <= MAX_FLUSH_TIMEOUT_S:
        raise ApiError(
            f"timeout_s is {timeout_s:g}: give more than 0 and at most {MAX_FLUSH_TIMEOUT_S:g} seconds.",
            param="timeout_s",
            code="invalid_value",
        )
    if body.timeout_s is not None and not body.wait:
        raise ApiError("timeout_s is given and wait is not true: omit it, or set wait.", param="timeout_s")
    return FlushWhenIdle(timeout_s=timeout_s) if body.wait else FlushCache()


def prepare_pin(context: RequestContext, body: CacheAction) -> CacheAction:
    """Encodes the prefix to pin."""
    if body.prompt is not None:
        body.prompt = encode_prompt(body.prompt, context, "prompt")
    return body


def _pin_query(body: CacheAction, name: str) -> PinPrefix:
    prompt = body.prompt
    if prompt is None:
        raise missing_parameter("prompt", "give the text or the token ids to pin")
    assert not isinstance(prompt, str), "prepare_pin encodes it"
    if body.expires_in_s is not None and not body.expires_in_s > 0:
        raise ApiError(f"expires_in_s is {body.expires_in_s:g}: give more than 0 seconds.", param="expires_in_s")
    return PinPrefix(
        name=name,
        prompt=prompt,
        expires_in_s=body.expires_in_s,
        tenant=body.tenant,
        cache_salt=body.cache_salt,
    )


async def get_pause(call: Call) -> Response:
    stats = await call.state.client.query(GetStats())
    return json_response(PauseState(stats.paused, stats.num_running, stats.num_waiting))


async def pause(call: Call) -> Response:
    assert isinstance(call.body, PauseRequest), "the route's request type"
    await call.state.client.query(PauseEngine(mode=call.body.mode))
    return await get_pause(call)


async def resume(call: Call) -> Response:
    await call.state.client.query(ResumeEngine())
    return await get_pause(call)


async def get_weights(call: Call) -> Response:
    stats = await call.state.client.query(GetStats())
    return json_response(WeightsState(stats.weight_version))


async def update_weights(call: Call) -> Response:
    body = call.body
    assert isinstance(body, WeightsRequest), "the route's request type"
    if body.version is not None and not 0 < len(body.version) <= MAX_WEIGHT_VERSION_CHARACTERS:
        raise ApiError(
            f"version has {len(body.version)} characters: give 1 to {MAX_WEIGHT_VERSION_CHARACTERS}.", param="version"
        )
    update = await call.state.client.query(UpdateWeights(path=body.path, mode=body.mode, version=body.version))
    return json_response(update)


async def record_trace(call: Call) -> Response:
    assert isinstance(call.body, TraceRequest), "the route's request type"
    trace = await call.state.client.query(RecordTrace(seconds=call.body.seconds))
    name = {"Content-Disposition": 'attachment; filename="paceline-trace.json"'}
    return Response(trace, headers=name, media_type="application/json")


async def get_drain(call: Call) -> Response:
    return json_response(DrainState(call.state.draining, call.state.counters.in_progress))


async def start_drain(call: Call) -> Response:
    return await _set_draining(call, True)


async def stop_drain(call: Call) -> Response:
    return await _set_draining(call, False)


async def _set_draining(call: Call, draining: bool) -> Response:
    call.state.set_draining(draining)
    call.state.on_draining(draining)
    return await get_drain(call)
