"""The command line: one file per command, imported when the command runs, so that `--help` is fast."""

from __future__ import annotations

import logging
import os
import sys
from collections import UserDict
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline import __version__

# The first paragraph of each command's help. A test compares them.
SUMMARIES = {
    "serve": "Serve a model over HTTP with an OpenAI-compatible API.",
    "chat": "Chat with a model in the terminal. With piped input, every line is a message.",
    "generate": "Answer prompts and exit. One answer is streamed, several are printed when all are complete.",
    "pull": "Download a model, and print its path.",
    "models": "List models on this machine, supported families, and shapes for random weights; or plan one.",
    "compile": "Compile the GPU kernels of a model ahead of time, on a machine with or without a GPU.",
    "doctor": "Check whether this machine can serve: software, GPU, memory, folders, port, limits, and a model.",
    "bench": "Run benchmarks and checks on this machine.",
    "sim": "Simulate workloads, policies and KV cache sizes on a virtual GPU.",
}


class _Commands(UserDict[str, Any]):
    """The command `name` is in paceline/cli/name.py: its function `name`, or its Typer `app`."""

    def __getitem__(self, name: str) -> Any:
        if name not in SUMMARIES:
            raise KeyError(name)
        module = import_module(f"paceline.cli.{name}")
        if hasattr(module, "app"):
            return typer.main.get_group(module.app)
        alone = typer.Typer(add_completion=False)
        alone.command(name)(getattr(module, name))
        return typer.main.get_command(alone)


def _unknown_option(error: Exception, given: list[str]) -> str:
    """The message for an option that vLLM, SGLang or llama.cpp have, and this command does not; else empty."""
    name, ctx = getattr(error, "option_name", ""), getattr(error, "ctx", None)  # of click's NoSuchOption
    if not name or ctx is None:
        return ""
    from paceline.peer_flags import peer_hint

    # Of -ngl it is -n that click does not know.
    whole = next((one for one in given if one.startswith(name) and not name.startswith("--")), name)
    known = [parameter.name for parameter in ctx.command.params]
    hint = peer_hint(whole, known, lambda one: f"--{one.replace('_', '-')}")
    return hint and f"{whole.partition('=')[0]} is no option: {hint}"


class _CommandGroup(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands(SUMMARIES)

    def list_commands(self, ctx: object) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: object, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))

    def invoke(self, ctx: Any) -> object:
        """Prints a user error as one line and exits with 2, or with 75 if a later start may succeed; other exceptions
        are bugs and keep their traceback."""
        name, given = (ctx._protected_args or [""])[0], list(ctx.args)
        if name == "serve":
            _set_up_json_logs(given)
        try:
            return super().invoke(ctx)
        except Exception as error:
            from paceline.request import PacelineError, Unavailable

            message = str(error) if isinstance(error, PacelineError) else _unknown_option(error, given)
            if not message and _logs_json() and hasattr(error, "format_message"):  # click's ClickException
                message = f"{error.format_message().removesuffix('.')}; see `paceline serve --help`."
            if not message:
                raise
            _say(logging.ERROR, message)
            raise typer.Exit(os.EX_TEMPFAIL if isinstance(error, Unavailable) else 2) from None


# No markup: rich alone would take as long to import as everything else that `paceline --help` needs.
app = typer.Typer(name="paceline", cls=_CommandGroup, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _callback(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Paceline, an inference and serving engine for large language models."""
    if any(name.startswith("PACELINE_") for name in os.environ):
        from paceline.cli.environment import warnings

        for warning in warnings():
            _say(logging.WARNING, warning)


def _set_up_json_logs(given: list[str]) -> None:
    """If a server's log is JSON, nothing else is written, not even about its options."""
    from paceline.cli.log_options import log_options
    from paceline.logs import set_up_logs

    level, format = log_options(given)
    if format == "json":
        set_up_logs(level, format, "server")


def _logs_json() -> bool:
    logs = sys.modules.get("paceline.logs")  # no other command needs it
    return logs is not None and logs.logs_json()


def _say(level: int, message: str) -> None:
    """A line on standard error, or in the log of a server whose log is JSON."""
    if _logs_json():
        logging.getLogger("paceline.server").log(level, message)
    else:
        typer.echo(f"paceline: {'warning: ' if level == logging.WARNING else ''}{message}", err=True)


def main() -> None:
    app()
