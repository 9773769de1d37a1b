"""Why is the first run of a workload slower than a later one? Compares them pass by pass.

    python benchmarks/first_runs.py [WORKLOAD ...]      nano, gsp, zipf, prompts (default: prompts)

The runs of a workload plan the same passes with other token ids. Prints the seconds of each run, then the passes of the
first one that took longest beside the same pass of the last: on the device, idle before it, and the launch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paceline import LLM
from paceline.bench.workloads import OfflineWorkload, gsp_offline, long_prompts, nano, zipf
from paceline.engine.timeline import Timeline

WORKLOADS = {"nano": nano, "gsp": gsp_offline, "zipf": zipf, "prompts": long_prompts}
_RUNS, _SHOWN = 3, 24


def run(llm: LLM, work: OfflineWorkload) -> tuple[float, Timeline]:
    timeline = Timeline()
    llm.engine.call(lambda _: setattr(llm.engine.loop, "trace", timeline)).result()
    began = time.perf_counter()
    llm.generate(work.prompts, work.params, progress=False)
    seconds = time.perf_counter() - began
    llm.engine.call(lambda _: setattr(llm.engine.loop, "trace", None)).result()
    return seconds, timeline


def compare(name: str, first: Timeline, last: Timeline) -> None:
    launches = [
        {span.step: span.ended - span.began for span in one.spans if span.what == "launch"} for one in (first, last)
    ]
    rows = []
    for a, b in zip(first.passes, last.passes, strict=False):
        launch = [steps.get(each.step, 0.0) for steps, each in zip(launches, (a, b), strict=True)]
        lost = a.device_s + a.idle_s - b.device_s - b.idle_s
        rows.append((lost, a, b, launch))
    total_ms = 1e3 * sum(row[0] for row in rows)
    print(f"{name}: {len(first.passes)} and {len(last.passes)} passes, first - last {total_ms:.1f} ms")
    print("  lost ms   device ms first/last   idle ms first/last   launch ms first/last   pass")
    for lost, a, b, launch in sorted(rows, key=lambda row: -row[0])[:_SHOWN]:
        print(
            f"  {lost * 1e3:7.2f}   {a.device_s * 1e3:9.2f} {b.device_s * 1e3:9.2f}   {a.idle_s * 1e3:8.2f} "
            f"{b.idle_s * 1e3:8.2f}   {launch[0] * 1e3:9.2f} {launch[1] * 1e3:9.2f}   {a.name}, {a.num_sampled} sampled"
        )


def main() -> None:
    with LLM(load="random", shape="qwen3-0.6b") as llm:
        for name in sys.argv[1:] or ["prompts"]:
            runs = [run(llm, WORKLOADS[name]().shifted(17 * number)) for number in range(_RUNS)]
            print(f"{name}: " + ", ".join(f"{seconds:.3f} s" for seconds, _ in runs))
            compare(name, runs[0][1], runs[-1][1])


if __name__ == "__main__":
    main()
