"""`/health`, `/ready` and `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from paceline.engine.output import EngineFailed
from paceline.server.engine_client import EngineState
from paceline.server.metrics import render
from paceline.server.queries import GetMetrics, GetStats
from paceline.server.response_types import EngineCount, Readiness
from paceline.server.routing import Call, json_response

_STATS_TIMEOUT_S = 0.5  # a busy engine delays no probe: /health is complete without statistics


async def get_health(call: Call) -> Response:
    """Liveness, from what is known without asking: a server that loads, drains or has lost some engines is alive."""
    client = call.state.client
    engines = client.engines
    failure = next((one.failure for one in engines if one.failure is not None), None)
    status = "draining" if call.state.draining else "ok"
    is_alive = any(one.failure is None for one in engines)
    if not is_alive:
        is_alive = any(one.is_loading for one in engines)
        status = "loading" if is_alive else "failed"
    report: dict[str, object] = {
        "status": status,
        "model": call.state.model_name,
        "failure": failure,
        "engines": msgspec.to_builtins(_counts(engines)),
        "num_passes": sum(one.num_passes for one in engines),
    }
    if not is_alive:
        return json_response(report, 503)
    try:
        # Not `wait_for`, which makes a task: when the server stops, nobody would handle its exception.
        async with asyncio.timeout(_STATS_TIMEOUT_S):
            stats = await client.query(GetStats())
    except (EngineFailed, TimeoutError):
        return json_response(report)
    return json_response({**report, **msgspec.to_builtins(stats)})


async def get_ready(call: Call) -> Response:
    """Readiness: an engine has generated a token and makes progress, and the server is not draining. Where some engines
    only compute prompts, one of the others: requests without a transfer are computed there."""
    engines = call.state.client.engines
    needed = [one for one in engines if one.role != "prefill"] or engines
    why = None
    if all(one.failure is not None for one in needed):
        why = next((one.failure for one in needed if not one.is_loading), needed[0].failure)
    elif any(one.paused for one in engines):
        why = "The engine is paused: POST /admin/resume resumes it."
    elif call.state.draining:
        why = "The server is draining: send requests to another server."
    return json_response(Readiness(why is None, why, _counts(engines)), 200 if why is None else 503)


def _counts(engines: Sequence[EngineState]) -> dict[str, EngineCount]:
    """By role, how many of the engines can generate."""
    found: dict[str, EngineCount] = {}
    for one in engines:
        count = found.setdefault(one.role, EngineCount(0, 0))
        count.up += one.failure is None
        count.total += 1
    return found


async def get_metrics(call: Call) -> Response:
    try:
        families, is_up = await call.state.client.query(GetMetrics()), True
    except EngineFailed:
        families, is_up = [], False
    state = call.state
    families = [*families, *state.counters.families(state.worker)]
    text = render(families, engine_up=is_up, names=state.config.metric_names)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
