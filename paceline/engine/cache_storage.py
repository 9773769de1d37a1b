"""The memory of a model's cache groups: one tensor for each of them, the same on every device.

Layers that keep KV of one geometry share a tensor of pages, keys and values in turn, so that one kernel can copy all
blocks of a page. Layers with a state share a tensor of slots. Who computes a layer finds its part by the layer's index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from paceline.model.layers import PagedKv
from paceline.model.spec import ModelSpec
from paceline.scheduler.plan import Join


class CacheStorage:
    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        num_slots: int,
        dtype: torch.dtype,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> None:
        """dtype: of keys and values. num_slots: of running requests."""
        self.dtype = dtype
        self.paged: list[Tensor] = []  # by group [2 * layers, pages, page size, KV heads, D]
        self.slotted: list[Tensor] = []  # by group [slots, layers, bytes]
        self.kv: dict[int, Tensor] = {}  # by layer [2, pages, page size, KV heads, D]
        self.states: dict[int, Tensor] = {}  # by layer [slots, bytes]
        for cache, layers in ((group.cache, group.layers) for group in spec.cache_groups):
            if isinstance(cache, PagedKv):
                assert cache.head_dim == cache.v_head_dim, "keys and values of a page are in one tensor"
                pages = zeros((2 * len(layers), num_pages, page_size, cache.num_kv_heads, cache.head_dim), dtype)
                self.paged.append(pages)
                self.kv |= {layer: pages[2 * at : 2 * at + 2] for at, layer in enumerate(layers)}
            else:
                units = zeros((num_slots, len(layers), cache.unit_bytes(dtype.itemsize, page_size)), torch.uint8)
                self.slotted.append(units)
                self.states |= {layer: units[:, at, : cache.num_bytes] for at, layer in enumerate(layers)}

    def begin(self, joins: Iterable[Join]) -> None:
        """Clears the states of requests that join: an earlier owner of the slot has left its own there."""
        for units in self.slotted:
            for join in joins:
                units[join.slot].zero_()

    def free(self) -> None:
        for one in (*self.paged, *self.slotted):
            one.untyped_storage().resize_(0)


class WholePages:
    """Where each group's part is in a page that is copied: groups follow each other, and so do the blocks of each."""

    def __init__(self, paged: Iterable[Tensor]) -> None:
        self.groups = [one.flatten(2) for one in paged]  # [blocks, pages, elements]
        ends = list(accumulate((len(one) * one.shape[2] for one in self.groups), initial=0))
        self._spans = [slice(*span) for span in pairwise(ends)]
        self.num_elements = ends[-1]

    def read(self, pages: Tensor) -> Tensor:
        """A copy of pages [N, num_elements]."""
        return torch.cat([group[:, pages].transpose(0, 1).flatten(1) for group in self.groups], 1)

    def write(self, pages: Tensor, whole: Tensor) -> None:
        for group, part in self.parts(whole):
            group[:, pages] = part.transpose(0, 1)

    def parts(self, pages: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each group, and a view of its part [N, blocks, elements] in whole pages [N, num_elements]."""
        return [
            (group, pages[:, span].view(-1, len(group), group.shape[2]))
            for group, span in zip(self.groups, self._spans, strict=True)
        ]
