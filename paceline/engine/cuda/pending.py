"""Launched passes and copies of a GPU, which the host may wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.engine.cuda.buffers import PassBuffers
from paceline.engine.cuda.inputs import PackedBatch
from paceline.engine.cuda.prompt_logprobs import logprob_columns, prompt_runs
from paceline.engine.cuda.stats import ExecutorStats
from paceline.engine.cuda.streams import CudaEvent
from paceline.engine.executor import Result
from paceline.engine.pooling import PooledStates
from paceline.kernels.layouts import DraftWord
from paceline.sampling.logprobs import LogprobRequest
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler.plan import NO_TOKENS

_COPY_POLL_S = 0.0005


class PassOwner(Protocol):
    """What a launched pass needs of its executor."""

    stats: ExecutorStats

    def wait_event(self, event: CudaEvent) -> None: ...

    def mask_buffer(self, pending: CudaPending, num_masks: int, num_words: int) -> Bits: ...


class CudaPending:
    """A launched forward pass."""

    __slots__ = (
        "_buffers",
        "_executor",
        "_packed",
        "_previous_end",
        "_result",
        "bucket",
        "delayed",
        "has_counts",
        "num_drafts",
        "prompt_logprobs",
        "slow_launch",
    )

    def __init__(
        self,
        executor: PassOwner,
        buffers: PassBuffers,
        previous_end: CudaEvent | None,
        packed: PackedBatch,
        bucket: int,
        prompt_logprobs: Sequence[LogprobRequest],
    ) -> None:
        self._executor, self._buffers, self._previous_end = executor, buffers, previous_end
        self._packed, self.bucket = packed, bucket
        self._result: Result | None = None
        self.prompt_logprobs = prompt_logprobs
        self.delayed: Callable[[Masks], None] | None = None
        self.slow_launch: str | None = None
        self.num_drafts = 0  # of each row, at most
        self.has_counts = False  # the scheduler expects how many tokens each row got

    def drafts(self) -> Drafts:
        if not self.num_drafts:
            return ()
        self._executor.wait_event(self._buffers.drafts_copied)
        rows = self._buffers.drafts[: self._packed.num_sampled].tolist()
        return [row[DraftWord.TOKENS : DraftWord.TOKENS + row[DraftWord.NUM_FED] - 1] for row in rows]

    def mask_buffer(self, num_masks: int, num_words: int) -> Bits:
        return self._executor.mask_buffer(self, num_masks, num_words)

    def sample(self, masks: Masks) -> None:
        assert self.delayed is not None, "this pass was not delayed, or has its masks already"
        finish, self.delayed = self.delayed, None
        finish(masks)

    @property
    def is_over(self) -> bool:
        return self._result is not None

    def wait(self) -> Result:
        assert self.delayed is None, "a delayed pass was waited for before its masks were given"
        if self._result is None:
            began = time.perf_counter()
            buffers, stats = self._buffers, self._executor.stats
            self._executor.wait_event(buffers.copied)
            device_s = buffers.began.elapsed_time(buffers.ended) / 1e3
            stats.wait_s += time.perf_counter() - began
            stats.add_pass(self.bucket, device_s)
            idle_s = self._previous_end.elapsed_time(buffers.began) / 1e3 if self._previous_end is not None else 0.0
            stats.idle_s += idle_s
            has_fetched = self._packed.fetch_pages.count
            fetch_s = buffers.fetch_began.elapsed_time(buffers.fetched) / 1e3 if has_fetched else None
            stats.fetch_s += fetch_s or 0.0
            # Copies: a later pass will reuse the buffers.
            count, width, counts, num_drafts = self._packed.num_sampled, self._packed.logprobs, None, None
            if self.num_drafts:
                rows = buffers.drafts[:count].numpy()
                counts, num_fed = rows[:, DraftWord.COUNT].copy(), rows[:, DraftWord.NUM_FED]
                num_drafts = num_fed - 1
                is_kept = np.arange(1 + self.num_drafts) < counts[:, None]
                tokens = rows[:, DraftWord.TOKENS : DraftWord.TOKENS + 1 + self.num_drafts][is_kept]
                # Logprobs are those of all fed tokens, one row after the other.
                kept = ((np.cumsum(num_fed) - num_fed)[:, None] + np.arange(1 + self.num_drafts))[is_kept]
            else:
                tokens = buffers.results[:count].numpy().copy() if count else NO_TOKENS
                kept = np.arange(count)
                if self.has_counts:
                    counts, num_drafts = np.ones(count, np.int32), np.zeros(count, np.int32)
            logprobs = None if width is None else logprob_columns(buffers.logprobs.numpy()[kept], width)
            self._result = Result(
                tokens,
                device_s,
                counts,
                num_drafts,
                idle_s=idle_s,
                logprobs=logprobs,
                prompt_logprobs=prompt_runs(buffers.host_prompt_lines.numpy(), self.prompt_logprobs),
                fetch_s=fetch_s,
                slow_launch=self.slow_launch,
                pooled=self._pooled_states(),
            )
        return self._result

    def _pooled_states(self) -> tuple[PooledStates, ...]:
        rows, starts = self._packed.pooled_rows, self._packed.pooled_starts
        if not len(rows):
            return ()
        states = self._buffers.host_pooled.numpy()[: len(rows)].astype(np.float64)  # copied, as above
        return tuple(map(PooledStates, rows.tolist(), starts.tolist(), states))


@dataclass(frozen=True, slots=True)
class CopyEnd:
    events: Sequence[CudaEvent]
    guard: Callable[[], None] | None

    def wait(self) -> None:
        for event in self.events:
            if self.guard is None:
                event.synchronize()
                continue
            while not event.query():  # it never occurs if a rank is lost in a pass before
                self.guard()
                time.sleep(_COPY_POLL_S)
