"""The KV cache of the CPU: the keys and values of every page.

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

from paceline.model.spec import ModelSpec
from paceline.scheduler.plan import Column, Swap
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
        share_host: bool = False,
    ) -> None:
        """share_host: other processes may write the host tier."""
        self.page_size, self.num_pages = page_size, num_pages
        kinds = [layer.mixer.cache for layer in spec.layers]
        layers = [_zeros((2, num_pages * page_size, one.num_kv_heads, one.head_dim), dtype) for one in kinds]
        self.keys = [layer[0] for layer in layers]
        self.values = [layer[1] for layer in layers]
        # One row per page. Rows from num_pages on are the values, so that one gather reads both.
        self._pages = [layer.view(2 * num_pages, -1) for layer in layers]
        # Where the keys and values of a page are in a whole page, which has all layers behind each other.
        ends = list(accumulate((2 * one.shape[1] for one in self._pages), initial=0))
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
        return array(*(one.data_ptr() for one in self.keys)), array(*(one.data_ptr() for one in self.values))

    def swap(self, swap: Swap) -> None:
        """Copies pages to the host tier, then others from it."""
        spill_pages, spill_hosts, fetch_pages, fetch_hosts = (
            torch.from_numpy(ids.astype(np.int64))
            for ids in (swap.spill_pages, swap.spill_hosts, swap.fetch_pages, swap.fetch_hosts)
        )
        for layer, span in zip(self._pages, self._spans, strict=True):
            pages = layer.view(2, self.num_pages, -1)
            self._hosts[spill_hosts, span] = pages[:, spill_pages].transpose(0, 1).flatten(1)
            pages[:, fetch_pages] = self._hosts[fetch_hosts, span].view(-1, 2, layer.shape[1]).transpose(0, 1)

    def export(self, page_ids: Column, target: SharedPages, targets: Column) -> None:
        """Copies pages to `target`."""
        pages, ids, into = (
            torch.from_numpy(page_ids).long(),
            torch.from_numpy(targets).long(),
            self._whole_pages(target),
        )
        for layer, span in zip(self._pages, self._spans, strict=True):
            into[ids, span] = layer.view(2, self.num_pages, -1)[:, pages].transpose(0, 1).flatten(1)

    def _whole_pages(self, shared: SharedPages) -> Tensor:
        """[pages, elements]"""
        assert shared.page_bytes == self.page_bytes, f"pages of {shared.page_bytes} and {self.page_bytes} bytes"
        return torch.from_numpy(shared.array).view(self._pages[0].dtype).view(shared.num_pages, -1)

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
    integer, size = {2: np.int16, 4: np.int32}[dtype.itemsize], math.prod(shape)
    zeros = np.zeros(size + _CACHE_LINE // dtype.itemsize, integer)
    first = -zeros.ctypes.data % _CACHE_LINE // dtype.itemsize  # vectors that cross a cache line take twice as long
    return torch.from_numpy(zeros[first : first + size].reshape(shape)).view(dtype)
