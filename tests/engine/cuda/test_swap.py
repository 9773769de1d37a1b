"""KV pages between a GPU and host memory, in the interpreter: the right pages, in an order that cannot race."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import ConfigError
from paceline.engine.cuda import swap as cuda_swap
from paceline.engine.cuda.build import host_page_cost
from paceline.engine.cuda.parts import _DEPTH
from paceline.engine.cuda.streams import HostStreams
from paceline.engine.cuda.swap import CudaSwap
from paceline.model.shapes import shape
from paceline.scheduler.invariants import check as check_invariants
from paceline.shared_pages import SharedPages
from tests.engine.cuda.interpreted import GREEDY, INTERPRETED, PROMPTS, expected, on_kernels

pytestmark = INTERPRETED


def test_pages_fetched_from_the_host_give_the_same_tokens_as_the_cpu() -> None:
    wanted = expected("tiny-qwen3", PROMPTS, GREEDY)
    llm, device = on_kernels("tiny-qwen3", num_pages=7, num_host_pages=24, max_swap_pages=3)
    with llm:
        for number in (0, 3, 0, 3, 0):
            (output,) = llm.generate([PROMPTS[number]], GREEDY)
            assert output.token_ids == wanted[number]
        llm.engine.call(check_invariants).result()
        counters = llm.engine.scheduler.counters
        assert counters.spilled_pages > 4 and counters.fetched_tokens > 4 * 4
        assert device.stats.fetched_pages * 4 == counters.fetched_tokens and device.stats.fetch_s > 0


def test_warm_up_changes_no_page() -> None:
    kv = torch.randn(4, 3, 2, 8)
    before = kv.clone()
    CudaSwap(HostStreams(), [kv], 2, 1).warm_up()
    assert torch.equal(kv, before)


def test_pages_of_two_groups_move_together() -> None:
    groups = [torch.randn(4, 6, 3, 8), torch.randn(2, 6, 3, 40)]
    before = [group.clone() for group in groups]
    swap = CudaSwap(HostStreams(), groups, 5, 3)
    swap.spill(torch.tensor([4, 1, 2], dtype=torch.int32), np.array([3, 0, 1], np.int32))
    for group in groups:
        group[:, [1, 2, 4]] = torch.nan
    began, arrived = (HostStreams().event() for _ in range(2))
    swap.fetch(torch.tensor([2, 5, 4], dtype=torch.int32), np.array([1, 0, 3], np.int32), began, arrived)
    for group, old in zip(groups, before, strict=True):
        assert torch.equal(group[:, [2, 5, 4, 0, 3]], old[:, [2, 1, 4, 0, 3]]) and group[:, 1].isnan().all()


def test_host_memory_that_cannot_be_pinned_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned(self: Any, size: int) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(HostStreams, "pinned", pinned)
    with pytest.raises(ConfigError, match=r"0.50 GiB of host memory for KV cannot be pinned \(CUDA error: out of mem"):
        CudaSwap(HostStreams(), [torch.zeros(4, 2, 256)], 2**17, 1)


def test_a_small_model_on_a_fast_gpu_fetches_only_long_prefixes() -> None:
    assert host_page_cost(shape("qwen3-0.6b"), 2, 16) == pytest.approx(16 * 114_688 / 53e9 * 700e12 / 1.2e9, rel=0.02)
    assert 16 < host_page_cost(shape("qwen3-0.6b"), 2, 16) < 32
    assert host_page_cost(shape("qwen3-14b"), 2, 16) < 2


# ---------------------------------------------------------------------- order between streams


@dataclass(eq=False)
class Op:
    stream: str
    number: int  # on its stream
    clock: dict[str, int]  # operations of each stream that have certainly run before
    reads: set[Any]
    writes: set[Any]


@dataclass
class Watch:
    """Streams that record operations, and which of them wait for which, instead of running them."""

    ops: list[Op] = field(default_factory=list)
    now: str = "engine"
    clocks: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    host: dict[str, int] = field(default_factory=dict)
    engine = "engine"
    spill = "spill"
    fetch = "fetch"

    @contextmanager
    def use(self, stream: str) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def event(self) -> WatchedEvent:
        return WatchedEvent(self)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def run(self, reads: set[Any], writes: set[Any]) -> None:
        clock = self.clocks[self.now]
        merge(clock, self.host)
        clock[self.now] = clock.get(self.now, 0) + 1
        self.ops.append(Op(self.now, clock[self.now], dict(clock), reads, writes))

    def races(self) -> list[tuple[Op, Op]]:
        return [
            (one, other)
            for one, other in itertools.combinations(self.ops, 2)
            if (one.writes & (other.reads | other.writes) or one.reads & other.writes)
            and other.clock.get(one.stream, 0) < one.number
        ]


@dataclass
class WatchedEvent:
    watch: Watch
    clock: dict[str, int] = field(default_factory=dict)

    def record(self, stream: str) -> None:
        self.clock = dict(self.watch.clocks[stream])

    def wait(self, stream: str) -> None:
        merge(self.watch.clocks[stream], self.clock)

    def synchronize(self) -> None:
        merge(self.watch.host, self.clock)


def merge(clock: dict[str, int], other: dict[str, int]) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def watched(monkeypatch: pytest.MonkeyPatch, seed: int, *, with_exports: bool = False) -> Watch:
    """Random plans as the scheduler may make them, on streams that run in any order that the events allow."""
    rng, watch = random.Random(seed), Watch()
    num_pages, num_hosts, most = 12, 10, 4
    swap = CudaSwap(watch, [torch.zeros(2, num_pages, 8)], num_hosts, most)  # type: ignore[arg-type]
    buffers = {one.data_ptr(): name for name, one in zip("abcd", [*swap._out, *swap._in], strict=True)}
    host_at = swap._blocks[0].data_ptr()
    page_bytes = swap._blocks[0][0].numel() * 4

    other = SharedPages.create(7, page_bytes)
    other_at = other.array.ctypes.data

    def part(tensor: torch.Tensor) -> set[Any]:
        """The pages of a host block, of another engine's memory or of a buffer that this view covers."""
        at = tensor.data_ptr()
        if other_at <= at < other_at + other.array.nbytes:
            return {("other", (at - other_at) // page_bytes + index) for index in range(len(tensor))}
        if host_at <= at < host_at + num_hosts * page_bytes:
            return {("host", (at - host_at) // page_bytes + index) for index in range(len(tensor))}
        base = max(start for start in buffers if start <= at)
        return {(buffers[base], (at - base) // page_bytes + index) for index in range(len(tensor))}

    def device(pages: torch.Tensor) -> set[Any]:
        return {("kv", page) for page in pages.tolist()}

    monkeypatch.setattr(cuda_swap, "collect_pages", lambda kv, pages, into: watch.run(device(pages), part(into)))
    monkeypatch.setattr(cuda_swap, "place_pages", lambda kv, pages, out: watch.run(part(out), device(pages)))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, out, **_: watch.run(part(out), part(into)))
    filled: list[int] = []
    ends: list[WatchedEvent] = []
    for _ in range(60):
        if len(ends) >= _DEPTH:
            ends[-_DEPTH].synchronize()  # the last pass with the same buffers has ended
        fetches = rng.sample(filled, rng.choice([0, 0, 1, min(3, len(filled))])) if len(filled) > 2 else []
        spills = rng.sample([one for one in range(num_hosts) if one not in fetches], rng.choice([0, 1, 2, most]))
        pages = rng.sample(range(num_pages), most)
        exports = with_exports and rng.random() < 0.5
        if spills:
            swap.spill(torch.tensor(pages[: len(spills)]), np.array(spills, np.int32))
        if exports:  # several in a row, of pages that the pass then writes
            swap.export(np.array(rng.choices(pages, k=7), np.int32), other, np.arange(7, dtype=np.int32))
        if fetches:  # also into pages that were just spilled
            ids = np.array(fetches, np.int32)
            swap.fetch(torch.tensor(pages[: len(fetches)]), ids, watch.event(), watch.event())  # type: ignore[arg-type]
        watch.run({("kv", page) for page in range(num_pages)}, {("kv", page) for page in pages})  # the pass
        ends.append(watch.event())
        ends[-1].record("engine")
        filled = sorted({*filled, *spills})
    return watch


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("with_exports", [False, True])
def test_operations_on_the_same_memory_are_ordered(
    monkeypatch: pytest.MonkeyPatch, seed: int, with_exports: bool
) -> None:
    with monkeypatch.context() as patch:
        watch = watched(patch, seed, with_exports=with_exports)
    assert sum(op.stream == "fetch" for op in watch.ops) > 20 and sum(op.stream == "spill" for op in watch.ops) > 40
    assert watch.races() == []


def test_copies_run_concurrently_with_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some copies are not ordered with a pass that was launched before or after them."""
    with monkeypatch.context() as patch:
        watch = watched(patch, 0)
    for stream in ("spill", "fetch"):
        free = [
            one
            for one, other in itertools.combinations(watch.ops, 2)
            if {one.stream, other.stream} == {stream, "engine"} and other.clock.get(one.stream, 0) < one.number
        ]
        assert len(free) > 20, stream


@pytest.mark.parametrize("event", ["_collected", "_placed", "_copied"])
def test_each_event_is_needed_to_prevent_races(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    make = CudaSwap.__init__

    def without(self: CudaSwap, streams: Any, *args: Any) -> None:
        make(self, streams, *args)
        for one in getattr(self, event):
            one.wait = lambda stream: None

    with monkeypatch.context() as patch:
        patch.setattr(CudaSwap, "__init__", without)
        watch = watched(patch, 1)
    assert watch.races()
