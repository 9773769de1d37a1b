"""Draws a window of trace files as pictures, one above the other: host lanes and device, as Perfetto shows them.

    python benchmarks/plot_trace.py off.json on.json --labels "overlap off,overlap on" --steps 6 -o overlap-trace.svg

The window begins at a pass in the middle of the run and is equally long in all files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_COLOURS = {
    "plan": "#0072b2", "launch": "#56b4e9", "wait": "#d9d9d9", "commit": "#009e73", "text": "#cc79a7",
    "masks": "#e69f00", "device": "#d55e00",
}  # fmt: skip
_LANES = ("plan", "launch", "wait", "commit", "text", "device")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--labels", required=True)
    parser.add_argument("--steps", type=int, default=6, help="passes of the first file in the window")
    parser.add_argument("--middle", type=float, default=0.5, help="where in the run the window is, 0 to 1")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "paceline"})
    figure, grid = plt.subplots(len(given.traces), 1, figsize=(10, 2.1 * len(given.traces)), squeeze=False)
    window = None
    for axes, path, label in zip(grid.flat, given.traces, given.labels.split(","), strict=True):
        spans = read(path)
        device = [span for span in spans if span[0] == "device"]
        first = device[int(len(device) * given.middle)]
        if window is None:
            later = device[int(len(device) * given.middle) + given.steps]
            window = later[1] - first[1]
        begin, end = first[1] - 0.02 * window, first[1] + window
        shown = [span for span in device if span[1] < end and span[2] > begin]
        busy = sum(min(span[2], end) - max(span[1], begin) for span in shown) / (end - begin)
        for lane, began, ended in spans:
            if lane in _LANES and ended > begin and began < end:
                row = len(_LANES) - 1 - _LANES.index(lane)
                axes.broken_barh([((began - begin) / 1e3, (ended - began) / 1e3)], (row - 0.4, 0.8),
                                 facecolors=_COLOURS[lane], edgecolor="white", linewidth=0.4)  # fmt: skip
        axes.set_yticks(range(len(_LANES)), reversed([f"CPU {lane}" if lane != "device" else "GPU" for lane in _LANES]))
        axes.set_xlim(0, (end - begin) / 1e3)
        axes.set_title(f"{label}: GPU busy {busy:.0%} of this window", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    grid.flat[-1].set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(given.output, metadata={"Date": None} if given.output.suffix == ".svg" else None)


def read(path: Path) -> list[tuple[str, float, float]]:
    """Spans as lane, begin and end in microseconds."""
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] in (1, 2)]
    return sorted(
        (
            ("device" if event["pid"] == 2 else event["name"].split()[0], event["ts"], event["ts"] + event["dur"])
            for event in spans
        ),
        key=lambda span: span[1],
    )


if __name__ == "__main__":
    main()
