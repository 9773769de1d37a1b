"""The command line: one file per command. Commands import torch and the server lazily, so that `--help` is fast."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline import __version__
from paceline.cli import bench, environment, sim
from paceline.cli.chat import chat
from paceline.cli.doctor import doctor
from paceline.cli.generate import generate
from paceline.cli.models import models
from paceline.cli.pull import pull
from paceline.cli.serve import serve
from paceline.request import PacelineError


class _CommandGroup(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Prints a user error as one line and exits with 2; other exceptions are bugs and keep their traceback."""
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            typer.echo(f"paceline: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(name="paceline", cls=_CommandGroup, no_args_is_help=True, add_completion=False)
app.add_typer(bench.app, name="bench")
app.add_typer(sim.app, name="sim")
for _command in (serve, chat, generate, pull, models, doctor):
    app.command()(_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Paceline, an inference and serving engine for large language models."""
    for warning in environment.warnings():
        typer.echo(f"paceline: warning: {warning}", err=True)


def main() -> None:
    app()
