"""What makes a launch slow on a GPU, and what a CUDA graph costs to capture.

    python benchmarks/slow_launches.py [--shape NAME | --model FILE] [--seconds 40] [--no-costs]

First a table: captures of several kinds, with an idle device and behind a kernel that runs for 0.3 s, and how long
each step of them took. Then the mix of `paceline bench offline mix`; for every launch of more than 20 ms, where the
engine's thread was, by samples of its stack.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from paceline import LLM
from paceline.bench.mix import mix
from paceline.bench.runner import BenchRunner
from paceline.config import OfflineConfig
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.cuda.graphs import GraphKey, GraphStage

_BUSY_CYCLES = 600_000_000  # about 0.3 s
_cuda: Any = torch.cuda  # most of it is untyped
_SAMPLED_S = 0.02  # launches that take longer are explained


def capture_costs(executor: CudaExecutor) -> None:
    """Runs on the engine's thread."""
    streams: Any = executor.streams
    sizes = executor.graphs.sizes
    prefill = executor.prefill.buckets
    kinds = {
        "decode": [(size, GraphKey()) for size in sizes],
        "filters": [(size, GraphKey(filters=True)) for size in sizes],
        "logprobs, adjusts": [(size, GraphKey(logprobs=True, adjusts=True)) for size in sizes],
        "logits": [(size, GraphKey(stage=GraphStage.LOGITS)) for size in sizes],
        "tokens": [(size, GraphKey(stage=GraphStage.TOKENS)) for size in sizes],
        "shared": [(size, GraphKey(shared_block_m=16)) for size in sizes[::2]],
        "prefill": [(sizes[-1], GraphKey(prefill=bucket)) for bucket in prefill],
        "prefill, all states": [(sizes[-1], GraphKey(prefill=bucket, all_states=True)) for bucket in prefill],
    }
    print(
        f"{'captured graph':34} {'device':6} {'begin':>8} {'work':>8} {'end':>8} {'replay':>8}  allocations, still busy"
    )
    for name, graphs in kinds.items():
        missing = [graph for graph in graphs if graph not in executor.graphs._graphs][::-1][:6]
        for number, (rows, key) in enumerate(missing):
            is_busy = number % 2 == 1
            torch.cuda.synchronize()
            allocated = _cuda.memory_stats()["num_device_alloc"]
            ended = _cuda.Event()
            with streams.use(streams.engine):
                if key.prefill is not None:
                    executor.prefill.load_padding(key.prefill)
                torch.cuda.synchronize()
                if is_busy:
                    _cuda._sleep(_BUSY_CYCLES)
                    ended.record()
                times = [time.perf_counter()]
                graph = _cuda.CUDAGraph()
                graph.capture_begin(pool=streams._pool, capture_error_mode="relaxed")
                times.append(time.perf_counter())
                executor.run_pass(rows, key)
                times.append(time.perf_counter())
                graph.capture_end()
                times.append(time.perf_counter())
                graph.replay()
                times.append(time.perf_counter())
                still = is_busy and not ended.query()
            torch.cuda.synchronize()
            executor.graphs._graphs[rows, key] = graph
            steps = " ".join(f"{(b - a) * 1e3:8.2f}" for a, b in itertools.pairwise(times))
            size = key.prefill.tokens if key.prefill else rows
            new = _cuda.memory_stats()["num_device_alloc"] - allocated
            print(f"{name + ' ' + str(size):34} {'busy' if is_busy else 'idle':6} {steps}  {new}, {still}", flush=True)


class Sampler(threading.Thread):
    """Samples the stack of a thread while it launches."""

    def __init__(self, executor: CudaExecutor, thread_id: int) -> None:
        super().__init__(daemon=True)
        self.thread_id, self.began, self.samples = thread_id, 0.0, Counter[str]()
        self.found: list[tuple[float, bool, str, Counter[str]]] = []
        watch = executor.watch
        begin, end = watch.begin, watch.end

        def begin_sampled() -> Any:
            self.samples, self.began = Counter(), time.perf_counter()
            return begin()

        def end_sampled(before: Any, what: str, *, is_device_busy: bool = False) -> str | None:
            seconds, self.began = time.perf_counter() - self.began, 0.0
            if seconds > _SAMPLED_S:
                self.found.append((seconds, is_device_busy, what, self.samples))
            cause = end(before, what, is_device_busy=is_device_busy)
            self.began = 0.0  # `_cause` has asked for the beginning, too
            return cause

        executor.watch.begin = begin_sampled  # type: ignore[method-assign]
        executor.watch.end = end_sampled  # type: ignore[method-assign]

    def run(self) -> None:
        while True:
            time.sleep(0.002)
            if self.began and (frame := sys._current_frames().get(self.thread_id)) is not None:
                places: list[str] = []
                while frame is not None and "importlib" in frame.f_code.co_filename:
                    frame = frame.f_back
                while frame is not None and len(places) < 6:
                    places.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}")
                    frame = frame.f_back
                self.samples[" < ".join(places)] += 1

    def report(self) -> None:
        print(f"{len(self.found)} launches of more than {_SAMPLED_S * 1e3:.0f} ms")
        for seconds, is_busy, what, samples in sorted(self.found, key=lambda one: -one[0])[:14]:
            print(f"{seconds * 1e3:6.0f} ms {'nobody waited' if is_busy else 'WAITED FOR   '} {what}")
            for place, count in samples.most_common(5):
                print(f"       {count:4} {place}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--model")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--costs", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    source: dict[str, Any] = {"model": given.model} if given.model else {"load": "random", "shape": given.shape}
    device = torch.device("cuda")
    config = OfflineConfig(mix_seconds=given.seconds, scale=1.0)

    def make() -> LLM:
        return LLM(max_running=512, **source)

    runner = BenchRunner(config, given.shape, make, make, device, torch.bfloat16)
    llm = runner.load_cold()
    print(f"ready after {runner.startup_s:.2f} s", flush=True)
    executor = llm.engine.executor.local
    assert isinstance(executor, CudaExecutor), "run this on a GPU"
    thread_id = llm.engine.call(lambda _: threading.get_ident()).result()
    sampler = Sampler(executor, thread_id)
    sampler.start()
    if given.seconds:
        found = mix(runner, llm)
        sampler.report()
        graphs = executor.graphs
        longest = max((seconds for seconds, is_busy, *_ in sampler.found if not is_busy), default=0.0)
        print(f"longest launch that a request waited for: {longest * 1e3:.0f} ms")
        print(found, f"{len(graphs._graphs)} graphs, {graphs.capture_s:.2f} s of captures", flush=True)
    llm.close()
    if given.costs:
        llm = make()
        executor = llm.engine.executor.local
        assert isinstance(executor, CudaExecutor), "as before"
        llm.engine.call(lambda _: torch.inference_mode()(capture_costs)(executor)).result()
        llm.close()


if __name__ == "__main__":
    main()
