"""Draws what overlap scheduling is worth by batch size, from the RESULT lines of `bench offline --overlap both`.

python benchmarks/plot_overlap.py benchmarks/results/2026-11-16-h200-overlap.jsonl -o docs/pictures/overlap-h200.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_COLOURS = ("#0072b2", "#d55e00")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.results.read_text().splitlines()]
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "paceline"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    for colour, shape in zip(_COLOURS, dict.fromkeys(row["shape"] for row in rows), strict=True):
        found: dict[str, dict[int, Any]] = {"on": {}, "off": {}}
        for row in rows:
            if row["workload"].startswith("sweep") and row["shape"] == shape:
                found[row["overlap"]][int(row["workload"].removeprefix("sweep-"))] = row
        batches = sorted(found["on"])
        ratios = [found["off"][size]["ms_per_token"] / found["on"][size]["ms_per_token"] for size in batches]
        left.plot(batches, ratios, "o-", color=colour, label=shape, markersize=4)
        for mode, style in (("off", "o--"), ("on", "o-")):
            idle = [100 * found[mode][size]["gpu_idle_share"] for size in batches]
            right.plot(batches, idle, style, color=colour, label=f"{shape}, overlap {mode}", markersize=4)
    left.axhline(1, color="#999999", linewidth=0.8)
    left.set(title="Tokens per second, overlap on / off", xlabel="running requests", ylabel="ratio", xscale="log")
    right.set(title="Time the GPU is idle", xlabel="running requests", ylabel="% of the run", xscale="log")
    for axes in (left, right):
        axes.set_xticks([1, 2, 4, 8, 16, 32, 64, 128, 256], [str(size) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    left.set_ylim(0.9, None)
    figure.tight_layout()
    figure.savefig(given.output, metadata={"Date": None} if given.output.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
