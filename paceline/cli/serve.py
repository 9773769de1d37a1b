"""`paceline serve`: serves a model with an OpenAI-compatible HTTP API."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from paceline.cli.options import ENVIRONMENT, Model, Shape, from_environment, takes
from paceline.config import (
    ConfigError,
    EngineConfig,
    SchedulerConfig,
    ServerConfig,
    TenantConfig,
    check_replicas,
    config_from,
    split_options,
)
from paceline.config_file import read_file

log = logging.getLogger("paceline.server")

if TYPE_CHECKING:
    from paceline.server.engine_client import ServedModel


@takes(ServerConfig, EngineConfig, SchedulerConfig)
def serve(
    options: dict[str, object],
    name_or_path: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model, as for --model.", show_default=False)
    ] = None,
    model: Model = None,
    load: Annotated[
        Literal["weights", "random"] | None,
        typer.Option(
            **from_environment("load"),
            help="weights: load the model's weights (default); random: random weights, for benchmarks.",
        ),
    ] = None,
    shape: Shape = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config", **from_environment("config"), help="TOML file with options and tenants; see docs/serving.md."
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API.

    Every option below can also be set in the environment (--port as PACELINE_PORT) and in the file given by --config.
    The command line takes precedence over the environment, and the environment over the file.
    """
    from paceline.cli.loading import bar, fetch, name_of
    from paceline.logs import logs_json
    from paceline.server.auth import ApiKeys
    from paceline.server.process_messages import ModelSource
    from paceline.server.run import bind, run, url_of
    from paceline.server.supervisor import ServerSetup

    began = time.perf_counter()
    if name_or_path is not None and model not in (None, name_or_path, os.environ.get(f"{ENVIRONMENT}MODEL")):
        raise ConfigError(f"model is {model!r}, and {name_or_path!r} is given, too: give one of them.")
    model = name_or_path or model
    tenants: tuple[TenantConfig, ...] = ()
    chosen: str | None = load
    if config_file is not None:
        file = read_file(config_file)
        options, tenants = {**file.options, **options}, file.tenants
        model, chosen, shape = model or file.model, load or file.load, shape or file.shape
    chosen = chosen or "weights"
    server_names = {item.name for item in dataclasses.fields(ServerConfig)}
    config = config_from(ServerConfig, {name: value for name, value in options.items() if name in server_names})
    ApiKeys(tenants, config.admin_key)  # invalid keys are reported here, and not by every front end
    rest = {name: value for name, value in options.items() if name not in server_names}
    engine_options, _ = split_options(rest)
    engine = EngineConfig(**engine_options)
    check_replicas(config, engine, tenants)
    taken = bind(config)
    try:
        tokenizer: str | int
        if engine.executor == "virtual":
            if model is not None or chosen != "weights" or shape is not None:
                raise ConfigError("executor is 'virtual', which runs no model: remove model, load and shape.")
            from paceline.engine.virtual.build import NAME, VOCAB_SIZE

            path, tokenizer, own_name = None, VOCAB_SIZE, NAME
        elif chosen == "random":
            from paceline.model.shapes import shape as named_shape

            if model is not None:
                raise ConfigError(f"model is {model!r} and load is 'random': remove the model and give a shape.")
            if shape is None:
                raise ConfigError("load is 'random' and no shape is given: give one, such as smollm2-135m.")
            path, tokenizer, own_name = None, named_shape(shape).vocab_size, name_of(None, None, shape)
        else:
            if shape is not None:
                raise ConfigError(f"shape is {shape!r}, which needs load='random': remove it.")
            path = str(fetch(model))
            tokenizer, own_name = path, name_of(model, Path(path), None)
        name = config.served_name or own_name
        setup = ServerSetup(config, name, tokenizer, ModelSource(path, chosen, shape, rest), tenants)
        with bar(f"loading {name}") as advance:
            status = run(
                setup,
                taken,
                advance,
                lambda served: _print_summary(served, url_of(taken), time.perf_counter() - began),
            )
    finally:
        taken.close()
    if status:
        raise typer.Exit(status)
    if logs_json():
        log.info("stopped")
    else:
        Console().print("Stopped.")


def _print_summary(served: ServedModel, url: str, seconds: float) -> None:
    from paceline import __version__
    from paceline.cli.loading import count, size
    from paceline.logs import logs_json

    body = {
        "model": served.name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    say = Console(highlight=False, soft_wrap=True).print
    kv_bytes, host_bytes = (tokens * served.kv_bytes_per_token for tokens in (served.kv_tokens, served.host_kv_tokens))
    host = f", {served.host_kv_tokens:,} more in host memory ({size(host_bytes)})" if served.host_kv_tokens else ""
    rows = {
        "model": f"{served.name}: {served.family} family, {count(served.num_parameters)} parameters, {served.dtype}",
        "device": served.device,
        "memory": f"KV cache of {served.kv_tokens:,} tokens ({size(kv_bytes)}){host}, context of "
        f"{served.context_tokens:,} tokens, up to {served.max_running} running requests",
        "address": url,
    }
    if logs_json():
        log.info("ready", extra={"fields": {"version": __version__, "seconds": round(seconds, 1), **rows}})
        return
    say(f"[bold]Paceline {__version__}[/bold], ready after {seconds:.1f} s")
    for title, text in rows.items():
        say(f"  [dim]{title:9}[/dim]", end="")
        say(text, markup=False)
    say("\nTry it:")
    say(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'", markup=False)
    say("\nPress Ctrl-C to stop.")
