"""The simulator's page: `paceline sim ui`.

The page asks for a run by its parameters and gets the whole film; nothing is kept between two questions, so a link that
holds the parameters shows the same thing anywhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import socket
import typing
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import uvicorn

from paceline.config import ConfigError, SchedulerConfig, WorkloadConfig
from paceline.request import PacelineError
from paceline.simulator.compare import scheduler_config
from paceline.simulator.frames import film
from paceline.simulator.profile import load_profile, profile_names
from paceline.simulator.workloads import SIZES, WORKLOADS, make_workload
from paceline.web import SECURITY, web_file

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
MOST_REQUESTS = 500
MOST_PAGES = 4096
# What is looked at rather than measured: few enough requests and pages to see each of them
DEFAULTS: dict[str, Any] = {
    "workload": "prefixes", "gpu": "h200-qwen3-0.6b", "overlap": True, "requests": 64, "rate": 80.0,
    "prompt_tokens": 384, "output_tokens": 24, "groups": 10, "shared": 0.8, "num_pages": 144, "max_running": 8,
    "policy": "fair", "max_wait": 0.2, "page_size": 16, "chunk_tokens": 256,
}  # fmt: skip


def run_film(asked: typing.Mapping[str, str]) -> dict[str, Any]:
    """The film for parameters as they stand in a link."""
    options = {**DEFAULTS, **{name: _value(name, text) for name, text in asked.items()}}
    workload = options["workload"]
    if workload not in WORKLOADS or workload in SIZES:
        raise ConfigError(f"workload is {workload!r}: choose one of {', '.join(set(WORKLOADS) - set(SIZES))}.")
    work = WorkloadConfig(**{name: options[name] for name in _names(WorkloadConfig) if name in options})
    if work.requests > MOST_REQUESTS:
        raise ConfigError(f"requests is {work.requests}: the page shows up to {MOST_REQUESTS}; `sim run` takes more.")
    profile = load_profile(options["gpu"])
    arrivals = make_workload(workload, work)
    config = scheduler_config(
        arrivals, profile, {name: options[name] for name in _names(SchedulerConfig) if name in options}
    )
    if config.num_pages > MOST_PAGES:
        raise ConfigError(f"num_pages is {config.num_pages}: the page shows up to {MOST_PAGES}; `sim run` takes more.")
    return film(arrivals, config, profile, overlap=options["overlap"])


def describe() -> dict[str, Any]:
    """Every parameter with its default, bounds and help, from where it is declared."""
    found: dict[str, Any] = {}
    for config in (WorkloadConfig, SchedulerConfig):
        for item in dataclasses.fields(config):
            default = DEFAULTS.get(item.name, None if item.default is dataclasses.MISSING else item.default)
            found[item.name] = {
                "default": "inf" if isinstance(default, float) and math.isinf(default) else default,
                **{name: item.metadata[name] for name in ("help", "low", "high", "choices")},
            }
    own = {"workload": sorted(set(WORKLOADS) - set(SIZES)), "gpu": profile_names(), "overlap": []}
    for name, choices in own.items():
        found[name] = {"default": DEFAULTS[name], "help": "", "low": None, "high": None, "choices": choices}
    return found


def _names(config: type) -> list[str]:
    return [item.name for item in dataclasses.fields(config)]


def _value(name: str, text: str) -> Any:
    hints = {**typing.get_type_hints(WorkloadConfig), **typing.get_type_hints(SchedulerConfig), "overlap": bool}
    if name in ("workload", "gpu"):
        return text
    if name not in hints or name == "tenant_weights":
        raise ConfigError(f"parameter {name!r} is not known.")
    kind = hints[name]
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        if kind is int:
            return int(text)
        return text if kind is str else float(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {text!r}: give {'true or false' if kind is bool else 'a number'}.") from None


class SimulatorApp:
    """An ASGI app: the page's files, what can be asked, and runs."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: object, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/api/options":
            await _answer(send, 200, msgspec.json.encode(describe()), "application/json")
        elif path == "/api/run":
            try:
                asked = dict(parse_qsl(scope["query_string"].decode(), keep_blank_values=True))
                found = await asyncio.to_thread(lambda: msgspec.json.encode(run_film(asked)))
            except PacelineError as error:
                await _answer(send, 400, msgspec.json.encode({"error": str(error)}), "application/json")
            else:
                await _answer(send, 200, found, "application/json")
        elif (file := web_file("sim.html" if path == "/" else path.removeprefix("/"))) is not None:
            await _answer(send, 200, file.body, file.type)
        else:
            await _answer(send, 404, b"There is nothing here.\n", "text/plain; charset=utf-8")


async def _answer(send: Send, status: int, body: bytes, kind: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()), *SECURITY]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(host: str, port: int, ready: Callable[[str], None]) -> None:
    """Until it is interrupted. `ready` gets the address once the port is taken."""
    try:
        taken = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be listened on: {error.strerror}.") from None
    with taken:
        ready(f"http://{host}:{taken.getsockname()[1]}")
        config = uvicorn.Config(SimulatorApp(), log_level="warning", access_log=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[taken])
