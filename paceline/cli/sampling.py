"""Sampling options that `generate` and `chat` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PANEL = "Sampling"

MaxTokens = Annotated[int | None, typer.Option(help="Most tokens of an answer.", rich_help_panel=_PANEL)]
Temperature = Annotated[
    float, typer.Option(help="0: always the likeliest token; 1: as the model has learned.", rich_help_panel=_PANEL)
]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this chance.", rich_help_panel=_PANEL)]
TopK = Annotated[int | None, typer.Option(help="Keep so many of the likeliest tokens.", rich_help_panel=_PANEL)]
MinP = Annotated[
    float, typer.Option(help="Keep tokens at least so likely as this share of the likeliest.", rich_help_panel=_PANEL)
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: tokens that stand there already become less likely.", rich_help_panel=_PANEL)
]
Regex = Annotated[str | None, typer.Option(help="The answer matches this pattern.", rich_help_panel=_PANEL)]
JsonSchema = Annotated[
    Path | None,
    typer.Option(help="A file: the answer is JSON that obeys its schema.", exists=True, dir_okay=False,
                 rich_help_panel=_PANEL),
]  # fmt: skip
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.", rich_help_panel=_PANEL)]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.", rich_help_panel=_PANEL)]
System = Annotated[str | None, typer.Option(help="A system message to begin with.")]
