"""The simulator page: `paceline sim ui`.

The page requests a simulation by its parameters and gets all frames in one response. The server keeps no state, so a
link with the parameters shows the same simulation anywhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import socket
import typing
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import uvicorn
from starlette.types import Scope, Send

from paceline.config import (
    DRAFT_ACCEPTANCE,
    ConfigError,
    SchedulerConfig,
    SpeculationConfig,
    WorkloadConfig,
    config_from,
    public_options,
)
from paceline.request import PacelineError
from paceline.simulator import workloads
from paceline.simulator.compare import scheduler_config
from paceline.simulator.frames import record_frames
from paceline.simulator.profile import load_profile, profile_names
from paceline.simulator.workloads import SIZES, WORKLOADS, make_workload
from paceline.web import SECURITY, web_file

MOST_REQUESTS = 500
MOST_PAGES = 4096
_CONFIGS = (WorkloadConfig, SpeculationConfig, SchedulerConfig)
PAGE_WORKLOADS = sorted(set(WORKLOADS) - set(SIZES))
# Few enough requests and pages to see each of them
DEFAULTS: dict[str, Any] = {
    "workload": "prefixes", "gpu": "h200-qwen3-0.6b", "overlap": True, "requests": 64, "rate": 80.0,
    "prompt_tokens": 384, "output_tokens": 24, "groups": 10, "shared": 0.8, "num_pages": 144, "max_running": 8,
    "policy": "fair", "max_wait": 0.2, "page_size": 16, "chunk_tokens": 256,
}  # fmt: skip
_SHOWN = {**DEFAULTS, "acceptance": DRAFT_ACCEPTANCE}  # the latter is what a simulation without recording uses
# Of workloads whose subject is not visible with the defaults above. Tenants compete if there is work for all of them
# at any time, and a turn of policy fair is about one of these requests instead of twenty.
WORKLOAD_DEFAULTS: dict[str, dict[str, object]] = {
    "tenants": {"tenants": 4, "rate": 400.0, "fair_quantum": 256},
    "one-long": workloads.DEFAULTS["one-long"],
}


def run_frames(parameters: typing.Mapping[str, str]) -> dict[str, object]:
    """The frames of a simulation with the parameters of a query string."""
    workload = parameters.get("workload", DEFAULTS["workload"])
    if workload not in PAGE_WORKLOADS:
        raise ConfigError(f"workload is {workload!r}: choose one of {', '.join(PAGE_WORKLOADS)}.")
    given = {name: _value(name, text) for name, text in parameters.items()}
    options: dict[str, Any] = {**DEFAULTS, **WORKLOAD_DEFAULTS.get(workload, {}), **given}
    work = config_from(WorkloadConfig, {name: options[name] for name in _names(WorkloadConfig) if name in options})
    if work.requests > MOST_REQUESTS:
        raise ConfigError(
            f"requests is {work.requests}: the page shows up to {MOST_REQUESTS}; use `paceline sim run` for more."
        )
    profile = load_profile(options["gpu"])
    arrivals = make_workload(workload, work)
    speculation, chosen = SpeculationConfig.split(options)
    config = scheduler_config(arrivals, profile, chosen)
    if config.num_pages > MOST_PAGES:
        raise ConfigError(
            f"num_pages is {config.num_pages}: the page shows up to {MOST_PAGES}; use `paceline sim run` for more."
        )
    return record_frames(arrivals, config, profile, overlap=options["overlap"], acceptance=speculation.acceptance)


def describe() -> dict[str, object]:
    """Every parameter with its default (and those of single workloads), bounds, help text and a sentence per choice."""
    found: dict[str, object] = {}
    for config in _CONFIGS:
        for item in public_options(config):
            default = _SHOWN.get(item.name, None if item.default is dataclasses.MISSING else item.default)
            found[item.name] = {
                "default_of": _default_of(item.name),
                "default": "inf" if isinstance(default, float) and math.isinf(default) else default,
                **{name: item.metadata[name] for name in ("help", "low", "high", "choices", "choice_help")},
            }
    sentences = {name: (WORKLOADS[name].__doc__ or "").rstrip(".") for name in PAGE_WORKLOADS}
    own: dict[str, tuple[list[str], str, dict[str, str]]] = {
        "workload": (PAGE_WORKLOADS, "kind of workload", sentences),
        "gpu": (profile_names(), "device and model whose timing is simulated", {}),
        "overlap": ([], "plan the next forward pass while one runs", {}),
    }
    for name, (choices, text, choice_help) in own.items():
        found[name] = {
            "default_of": _default_of(name),
            "default": DEFAULTS[name],
            "help": text,
            "low": None,
            "high": None,
            "choices": choices,
            "choice_help": choice_help,
        }
    return found


def _default_of(name: str) -> dict[str, object]:
    return {workload: defaults[name] for workload, defaults in WORKLOAD_DEFAULTS.items() if name in defaults}


def _names(config: type) -> list[str]:
    return [item.name for item in public_options(config)]


_PARAMETERS = {*(name for config in _CONFIGS for name in _names(config)), "overlap"} - {"tenant_weights"}


def _value(name: str, text: str) -> object:
    hints: dict[str, object] = {"overlap": bool}
    for config in _CONFIGS:
        hints |= typing.get_type_hints(config)
    if name in ("workload", "gpu"):
        return text
    if name not in _PARAMETERS:
        raise ConfigError(f"unknown parameter {name!r}.")
    kind = hints[name]
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        if kind is int:
            return int(text)
        return text if kind is str else float(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {text!r}: expected {'true or false' if kind is bool else 'a number'}.") from None


class SimulatorApp:
    """An ASGI app: the files of the page, its options, and simulations."""

    async def __call__(self, scope: Scope, receive: object, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/api/options":
            await _respond(send, 200, msgspec.json.encode(describe()), "application/json")
        elif path == "/api/run":
            try:
                parameters = dict(parse_qsl(scope["query_string"].decode(), keep_blank_values=True))
                found = await asyncio.to_thread(lambda: msgspec.json.encode(run_frames(parameters)))
            except PacelineError as error:
                await _respond(send, 400, msgspec.json.encode({"error": str(error)}), "application/json")
            else:
                await _respond(send, 200, found, "application/json")
        elif (file := web_file("sim.html" if path == "/" else path.removeprefix("/"))) is not None:
            await _respond(send, 200, file.body, file.type)
        else:
            await _respond(send, 404, b"Not found.\n", "text/plain; charset=utf-8")


async def _respond(send: Send, status: int, body: bytes, kind: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()), *SECURITY]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serves the page until interrupted. `ready` gets the URL once the socket listens."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}.") from None
    with listener:
        ready(f"http://{host}:{listener.getsockname()[1]}")
        config = uvicorn.Config(SimulatorApp(), log_level="warning", access_log=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[listener])
