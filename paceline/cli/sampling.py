"""Sampling options that `generate` and `chat` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PANEL = "Sampling"

MaxTokens = Annotated[int | None, typer.Option(help="Maximum number of output tokens.", rich_help_panel=_PANEL)]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.", rich_help_panel=_PANEL)]
TopP = Annotated[
    float,
    typer.Option(
        help="Nucleus sampling: keep the most likely tokens up to this total probability.", rich_help_panel=_PANEL
    ),
]
TopK = Annotated[
    int | None, typer.Option(help="Keep only the k most likely tokens (default: all).", rich_help_panel=_PANEL)
]
MinP = Annotated[
    float,
    typer.Option(help="Keep tokens with at least this fraction of the highest probability.", rich_help_panel=_PANEL),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: tokens of prompt and output become less likely.", rich_help_panel=_PANEL)
]
Regex = Annotated[
    str | None, typer.Option(help="Constrain the output to this regular expression.", rich_help_panel=_PANEL)
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        help="Constrain the output to the JSON schema in this file.",
        exists=True,
        dir_okay=False,
        rich_help_panel=_PANEL,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Random seed for reproducible sampling.", rich_help_panel=_PANEL)]
Stop = Annotated[
    list[str] | None, typer.Option(help="Stop string, not part of the output; may be repeated.", rich_help_panel=_PANEL)
]
System = Annotated[str | None, typer.Option(help="System message.")]
SeparateReasoning = Annotated[
    bool, typer.Option(help="Separate the reasoning of a thinking model from the answer, and show it dimmed.")
]
