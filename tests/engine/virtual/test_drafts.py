"""Speculative decoding on the virtual GPU: the same tokens in fewer passes, and the same outcomes on every run."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from paceline.config import ConfigError, SchedulerConfig
from paceline.engine.executor import Result
from paceline.engine.loop import Loop
from paceline.engine.virtual.build import virtual_tokens
from paceline.engine.virtual.drafts import DraftVerifier, RandomDrafts
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.llm import LLM
from paceline.request import Request, SamplingParams
from paceline.scheduler import Counters, Plan, Scheduler
from paceline.scheduler.step_time import StepTime
from paceline.scheduler.tracked_request import TrackedRequest

Rows = dict[str, list[tuple[int, int]]]  # by request: drafts and tokens of each pass


class PassLog:
    """A `Trace` that keeps what each request got from each pass."""

    def __init__(self) -> None:
        self.rows: Rows = defaultdict(list)
        self._slots: dict[int, str] = {}

    def span(self, what: str, step: int, began: float, ended: float) -> None:
        pass

    def passed(self, plan: Plan, result: Result) -> None:
        self._slots |= {join.slot: join.request_id for join in plan.joins}
        assert result.counts is not None and result.num_drafts is not None
        rows = zip(plan.slots[plan.samples].tolist(), result.num_drafts.tolist(), result.counts.tolist(), strict=True)
        for slot, num_drafts, count in rows:
            if count:
                self.rows[self._slots[slot]].append((num_drafts, count))


def requests(count: int, max_tokens: int = 40) -> list[Request]:
    rng = np.random.default_rng(3)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [Request(f"{n}", rng.integers(0, 500, 5 + n).astype(np.int32), params) for n in range(count)]


def serve(
    asked: list[Request], *, acceptance: float = 0.7, overlap: bool = True, **options: Any
) -> tuple[list[TrackedRequest], Rows, Counters]:
    settings = {"num_pages": 400, "page_size": 4, "max_running": 8, "draft_tokens": 4} | options
    scheduler, clock, log = Scheduler(SchedulerConfig(**settings)), VirtualClock(), PassLog()
    size = scheduler.config.max_running
    drafts = DraftVerifier(size, RandomDrafts(size, acceptance))
    executor = VirtualExecutor(clock, tokens=virtual_tokens(size), drafts=drafts)
    loop = Loop(scheduler, executor, clock, overlap=overlap, trace=log)
    added = [scheduler.add(request, clock.now) for request in asked]
    loop.drain()
    return added, log.rows, scheduler.counters


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [400, 40])
def test_drafts_do_not_change_the_tokens(overlap: bool, num_pages: int) -> None:
    added, _, counters = serve(requests(12), overlap=overlap, num_pages=num_pages)
    assert (counters.retractions > 0) == (num_pages == 40)
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    for request in added:
        assert list(request.output) == virtual_tokens().answer(request.prompt, 40), request.id


def test_the_outcome_of_a_request_depends_on_nothing_else() -> None:
    _, together, _ = serve(requests(12))
    _, again, _ = serve(requests(12))
    assert together == again
    for request in requests(12):
        _, alone, _ = serve([request], overlap=False)
        assert alone[request.id] == together[request.id]


@pytest.mark.parametrize(("acceptance", "tokens"), [(0.0, [1] * 40), (1.0, [1] + [5] * 7 + [4])])
def test_no_draft_or_every_draft_is_right(acceptance: float, tokens: list[int]) -> None:
    _, rows, _ = serve(requests(1), acceptance=acceptance)
    assert [count for _, count in rows["0"]] == tokens


def test_a_row_drafts_no_further_than_its_last_token() -> None:
    _, rows, _ = serve(requests(1, max_tokens=7), acceptance=1.0)
    assert rows["0"] == [(0, 1), (4, 5), (0, 1)]


def test_accepted_drafts_follow_the_probability() -> None:
    """Of k drafts with an acceptance of a, a + a^2 + ... + a^k are accepted on average."""
    _, rows, counters = serve(requests(40, max_tokens=400), acceptance=0.6, num_pages=4000)
    full = [count - 1 for counts in rows.values() for num_drafts, count in counts if num_drafts == 4]
    assert len(full) > 4000
    assert np.mean(full) == pytest.approx(0.6 + 0.36 + 0.216 + 0.1296, abs=0.05)
    assert counters.accepted_tokens == sum(count - 1 for counts in rows.values() for _, count in counts)
    assert counters.drafted_tokens == sum(num_drafts for counts in rows.values() for num_drafts, _ in counts)


def test_another_seed_gives_other_outcomes() -> None:
    slots, positions, limits = np.arange(64), np.full(64, 9), np.full(64, 7)
    one, same, other = (RandomDrafts(64, 0.5, seed).verify(slots, positions, limits)[1] for seed in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()


def test_draft_tokens_take_time() -> None:
    executor = VirtualExecutor(VirtualClock(), drafts=DraftVerifier(1, RandomDrafts(1, 0.5)))
    scheduler = Scheduler(SchedulerConfig(num_pages=100, max_running=1, draft_tokens=3))
    scheduler.add(requests(1)[0], 0.0)
    prefill, decode = scheduler.plan(0.0), scheduler.plan(0.0)
    assert prefill is not None and decode is not None
    free, paid = StepTime(1.0, 2.0, 3.0, 0.0), StepTime(1.0, 2.0, 3.0, 0.0, per_draft_token=0.5)
    assert (free.of(prefill), paid.of(prefill)) == (11.0, 11.0)
    assert (free.of(decode), paid.of(decode)) == (4.0, 5.5)
    executor.launch(prefill)
    assert executor.launch(decode).wait().num_drafted == 3


def test_a_virtual_engine_speculates() -> None:
    params, texts = SamplingParams(max_tokens=60), [f"question {n}" for n in range(6)]
    found = {}
    for options in ({}, {"speculate": "ngram"}, {"speculate": "ngram", "virtual_acceptance": 0.0}):
        with LLM(executor="virtual", virtual_slowdown=0.01, **options) as llm:
            outputs = [output.token_ids for output in llm.generate(texts, params)]
            counters = llm.engine.call(lambda scheduler: scheduler.counters).result()
            found[tuple(options)] = outputs, counters.accepted_tokens, counters.steps
    plain, speculated, rejected = found.values()
    assert plain[0] == speculated[0] == rejected[0]
    assert plain[1] == rejected[1] == 0 < speculated[1]
    assert speculated[2] < 0.6 * plain[2]


def test_the_acceptance_is_a_probability() -> None:
    with pytest.raises(ConfigError, match=r"virtual_acceptance is 1\.5: must be at most 1\.0"):
        LLM(executor="virtual", speculate="ngram", virtual_acceptance=1.5)
