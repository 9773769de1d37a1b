"""The rows that running requests own: which pages each row reads, and how far it has got.

Columns indexed by slot, so that a decode step over 256 rows is a handful of array operations. Every change of a
page table row is also noted for the plan: an executor sees nothing but those changes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.request import Request
from paceline.scheduler.page_pool import NO_PAGES, Pages

Column = npt.NDArray[np.int32]


class Slots:
    def __init__(self, max_running: int, max_row_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self.requests: list[Request | None] = [None] * max_running
        self.computed: Column = np.zeros(max_running, np.int32)  # positions with KV once all planned passes have run
        self.covered: Column = np.zeros(max_running, np.int32)  # positions its pages have room for
        self.remaining: Column = np.zeros(max_running, np.int32)  # tokens that no planned pass has sampled yet
        self.max_outputs: Column = np.zeros(max_running, np.int32)
        self.expected: Column = np.zeros(max_running, np.int32)  # the caller's guess of the output; 0: none was given
        self.held_pages: Column = np.zeros(max_running, np.int32)  # pages at the row's beginning that are the tree's
        self.limits: Column = np.zeros(max_running, np.int32)  # prompt and output at full length
        self.prompt_tokens: Column = np.zeros(max_running, np.int32)  # to be prefilled, output before a retraction too
        self.runs_full_length: npt.NDArray[np.bool_] = np.zeros(max_running, np.bool_)  # is counted at full length
        self.num_pages: Column = np.zeros(max_running, np.int32)
        # calloc: rows that are never used cost address space, not memory
        self.page_table: npt.NDArray[np.int32] = np.zeros((max_running, max_row_pages), np.int32)
        self._free = list(range(max_running - 1, -1, -1))
        self._changes: list[tuple[Column, Column, Pages]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, request: Request) -> int:
        slot = self._free.pop()
        assert self.requests[slot] is None, f"slot {slot} was handed out while it was taken"
        self.requests[slot] = request
        self.num_pages[slot] = self.covered[slot] = 0
        request.slot = slot
        return slot

    def release(self, request: Request) -> None:
        slot = request.slot
        assert slot is not None, f"request {request.id} gave its slot back twice"
        assert self.requests[slot] is request, f"slot {slot} is not request {request.id}'s"
        self.requests[slot] = None
        request.slot = None
        self._free.append(slot)

    def row(self, slot: int) -> Pages:
        """A view of the pages of one row."""
        view: Pages = self.page_table[slot, : self.num_pages[slot]]
        return view

    def append_pages(self, slot: int, pages: Pages) -> None:
        start = int(self.num_pages[slot])
        self.write_pages(slot, start, pages)
        self.num_pages[slot] = start + len(pages)
        self.covered[slot] = self.num_pages[slot] * self._page_size

    def write_pages(self, slot: int, start: int, pages: Pages) -> None:
        if len(pages):
            end = start + len(pages)
            self.page_table[slot, start:end] = pages
            indices = np.arange(start, end, dtype=np.int32)
            self._changes.append((np.full(len(pages), slot, np.int32), indices, pages))

    def append_page_each(self, slots: Column, pages: Pages) -> None:
        """One more page for each of `slots`."""
        indices = self.num_pages[slots]
        self.page_table[slots, indices] = pages
        self.num_pages[slots] = indices + 1
        self.covered[slots] = (indices + 1) * self._page_size
        self._changes.append((slots, indices, pages))

    def take_changes(self) -> tuple[Column, Column, Pages]:
        """(slots, indices, pages) of all page table entries written since the last plan, in order."""
        changes, self._changes = self._changes, []
        if not changes:
            return NO_PAGES, NO_PAGES, NO_PAGES
        if len(changes) == 1:
            return changes[0]
        slots, indices, pages = zip(*changes, strict=True)
        return np.concatenate(slots), np.concatenate(indices), np.concatenate(pages)
