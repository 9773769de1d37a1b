"""The running set: which requests prefill and decode, and what is derived from that.

A steady decode step changes nothing here, so what every step needs (slots, sharing and tenants of the decodes) is
cached. The one thing to know before changing it: only the methods of this class change the two lists, and each of them
invalidates what it must.

With a pipeline of N stages a row's next token is known N passes later. So decodes are divided among N passes, which
alternate: a pass has an Nth of them, those that have waited longest. Which rows are together follows from that alone,
and in a steady state it is always the same ones.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from itertools import compress

import numpy as np

from paceline.scheduler.memory import Memory
from paceline.scheduler.plan import Column, Sharing
from paceline.scheduler.sharing import find_sharing
from paceline.scheduler.tracked_request import Phase, TrackedRequest


class RunningSet:
    """Requests that hold a slot and have tokens that are not planned yet."""

    def __init__(self, memory: Memory, *, shared_reads: bool, num_stages: int = 1) -> None:
        self._memory = memory
        self._shared_reads = shared_reads
        self._num_stages = num_stages
        self.decoding: list[TrackedRequest] = []
        self.prefilling: list[TrackedRequest] = []  # admitted, prompt not fully planned; most senior first
        self.decodes_by_tenant: Counter[str] = Counter()
        self._decoding: set[TrackedRequest] = set()  # to search the list for one takes as long as planning its pass
        self._decode_slots: Column | None = None
        self._slots: Column | None = None
        self._decode_sharing: dict[bytes, Sharing | None] = {}  # by slots of the batch

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def requests(self) -> list[TrackedRequest]:
        return self.decoding + self.prefilling

    def is_decoding(self, request: TrackedRequest) -> bool:
        return request in self._decoding

    # ------------------------------------------------------------------ changes

    def start_prefill(self, request: TrackedRequest) -> None:
        request.enter(Phase.PREFILL)
        self._memory.slots.is_prefill[request.slot] = True
        insort(self.prefilling, request, key=lambda running: running.seniority)
        self._slots = None

    def finish_prefill(self, request: TrackedRequest) -> None:
        """The prompt is fully planned: the request decodes next, or ends with this pass."""
        self._memory.slots.is_prefill[request.slot] = False
        self.prefilling.remove(request)
        self._slots = None

    def start_decoding(self, request: TrackedRequest) -> None:
        request.enter(Phase.DECODING)
        self.decoding.append(request)
        self._decoding.add(request)
        self.decodes_by_tenant[request.tenant] += 1
        self._decode_slots = None
        self._decodes_changed()

    def stop_decoding(self, *requests: TrackedRequest) -> None:
        """These requests, which have slots, are no decode rows any more."""
        if not requests:
            return
        rows = self.decode_slots
        if len(requests) == 1:
            at = int((rows == requests[0].slot).argmax())
            del self.decoding[at]
            self._decode_slots = np.concatenate([rows[:at], rows[at + 1 :]])
        else:
            leaves = np.zeros(len(self._memory.slots.requests), np.bool_)
            leaves[np.array([request.slot for request in requests], np.int32)] = True
            stays = ~leaves[rows]
            self.decoding = list(compress(self.decoding, stays.tolist()))
            self._decode_slots = rows[stays]
        self._decode_slots.flags.writeable = False
        self._decoding.difference_update(requests)
        for request in requests:
            self.decodes_by_tenant[request.tenant] -= 1
            if not self.decodes_by_tenant[request.tenant]:
                del self.decodes_by_tenant[request.tenant]
        self._decodes_changed()

    def discard(self, request: TrackedRequest) -> None:
        """Removes a request if it is here: one that ends with a pass in flight has left already."""
        if self._memory.slots.is_prefill[request.slot]:
            self._memory.slots.is_prefill[request.slot] = False
            self.prefilling.remove(request)
            self._slots = None
        elif request in self._decoding:
            self.stop_decoding(request)

    def rows_remapped(self) -> None:
        """Rows read other pages than before, so the sharing of decodes has changed."""
        self._decode_sharing.clear()

    def _decodes_changed(self) -> None:
        self._slots = None
        self._decode_sharing.clear()

    # ------------------------------------------------------------------ derived

    @property
    def decode_slots(self) -> Column:
        """Slots of the decoding requests, in row order. Read-only: plans keep it."""
        if self._decode_slots is None:
            self._decode_slots = np.array([request.slot for request in self.decoding], np.int32)
            self._decode_slots.flags.writeable = False
        return self._decode_slots

    @property
    def slots(self) -> Column:
        """Slots of `requests`."""
        if self._slots is None:
            prefilling = np.array([request.slot for request in self.prefilling], np.int32)
            self._slots = np.concatenate([self.decode_slots, prefilling])
        return self._slots

    def due_slots(self, latest: int) -> Column:
        """Slots of the decodes for the next pass, in row order: at most an Nth of all, of those whose last pass is not
        after step `latest`. Read-only."""
        rows = self.decode_slots
        if self._num_stages == 1:
            return rows
        last_steps = self._memory.slots.last_step[rows]
        ready = np.flatnonzero(last_steps <= latest)
        num_rows = -(-len(rows) // self._num_stages)
        if len(ready) > num_rows:
            longest = np.argsort(last_steps[ready], kind="stable")[:num_rows]
            ready = np.sort(ready[longest])
        due: Column = rows[ready]
        return due

    def decode_sharing(
        self, requests: Sequence[TrackedRequest], rows: Column, starts: Column, step: int
    ) -> Sharing | None:
        """Of the decode batch of `step`: `requests` in slots `rows`, with `starts` positions in memory."""
        key = rows.tobytes()
        if key not in self._decode_sharing:
            if len(self._decode_sharing) >= self._num_stages:
                self._decode_sharing.clear()
            self._decode_sharing[key] = self.sharing(requests, rows, starts, step)
        return self._decode_sharing[key]

    def sharing(self, requests: Sequence[TrackedRequest], rows: Column, starts: Column, step: int) -> Sharing | None:
        """Of a batch with these rows. Its version is the step that found it, so it never repeats."""
        if not self._shared_reads:
            return None
        slots, locked_nodes = self._memory.slots, self._memory.locked_nodes
        # Where only one request has locked a prefix, nothing is shared. That is most rows, or all.
        may_share = np.flatnonzero(slots.num_prefix_pages[rows] > slots.exclusive_pages[rows]).tolist()
        return find_sharing([(row, locked_nodes[requests[row]]) for row in may_share], starts, step)
