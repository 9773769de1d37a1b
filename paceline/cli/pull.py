"""`paceline pull`: downloads a model."""

from __future__ import annotations

from typing import Annotated

import typer

Name = Annotated[
    str | None, typer.Argument(help="Hugging Face id (default: smollm2-135m-instruct).", show_default=False)
]


def pull(model: Name = None) -> None:
    """Download a model, and print its path."""
    from paceline.cli.loading import fetch

    typer.echo(str(fetch(model)))
