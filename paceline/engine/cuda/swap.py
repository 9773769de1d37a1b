"""Copies KV pages between the GPU and pinned host memory, concurrently with forward passes.

    engine  ── pass N-1 ── collect ─────────────── place ── pass N ──
    spill                    └─▶ buffer ─▶ host      ▲
    fetch       host ─▶ buffer ──────────────────────┘

Pages that a plan spills are collected into a buffer before the pass can write those pages again, and are copied from
there while the pass runs. Pages that it fetches are copied into another buffer while earlier passes still run, and
are placed before the pass. The host waits for nothing. The pass waits for the pages it fetches, and for a buffer if the
spill before last is still being copied.

Pages are exported to another engine as they are spilled: to memory that both processes have mapped and pinned. There
may be several exports in a row, so the host waits before an export until few copies are left.

Each direction alternates between two buffers. The order between the directions:
- A fetch waits for the copy that filled its host pages, however long ago that was launched.
- A spill writes host pages that a fetch of an earlier plan may have read. That fetch was placed before this spill is
  collected, so it has been read.
- In one plan no host page occurs in both directions (scheduler/host_tier.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.config import ConfigError
from paceline.engine.cache_storage import WholePages
from paceline.engine.cuda.streams import CudaEvent, Streams
from paceline.kernels.move_pages import collect_pages, place_pages
from paceline.scheduler.plan import Column
from paceline.shared_pages import SharedPages

# Spills whose copies may still be running. Earlier ones have ended: a spill waits for the copy before last, at most
# four passes are in flight, and the host has waited for all passes before these.
_RECENT = 8
_BLOCK_BYTES = 1 << 30  # torch rounds pinned memory up to a power of two


def buffer_bytes(max_pages: int, page_bytes: int) -> int:
    """Device memory of the buffers."""
    return 4 * max_pages * page_bytes


class CudaSwap:
    def __init__(
        self, streams: Streams, kv: Sequence[Tensor], num_host_pages: int, max_pages: int, *, share_host: bool = False
    ) -> None:
        """`kv` has the pages of every group [blocks, pages, ...]; one pass spills, and fetches, at most `max_pages`.
        share_host: other processes may write the host pages."""
        self._streams = streams
        self.kv = WholePages(kv)
        self._dtype, self._device, size = kv[0].dtype, kv[0].device, self.kv.num_elements
        self._out, self._in = (
            [torch.empty(max_pages, size, dtype=self._dtype, device=self._device) for _ in range(2)] for _ in range(2)
        )
        page_bytes = size * self._dtype.itemsize
        self._per_block = max(1, _BLOCK_BYTES // page_bytes)
        self.host = SharedPages.create(num_host_pages, page_bytes) if share_host else None
        try:
            if self.host is not None:
                self._per_block = num_host_pages
                self.map_pages(self.host)
                self._blocks = [self._whole_pages(self.host)]
            else:
                self._blocks = [
                    streams.pinned(min(self._per_block, num_host_pages - first) * page_bytes // 4)
                    .view(self._dtype)
                    .view(-1, size)
                    for first in range(0, num_host_pages, self._per_block)
                ]
        except RuntimeError as error:
            raise ConfigError(
                f"{num_host_pages * page_bytes / 2**30:.2f} GiB of host memory for KV cannot be pinned ({error}): "
                "lower host_kv_tokens, or allow this process to lock more memory."
            ) from None
        self._collected, self._placed = ([streams.event() for _ in range(2)] for _ in range(2))
        self._copied = [streams.event() for _ in range(_RECENT)]
        self._num_spills = self._num_fetches = 0
        self._filled_by = np.full(num_host_pages, -_RECENT, np.int64)  # the spill that wrote each host page last

        self._page_ids = streams.pinned(_RECENT * max_pages).view(_RECENT, max_pages)  # of exports

    def warm_up(self) -> None:
        """Compiles the kernels: copies a page out and back."""
        page = torch.zeros(1, dtype=torch.int32, device=self._device)
        for kv, part in self.kv.parts(self._out[0][:1]):
            collect_pages(kv, page, part)
            place_pages(kv, page, part)

    def spill(self, pages: Tensor, hosts: Column) -> None:
        """Copies device pages [N] to host pages. Called with the engine stream as the current stream."""
        self._filled_by[hosts] = self._num_spills
        self._copy_out(pages, [(host, first, end) for host, first, end in self._runs(hosts)], len(hosts))

    def export(self, pages: Column, target: SharedPages, targets: Column) -> list[CudaEvent]:
        """Copies device pages to pages of `target`, which was mapped. Called with the engine stream as the current
        stream. Returns the events that end the copies."""
        into, most, ends = self._whole_pages(target), self._page_ids.shape[1], []
        for start in range(0, len(pages), most):
            ids, hosts = pages[start : start + most], targets[start : start + most]
            self._wait_recent()  # before its page ids are overwritten
            staged = self._page_ids[self._num_spills % _RECENT][: len(ids)]
            staged.numpy()[:] = ids
            borders = [0, *(np.flatnonzero(np.diff(hosts) != 1) + 1).tolist(), len(hosts)]
            runs = [(into[hosts[first] : hosts[end - 1] + 1], first, end) for first, end in itertools.pairwise(borders)]
            self._copy_out(staged.to(self._device, non_blocking=True), runs, len(ids))
            ends.append(self._streams.event())
            ends[-1].record(self._streams.spill)
        return ends

    def _wait_recent(self) -> None:
        """Waits on the host until at most `_RECENT` - 1 copies may be running. With spills alone that is always so."""
        if self._num_spills + 1 >= _RECENT:
            self._copied[(self._num_spills + 1) % _RECENT].synchronize()

    def _copy_out(self, pages: Tensor, runs: list[tuple[Tensor, int, int]], count: int) -> None:
        streams, number = self._streams, self._num_spills
        self._wait_recent()
        self._num_spills += 1
        buffer, collected = self._out[number % 2][:count], self._collected[number % 2]
        if number >= 2:
            self._copied[(number - 2) % _RECENT].wait(streams.engine)  # it read this buffer
        for kv, part in self.kv.parts(buffer):
            collect_pages(kv, pages, part)
        collected.record(streams.engine)
        with streams.use(streams.spill):
            collected.wait(streams.spill)
            for host, first, end in runs:
                host.copy_(buffer[first:end], non_blocking=True)
            self._copied[number % _RECENT].record(streams.spill)

    def fetch(self, pages: Tensor, hosts: Column, began: CudaEvent, arrived: CudaEvent) -> None:
        """Copies host pages to device pages [N], before the next work of the engine stream (the current stream). The
        events are recorded around the copy."""
        streams, number = self._streams, self._num_fetches
        self._num_fetches += 1
        buffer, placed = self._in[number % 2][: len(hosts)], self._placed[number % 2]
        last = int(self._filled_by[hosts].max())
        with streams.use(streams.fetch):
            if number >= 2:
                placed.wait(streams.fetch)  # of the fetch before last, which used this buffer
            if last > self._num_spills - _RECENT:
                self._copied[last % _RECENT].wait(streams.fetch)
            began.record(streams.fetch)
            for host, first, end in self._runs(hosts):
                buffer[first:end].copy_(host, non_blocking=True)
            arrived.record(streams.fetch)
        arrived.wait(streams.engine)
        for kv, part in self.kv.parts(buffer):
            place_pages(kv, pages, part)
        placed.record(streams.engine)

    def map_pages(self, target: SharedPages) -> None:
        """Pins memory that other processes share, so that copies to and from it are asynchronous."""
        self._streams.register(target.array)

    def unmap_pages(self, target: SharedPages) -> None:
        self._streams.unregister(target.array)

    def _whole_pages(self, shared: SharedPages) -> Tensor:
        """[pages, elements]"""
        size = self.kv.num_elements
        assert shared.page_bytes == size * self._dtype.itemsize, f"pages of {shared.page_bytes} bytes"
        return torch.from_numpy(shared.array).view(self._dtype).view(-1, size)

    def _runs(self, hosts: Column) -> Iterator[tuple[Tensor, int, int]]:
        """Runs of consecutive host pages, and their range of the buffer: one copy each."""
        breaks = np.flatnonzero((np.diff(hosts) != 1) | (hosts[1:] % self._per_block == 0)) + 1
        borders = [0, *breaks.tolist(), len(hosts)]
        for first, end in itertools.pairwise(borders):
            block, at = divmod(int(hosts[first]), self._per_block)
            yield self._blocks[block][at : at + end - first], first, end
