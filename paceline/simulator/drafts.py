"""Drafts of simulated requests (speculative decoding): by a probability, or as a recording has them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import DRAFT_ACCEPTANCE
from paceline.engine.virtual.drafts import RandomDrafts
from paceline.scheduler.plan import Column, Join
from paceline.simulator.workloads import Arrival


class ArrivalDrafts:
    """The drafts of `arrivals`: those recorded with a request, else right with the probability `acceptance`. If that is
    given, it is used for all."""

    def __init__(self, arrivals: Sequence[Arrival], max_running: int, acceptance: float | None) -> None:
        self._random = RandomDrafts(max_running, DRAFT_ACCEPTANCE if acceptance is None else acceptance)
        recorded = arrivals if acceptance is None else ()
        self._scripts = {one.id: DraftScript(one.drafted, one.accepted) for one in recorded if one.drafted}
        self._slots: dict[int, tuple[DraftScript, int]] = {}  # slot -> script, number of prompt tokens

    def join(self, join: Join) -> None:
        self._random.join(join)
        self._slots.pop(join.slot, None)
        if (script := self._scripts.get(join.request_id)) is not None:
            self._slots[join.slot] = script, join.num_prompt_tokens

    def verify(self, slots: Column, positions: Column, limits: Column) -> tuple[Column, Column]:
        drafted, accepted = self._random.verify(slots, positions, limits)
        if self._slots:
            drafted = drafted.copy()
            for row, slot in enumerate(slots.tolist()):
                if slot in self._slots:
                    script, num_prompt_tokens = self._slots[slot]
                    at = int(positions[row]) + 1 - num_prompt_tokens
                    drafted[row], accepted[row] = script.verify(at, int(limits[row]))
        return drafted, accepted


class DraftScript:
    """The drafts of one recorded request, by output token, so that they also apply to other passes than the recorded
    ones: with fewer drafts, or after a retraction."""

    def __init__(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """As in `RecordedRequest`."""
        self._available: list[int] = []  # drafts there are for this token and those after it
        self._right: list[bool] = []
        for num_drafts, num_accepted in zip(drafted, accepted, strict=True):
            self._available += [num_drafts - index for index in range(num_accepted + 1)]
            self._right += [True] * num_accepted + [False]

    def verify(self, at: int, limit: int) -> tuple[int, int]:
        """Drafts of a pass whose first token is output token `at`, at most `limit`, and how many are accepted."""
        if at >= len(self._available):
            return 0, 0
        num_drafts = min(self._available[at], limit)
        accepted = 0
        while accepted < num_drafts and self._right[at + accepted]:
            accepted += 1
        return num_drafts, accepted
