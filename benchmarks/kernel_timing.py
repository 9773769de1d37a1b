"""Shared by the kernel benchmarks: the shape of the model, rows to decode, timing inside a CUDA graph.

Tensors that are timed must outlive their graph: a graph holds addresses, not tensors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from paceline.engine.cuda.compile_workers import CompileWorkers
from paceline.engine.cuda.packing import sampling_words
from paceline.engine.cuda.precompile import _compile
from paceline.kernels.binaries import KernelStore
from paceline.kernels.decode_attention import DecodeWorkspace
from paceline.kernels.decode_units import Chunks, DecodeUnits, decode_units
from paceline.kernels.driver import use_binaries
from paceline.kernels.slot_state import SlotState
from paceline.kernels.variants import KernelVariant

Job = TypeVar("Job")
# Qwen3-0.6B
HIDDEN, LAYERS, Q_HEADS, KV_HEADS, HEAD, FFN, VOCAB, EPS = 1024, 28, 16, 8, 128, 3072, 151_936, 1e-6
# name, N, K, gated: the linear layers of Qwen3-14B
LINEARS = [
    ("14B qkv", 7168, 5120, False),
    ("14B out", 5120, 5120, False),
    ("14B gate_up", 34816, 5120, True),
    ("14B down", 5120, 17408, False),
]
L2_BYTES = 200 << 20  # more than the L2 cache holds
PAGE = 16
BF16 = torch.bfloat16
RESULTS: dict[str, object] = {}


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, repeats: int = 9, inner: int = 3) -> float:
    """Median seconds of one replay."""
    graph.replay()
    return statistics.median(mean_of(graph, inner) for _ in range(repeats))


def mean_of(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Mean seconds of so many consecutive replays."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / replays / 1e3


def timed(work: Callable[[], object]) -> float:
    return time_graph(graph_of(work))


def in_turn(works: list[Callable[[], object]]) -> float:
    """Seconds of each, if their weights are not in the L2 cache."""

    def work() -> None:
        for one in works:
            one()

    return timed(work) / len(works)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all(), "an output is not finite"
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16).mul_(scale)


def ints(values: list[int] | np.ndarray) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, np.int32)).cuda()


def compile_all(function: Callable[[Job], str], jobs: list[Job]) -> set[Job]:
    """Compiles in parallel, since the timed process would compile one by one. Returns the jobs that cannot run."""
    begin = time.time()
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        answers = list(pool.map(function, jobs, chunksize=4))
    failed = {job: answer for job, answer in zip(jobs, answers, strict=True) if answer}
    print(f"compiled {len(jobs)} variants in {time.time() - begin:.0f} s, {len(failed)} cannot run", flush=True)
    for answer in list(failed.values())[:3]:
        print("  ", answer)
    return set(failed)


def compile_variants(variants: set[KernelVariant], folder: Path) -> tuple[int, int]:
    """Compiles recorded launches in parallel; later launches use them. Returns the architecture, and how many failed:
    those that need too much shared memory, for instance."""
    major, minor = torch.cuda.get_device_capability()
    arch, failed = 10 * major + minor, 0
    with closing(CompileWorkers(16)) as workers:
        for task in [workers.submit(_compile, variant, folder, arch) for variant in sorted(variants, key=repr)]:
            try:
                task.result()
            except Exception as error:  # reported when it is timed
                failed += 1
                print("cannot compile:", repr(error)[:160])
    use_binaries(KernelStore(folder, arch), [])
    return arch, failed


@dataclass(frozen=True)
class Scene:
    name: str
    lengths: tuple[int, ...]  # positions being decoded
    chunks: Chunks = Chunks()  # noqa: RUF009  (frozen)
    group: int = 1  # consecutive rows that share a prefix
    prefix: int = 0
    layers: int = LAYERS


def scene(name: str, batch: int, mean: int, spread: int = 0, **kwargs: object) -> Scene:
    rng = np.random.default_rng(batch)
    lengths = rng.integers(mean - spread, mean + spread + 1, batch)
    return Scene(name, tuple(lengths.tolist()), **kwargs)  # type: ignore[arg-type]


class Rows:
    """Device state for the rows of a scene, with pages in random order."""

    def __init__(self, what: Scene, rows_per_unit: int = 8, share: bool = True) -> None:
        batch = len(what.lengths)
        longest = max(what.lengths) + 64
        per_slot = -(-longest // PAGE)
        self.state = SlotState.empty(batch, per_slot * PAGE, PAGE, batch, "cuda")
        counts = [-(-(n + 64) // PAGE) for n in what.lengths]
        self.num_pages = sum(counts)
        order = torch.randperm(self.num_pages, device="cuda").int()
        begin = 0
        for row, count in enumerate(counts):
            self.state.page_table[row, :count] = order[begin : begin + count]
            begin += count
        self.state.num_computed.copy_(ints(list(what.lengths)))
        self.state.token_pool.random_(0, VOCAB)
        self.state.row_slots.copy_(torch.arange(batch))
        self.state.num_rows.fill_(batch)
        for row in range(batch):
            self.state.sampling[row] = torch.from_numpy(sampling_words(0.6, 0, 1.0, 0.0, row)).cuda()
        self.capacity = what.chunks.capacity(batch, per_slot * PAGE) + (batch if what.prefix else 0)
        self.units = DecodeUnits.empty(batch, self.capacity, self.capacity, "cuda")
        self.workspace = DecodeWorkspace.empty(batch, self.capacity, Q_HEADS, KV_HEADS, HEAD, "cuda")
        self.keep: tuple[object, ...] = ()
        self.kv_bytes = sum(what.lengths) * KV_HEADS * HEAD * 2 * 2
        if what.prefix:
            self._share(what, rows_per_unit, share)

    def _share(self, what: Scene, rows_per_unit: int, share: bool) -> None:
        batch, size = len(what.lengths), what.chunks.max_tokens
        segments = [(begin, min(begin + size, what.prefix)) for begin in range(0, what.prefix, size)]
        units: list[tuple[int, ...]] = []
        query_rows: list[int] = []
        for first in range(0, batch, what.group):
            self.state.page_table[first : first + what.group, : what.prefix // PAGE] = self.state.page_table[
                first, : what.prefix // PAGE
            ]
            for index, segment in enumerate(segments):
                for begin in range(first, first + what.group, rows_per_unit):
                    members = list(range(begin, min(begin + rows_per_unit, first + what.group)))
                    units.append((begin, len(query_rows), len(members), *segment, index))
                    query_rows += members
        if share:
            self.units.shared_units[: len(units)] = ints(np.array(units))
            self.units.num_shared.fill_(len(units))
            self.units.shared_chunk.fill_(size)
            self.units.shared_rows.copy_(ints([(what.prefix, len(segments))] * batch))
            self.units.query_rows[: len(query_rows)] = ints(query_rows)

    def split(self, chunks: Chunks, step: torch.Tensor | None = None) -> None:
        decode_units(self.units, self.state.row_slots, self.state.num_rows, self.state.num_computed, chunks, step=step)
