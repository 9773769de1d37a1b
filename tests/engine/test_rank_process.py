"""The loop of a rank other than 0."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest

from paceline.codec import encode
from paceline.config import SchedulerConfig
from paceline.engine.executor import Executor
from paceline.engine.rank_copies import RankCopier
from paceline.engine.rank_messages import LaunchPass, StopRank
from paceline.engine.rank_process import run_rank
from paceline.request import Request, SamplingParams, as_tokens
from paceline.scheduler import Scheduler


class CountingExecutor:
    """Counts the passes that were launched and not waited for."""

    def __init__(self) -> None:
        self.num_launched, self.waited = 0, list[int]()
        self.closed = False

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
    mine, theirs = socket.socketpair()
    with mine, theirs:
        copier = RankCopier(cast(Executor, executor), theirs, lambda report: None)
        assert run_rank(cast(Executor, executor), lambda: next(queue, None), lambda _: None, copier) == stops
    assert executor.waited == [0, 1, 2] and executor.closed == stops
