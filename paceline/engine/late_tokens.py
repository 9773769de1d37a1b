"""LateTokens: the tokens that the first stage of a pipeline gets from the last one."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

import numpy as np

from paceline.scheduler.plan import Column, Plan

StoreTokens = Callable[[Column, Column, Column], None]  # slots, positions, tokens


class LateTokens:
    """The tokens of the first stage. What a pass samples arrives when later passes have begun here; it is stored when a
    pass needs it, or before the next one."""

    def __init__(self, max_running: int, store: StoreTokens) -> None:
        self._store = store
        self._arrived: SimpleQueue[tuple[Plan, Column] | Exception] = SimpleQueue()
        self._stored_step = 0  # the tokens of all passes up to this one are stored
        self._sampled_step = np.zeros(max_running, np.int64)  # by slot: the last pass that samples for its request
        self._joined_step = np.zeros(max_running, np.int64)  # by slot: the pass with which its request joined

    def put(self, plan: Plan, tokens: Column) -> None:
        """Called in the order of the passes, by another thread."""
        self._arrived.put((plan, tokens))

    def fail(self, error: Exception) -> None:
        """No more tokens will arrive."""
        self._arrived.put(error)

    def begin(self, plan: Plan) -> None:
        """Blocks until the tokens that this pass feeds are stored. Called in launch order."""
        for join in plan.joins:
            self._joined_step[join.slot] = plan.step
            self._sampled_step[join.slot] = 0
        needed = int(self._sampled_step[plan.slots].max(initial=0))
        while self._store_next(wait=self._stored_step < needed):
            pass
        self._sampled_step[plan.slots[plan.samples]] = plan.step

    def _store_next(self, *, wait: bool) -> bool:
        try:
            arrived = self._arrived.get(block=wait)
        except Empty:
            return False
        if isinstance(arrived, Exception):
            raise arrived
        plan, tokens = arrived
        rows = np.flatnonzero(plan.samples)
        # The slot may have another request by now, whose tokens must stay.
        is_same = self._joined_step[plan.slots[rows]] <= plan.step
        rows, tokens = rows[is_same], tokens[is_same]
        # A row without a token continues with a valid id until the host has seen it.
        self._store(plan.slots[rows], plan.starts[rows] + plan.lengths[rows], np.maximum(tokens, 0))
        self._stored_step = plan.step
        return True
