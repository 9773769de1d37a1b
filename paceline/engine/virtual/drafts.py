"""Speculative decoding on a virtual GPU: how many drafts each row feeds, and how many are accepted.

Whether a draft is right depends on its request and its position alone. A request therefore gets the same tokens per
pass alone, in a batch, with or without overlap, and after a retraction.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.scheduler.plan import Column, Join, Plan


class DraftOutcomes(Protocol):
    """Which drafts exist and which are right."""

    def join(self, join: Join) -> None:
        """A request takes a slot."""

    def verify(self, slots: Column, positions: Column, limits: Column) -> tuple[Column, Column]:
        """The drafts that each row feeds, at most limits[i], and how many of them are accepted. Row i feeds the token
        at positions[i] of its slot; its drafts are guesses of the tokens after it."""


class RandomDrafts:
    """Rows feed as many drafts as they may. A draft is right with a fixed probability if all before it are."""

    def __init__(self, max_running: int, acceptance: float, seed: int = 0) -> None:
        self._acceptance, self._seed = acceptance, np.uint64(seed)
        self._keys: npt.NDArray[np.uint64] = np.zeros(max_running, np.uint64)

    def join(self, join: Join) -> None:
        self._keys[join.slot] = zlib.crc32(join.tokens[: join.num_prompt_tokens].tobytes())

    def verify(self, slots: Column, positions: Column, limits: Column) -> tuple[Column, Column]:
        offsets = np.arange(1, 1 + int(limits.max(initial=0)))
        keys = self._keys[slots][:, None]
        right = _uniform(keys ^ (self._seed << np.uint64(32)), positions[:, None] + offsets) < self._acceptance
        right &= offsets <= limits[:, None]
        return limits, np.logical_and.accumulate(right, axis=1).sum(axis=1, dtype=np.int32)


def _uniform(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each key and position (SplitMix64)."""
    mixed = keys * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    found: npt.NDArray[np.float64] = (mixed >> np.uint64(11)) * 2.0**-53
    return found


class DraftVerifier:
    """Executes plans with drafts. The positions of rows are kept here: with passes in flight the scheduler knows only
    the highest possible one."""

    def __init__(self, max_running: int, model: DraftOutcomes) -> None:
        self._model = model
        self._positions: Column = np.zeros(max_running, np.int32)  # of the token that each slot feeds next

    def verify(self, plan: Plan) -> tuple[Plan, Column | None, Column | None]:
        """`plan` with a sampling row for each token that it yields, at exact positions. Then, by sampling row of
        `plan`: the number of these tokens, and of drafts that were fed; None if the plan has no drafts."""
        for join in plan.joins:
            self._model.join(join)
        ends = plan.starts + plan.lengths  # where the next token of each row belongs
        if plan.drafts is None:
            self._positions[plan.slots] = ends
            return plan, None, None
        count, sampling = plan.num_decodes, np.flatnonzero(plan.samples)  # decode rows come first and all sample
        slots = plan.slots[:count]
        ends[:count] = self._positions[slots] + 1
        room = plan.max_lengths[:count] - 1 - ends[:count]  # drafts after which another token fits; < 0: it has all
        num_drafts, counts = np.zeros(len(sampling), np.int32), np.ones(len(sampling), np.int32)
        limits = np.clip(room, 0, plan.drafts)
        num_drafts[:count], accepted = self._model.verify(slots, ends[:count] - 1, limits)
        counts[:count] = np.where(room >= 0, 1 + accepted, 0)
        self._positions[plan.slots] = ends
        self._positions[slots] += counts[:count] - 1
        rows = np.repeat(sampling, counts)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        yielded = replace(
            plan,
            slots=plan.slots[rows],
            starts=(ends[rows] + offsets - 1).astype(np.int32),
            lengths=np.ones(len(rows), np.int32),
            samples=np.ones(len(rows), np.bool_),
        )
        return yielded, counts, num_drafts
