"""`paceline bench …`: what things cost, measured here and now."""

from __future__ import annotations

import typer

app = typer.Typer(help="Measure Paceline on this machine.", no_args_is_help=True)


@app.callback()
def _callback() -> None:
    """Measure Paceline on this machine."""


@app.command()
def scheduler() -> None:
    """The scheduler alone: plan + commit, prefix matching, cache hits. The last line is one JSON object."""
    from paceline.bench import scheduler as bench

    bench.main()
