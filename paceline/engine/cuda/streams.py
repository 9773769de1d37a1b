"""Streams, events and pinned memory: what a CUDA device has and a CPU does not.

`CudaStreams` are the real ones. With `HostStreams` everything runs immediately, in order, on the CPU: this is how the
executor is tested in Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, Self, SupportsInt

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_cuda: ModuleType = torch.cuda  # most of it is untyped
_PORTABLE = 1  # cudaHostRegisterPortable


def _check(status: SupportsInt) -> None:
    if int(status):
        raise RuntimeError(f"CUDA error {int(status)}: {_cuda.cudart().cudaGetErrorString(status)}")


class CudaEvent(Protocol):
    def record(self, stream: torch.Stream) -> None: ...

    def wait(self, stream: torch.Stream) -> None:
        """Makes work launched on `stream` from now on wait for this event."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """Whether it has completed."""

    def elapsed_time(self, end: Self, /) -> float:
        """Milliseconds from this event to `end`; both have completed."""


class Graph(Protocol):
    def replay(self) -> None: ...


class Streams(Protocol):
    engine: torch.Stream  # runs forward passes and applies every change of device state
    copy: torch.Stream  # copies uploads to staging buffers
    results: torch.Stream  # copies results to the host; on this stream an upload would wait for the pass before it
    side: torch.Stream  # decode attention, concurrently with prefill attention on the engine stream
    shared: torch.Stream  # decode attention of shared units, concurrently with that of single rows
    spill: torch.Stream  # copies KV pages to host memory
    fetch: torch.Stream  # copies KV pages from host memory
    send: torch.Stream  # sends hidden states to the next stage of a pipeline

    def follow(self, later: torch.Stream, earlier: torch.Stream) -> None:
        """Makes work launched on `later` from now on wait for everything launched on `earlier` so far."""

    def use(self, stream: torch.Stream) -> AbstractContextManager[None]: ...

    def event(self) -> CudaEvent: ...

    def pinned(self, size: int) -> Tensor:
        """int32 in pinned host memory, so that copies are asynchronous."""

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Pins memory that torch has not allocated."""

    def unregister(self, memory: npt.NDArray[np.uint8]) -> None: ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Captures what `work` launches, without executing it. Work of earlier passes may be running."""

    def free_memory(self) -> int: ...

    def reserved_memory(self) -> int:
        """Bytes of device memory that this process has allocated."""

    def synchronize(self) -> None: ...


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.engine: torch.Stream = _cuda.Stream(device)
        self.copy: torch.Stream = _cuda.Stream(device)
        self.results: torch.Stream = _cuda.Stream(device)
        self.side: torch.Stream = _cuda.Stream(device)
        self.shared: torch.Stream = _cuda.Stream(device)
        self.spill: torch.Stream = _cuda.Stream(device)
        self.fetch: torch.Stream = _cuda.Stream(device)
        self.send: torch.Stream = _cuda.Stream(device)
        self._pool: _POOL_HANDLE | None = None

    def follow(self, later: torch.Stream, earlier: torch.Stream) -> None:
        later.wait_stream(earlier)

    def use(self, stream: torch.Stream) -> AbstractContextManager[None]:
        return _CurrentStream(stream)

    def event(self) -> CudaEvent:
        event: CudaEvent = _cuda.Event(enable_timing=True)
        return event

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=True)

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        with torch.cuda.device(self.device):
            _check(_cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))

    def unregister(self, memory: npt.NDArray[np.uint8]) -> None:
        with torch.cuda.device(self.device):
            _check(_cuda.cudart().cudaHostUnregister(memory.ctypes.data))

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # All graphs run on one stream, one after the other, so they share a memory pool. Relaxed: kernels may be loaded
        # during the capture, and calls of other threads must not make it fail.
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with _cuda.stream(self.engine):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def free_memory(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def reserved_memory(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class _CurrentStream:
    """`torch.cuda.stream`, which every pass enters several times, in a tenth of the time."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
        stream = self._stream
        _set_stream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        _set_stream(*self._before)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    """Makes a stream the current one, and its GPU."""
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class _HostEvent:
    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: torch.Stream) -> None:
        self._at = time.perf_counter()  # everything launched before has run

    def wait(self, stream: torch.Stream) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostEvent, /) -> float:
        return (end._at - self._at) * 1e3


class _HostGraph:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def _host_stream(stream_id: int) -> torch.Stream:
    return torch.Stream(stream_id=stream_id, device_index=0, device_type=0)


class HostStreams:
    """All streams are one. A graph must end with its work on one stream, as CUDA demands: that is checked."""

    engine, copy, results, side, shared, spill, fetch, send = map(_host_stream, range(8))  # told apart by their ids

    def __init__(self) -> None:
        self._unjoined: set[torch.Stream] = set()  # streams that the engine's stream does not wait for yet

    def follow(self, later: torch.Stream, earlier: torch.Stream) -> None:
        if later != self.engine:
            self._unjoined.add(later)
        self._unjoined.discard(earlier)

    def use(self, stream: torch.Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self) -> CudaEvent:
        return _HostEvent()

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32)

    def register(self, memory: npt.NDArray[np.uint8]) -> None: ...

    def unregister(self, memory: npt.NDArray[np.uint8]) -> None: ...

    def capture(self, work: Callable[[], None]) -> Graph:
        def replay() -> None:
            self._unjoined.clear()
            work()
            assert not self._unjoined, f"a graph ends with work on other streams: {self._unjoined}"

        return _HostGraph(replay)

    def free_memory(self) -> int:
        from paceline.engine.kv_sizing import free_memory

        return free_memory()

    def reserved_memory(self) -> int:
        return 0

    def synchronize(self) -> None: ...


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
