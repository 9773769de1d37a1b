"""Streams, events and pinned memory: the only things a CUDA device has that a CPU has not.

`CudaStreams` are the real ones. `HostStreams` do nothing, in order: with them the whole device runs on the CPU, in
Triton's interpreter, which is how it is tested where there is no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

_cuda: Any = torch.cuda  # much of it has no types


class CudaEvent(Protocol):
    def record(self, stream: Any) -> None: ...

    def wait(self, stream: Any) -> None:
        """What is launched on `stream` from now on runs after this event."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`; both have passed."""


class Graph(Protocol):
    def replay(self) -> None: ...


class Streams(Protocol):
    engine: Any  # runs passes and applies every change of device state
    copy: Any  # brings uploads into staging buffers
    results: Any  # brings results out; behind them, an upload would wait for the pass that yields them
    side: Any  # for what can run beside the engine stream's own launches
    spill: Any  # brings KV pages to host memory
    fetch: Any  # brings them back

    def follow(self, later: Any, earlier: Any) -> None:
        """What is launched on `later` from now on runs after what was launched on `earlier`."""

    def use(self, stream: Any) -> AbstractContextManager[Any]: ...

    def event(self) -> CudaEvent: ...

    def pinned(self, size: int) -> Tensor:
        """int32 on the host, where copies need not wait for each other."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """`work`, to be run again and again. It must have run before, so that nothing is compiled while capturing."""

    def free_memory(self) -> int: ...

    def synchronize(self) -> None: ...


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.engine: Any = _cuda.Stream(device)
        self.copy: Any = _cuda.Stream(device)
        self.results: Any = _cuda.Stream(device)
        self.side: Any = _cuda.Stream(device)
        self.spill: Any = _cuda.Stream(device)
        self.fetch: Any = _cuda.Stream(device)
        self._pool: Any = None

    def follow(self, later: Any, earlier: Any) -> None:
        later.wait_stream(earlier)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = _cuda.stream(stream)
        return context

    def event(self) -> Any:
        return _cuda.Event(enable_timing=True)

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=True)

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # All graphs run on one stream, one after the other, so they may share their memory. Thread-local: what other
        # threads do meanwhile is none of this capture's business.
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self.engine):
            self.engine.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def free_memory(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class _HostEvent:
    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: Any) -> None:
        self._at = time.perf_counter()  # all that was launched before has run

    def wait(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return float(end._at - self._at) * 1e3


class _HostGraph:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class HostStreams:
    engine = copy = results = side = spill = fetch = None

    def follow(self, later: Any, earlier: Any) -> None: ...

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self) -> CudaEvent:
        return _HostEvent()

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32)

    def capture(self, work: Callable[[], None]) -> Graph:
        return _HostGraph(work)

    def free_memory(self) -> int:
        from paceline.engine.cpu.kv_cache import free_memory

        return free_memory()

    def synchronize(self) -> None: ...


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
