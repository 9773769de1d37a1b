"""`paceline pull`: fetch a model before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

Name = Annotated[
    str | None, typer.Argument(help="A hub id, or smollm2-135m-instruct, the default.", show_default=False)
]


def pull(model: Name = None) -> None:
    """Fetch a model, or say where it is."""
    from paceline.cli.loading import fetch

    typer.echo(str(fetch(model)))
