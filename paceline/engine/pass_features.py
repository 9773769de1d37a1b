"""What a pass has to do, in numbers: what its time depends on.

The recorder writes these numbers beside the measured time and the virtual GPU computes its time from them, so a fit
means the same in both places. They come from the plan alone, as all that an executor knows; what ended since the last
launch, which costs the host its text, is told apart from them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from paceline.request import Request
from paceline.scheduler.plan import Plan


class PassFeatures(msgspec.Struct, frozen=True, gc=False):
    """Decode rows read their context; prompt rows compute new tokens against what lies before them."""

    num_decodes: int
    num_prompts: int  # rows with prompt tokens
    num_prompt_tokens: int
    num_sampled: int
    bucket: int  # rows of the graph that runs a pass of decodes; 0: a pass with prompts
    context_tokens: int  # KV positions read by decode rows
    repeated_tokens: int  # KV positions that a row, decode or prompt, has in common with one before it
    longest_context: int  # of one decode row
    prompt_context_tokens: int  # KV positions before the prompt rows' new ones
    prompt_pairs: int  # of a new prompt token and a position it attends to
    num_joins: int
    join_tokens: int
    num_page_changes: int
    num_spilled_pages: int = 0
    num_fetched_pages: int = 0

    @property
    def own_tokens(self) -> int:
        """KV positions that rows read, each counted once however many rows read it."""
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


class Ended(msgspec.Struct, frozen=True, gc=False):
    """Requests that ended since the launch before: what the host has to do for them before the next one."""

    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Ended:
        sizes = [(len(one.prompt), len(one.output)) for one in requests]
        return cls(len(sizes), sum(prompt for prompt, _ in sizes), sum(output for _, output in sizes))


def bucket_of(num_rows: int, buckets: Sequence[int]) -> int:
    """The smallest of `buckets` (ascending) that holds so many rows; past the largest, the number itself."""
    index = bisect.bisect_left(buckets, num_rows)
    return buckets[index] if index < len(buckets) else num_rows


def read_features(plan: Plan, buckets: Sequence[int]) -> PassFeatures:
    """What `plan` asks for, of a device with graphs for `buckets` rows."""
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
        num_page_changes=len(plan.page_ids),
        num_spilled_pages=0 if plan.swap is None else len(plan.swap.spill_pages),
        num_fetched_pages=0 if plan.swap is None else len(plan.swap.fetch_pages),
    )
