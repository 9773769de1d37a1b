"""Tensor parallelism: executes plans on rank 0 and sends them to the other ranks, which execute the same.

    engine ── plan ─┬─▶ executor of rank 0 ─────────▶ results
                    └─▶ ring ─▶ executor of rank 1 ... (rank_process.py)
                                  └── collectives between the executors, in every layer and for sampling

Every rank computes its part of every pass, and all of them get the same tokens. Only rank 0 plans and returns results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from paceline.engine.executor import DelayedPending, Executor, Pending, Result
from paceline.engine.rank_messages import (
    AddAdapter,
    LaunchPass,
    MessageToRank,
    RemoveAdapter,
    RunBackgroundWork,
    SamplePass,
)
from paceline.model.lora import LoraFile, LoraWeights
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler.plan import Plan


class RankLink(Protocol):
    """The other ranks."""

    def agree(self, num_pages: int) -> int:
        """The least number of pages that fits on all ranks, which all of them use."""

    def wait_ready(self) -> None:
        """Blocks until all executors are built."""

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """Calls `on_failure`, on another thread, if a rank is lost from now on."""

    def send(self, message: MessageToRank) -> None: ...

    def check(self) -> None:
        """Raises if a rank was lost."""

    def wait_failure(self) -> None:
        """As `check`, if that is noticed within a second."""

    def close(self) -> None: ...


class RankedExecutor(Executor):
    """An executor with other ranks, or stages, that execute the same plans with the same adapters."""

    _local: Executor
    _ranks: RankLink

    def arrange_adapter(self, file: LoraFile) -> LoraWeights:
        return self._local.arrange_adapter(file)

    def add_adapter(self, adapter: str, file: LoraFile, weights: LoraWeights) -> None:
        self._ranks.send(AddAdapter(adapter, file.folder, file.digest))
        self._local.add_adapter(adapter, file, weights)

    def remove_adapter(self, adapter: str) -> None:
        self._ranks.send(RemoveAdapter(adapter))
        self._local.remove_adapter(adapter)


class ParallelExecutor(RankedExecutor):
    def __init__(self, local: Executor, ranks: RankLink) -> None:
        """local: the executor of rank 0."""
        self._local, self._ranks = local, ranks
        self.capabilities = replace(local.capabilities, weights=False)

    @property
    def local(self) -> Executor:
        return self._local

    @property
    def slow_launches(self) -> Mapping[str, int]:
        return self.local.slow_launches

    @property
    def expert_rows(self) -> Sequence[Sequence[int]]:
        return self.local.expert_rows  # all ranks have a part of every expert

    def launch(self, plan: Plan) -> Pending:
        self._ranks.send(LaunchPass(plan))  # first: the others begin while this rank launches
        with rank_errors(self._ranks):
            return _ParallelPending(self.local.launch(plan), self._ranks)

    def prepare(self, plan: Plan) -> None:
        self.local.prepare(plan)

    def launch_delayed(self, plan: Plan) -> DelayedPending:
        self._ranks.send(LaunchPass(plan, delayed=True))
        with rank_errors(self._ranks):
            return _ParallelDelayed(self.local.launch_delayed(plan), self._ranks)

    def run_background_work(self) -> bool:
        self._ranks.send(RunBackgroundWork())
        return self.local.run_background_work()

    def close(self) -> None:
        # Ranks stop behind the passes that were launched; this one waits for the same passes.
        self._ranks.close()
        self.local.close()


@contextmanager
def rank_errors(ranks: RankLink) -> Iterator[None]:
    """If a rank was lost, that is the reason of an error."""
    try:
        yield
    except Exception:
        ranks.wait_failure()
        raise


class _ParallelPending:
    __slots__ = ("_pending", "_ranks")

    def __init__(self, pending: Pending, ranks: RankLink) -> None:
        self._pending, self._ranks = pending, ranks

    def wait(self) -> Result:
        with rank_errors(self._ranks):
            return self._pending.wait()


class _ParallelDelayed(_ParallelPending):
    __slots__ = ("_delayed",)

    def __init__(self, pending: DelayedPending, ranks: RankLink) -> None:
        super().__init__(pending, ranks)
        self._delayed = pending

    def drafts(self) -> Drafts:
        return self._delayed.drafts()

    def mask_buffer(self, num_masks: int, num_words: int) -> Bits:
        return self._delayed.mask_buffer(num_masks, num_words)

    def sample(self, masks: Masks) -> None:
        self._ranks.send(SamplePass(masks))
        with rank_errors(self._ranks):
            self._delayed.sample(masks)
