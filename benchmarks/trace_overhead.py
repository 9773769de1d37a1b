"""What recording a trace costs: the same decode batches with and without a recorder, alternating, on one engine.

    python benchmarks/trace_overhead.py --shape qwen3-0.6b --batches 1,64,256

Prints a line per batch size: milliseconds per output token, and their ratio. Recording must cost less than 2%.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial

from paceline.bench.workloads import sweep
from paceline.engine import trace_recorder
from paceline.llm import LLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with LLM(load="random", shape=given.shape) as llm:
        engine = llm.engine
        for batch in (int(text) for text in given.batches.split(",")):
            times: dict[bool, list[float]] = {False: [], True: []}
            size = encode_s = 0.0
            for repeat in range(given.repeats + 1):
                for traced in (False, True):
                    work = sweep(batch, given.tokens, seed=1000 * repeat + batch + traced)
                    recorder = None
                    if traced:
                        recorder = engine.call(lambda scheduler: trace_recorder._install(engine, scheduler)).result()
                    began = time.perf_counter()
                    llm.generate(work.prompts, work.params)
                    seconds = time.perf_counter() - began
                    if recorder is not None:
                        engine.call(partial(trace_recorder._remove, engine, recorder=recorder)).result()
                        began = time.perf_counter()
                        size = sum(map(len, trace_recorder._encode(recorder)))
                        encode_s = time.perf_counter() - began
                    if repeat:  # the first pair warms up
                        times[traced].append(seconds / given.tokens * 1e3)
            off, on = min(times[False]), min(times[True])
            print(f"{batch:4d} rows: {off:.4f} ms per token, {on:.4f} recorded, ratio {on / off:.4f}; "
                  f"{size / 1e6:.1f} MB in {encode_s:.2f} s")  # fmt: skip
            print("RESULT " + json.dumps({"rows": batch, "off_ms": off, "on_ms": on, "ratio": on / off}), flush=True)


if __name__ == "__main__":
    main()
