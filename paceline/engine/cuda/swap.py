"""Copies KV pages between the GPU and pinned host memory, concurrently with forward passes.

    engine  ── pass N-1 ── collect ─────────────── place ── pass N ──
    spill                    └─▶ buffer ─▶ host      ▲
    fetch       host ─▶ buffer ──────────────────────┘

Pages that a plan spills are collected into a buffer before the pass can write those pages again, and are copied from
there while the pass runs. Pages that it fetches are copied into another buffer while earlier passes still run, and
are placed before the pass. The host waits for nothing. The pass waits for the pages it fetches, and for a buffer if the
spill before last is still being copied.

Each direction alternates between two buffers. The order between the directions:
- A fetch waits for the copy that filled its host pages, however long ago that was launched.
- A spill writes host pages that a fetch of an earlier plan may have read. That fetch was placed before this spill is
  collected, so it has been read.
- In one plan no host page occurs in both directions (scheduler/host_tier.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from paceline.config import ConfigError
from paceline.engine.cuda.streams import CudaEvent, Streams
from paceline.kernels.move_pages import collect_pages, place_pages
from paceline.scheduler.plan import Column

# Spills whose copies may still be running. Earlier ones have ended: a spill waits for the copy before last, at most
# four passes are in flight, and the host has waited for all passes before these.
_RECENT = 8
_BLOCK_BYTES = 1 << 30  # torch rounds pinned memory up to a power of two


def buffer_bytes(max_pages: int, page_bytes: int) -> int:
    """Device memory of the buffers."""
    return 4 * max_pages * page_bytes


class CudaSwap:
    def __init__(self, streams: Streams, kv: Tensor, num_host_pages: int, max_pages: int) -> None:
        """`kv` [parts, pages, ...] is the whole KV cache; one pass spills, and fetches, at most `max_pages`."""
        self._streams = streams
        self._kv = kv.flatten(2)
        parts, _, size = self._kv.shape
        self._out, self._in = (
            [torch.empty(max_pages, parts, size, dtype=kv.dtype, device=kv.device) for _ in range(2)] for _ in range(2)
        )
        page_bytes = parts * size * kv.dtype.itemsize
        self._per_block = max(1, _BLOCK_BYTES // page_bytes)
        try:
            self._blocks = [
                streams.pinned(min(self._per_block, num_host_pages - first) * page_bytes // 4)
                .view(kv.dtype)
                .view(-1, parts, size)
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

    def warm_up(self) -> None:
        """Compiles the kernels: copies a page out and back."""
        page = torch.zeros(1, dtype=torch.int32, device=self._kv.device)
        for move in (collect_pages, place_pages):
            move(self._kv, page, self._out[0][:1])

    def spill(self, pages: Tensor, hosts: Column) -> None:
        """Copies device pages [N] to host pages. Called with the engine stream as the current stream."""
        streams, number = self._streams, self._num_spills
        self._num_spills += 1
        buffer, collected = self._out[number % 2][: len(hosts)], self._collected[number % 2]
        if number >= 2:
            self._copied[(number - 2) % _RECENT].wait(streams.engine)  # it read this buffer
        collect_pages(self._kv, pages, buffer)
        collected.record(streams.engine)
        with streams.use(streams.spill):
            collected.wait(streams.spill)
            for host, first, end in self._runs(hosts):
                host.copy_(buffer[first:end], non_blocking=True)
            self._copied[number % _RECENT].record(streams.spill)
        self._filled_by[hosts] = number

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
        place_pages(self._kv, pages, buffer)
        placed.record(streams.engine)

    def _runs(self, hosts: Column) -> Iterator[tuple[Tensor, int, int]]:
        """Runs of consecutive host pages, and their range of the buffer: one copy each."""
        breaks = np.flatnonzero((np.diff(hosts) != 1) | (hosts[1:] % self._per_block == 0)) + 1
        borders = [0, *breaks.tolist(), len(hosts)]
        for first, end in itertools.pairwise(borders):
            block, at = divmod(int(hosts[first]), self._per_block)
            yield self._blocks[block][at : at + end - first], first, end
