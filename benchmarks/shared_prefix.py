"""How much faster is decoding when rows read a shared prefix once (`shared_reads`)?

    python benchmarks/shared_prefix.py [--shape qwen3-0.6b]            on a GPU
    python benchmarks/shared_prefix.py --plot OUTPUT PICTURE           anywhere

Prints the device time of a decode batch with `shared_reads` on and off, by group size and prefix length, for groups of
rows with one prefix each, with the same weights and prompts. Where 256 rows do not fit the memory, both batches are
smaller.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

GROUPS, PREFIXES = (1, 2, 4, 16, 64, 256), (128, 512, 2048, 16384)
ROWS, OWN, TOKENS_OUT, POOL = 256, 128, 24, 280_000


def scene(group: int, prefix: int) -> list[list[int]] | None:
    """The prompts of a batch; None if not even two groups fit."""
    each = prefix + group * (OWN + TOKENS_OUT)
    count = min(ROWS // group, POOL // each)
    if count < 1 or (count < 2 and group < ROWS):
        return None
    rng = np.random.default_rng(group * 100_003 + prefix)
    heads = rng.integers(100_000, size=(count, prefix)).tolist()
    return [[*head, *rng.integers(100_000, size=OWN).tolist()] for head in heads for _ in range(group)]


def measure(shared: bool, shape: str) -> dict[tuple[int, int], tuple[int, float]]:
    """(group, prefix) -> rows, milliseconds of a decode batch."""
    from paceline.llm import LLM
    from paceline.request import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=TOKENS_OUT)
    found = {}
    with LLM(load="random", shape=shape, device="cuda", kv_tokens=POOL + 100_000, shared_reads=shared) as llm:
        device: Any = llm.engine.executor
        for prefix in PREFIXES:
            for group in GROUPS:
                prompts = scene(group, prefix)
                if prompts is None:
                    continue
                llm.generate(prompts, params)  # prefill, and graph capture
                device.reset_stats()
                llm.generate(prompts, params)
                decodes = [of for bucket, of in device.stats.by_bucket.items() if bucket]
                each = sum(of.device_s for of in decodes) / sum(of.passes for of in decodes)
                found[group, prefix] = (len(prompts), each * 1e3)
                result = {
                    "workload": "sharing",
                    "shape": shape,
                    "group": group,
                    "prefix": prefix,
                    "rows": len(prompts),
                    "shared_reads": shared,
                    "ms": round(each * 1e3, 3),
                }
                print("RESULT " + json.dumps(result), flush=True)
    return found


def run(shape: str) -> None:
    on = measure(True, shape)
    gc.collect()
    off = measure(False, shape)
    print(
        f"{shape}: speed-up of a decode batch (ms separate / ms shared), rows\n| prefix | "
        + " | ".join(map(str, GROUPS))
    )
    for prefix in PREFIXES:
        cells = []
        for group in GROUPS:
            if (group, prefix) not in on:
                cells.append("–")
                continue
            rows, shared_ms = on[group, prefix]
            separate_ms = off[group, prefix][1]
            cells.append(f"{separate_ms / shared_ms:.2f} ({separate_ms:.2f} / {shared_ms:.2f}; {rows})")
        print(f"| {prefix} | " + " | ".join(cells), flush=True)


def plot(source: Path, target: Path) -> None:
    """Plots the RESULT lines in a file: speed-up by group size, one line per prefix length."""
    from matplotlib import pyplot

    ms: dict[tuple[int, int], dict[bool, float]] = {}
    for line in source.read_text().splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line[7:])
            ms.setdefault((found["prefix"], found["group"]), {})[found["shared_reads"]] = found["ms"]
    lines: dict[int, list[tuple[int, float]]] = {}
    for (prefix, group), of in sorted(ms.items()):
        lines.setdefault(prefix, []).append((group, of[False] / of[True]))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for prefix, points in lines.items():
        groups, gains = zip(*points, strict=True)
        axes.plot(groups, gains, marker="o", label=f"{prefix:,} tokens")
    axes.loglog()
    for axis, ticks in ((axes.xaxis, sorted({group for _, group in ms})), (axes.yaxis, (1, 2, 4, 8))):
        axis.set_ticks(ticks, labels=[str(tick) for tick in ticks])
        axis.set_minor_locator(pyplot.NullLocator())
    axes.set_xlabel("requests with the same prefix")
    axes.set_ylabel("speed-up over separate reads")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend(title="shared prefix")
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("OUTPUT", "PICTURE"), help="plot the output of a run")
    given = parser.parse_args()
    if given.plot:
        plot(*given.plot)
    else:
        run(given.shape)


if __name__ == "__main__":
    main()
