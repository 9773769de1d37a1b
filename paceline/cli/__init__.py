"""The command line: one file per command. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import typer

from paceline.cli import bench

app = typer.Typer(name="paceline", help="Serves large language models.", no_args_is_help=True, add_completion=False)
app.add_typer(bench.app, name="bench")


@app.callback()
def _callback() -> None:
    """Serves large language models."""


def main() -> None:
    app()
