"""Report: what an experiment found, as a table and as panels of a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars, or one line per label: y[i][j] is the value of labels[i] at x[j]."""

    kind: Literal["bars", "lines"]
    x: Sequence[str] | Sequence[float]
    y: list[list[float]]
    labels: list[str]
    x_title: str
    y_title: str
    title: str = ""
    points: list[str] | None = None  # a label for each point of a line
    baseline: tuple[float, str] | None = None  # a line at this value, with its label


@dataclass(frozen=True, slots=True)
class Report:
    columns: list[str]
    rows: list[list[str | float]]
    note: str
    panels: list[list[Panel]]  # of the plot, by row


@dataclass(frozen=True, slots=True)
class Experiment:
    title: str
    answers: str  # the published figure or claim that it can be compared with
    run: Callable[[], Report]
