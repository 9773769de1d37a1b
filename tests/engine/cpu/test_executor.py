"""The CPU executor runs passes in launch order, and none after an error."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from paceline.engine.cpu.executor import CpuExecutor, ExecutorFailed
from paceline.engine.executor import Result


class FakePlan:
    def __init__(self, step: int) -> None:
        self.step = step


class FakeDevice:
    def __init__(self, *, fails_at: int | None = None) -> None:
        self.go = threading.Event()
        self.ran: list[int] = []
        self._fails_at = fails_at

    def run(self, plan: Any, masks: Any) -> Result:
        assert self.go.wait(10), "the pass was not allowed to run"
        self.ran.append(plan.step)
        if plan.step == self._fails_at:
            raise MemoryError("no memory")
        return Result(np.array([plan.step], np.int32), 0.0)


def test_launch_returns_at_once_and_passes_run_in_order() -> None:
    device = FakeDevice()
    executor = CpuExecutor(device)
    pending = [executor.launch(FakePlan(step)) for step in range(5)]  # type: ignore[arg-type]
    assert device.ran == []
    device.go.set()
    assert [int(one.wait().tokens[0]) for one in reversed(pending)] == [4, 3, 2, 1, 0]
    assert device.ran == [0, 1, 2, 3, 4]
    seconds = pending[0].wait().device_s
    assert seconds is not None and seconds > 0
    executor.close()
    executor.close()


def test_after_an_error_no_pass_runs_and_every_pass_reports_it() -> None:
    device = FakeDevice(fails_at=1)
    executor = CpuExecutor(device)
    pending = [executor.launch(FakePlan(step)) for step in range(3)]  # type: ignore[arg-type]
    device.go.set()
    assert pending[0].wait().tokens.tolist() == [0]
    for one in (*pending[1:], executor.launch(FakePlan(9))):  # type: ignore[arg-type]
        with pytest.raises(ExecutorFailed, match="pass 1 failed: MemoryError: no memory") as raised:
            one.wait()
        assert isinstance(raised.value.__cause__, MemoryError)
    assert device.ran == [0, 1]
    executor.close()


def test_a_pass_that_fails_before_it_has_drafts_reports_it_to_those_who_wait_for_them() -> None:
    device = FakeDevice(fails_at=0)
    executor = CpuExecutor(device)
    pending = [executor.launch_delayed(FakePlan(step)) for step in range(2)]  # type: ignore[arg-type]
    device.go.set()
    for one in pending:
        with pytest.raises(ExecutorFailed, match="pass 0 failed: MemoryError: no memory"):
            one.drafts()
    executor.close()
