"""Slots: one row per running request, with the pages it reads and how far it has got.

Columns indexed by slot, so that a decode step over 256 rows is a handful of array operations. Every page table change
is also recorded for the plan: an executor sees only those changes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.scheduler.page_pool import Pages
from paceline.scheduler.plan import NO_CHANGES, Column, TableChanges
from paceline.scheduler.tracked_request import TrackedRequest


class Slots:
    def __init__(self, max_running: int, max_row_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self.requests: list[TrackedRequest | None] = [None] * max_running
        # Positions that have KV once all planned passes have run, if no draft is accepted.
        self.computed: Column = np.zeros(max_running, np.int32)
        # By how many positions a row may be further than that: drafts of passes in flight that may be accepted.
        self.ahead: Column = np.zeros(max_running, np.int32)
        self.capacity: Column = np.zeros(max_running, np.int32)  # positions that its pages can hold
        self.remaining: Column = np.zeros(max_running, np.int32)  # tokens that no planned pass samples yet, at most
        self.max_outputs: Column = np.zeros(max_running, np.int32)
        self.expected: Column = np.zeros(max_running, np.int32)  # the caller's estimate of the output; 0: none
        self.num_prefix_pages: Column = np.zeros(max_running, np.int32)  # pages at the row's beginning in the tree
        self.max_lengths: Column = np.zeros(max_running, np.int32)  # prompt and output at full length
        self.prompt_tokens: Column = np.zeros(max_running, np.int32)  # to prefill; after a retraction, output too
        self.runs_full_length: npt.NDArray[np.bool_] = np.zeros(max_running, np.bool_)  # is counted at full length
        self.is_prefill: npt.NDArray[np.bool_] = np.zeros(max_running, np.bool_)  # its prompt is not fully planned
        self.priority: npt.NDArray[np.int64] = np.zeros(max_running, np.int64)
        self.seniority: npt.NDArray[np.int64] = np.zeros(max_running, np.int64)
        self.is_background: npt.NDArray[np.bool_] = np.zeros(max_running, np.bool_)
        self.is_protected: npt.NDArray[np.bool_] = np.zeros(max_running, np.bool_)  # see scheduler/retraction.py
        self.num_pages: Column = np.zeros(max_running, np.int32)
        self.exclusive_pages: npt.NDArray[np.int64] = np.zeros(max_running, np.int64)  # as each request has them
        self.last_step: npt.NDArray[np.int64] = np.zeros(max_running, np.int64)  # of the last pass with this row
        # calloc: rows that are never used cost address space, not memory
        self.page_table: npt.NDArray[np.int32] = np.zeros((max_running, max_row_pages), np.int32)
        self._free = list(range(max_running - 1, -1, -1))
        self._changes: list[TableChanges] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, request: TrackedRequest) -> int:
        slot = self._free.pop()
        assert self.requests[slot] is None, f"slot {slot} was handed out while it was taken"
        self.requests[slot] = request
        self.num_pages[slot] = self.capacity[slot] = self.ahead[slot] = 0
        self.exclusive_pages[slot] = request.exclusive_pages
        request.slot = slot
        return slot

    def release(self, request: TrackedRequest) -> None:
        slot = request.slot
        assert slot is not None, f"request {request.id} released its slot twice"
        assert self.requests[slot] is request, f"slot {slot} does not belong to request {request.id}"
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
        self.capacity[slot] = self.num_pages[slot] * self._page_size

    def write_pages(self, slot: int, start: int, pages: Pages) -> None:
        if len(pages):
            end = start + len(pages)
            self.page_table[slot, start:end] = pages
            indices = np.arange(start, end, dtype=np.int32)
            self._changes.append(TableChanges(np.full(len(pages), slot, np.int32), indices, pages))

    def append_page_each(self, slots: Column, pages: Pages) -> None:
        """Adds pages[i] to slots[i]."""
        indices = self.num_pages[slots]
        self.page_table[slots, indices] = pages
        self.num_pages[slots] = indices + 1
        self.capacity[slots] = (indices + 1) * self._page_size
        self._changes.append(TableChanges(slots, indices, pages))

    def take_changes(self) -> TableChanges:
        """All page table entries written since the last plan, in order."""
        changes, self._changes = self._changes, []
        if not changes:
            return NO_CHANGES
        if len(changes) == 1:
            return changes[0]
        return TableChanges(*map(np.concatenate, zip(*changes, strict=True)))
