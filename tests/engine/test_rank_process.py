"""The loop of a rank other than 0."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.codec import encode
from paceline.config import SchedulerConfig
from paceline.engine.executor import Executor
from paceline.engine.rank_copies import RankCopier
from paceline.engine.rank_messages import (
    AddAdapter,
    DropWeights,
    LaunchPass,
    RankReport,
    ReadWeights,
    StopRank,
    UseWeights,
    WeightsRead,
)
from paceline.engine.rank_process import run_rank
from paceline.engine.weight_source import WeightSource
from paceline.model.lora import read_adapter
from paceline.model.shapes import shape
from paceline.request import Request, SamplingParams, as_tokens
from paceline.scheduler import Scheduler
from tests.oracle.adapters import adapted_shapes, write_adapter


class CountingExecutor:
    """Counts the passes that were launched and not waited for."""

    def __init__(self) -> None:
        self.num_launched, self.waited = 0, list[int]()
        self.closed = False

    def let_capture(self, may_capture: bool) -> None: ...

    def launch(self, plan: Any) -> Any:
        assert self.num_launched - len(self.waited) < 2, "buffers and events of two passes exist"
        number, executor = self.num_launched, self
        self.num_launched += 1

        class CountingPending:
            def wait(self) -> None:
                executor.waited.append(number)

        return CountingPending()

    def close(self) -> None:
        self.closed = True


def run(executor: Any, queue: Iterator[bytes], report: Callable[[RankReport], None]) -> bool:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        copier = RankCopier(cast(Executor, executor), theirs, report)
        return run_rank(cast(Executor, executor), lambda: next(queue, None), report, copier)


@pytest.mark.parametrize("stops", [True, False])
def test_a_rank_waits_for_its_passes_in_order_and_has_two_in_flight(stops: bool) -> None:
    scheduler = Scheduler(SchedulerConfig(num_pages=8))
    scheduler.add(Request("a", as_tokens([1, 2, 3]), SamplingParams(max_tokens=4)), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    messages = [encode(LaunchPass(plan)) for _ in range(5)]
    if stops:
        messages.append(encode(StopRank()))
    queue, executor = iter(messages), CountingExecutor()
    assert run(executor, queue, lambda _: None) == stops
    assert executor.waited == [0, 1, 2] and executor.closed == stops


class RecordingExecutor:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def arrange_adapter(self, file: Any) -> str:
        return "arranged"

    def add_adapter(self, adapter: str, file: Any, weights: str) -> None:
        self.calls.append(f"add {adapter}")

    def read_weights(self, source: WeightSource) -> str:
        return source.path

    def load_weights(self, decoder: str) -> None:
        self.calls.append(f"load {decoder}")

    def close(self) -> None:
        self.calls.append("close")


def test_new_weights_find_all_adapters_that_were_announced(tmp_path: Path) -> None:
    """Rank 0 knows an adapter as soon as it is announced, and folds the norms of the new weights into it. Other ranks
    add it with the first pass that uses it, which may come later."""
    write_adapter(tmp_path, adapted_shapes(shape("tiny-qwen3")), rank=2)
    sources = [WeightSource(path, "float32", 64, "") for path in ("dropped", "used")]
    messages = [
        AddAdapter("a", str(tmp_path), read_adapter(tmp_path).digest),
        ReadWeights(1, sources[0]),
        DropWeights(),
        ReadWeights(2, sources[1]),
        UseWeights(),
        StopRank(),
    ]
    queue, executor, reports = map(encode, messages), RecordingExecutor(), list[RankReport]()
    assert run(executor, queue, reports.append)
    assert executor.calls == ["add a", "load used", "close"]
    assert reports == [WeightsRead(1), WeightsRead(2)]
