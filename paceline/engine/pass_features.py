"""Features of a forward pass: the quantities its duration depends on.

The recorder writes them beside the measured time, and the virtual GPU computes a time from them, so a fitted profile
means the same in both places. They are derived from the plan alone. Requests that finished since the last launch cost
host time too (detokenization); they are described separately (`FinishedRequests`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from paceline.scheduler.plan import Plan
from paceline.scheduler.tracked_request import TrackedRequest


class PassFeatures(msgspec.Struct, frozen=True, gc=False):
    """Decode rows read their context; prefill rows compute new tokens that attend to everything before them."""

    num_decodes: int
    num_prompts: int  # rows with prompt tokens
    num_prompt_tokens: int
    num_sampled: int
    bucket: int  # rows of the CUDA graph of a decode batch; 0: a prefill or mixed batch
    context_tokens: int  # KV positions read by decode rows
    repeated_tokens: int  # KV positions that a row shares with an earlier row
    longest_context: int  # of one decode row
    prompt_context_tokens: int  # KV positions before the prompt rows' new ones
    prompt_pairs: int  # pairs of a new prompt token and a position it attends to
    num_joins: int
    join_tokens: int
    num_page_changes: int
    num_spilled_pages: int = 0
    num_fetched_pages: int = 0
    num_drafts: int = 0  # that the plan allows

    @property
    def own_tokens(self) -> int:
        """Distinct KV positions read: a shared position counts once."""
        return self.context_tokens + self.prompt_context_tokens - self.repeated_tokens

    @property
    def num_moved_pages(self) -> int:
        return self.num_spilled_pages + self.num_fetched_pages

    @property
    def has_prompts(self) -> bool:
        return self.num_prompts > 0

    @property
    def has_decodes(self) -> bool:
        return self.num_decodes > 0

    @property
    def has_repeated(self) -> bool:
        return self.repeated_tokens > 0

    @property
    def has_page_changes(self) -> bool:
        """Otherwise a decode batch may upload nothing."""
        return self.num_page_changes > 0


class FinishedRequests(msgspec.Struct, frozen=True, gc=False):
    """Requests that finished since the previous launch: host work before the next one."""

    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def has_requests(self) -> bool:
        return self.num_requests > 0

    @classmethod
    def of(cls, requests: Iterable[TrackedRequest]) -> FinishedRequests:
        sizes = [(len(one.prompt), len(one.output)) for one in requests]
        return cls(len(sizes), sum(prompt for prompt, _ in sizes), sum(output for _, output in sizes))


def bucket_of(num_rows: int, buckets: Sequence[int]) -> int:
    """The smallest of `buckets` (ascending) with at least `num_rows` rows; beyond the largest, `num_rows` itself."""
    index = bisect.bisect_left(buckets, num_rows)
    return buckets[index] if index < len(buckets) else num_rows


def read_features(plan: Plan, buckets: Sequence[int]) -> PassFeatures:
    """The features of `plan` on a device with CUDA graphs for `buckets` rows."""
    count = plan.num_decodes
    starts, lengths = plan.starts[count:].astype(np.int64), plan.lengths[count:].astype(np.int64)
    before, new = int(starts.sum()), plan.num_prefill_tokens
    return PassFeatures(
        num_decodes=count,
        num_prompts=plan.num_rows - count,
        num_prompt_tokens=new,
        num_sampled=int(np.count_nonzero(plan.samples)),
        bucket=0 if plan.num_rows > count else bucket_of(count, buckets),
        context_tokens=plan.num_context_tokens - before - new,
        repeated_tokens=0 if plan.sharing is None else int(plan.sharing.common.sum()),
        longest_context=int(plan.starts[:count].max()) + 1 if count else 0,
        prompt_context_tokens=before,
        prompt_pairs=int((lengths * starts + lengths * (lengths + 1) // 2).sum()),
        num_joins=len(plan.joins),
        join_tokens=sum(len(join.tokens) for join in plan.joins),
        num_page_changes=sum(len(one.pages) for one in plan.page_changes),
        num_spilled_pages=0 if plan.swap is None else len(plan.swap.spill_pages),
        num_fetched_pages=0 if plan.swap is None else len(plan.swap.fetch_pages),
        num_drafts=plan.num_drafts,
    )
