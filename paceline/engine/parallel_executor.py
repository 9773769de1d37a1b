"""Tensor parallelism: executes plans on rank 0 and sends them to the other ranks, which execute the same.

    engine ── plan ─┬─▶ executor of rank 0 ─────────▶ results
                    └─▶ ring ─▶ executor of rank 1 ... (rank_process.py)
                                  └── collectives between the executors, in every layer and for sampling

Every rank computes its part of every pass, and all of them get the same tokens. Only rank 0 plans and returns results.
Pages that other engines get, or that they sent, consist of the parts of all ranks (rank_copies.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from paceline.engine.executor import Completion, DelayedPending, Executor, Pending, Result
from paceline.engine.rank_copies import RankMemory
from paceline.engine.rank_messages import (
    AddAdapter,
    AfterLaunched,
    DropWeights,
    ExportPages,
    LaunchPass,
    MessageToRank,
    ReadWeights,
    RemoveAdapter,
    RunBackgroundWork,
    SamplePass,
    UseWeights,
    WeightsRead,
)
from paceline.engine.weight_source import WeightSource
from paceline.model.lora import LoraFile, LoraWeights
from paceline.model.spec import ModelError
from paceline.request import PacelineError
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler.plan import Column, Plan
from paceline.shared_pages import SharedPages

if TYPE_CHECKING:
    from paceline.model.decoder import Decoder


class RankLink(Protocol):
    """The other ranks."""

    size: int  # with rank 0
    memory: RankMemory

    def agree(self, num_pages: int) -> int:
        """The least number of pages, of the KV cache or of host memory, that fits on all ranks: all of them use it."""

    def wait_ready(self) -> None:
        """Blocks until all executors are built."""

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """Calls `on_failure`, on another thread, if a rank is lost from now on."""

    def send(self, message: MessageToRank) -> None: ...

    def launch_copies(self, message: ExportPages | AfterLaunched) -> Completion:
        """Sends a message about copies. Returns their end on all of these ranks; it raises if one is lost."""

    def wait_weights(self, rank: int) -> WeightsRead:
        """Blocks until a rank reports about weights that it was told to read. Raises if a rank was lost."""

    def check(self) -> None:
        """Raises if a rank was lost."""

    def wait_failure(self) -> None:
        """As `check`, if that is noticed within a second."""

    def close(self) -> None: ...


class RankedExecutor(Executor):
    """An executor with other ranks, or stages, that execute the same plans with the same adapters and weights."""

    _local: Executor
    _ranks: RankLink
    _num_announced = 0  # weights

    def read_weights(self, source: WeightSource) -> Decoder:
        return self._local.read_weights(source)

    def announce_weights(self, source: WeightSource) -> None:
        self._num_announced += 1
        self._ranks.send(ReadWeights(self._num_announced, source))

    def wait_weights(self) -> None:
        errors = []
        for rank in range(1, self._ranks.size):
            while (report := self._ranks.wait_weights(rank)).number != self._num_announced:
                pass  # it is about an update that was given up before
            if report.error:
                errors.append(f"rank {rank} of {self._ranks.size}: {report.error}")
        if errors:
            raise ModelError(errors[0])

    def drop_weights(self) -> None:
        self._ranks.send(DropWeights())

    def load_weights(self, decoder: Decoder) -> None:
        self._ranks.send(UseWeights())  # first: scales of an FP8 cache are found by all ranks together
        with rank_errors(self._ranks):
            self._local.load_weights(decoder)

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
        self.capabilities = local.capabilities
        self._host_pages = None if local.host_pages is None else ranks.memory.join_host_pages(local.host_pages)
        self._ids = itertools.count()
        self._mapped: dict[SharedPages, int] = {}

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
        self._send_launch(plan, delayed=False)  # first: the others begin while this rank launches
        with rank_errors(self._ranks):
            return _ParallelPending(self.local.launch(plan), self._ranks)

    def prepare(self, plan: Plan) -> None:
        self.local.prepare(plan)

    def launch_delayed(self, plan: Plan) -> DelayedPending:
        self._send_launch(plan, delayed=True)
        with rank_errors(self._ranks):
            return _ParallelDelayed(self.local.launch_delayed(plan), self._ranks)

    def _send_launch(self, plan: Plan, *, delayed: bool) -> None:
        may_capture = self.local.may_capture  # once: it may be true a moment later
        self._ranks.send(LaunchPass(plan, delayed, may_capture))
        self.local.let_capture(may_capture)

    def run_background_work(self) -> bool:
        self._ranks.send(RunBackgroundWork())
        return self.local.run_background_work()

    @property
    def host_pages(self) -> SharedPages | None:
        return self._host_pages

    def map_pages(self, target: SharedPages) -> None:
        id = next(self._ids)
        self.local.map_pages(target.of_rank(0))
        try:
            self._ranks.memory.map(id, target)
        except PacelineError:
            self._unmap(id, target)
            raise
        self._mapped[target] = id

    def unmap_pages(self, target: SharedPages) -> None:
        self._unmap(self._mapped.pop(target), target)

    def _unmap(self, id: int, target: SharedPages) -> None:
        self.local.unmap_pages(target.of_rank(0))
        self._ranks.memory.unmap(id)

    def export_pages(self, pages: Column, target: SharedPages, targets: Column) -> Completion:
        others = self._ranks.launch_copies(ExportPages(self._mapped[target], pages, targets))
        return _ParallelCopies(self.local.export_pages(pages, target.of_rank(0), targets), others)

    def after_launched(self) -> Completion:
        others = self._ranks.launch_copies(AfterLaunched())
        return _ParallelCopies(self.local.after_launched(), others)

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


class _ParallelCopies:
    """Copies of all ranks."""

    __slots__ = ("_local", "_others")

    def __init__(self, local: Completion, others: Completion) -> None:
        self._local, self._others = local, others

    def wait(self) -> None:
        try:
            self._local.wait()
        finally:  # whatever happened here, the others may still write
            self._others.wait()


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
