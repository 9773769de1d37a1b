"""Power and clocks of decode attention and of a plain memory read: `python benchmarks/kernels.py power`.

Each runs for seconds, as in a real run: a GPU at its power limit lowers its clock, which a burst of milliseconds does
not show. Prints TB/s in a burst and sustained, watts, MHz and joules per TB.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time

import torch

from benchmarks.kernel_attention import attention_of
from benchmarks.kernel_timing import HEAD, KV_HEADS, PAGE, RESULTS, Rows, graph_of, mean_of, randn, scene, time_graph
from paceline.kernels._triton import tl, triton
from paceline.kernels.decode_attention import DecodeTuning, decode_attention_tuning
from paceline.kernels.decode_units import Chunks

_SETTLE_S, _RUN_S = 0.7, 1.8

OTHERS = {
    "32 keys, 4 warps": DecodeTuning(block_m=2),
    "16 keys, 1 warp": DecodeTuning(block_m=2, block_n=16, num_warps=1, num_stages=4, max_registers=255),
    "16 keys, 2 warps": DecodeTuning(block_m=2, block_n=16, num_warps=2, num_stages=4, max_registers=168),
}


@triton.jit
def _read_kernel(x, order, out, PAGES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(PAGES):
        page = tl.load(order + tl.program_id(0) * PAGES + i).to(tl.int64)
        for j in tl.static_range(SIZE // BLOCK):
            total += tl.load(x + page * SIZE + j * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


class Meter:
    """Samples watts and MHz some twenty times per second."""

    def __init__(self) -> None:
        tool = ["nvidia-smi", "-lms", "50", "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits"]
        self._process = subprocess.Popen(tool, stdout=subprocess.PIPE, text=True)
        self._seen: list[tuple[float, float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None, "stdout is a pipe"
        for line in self._process.stdout:
            watts, clock = line.split(",")
            self._seen.append((time.time(), float(watts), float(clock)))

    def since(self, begin: float) -> tuple[float, float]:
        seen = [(watts, clock) for at, watts, clock in self._seen if at >= begin]
        return statistics.mean(watts for watts, _ in seen), statistics.mean(clock for _, clock in seen)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def bench_power() -> None:
    print("Memory reads: TB/s in a burst and sustained, watts, MHz, joules per TB")
    meter = Meter()
    try:
        _read(meter)
        for name, batch, mean, spread in [
            ("b256 ~840", 256, 840, 700),
            ("b160 ~1000", 160, 1000, 700),
            ("b96 ~1200", 96, 1200, 700),
            ("b256 ~272", 256, 272, 128),
        ]:
            what = scene(name, batch, mean, spread, chunks=Chunks(max_tokens=2048))
            rows = Rows(what)
            rows.split(what.chunks)
            caches = randn(2 * what.layers, rows.num_pages, PAGE, KV_HEADS, HEAD)
            shipped = decode_attention_tuning(batch, 2, 0, short_contexts=mean < 400)[0]
            for label, tuning in {"as shipped": shipped, **OTHERS}.items():
                graph = graph_of(attention_of(rows, what, tuning, caches))
                _sustain(meter, f"{name}, {label}", graph, rows.kv_bytes * what.layers)
            del caches
    finally:
        meter.close()


def _read(meter: Meter, pages: int = 1 << 17, size: int = 8192, block: int = 2048, each: int = 16) -> None:
    x = torch.randn(pages * size, device="cuda")
    order = torch.randperm(pages, device="cuda").int()
    out = torch.empty(pages // each * block, device="cuda")
    work = graph_of(lambda: _read_kernel[(pages // each,)](x, order, out, each, size, block, num_warps=8))
    _sustain(meter, "a plain read", work, pages * size * 4)


def _sustain(meter: Meter, name: str, graph: torch.cuda.CUDAGraph, num_bytes: int) -> None:
    burst = time_graph(graph, repeats=5, inner=2)
    inner = max(1, int(0.05 / burst))
    began, times = time.time(), []
    while time.time() < began + _RUN_S:
        took = mean_of(graph, inner)
        if time.time() > began + _SETTLE_S:
            times.append(took)
    seconds = statistics.mean(times)
    watts, clock = meter.since(began + _SETTLE_S)
    RESULTS[f"power {name}"] = (burst, seconds, watts, clock)
    rates = f"{num_bytes / burst / 1e12:6.2f} {num_bytes / seconds / 1e12:6.2f}"
    print(f"{name:32} {rates} {watts:6.0f} {clock:6.0f} {watts * seconds / num_bytes * 1e12:7.1f}", flush=True)
    time.sleep(0.5)
