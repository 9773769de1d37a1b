"""The KV cache of the CPU: the keys and values of every page.

Positions are flat: position `offset` of page `page` has the index `page * page_size + offset`. Keys and values are
separate, so that a row with consecutive pages is read in place, without a copy. Padding reads positions after a row's
end, in its own last page. Therefore a row that begins a page clears the rest of it: a weight of zero times the NaN of
an earlier owner would still be NaN.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.model.spec import ModelSpec
from paceline.scheduler.plan import Swap


class KVCache:
    def __init__(
        self, spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype, num_host_pages: int = 0
    ) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        shape = (2, num_pages * page_size, spec.num_kv_heads, spec.head_dim)
        layers = [_zeros(shape, dtype) for _ in range(spec.num_layers)]
        self.keys = [layer[0] for layer in layers]
        self.values = [layer[1] for layer in layers]
        # One row per page. Rows from num_pages on are the values, so that one gather reads both.
        self._pages = [layer.view(2 * num_pages, -1) for layer in layers]
        self._row = (page_size, spec.num_kv_heads, spec.head_dim)
        self._scratch = torch.empty(0, dtype=dtype)
        # Main memory is already the device's memory here, so a host tier only adds capacity. It is the reference
        # implementation of the GPU's.
        self._hosts = [_zeros((2, num_host_pages, pages.shape[1]), dtype) for pages in self._pages]

    def swap(self, swap: Swap) -> None:
        """Copies pages to the host tier, then others from it."""
        spill_pages, spill_hosts, fetch_pages, fetch_hosts = (
            torch.from_numpy(ids.astype(np.int64))
            for ids in (swap.spill_pages, swap.spill_hosts, swap.fetch_pages, swap.fetch_hosts)
        )
        for layer, host in zip(self._pages, self._hosts, strict=True):
            pages = layer.view(2, self.num_pages, -1)
            host[:, spill_hosts] = pages[:, spill_pages]
            pages[:, fetch_pages] = host[:, fetch_hosts]

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
        keys, values = found.view(2, num_rows, -1, *self._row[1:]).unbind(0)
        return keys, values


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # numpy's zeros are untouched pages of the system, which cost nothing until they are written. torch fills its zeros,
    # which takes seconds for gigabytes and uses all of the memory at once.
    integer = {2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, integer)).view(dtype)
