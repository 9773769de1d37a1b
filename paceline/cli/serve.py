"""`paceline serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paceline.cli.options import Load, Model, Shape, takes
from paceline.config import EngineConfig, SchedulerConfig, ServerConfig

if TYPE_CHECKING:
    from paceline.cli.loading import Loaded


@takes(ServerConfig, EngineConfig, SchedulerConfig)
def serve(options: dict[str, Any], model: Model = None, load: Load = "weights", shape: Shape = None) -> None:
    """Serve a model over HTTP, as OpenAI does: chat and completions, streaming or not."""
    from paceline.cli.loading import load_engine
    from paceline.server.app import App
    from paceline.server.client import LocalClient
    from paceline.server.run import bind, run, url_of

    server_names = {item.name for item in dataclasses.fields(ServerConfig)}
    config = ServerConfig(**{name: value for name, value in options.items() if name in server_names})
    taken = bind(config)
    try:
        loaded = load_engine(
            model, load, shape, {name: value for name, value in options.items() if name not in server_names}
        )
        name = config.served_name or loaded.name
        client = LocalClient(loaded.engine)
        app = App(client, loaded.engine.tokenizer, config, name=name, max_tokens=loaded.max_tokens)
        run(app, client, config, taken, lambda: _say_hello(loaded, name, url_of(taken)))
    finally:
        taken.close()
    Console().print("Ended.")


def _say_hello(loaded: Loaded, name: str, url: str) -> None:
    from paceline import __version__
    from paceline.cli.loading import count, size

    max_running = loaded.engine.scheduler.config.max_running
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    say = Console(highlight=False, soft_wrap=True).print
    rows = {
        "model": f"{name}: {loaded.family} family, {count(loaded.num_parameters)} parameters, {loaded.dtype}",
        "device": f"{loaded.device}, {loaded.num_threads} thread{'s' if loaded.num_threads > 1 else ''}",
        "memory": f"KV of {loaded.kv_tokens:,} tokens ({size(loaded.kv_bytes)}), context {loaded.context_tokens:,}, "
        f"{max_running} requests at once",
        "address": url,
    }
    say(f"[bold]Paceline {__version__}[/bold], ready after {loaded.seconds:.1f} s")
    for title, text in rows.items():
        say(f"  [dim]{title:9}[/dim]", end="")
        say(text, markup=False)
    say("\nTry it:")
    say(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'", markup=False)
    say("\nCtrl-C ends it.")
