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
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from paceline.model.layers import PagedKv
from paceline.model.spec import ModelSpec
from paceline.scheduler.plan import Column, Plan, Swap
from paceline.shared_pages import SharedPages

_CACHE_LINE = 64


class KVCache:
    """The storage of every cache group of a model. In a page, and in the host tier, paged groups follow each other, and
    so do the layers of a group."""

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
        self.keys: dict[int, Tensor] = {}  # by layer, as the other two
        self.values: dict[int, Tensor] = {}
        self._layers: dict[int, Tensor] = {}  # One row per page. Rows from num_pages on are the values, for one gather.
        self.states: dict[int, Tensor] = {}  # by layer [slots, bytes]
        self._paged: list[Tensor] = []  # by group [2 * layers, pages, elements]
        self._slotted: list[Tensor] = []  # by group [slots, layers, bytes]
        for cache, layers in ((group.cache, group.layers) for group in spec.cache_groups):
            if isinstance(cache, PagedKv):
                shape = (len(layers), 2, num_pages * page_size, cache.num_kv_heads, cache.head_dim)
                kv = _zeros(shape, dtype)
                self._paged.append(kv.view(2 * len(layers), num_pages, -1))
                for layer, own in zip(layers, kv, strict=True):
                    self.keys[layer], self.values[layer] = own
                    self._layers[layer] = own.view(2 * num_pages, -1)
            else:
                units = _zeros((num_slots, len(layers), cache.unit_bytes(1, page_size)), torch.uint8)
                self._slotted.append(units)
                self.states.update(zip(layers, units[..., : cache.num_bytes].unbind(1), strict=True))
        # Where the groups are in a whole page.
        ends = list(accumulate((len(one) * one.shape[2] for one in self._paged), initial=0))
        self._spans = [slice(*span) for span in pairwise(ends)]
        self._scratch = torch.empty(0, dtype=dtype)
        # Main memory is already the device's memory here, so a host tier only adds capacity. It is the reference
        # implementation of the GPU's.
        self.page_bytes = ends[-1] * dtype.itemsize
        self.host: SharedPages | None = None
        if share_host:
            self.host = SharedPages.create(num_host_pages, self.page_bytes)
            self._hosts = self._whole_pages(self.host)
        else:
            self._hosts = _zeros((num_host_pages, ends[-1]), dtype)

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
        for units in self._slotted:
            units[[join.slot for join in plan.joins]] = 0

    def swap(self, swap: Swap) -> None:
        """Copies pages to the host tier, then others from it."""
        spill_pages, spill_hosts, fetch_pages, fetch_hosts = (
            torch.from_numpy(ids.astype(np.int64))
            for ids in (swap.spill_pages, swap.spill_hosts, swap.fetch_pages, swap.fetch_hosts)
        )
        for pages, span in zip(self._paged, self._spans, strict=True):
            self._hosts[spill_hosts, span] = pages[:, spill_pages].transpose(0, 1).flatten(1)
            pages[:, fetch_pages] = self._hosts[fetch_hosts, span].view(-1, len(pages), pages.shape[2]).transpose(0, 1)

    def export(self, page_ids: Column, target: SharedPages, targets: Column) -> None:
        """Copies pages to `target`."""
        ids, hosts, into = (
            torch.from_numpy(page_ids).long(),
            torch.from_numpy(targets).long(),
            self._whole_pages(target),
        )
        for pages, span in zip(self._paged, self._spans, strict=True):
            into[hosts, span] = pages[:, ids].transpose(0, 1).flatten(1)

    def _whole_pages(self, shared: SharedPages) -> Tensor:
        """[pages, elements]"""
        assert shared.page_bytes == self.page_bytes, f"pages of {shared.page_bytes} and {self.page_bytes} bytes"
        return torch.from_numpy(shared.array).view(self.dtype).view(shared.num_pages, -1)

    def gather(self, layer: int, page_ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, positions, KV heads, D] of `page_ids`: the pages of the keys, then those of the
        values. The next gather overwrites the result."""
        pages = self._layers[layer]
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
