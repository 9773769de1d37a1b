"""What a pass has to do, in numbers: what its time depends on.

The recorder writes these numbers beside the measured time and the virtual GPU computes its time from them, so a fit
means the same in both places. They come from plans alone, as all that an executor knows; a reader therefore has to see
every plan, in order.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.scheduler.plan import Plan


class PassFeatures(msgspec.Struct, frozen=True, gc=False):
    """Decode rows read their context; prompt rows compute new tokens against what lies before them."""

    num_decodes: int
    num_prompts: int  # rows with prompt tokens
    num_prompt_tokens: int
    num_sampled: int
    bucket: int  # rows of the graph that runs a pass of decodes; 0: a pass with prompts
    context_tokens: int  # KV positions read by decode rows
    repeated_tokens: int  # of these, read by another decode row of this pass too, counted from the second on
    longest_context: int  # of one decode row
    prompt_context_tokens: int  # KV positions before the prompt rows' new ones
    prompt_pairs: int  # of a new prompt token and a position it attends to
    num_joins: int
    join_tokens: int
    num_page_changes: int

    @property
    def own_tokens(self) -> int:
        """KV positions that decode rows read, each counted once however many rows read it."""
        return self.context_tokens - self.repeated_tokens

    @property
    def has_prompts(self) -> bool:
        return self.num_prompts > 0


class PlanReader:
    """Reads the features off plans. `buckets`: rows of the graphs there are, ascending."""

    def __init__(self, page_size: int, buckets: Sequence[int]) -> None:
        self._page_size = page_size
        self._buckets = list(buckets)
        self._table: npt.NDArray[np.int32] = np.full((1, 64), -1, np.int32)  # as executors keep it; -1: never written
        self._slots: npt.NDArray[np.int32] | None = None  # of the decode rows that `_repeated` was counted for
        self._repeated = 0

    def bucket(self, num_rows: int) -> int:
        """The graph that serves so many rows; past the largest, the number itself."""
        index = bisect.bisect_left(self._buckets, num_rows)
        return self._buckets[index] if index < len(self._buckets) else num_rows

    def read(self, plan: Plan) -> PassFeatures:
        self._follow(plan)
        count = plan.num_decodes
        decodes, prompts = slice(0, count), slice(count, None)
        starts, lengths = plan.starts[prompts].astype(np.int64), plan.lengths[prompts].astype(np.int64)
        before = int(starts.sum())
        new = plan.num_prefill_tokens
        return PassFeatures(
            num_decodes=count,
            num_prompts=plan.num_rows - count,
            num_prompt_tokens=new,
            num_sampled=int(np.count_nonzero(plan.samples)),
            bucket=0 if plan.num_rows > count else self.bucket(count),
            context_tokens=plan.num_context_tokens - before - new,
            repeated_tokens=self._count_repeated(plan),
            longest_context=int(plan.starts[decodes].max()) + 1 if count else 0,
            prompt_context_tokens=before,
            prompt_pairs=int((lengths * starts + lengths * (lengths + 1) // 2).sum()),
            num_joins=len(plan.joins),
            join_tokens=sum(len(join.tokens) for join in plan.joins),
            num_page_changes=len(plan.page_ids),
        )

    def _follow(self, plan: Plan) -> None:
        """Applies the plan's page table changes."""
        if not len(plan.page_ids):
            return
        rows, width = int(plan.page_slots.max()) + 1, int(plan.page_indices.max()) + 1
        old = self._table
        if rows > old.shape[0] or width > old.shape[1]:
            shape = (max(old.shape[0], 2 * rows), max(old.shape[1], 2 * width))
            self._table = np.full(shape, -1, np.int32)
            self._table[: old.shape[0], : old.shape[1]] = old
        self._table[plan.page_slots, plan.page_indices] = plan.page_ids

    def _count_repeated(self, plan: Plan) -> int:
        """Positions in pages that an earlier decode row reads too.

        Pages that decode rows fill are theirs alone, so this changes only when rows come or go, or a row is remapped to
        another's copy."""
        slots = plan.slots[: plan.num_decodes]
        same = self._slots is not None and (slots is self._slots or np.array_equal(slots, self._slots))
        if same and not plan.joins and len(plan.page_ids) <= plan.num_decodes:
            return self._repeated
        self._slots = slots
        self._repeated = 0
        if len(slots) > 1:
            # Only whole pages can be shared: the one a row is writing is its own.
            num_pages = plan.starts[: plan.num_decodes] // self._page_size
            width = min(int(num_pages.max()), self._table.shape[1])
            rows = self._table[slots, :width]
            pages = rows[np.arange(width) < num_pages[:, None]]
            if len(pages):
                seen = np.zeros(int(pages.max()) + 1, np.bool_)
                seen[pages] = True
                self._repeated = (len(pages) - int(np.count_nonzero(seen))) * self._page_size
        return self._repeated
