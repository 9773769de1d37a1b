"""How much do busy processes on the same cores slow down CPU decoding, by the spin count of OpenMP's threads?

    python benchmarks/cpu_contention.py --spins 300000,4000,0 --busy 0,1,2 --rounds 10

Prints milliseconds per token (median, mean, slowest turn) by number of busy processes and spin count, and the ratio to
the first spin count. 300,000 is libgomp's default; 0 never spins. Each spin count has its own process with the default
model; the processes take turns, so that other load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from statistics import mean, median


def serve_turns() -> None:
    """A process with an engine: for each number on stdin, generates so many tokens and prints the ms of each."""
    from paceline import LLM, SamplingParams
    from paceline.engine.timeline import Timeline

    timeline = Timeline()
    with LLM(kv_tokens=2048, trace=timeline) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            params = SamplingParams(max_tokens=int(line), ignore_eos=True, temperature=0)
            first = len(timeline.passes)
            llm.generate("The capital of France is", params)
            print(json.dumps([one.device_s * 1e3 for one in timeline.passes[first + 1 :]]), flush=True)


def start(spins: int) -> subprocess.Popen[str]:
    env = {**os.environ, "GOMP_SPINCOUNT": str(spins)}
    command = [sys.executable, __file__, "--turns"]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], num_tokens: int) -> list[float]:
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    print(num_tokens, file=process.stdin, flush=True)
    return list(json.loads(process.stdout.readline()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--spins", default="300000,4000,0", help="spin counts to compare; ratios are to the first")
    parser.add_argument("--busy", default="0,1,2", help="numbers of busy processes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=8, help="tokens per turn")
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turns:
        serve_turns()
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    processes = {int(spins): start(int(spins)) for spins in args.spins.split(",")}
    for process in processes.values():
        assert process.stdout is not None and process.stdout.readline() == "ready\n", "an engine did not start"
        ask(process, args.tokens)
    turns: dict[tuple[int, int], list[list[float]]] = defaultdict(list)
    for _ in range(args.rounds):
        for num_busy in map(int, args.busy.split(",")):
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
            time.sleep(0.5)  # until the scheduler has spread them
            for spins, process in processes.items():
                turns[num_busy, spins].append(ask(process, args.tokens))
            for one in busy:
                one.kill()
                one.wait()
    for process in processes.values():
        process.communicate()
    print("ms per token; load averages", *(f"{load:.1f}" for load in os.getloadavg()))
    print("busy   spins  median    mean  slowest turn   ratio of medians, turn by turn")
    first = next(iter(processes))
    for (num_busy, spins), found in sorted(turns.items(), key=lambda item: item[0][0]):
        ratio = median(median(a) / median(b) for a, b in zip(found, turns[num_busy, first], strict=True))
        means = [mean(turn) for turn in found]
        middle = median(median(turn) for turn in found)
        print(f"{num_busy:4} {spins:7} {middle:7.1f} {mean(means):7.1f} {max(means):13.1f} {ratio:8.2f}")


if __name__ == "__main__":
    main()
