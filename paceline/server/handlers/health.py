"""`/health`, `/ready` and `/metrics`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from paceline.engine.output import EngineFailed
from paceline.server.metrics import render
from paceline.server.queries import GetHealth, GetMetrics, GetStats, Health
from paceline.server.response_types import Readiness
from paceline.server.routing import Call, json_response

_STATS_TIMEOUT_S = 1.0  # /health does not fail because a busy engine has not returned its statistics yet


async def get_health(call: Call) -> Response:
    """Liveness: a server that is loading or draining is alive, an engine without progress is not."""
    client = call.state.client
    status = "draining" if call.state.draining else "ok"
    report: dict[str, Any] = {"status": status, "model": call.state.model_name, "failure": None}
    try:
        assert client.model
    except EngineFailed as error:
        report |= {"status": "loading" if client.loading else "no engine", "failure": str(error)}
        return json_response(report, 200 if client.loading else 503)
    try:
        health: Health = await client.query(GetHealth())
    except EngineFailed as error:
        health = Health(str(error))
    report["num_passes"] = health.num_passes
    if health.failure is not None:
        return json_response({**report, "status": "failed", "failure": health.failure}, 503)
    try:
        # Not `wait_for`, which makes a task: when the server stops, nobody would handle its exception.
        async with asyncio.timeout(_STATS_TIMEOUT_S):
            stats = await client.query(GetStats())
    except (EngineFailed, TimeoutError):
        return json_response(report)
    return json_response({**report, **msgspec.to_builtins(stats)})


async def get_ready(call: Call) -> Response:
    """Readiness: the engine has generated a token, makes progress, and the server is not draining."""
    client = call.state.client
    try:
        assert client.model
        health: Health = await client.query(GetHealth())
        why = health.failure
        if health.paused:
            why = "The engine is paused: POST /admin/resume resumes it."
    except EngineFailed as error:
        why = str(error)
    if why is None and call.state.draining:
        why = "The server is draining: send requests to another server."
    return json_response(Readiness(why is None, why), 200 if why is None else 503)


async def get_metrics(call: Call) -> Response:
    try:
        families, is_up = await call.state.client.query(GetMetrics()), True
    except EngineFailed:
        families, is_up = [], False
    state = call.state
    families = [*families, *state.counters.families(state.worker)]
    text = render(families, engine_up=is_up, names=state.config.metric_names)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
