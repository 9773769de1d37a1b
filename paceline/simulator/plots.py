"""Plots of simulations and experiments, PNG or SVG by file suffix. Needs matplotlib: `pip install paceline[plots]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.config import ConfigError
from paceline.simulator.report import Experiment, Panel
from paceline.simulator.run import SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Safe for colour blindness (Okabe and Ito), in the order that the pages use
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")
_STYLE: dict[str, object] = {
    "figure.dpi": 120, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "svg.hashsalt": "paceline",
}  # fmt: skip


def _pyplot() -> ModuleType:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'paceline[plots]'.") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    plt: ModuleType = matplotlib.pyplot
    plt.rcParams.update(_STYLE)
    return plt


def check_plots(path: Path) -> None:
    """Refuses what could not be plotted, before anything is simulated."""
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"plot is {path.name!r}: expected a .png or .svg file.")
    _pyplot()


def _save(plt: ModuleType, figure: Figure, path: Path, top: float = 1.0) -> None:
    check_plots(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout(rect=(0, 0, 1, top))
    # Without dates: the same values give the same file, byte by byte.
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
    plt.close(figure)


def plot_experiment(experiment: Experiment, panels: list[list[Panel]], path: Path) -> None:
    plt = _pyplot()
    rows, columns = len(panels), len(panels[0])
    figure, grid = plt.subplots(rows, columns, figsize=(1.6 + (4.8, 4.0, 3.2)[columns - 1] * columns, 0.9 + 2.7 * rows))
    for axes, panel in zip(np.atleast_1d(grid).flat, (one for row in panels for one in row), strict=True):
        _bar_groups(axes, panel) if panel.kind == "bars" else _lines(axes, panel)
        axes.set(xlabel=panel.x_title, ylabel=panel.y_title)
        axes.set_title(panel.title, fontsize=9, fontweight="normal", loc="center")
        first = panel is panels[0][0]
        if len(panel.labels) > 1 and (first or panel.labels != panels[0][0].labels):
            axes.legend(fontsize=8)
    figure.suptitle(experiment.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    height, source = figure.get_figheight(), f"Compare with {experiment.answers}"
    figure.text(0.01, 1 - 0.36 / height, source, fontsize=7.5, color="#555555", va="top")
    _save(plt, figure, path, top=1 - 0.3 / height)


def _bar_groups(axes: Axes, panel: Panel) -> None:
    places, width, size = np.arange(len(panel.x)), 0.8 / len(panel.y), 8 if len(panel.y) < 3 else 7
    for index, values in enumerate(panel.y):
        offset = (index - (len(panel.y) - 1) / 2) * width
        bars = axes.bar(places + offset, values, width * 0.94, color=COLOURS[index], label=panel.labels[index])
        axes.bar_label(bars, fmt="%.3g" if max(values) < 1000 else "{:,.0f}", padding=2, fontsize=size)
    crowded = max(len(str(x)) for x in panel.x) * len(panel.x) > 50
    axes.set_xticks(places, list(map(str, panel.x)), rotation=20 if crowded else 0, ha="right" if crowded else "center")
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12 * len(panel.y))


def _lines(axes: Axes, panel: Panel) -> None:
    dense = len(panel.x) > 50
    places = list(range(len(panel.x))) if isinstance(panel.x[0], str) else panel.x
    overlap = any(len(set(at)) < len(at) for at in zip(*panel.y, strict=True))
    for index, values in enumerate(panel.y):
        # Where lines overlap the first ones are wider, and the dashes of the fourth and fifth alternate.
        axes.plot(
            places,
            values,
            color=COLOURS[index],
            label=panel.labels[index],
            linewidth=1.5 + 1.2 * max(0, min(3, len(panel.y) - 1) - index) if overlap and not dense else 1.5,
            linestyle=(3 * (index - 3), (3, 3)) if index >= 3 and overlap else "-",
            marker=None if dense else "o",
            markersize=5,
        )
        for place, (x, y, name) in enumerate(zip(places, values, panel.points or (), strict=False)):
            # Alternating above and below, so that neighbours do not overlap
            offset = (10, -14) if place % 2 else (2, 12)
            axes.annotate(name, (x, y), textcoords="offset points", xytext=offset, fontsize=8)
    if panel.baseline is not None:
        value, name = panel.baseline
        axes.axhline(value, color="#555555", linewidth=1.0, linestyle=(0, (4, 3)), label=name, zorder=1)
    axes.margins(0.1 if panel.points else 0.04, 0.15)
    if panel.points is None:
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    if not dense and panel.points is None:
        axes.set_xticks(places, list(map(str, panel.x)) if isinstance(panel.x[0], str) else None)


_OVER_TIME = {
    "waiting": "Waiting requests", "running": "Running requests", "tokens": "Output tokens/s",
    "hit_rate": "Prefix cache hit rate, cumulative", "used": "KV cache usage", "busy": "GPU utilization",
    "retractions": "Retractions, cumulative",
}  # fmt: skip
_RATES = ("tokens", "busy")  # drawn as a moving average
_SHARES = {"ttft": ("TTFT", "s"), "waits": ("Waiting time", "s"), "tpot": ("TPOT", "ms")}


def plot_runs(runs: Mapping[str, SimulationResult], path: Path) -> None:
    """Simulations of one workload: time series, latency distributions, and fairness between tenants."""
    plt = _pyplot()
    figure, grid = plt.subplots(4, 3, figsize=(12, 10.5))
    places = iter(grid.flat)
    for name, title in _OVER_TIME.items():
        axes = next(places)
        for index, (label, run) in enumerate(runs.items()):
            values = _smooth(run, name) if name in _RATES else getattr(run.series, name)
            axes.plot(run.series.time, values, color=COLOURS[index % len(COLOURS)], linewidth=1.1, label=label)
        axes.set(title=title, xlabel="s")
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.0 if name == "retractions" else 0.0))
    for name, (title, unit) in _SHARES.items():
        axes = next(places)
        for index, (label, run) in enumerate(runs.items()):
            values = np.sort(getattr(run, name)) * (1e3 if unit == "ms" else 1)
            shares = np.arange(1, len(values) + 1) / max(1, len(values))
            axes.plot(values, shares, color=COLOURS[index % len(COLOURS)], linewidth=1.3, label=label)
        axes.set(title=f"{title}, cumulative distribution", xlabel=unit)
        axes.set_ylim(0, 1.02)
    slowest = {name: run.summary()["ttft_p99_ms"] / 1e3 for name, run in runs.items()}
    _bars(next(places), "TTFT p99, s", slowest)
    _bars(next(places), "Fairness between tenants (Jain)", {name: run.fairness() for name, run in runs.items()})
    grid.flat[0].legend()
    _save(plt, figure, path)


def _smooth(run: SimulationResult, name: str) -> npt.NDArray[np.float64]:
    """A moving average over a twentieth of the samples, weighted by duration."""
    width = max(1, len(run.series.time) // 20)
    spans = np.diff(run.series.time, prepend=0.0)
    kernel = np.ones(width)
    sums = np.convolve(np.array(getattr(run.series, name)) * spans, kernel, "same")
    smooth: npt.NDArray[np.float64] = sums / np.maximum(np.convolve(spans, kernel, "same"), 1e-12)
    return smooth


def _bars(axes: Axes, title: str, values: Mapping[str, float]) -> None:
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(values))]
    axes.bar_label(axes.bar(list(values), list(values.values()), 0.6, color=colours), fmt="%.3g", fontsize=8)
    axes.set(title=title)
    axes.margins(y=0.15)
    axes.grid(axis="x", visible=False)
