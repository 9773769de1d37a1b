"""The cache of the CPU: the keys and values of every page, and the state of every running request.

Positions are flat: position `offset` of page `page` has the index `page * page_size + offset`. Keys and values are
separate, so that a row with consecutive pages is read in place, without a copy. Padding reads positions after a row's
end, in its own last page. Therefore a row that begins a page clears the rest of it: a weight of zero times the NaN of
an earlier owner would still be NaN.
"""

from __future__ import annotations

import ctypes
import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from paceline.engine.cache_storage import CacheStorage, WholePages
from paceline.model.spec import ModelSpec
from paceline.scheduler.plan import Column, Plan, Swap
from paceline.shared_pages import SharedPages

_CACHE_LINE = 64


class KVCache:
    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        num_host_pages: int = 0,
        *,
        num_slots: int = 0,
        share_host: bool = False,
    ) -> None:
        """num_slots: of running requests that have a state. share_host: other processes may write the host tier."""
        self.page_size, self.num_pages, self.dtype = page_size, num_pages, dtype
        self._storage = storage = CacheStorage(spec, num_pages, page_size, num_slots, dtype, _zeros)
        self.keys = {layer: kv[0].flatten(0, 1) for layer, kv in storage.kv.items()}
        self.values = {layer: kv[1].flatten(0, 1) for layer, kv in storage.kv.items()}
        self.states = storage.states
        # One row per page. Rows from num_pages on are the values, so that one gather reads both.
        self._pages = {layer: kv.flatten(0, 1).flatten(1) for layer, kv in storage.kv.items()}
        self._whole = WholePages(storage.paged)
        self._scratch = torch.empty(0, dtype=dtype)
        # Main memory is already the device's memory here, so a host tier only adds capacity. It is the reference
        # implementation of the GPU's.
        self.page_bytes = self._whole.num_elements * dtype.itemsize
        self.host: SharedPages | None = None
        if share_host:
            self.host = SharedPages.create(num_host_pages, self.page_bytes)
            self._hosts = self._whole_pages(self.host)
        else:
            self._hosts = _zeros((num_host_pages, self._whole.num_elements), dtype)

    @cached_property
    def addresses(self) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p]]:
        """The addresses of the keys and of the values, by layer."""
        array = ctypes.c_void_p * len(self.keys)
        keys, values = ([kv[layer].data_ptr() for layer in sorted(kv)] for kv in (self.keys, self.values))
        return array(*keys), array(*values)

    def apply(self, plan: Plan) -> None:
        """What a plan changes before its pass: pages that move, and states that begin."""
        if plan.swap is not None:
            self.swap(plan.swap)
        self._storage.begin(plan.joins)

    def swap(self, swap: Swap) -> None:
        """Copies pages to the host tier, then others from it."""
        spill_pages, spill_hosts, fetch_pages, fetch_hosts = (
            torch.from_numpy(ids.astype(np.int64))
            for ids in (swap.spill_pages, swap.spill_hosts, swap.fetch_pages, swap.fetch_hosts)
        )
        self._hosts[spill_hosts] = self._whole.read(spill_pages)
        self._whole.write(fetch_pages, self._hosts[fetch_hosts])

    def export(self, page_ids: Column, target: SharedPages, targets: Column) -> None:
        """Copies pages to `target`."""
        pages, hosts = torch.from_numpy(page_ids).long(), torch.from_numpy(targets).long()
        self._whole_pages(target)[hosts] = self._whole.read(pages)

    def _whole_pages(self, shared: SharedPages) -> Tensor:
        """[pages, elements]"""
        assert shared.page_bytes == self.page_bytes, f"pages of {shared.page_bytes} and {self.page_bytes} bytes"
        return torch.from_numpy(shared.array).view(self.dtype).view(shared.num_pages, -1)

    def gather(self, layer: int, page_ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, positions, KV heads, D] of `page_ids`: the pages of the keys, then those of the
        values. The next gather overwrites the result."""
        pages = self._pages[layer]
        # New memory for every layer would cost more in page faults than the copy itself.
        size = page_ids.numel() * pages.shape[1]
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size * 5 // 4, dtype=pages.dtype)
        found = self._scratch[:size].view(-1, pages.shape[1])
        torch.index_select(pages, 0, page_ids, out=found)
        keys, values = found.view(2, num_rows, -1, *self.keys[layer].shape[1:]).unbind(0)
        return keys, values


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # numpy's zeros are untouched pages of the system, which cost nothing until they are written. torch fills its zeros,
    # which takes seconds for gigabytes and uses all of the memory at once.
    integer, size = {1: np.int8, 2: np.int16, 4: np.int32}[dtype.itemsize], math.prod(shape)
    zeros = np.zeros(size + _CACHE_LINE // dtype.itemsize, integer)
    first = -zeros.ctypes.data % _CACHE_LINE // dtype.itemsize  # vectors that cross a cache line take twice as long
    return torch.from_numpy(zeros[first : first + size].reshape(shape)).view(dtype)
