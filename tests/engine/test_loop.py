"""The order of a step with grammar rows: everything that does not need their masks is done first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from paceline.engine.executor import Executor, Pending, Result
from paceline.engine.timeline import Timeline
from paceline.request import Request
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler.plan import Plan, Updates
from paceline.testing import Harness
from tests.helpers import harness, request

Said = list[tuple[str, int]]  # what, of which pass


class FakeConstraints:
    """Every pass needs masks; their content is ignored. The buffer is a method of `FakeDelayed`, which has the step."""

    def __init__(self, said: Said) -> None:
        self.said = said
        self.started: int | None = None

    def apply_to(self, sampled: Iterable[Request]) -> bool:
        return True

    def masks(self, sampled: Sequence[Request], buffer: Any, drafts: Drafts) -> Masks:
        assert self.started is None
        self.said.append(("masks", buffer.__self__.step))
        return Masks(np.arange(1), buffer(1, 1))

    def start_masks(self, sampled: Sequence[Request], buffer: Any, drafts: Drafts) -> None:
        assert self.started is None
        self.started = buffer.__self__.step
        self.said.append(("start", self.started))
        buffer(1, 1)

    def wait_masks(self) -> Masks:
        assert self.started is not None
        self.said.append(("collect", self.started))
        self.started = None
        return Masks(np.arange(1), np.zeros((1, 1), np.int32))

    def advance(self, updates: Updates) -> Sequence[tuple[Request, str]]:
        assert self.started is None, "grammars advanced while their masks were computed"
        self.said.append(("advance", -1))
        return ()


class FakeDelayed:
    def __init__(self, pending: Pending, step: int, said: Said) -> None:
        self.pending, self.step, self.said = pending, step, said

    def drafts(self) -> Drafts:
        return ()

    def mask_buffer(self, num_masks: int, num_words: int) -> Bits:
        return np.zeros((num_masks, num_words), np.int32)

    def sample(self, masks: Masks) -> None:
        self.said.append(("sample", self.step))

    def wait(self) -> Result:
        assert ("sample", self.step) in self.said
        self.said.append(("wait", self.step))
        return self.pending.wait()


class FakeExecutor(Executor):
    def __init__(self, launch: Callable[[Plan], Pending], said: Said) -> None:
        self._launch, self.said = launch, said

    def prepare(self, plan: Plan) -> None:
        self.said.append(("prepare", plan.step))

    def launch(self, plan: Plan) -> Pending:
        raise AssertionError("all passes have masks")

    def launch_delayed(self, plan: Plan) -> FakeDelayed:
        self.said.append(("launch", plan.step))
        return FakeDelayed(self._launch(plan), plan.step, self.said)


def masked(*, overlap: bool = True, sync: bool = False) -> tuple[Harness, Said]:
    subject, said = harness(overlap=overlap), Said()
    loop, plan, commit = subject.loop, subject.scheduler.plan, subject.scheduler.commit
    loop.sync, loop.constraints = sync, FakeConstraints(said)
    loop.executor = FakeExecutor(subject.executor.launch, said)

    def planning(now: float) -> Plan | None:
        if (found := plan(now)) is not None:
            said.append(("plan", found.step))
        return found

    def committing(which: Plan, *rest: Any) -> Updates:
        said.append(("commit", which.step))
        return commit(which, *rest)

    subject.scheduler.plan, subject.scheduler.commit = planning, committing  # type: ignore[method-assign]
    return subject, said


FIRST = ["plan 1", "launch 1", "masks 1", "sample 1"]


def step(subject: Harness, said: Said) -> list[str]:
    before = len(said)
    subject.step()
    return [what if of < 0 else f"{what} {of}" for what, of in said[before:]]


def test_the_next_pass_is_planned_and_prepared_while_masks_are_computed() -> None:
    subject, said = masked()
    subject.add(request(max_tokens=4))
    assert step(subject, said) == [*FIRST, "plan 2", "launch 2", "wait 1", "commit 1", "advance", "start 2"]
    for n in (2, 3):
        assert step(subject, said) == [
            f"plan {n + 1}", f"prepare {n + 1}", f"collect {n}", f"sample {n}", f"launch {n + 1}", f"wait {n}",
            f"commit {n}", "advance", f"start {n + 1}",
        ]  # fmt: skip
    assert step(subject, said) == ["collect 4", "sample 4", "wait 4", "commit 4", "advance"]
    assert not subject.scheduler.has_work
    subject.assert_reference()


def test_sync_launches_nothing_before_the_device_is_idle() -> None:
    subject, said = masked(sync=True)
    subject.add(request(max_tokens=3))
    assert step(subject, said) == [*FIRST, "plan 2", "wait 1", "launch 2", "commit 1", "advance", "start 2"]
    assert step(subject, said) == [
        "plan 3", "collect 2", "sample 2", "wait 2", "launch 3", "commit 2", "advance", "start 3",
    ]  # fmt: skip
    subject.run()
    subject.assert_reference()


def test_without_overlap_masks_are_computed_where_they_are_needed() -> None:
    subject, said = masked(overlap=False)
    subject.add(request(max_tokens=2))
    assert step(subject, said) == [*FIRST, "wait 1", "commit 1", "advance"]
    subject.run()
    assert not {"start", "collect", "prepare"} & {what for what, _ in said}
    subject.assert_reference()


def test_a_delayed_pass_is_sampled_even_if_all_its_requests_have_finished() -> None:
    subject, said = masked()
    gone = request(max_tokens=9)
    subject.add(gone)
    assert step(subject, said)[-1] == "start 2"
    subject.scheduler.abort(gone.id, subject.clock())
    assert step(subject, said) == ["collect 2", "sample 2", "wait 2", "commit 2", "advance"]
    subject.add(request(max_tokens=2))
    subject.run()
    subject.assert_reference()


def test_trace_counts_waiting_for_masks_as_masks_and_preparing_as_launch() -> None:
    subject, _ = masked()
    trace = subject.loop.trace = Timeline()
    constraints, executor = subject.loop.constraints, subject.loop.executor

    def slow(of: Any, name: str, seconds: float) -> None:
        call = getattr(of, name)
        setattr(of, name, lambda *args: (subject.clock.advance(seconds), call(*args))[1])

    for of, name, seconds in ((constraints, "advance", 1.0), (constraints, "start_masks", 2.0),
                              (constraints, "wait_masks", 4.0), (executor, "prepare", 8.0)):  # fmt: skip
        slow(of, name, seconds)
    subject.add(request(max_tokens=3))
    subject.run()
    spans = {what: [(s.step, round(s.ended - s.began)) for s in trace.spans if s.what == what]
             for what in ("masks", "launch")}  # fmt: skip
    assert spans["masks"] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert spans["launch"] == [(1, 0), (2, 0), (3, 8), (3, 0)]


@pytest.mark.parametrize("overlap", [True, False])
def test_masks_that_allow_everything_do_not_change_tokens(overlap: bool) -> None:
    subject, _ = masked(overlap=overlap)
    subject.add_all(*(request(range(1, 3 + count), max_tokens=1 + count % 5) for count in range(12)))
    subject.run()
    subject.assert_reference()
