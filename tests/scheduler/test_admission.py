"""Admission: who gets the prompt tokens of a pass, who may go first, and who waits for whom."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import Phase, Request
from paceline.scheduler import EventKind, Plan, Scheduler
from tests.helpers import admissions, events, harness, prompt, request, scheduler


def large(**options: Any) -> Scheduler:
    """Memory and slots for everything; driven without a model, since prompts are long."""
    settings: dict[str, Any] = {"num_pages": 40_000, "page_size": 16, "max_running": 64, "max_batch_tokens": 8192}
    return scheduler(**settings | options)


def step(core: Scheduler) -> Plan:
    plan = core.plan(0.0)
    assert plan is not None, "requests are left and none can be planned"
    core.commit(plan, np.ones(int(plan.samples.sum()), np.int32), 0.0)
    return plan


def passes_until_finished(core: Scheduler, *requests: Request) -> int:
    count = 0
    while not all(one.is_finished for one in requests):
        step(core)
        count += 1
    return count


def long_prompts(core: Scheduler, count: int, num_tokens: int = 20_000, **fields: Any) -> list[Request]:
    found = [request(prompt([number + 1] * num_tokens), 1, **fields) for number in range(count)]
    for one in found:
        core.add(one, 0.0)
    return found


# ---------------------------------------------------------------------- the prefill budget


@pytest.mark.parametrize("chunk_tokens", [2048, 8192])
def test_long_prompts_use_the_whole_prefill_budget(chunk_tokens: int) -> None:
    core = large(chunk_tokens=chunk_tokens)
    prompts = long_prompts(core, 12)
    assert passes_until_finished(core, *prompts) == -(-12 * 20_000 // 8192)


def test_more_long_prompts_than_are_tried_in_a_step_use_the_whole_prefill_budget() -> None:
    core = large()
    long_prompts(core, 120, 2100)
    assert [step(core).num_prefill_tokens for _ in range(30)] == [8192] * 30


@pytest.mark.parametrize("chunk_tokens", [1024, 2048, 8192])
@pytest.mark.parametrize("num_decodes", [1, 50])
def test_a_short_prompt_is_admitted_at_once_while_long_ones_use_the_whole_budget(
    chunk_tokens: int, num_decodes: int
) -> None:
    core = large(chunk_tokens=chunk_tokens, max_running=128)
    for number in range(num_decodes):
        core.add(request([number + 1], 100), 0.0)
    step(core)
    long_prompts(core, 12)
    for _ in range(5):
        assert step(core).num_prefill_tokens == 8192 - num_decodes
        core.add(short := request(prompt([99] * 300), 1), 0.0)
        plan = step(core)
        assert short.is_finished
        assert plan.num_prefill_tokens == 8192 - num_decodes


def test_a_row_has_one_chunk_in_a_pass() -> None:
    """What is left is added to the chunk that a prompt already has."""
    core = large(chunk_tokens=8192)
    long_prompts(core, 2)
    assert step(core).lengths.tolist() == [8192]
    core.add(request(prompt([99] * 300), 1), 0.0)
    plan = step(core)
    assert sorted(plan.lengths.tolist()) == [300, 7892]
    assert len(set(plan.slots.tolist())) == plan.num_rows


def test_long_prompts_hold_no_more_slots_than_get_tokens() -> None:
    core = large(max_running=8)
    long_prompts(core, 12)
    for _ in range(10):
        plan = step(core)
        assert core.num_running <= plan.num_rows + 1


@settings(max_examples=60)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(0, 2)), min_size=1, max_size=14),
    chunk_tokens=st.sampled_from([8, 16, 32]),
    policy=st.sampled_from(["priority", "fair", "fcfs"]),
)
def test_no_prompt_token_of_a_pass_is_left_unused_or_given_to_a_lower_priority(
    arrivals: list[tuple[int, int, int]], chunk_tokens: int, policy: str
) -> None:
    """With memory and slots for all, whatever `priority` allows: requests of a priority and above get min(budget, what
    they can use) tokens. For other policies that holds for all requests together."""
    core = large(chunk_tokens=chunk_tokens, max_prefill_tokens=32, policy=policy, page_size=4)
    alive: list[Request] = []
    for number, (priority, num_tokens, pause) in enumerate(arrivals):
        core.add(one := request(prompt([number + 1] * num_tokens), 1, priority=priority), 0.0)
        alive.append(one)
        for _ in range(pause if number + 1 < len(arrivals) else 99):
            if not alive:
                break
            usable = {one.id: min(chunk_tokens, one.num_tokens - computed(core, one)) for one in alive}
            plan = core.plan(0.0)
            assert plan is not None
            planned = dict(zip((one.id for one in core.requests_of(plan)), plan.lengths.tolist(), strict=True))
            for lowest in {one.priority for one in alive} if policy == "priority" else {0}:
                ids = [one.id for one in alive if one.priority >= lowest]
                assert sum(planned.get(one, 0) for one in ids) == min(32, sum(usable[one] for one in ids))
            core.commit(plan, np.ones(int(plan.samples.sum()), np.int32), 0.0)
            alive = [one for one in alive if not one.is_finished]
    assert not alive


def computed(core: Scheduler, one: Request) -> int:
    return 0 if one.slot is None else int(core.memory.slots.computed[one.slot])


def test_short_prompts_do_not_take_memory_that_a_long_one_lacked() -> None:
    """A long prompt is tried after short ones, which took what was freed, uncounted, for as long as another long prompt
    was computed. Now at most max_overtakes of them do."""
    core = scheduler(
        num_pages=122,
        page_size=4,
        max_running=32,
        max_prefill_tokens=16,
        chunk_tokens=8,
        max_overtakes=3,
        policy="fcfs",
        context_tokens=2000,
    )
    core.add(first := request(prompt([1] * 400), 1), 0.0)
    numbers = itertools.count(3)
    for _ in range(6):
        core.add(request([next(numbers)], 20), 0.0)
    for _ in range(3):
        step(core)
    core.add(long := request(prompt([2] * 60), 20), 0.0)
    while long.slot is None:
        while core.num_waiting < 4:
            core.add(request([next(numbers), 4], 20), 0.0)
        step(core)
        assert not first.is_finished
    assert long.overtaken == 3


# ---------------------------------------------------------------------- priorities


def test_a_reservation_yields_to_a_higher_priority_and_returns() -> None:
    """The higher priority waited 39 passes for the reserved request to start."""
    core = scheduler(policy="priority", num_pages=20, page_size=4, max_overtakes=0)
    core.add(request(prompt([1] * 8), 40, id="runner"), 0.0)
    step(core)
    core.add(request(prompt([2] * 60), 16, id="reserved"), 0.0)
    step(core)
    assert events(core, EventKind.RESERVE, "reserved")
    for priority in (0, -1):
        core.add(request([6], 2, priority=priority, id=f"after{priority}"), 0.0)
    core.add(high := request([7], 2, priority=1, id="high"), 0.0)
    assert passes_until_finished(core, high) == 2
    passes_until_finished(core, *core.requests.values())
    assert admissions(core) == ["runner", "high", "reserved", "after0", "after-1"]


@pytest.mark.parametrize("chunk_tokens", [2048, 8192])
@pytest.mark.parametrize("num_running", [3, 6])
def test_a_long_prompt_of_higher_priority_does_not_wait_for_lower_ones(chunk_tokens: int, num_running: int) -> None:
    core = large(policy="priority", chunk_tokens=chunk_tokens)
    lower = long_prompts(core, num_running)
    step(core)
    core.add(high := request(prompt([99] * 12_000), 1, priority=1), 0.0)
    assert passes_until_finished(core, high) == -(-12_000 // chunk_tokens)
    passes_until_finished(core, *lower)


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_are_retracted_for_a_higher_priority(overlap: bool) -> None:
    """Prompts had a chunk in every pass and were never retracted: the higher priority waited until they were done."""
    subject = harness(policy="priority", retract_gap=1, max_running=2, chunk_tokens=8, num_pages=400, overlap=overlap)
    subject.add(*(request(prompt([number + 1] * 200), 4) for number in range(2)))
    subject.step()
    subject.add(high := request(prompt([9] * 4), 4, priority=1))
    subject.step()
    assert high.phase is not Phase.WAITING
    assert subject.scheduler.counters.retractions == 1
    subject.run()
    subject.assert_reference()


def test_all_requests_of_higher_priority_are_admitted_in_the_next_pass() -> None:
    core = scheduler(policy="priority", retract_gap=1, max_running=4, num_pages=200)
    for number in range(4):
        core.add(request([number + 1], 50), 0.0)
    step(core)
    higher = [request([number + 11], 4, priority=1) for number in range(4)]
    for one in higher:
        core.add(one, 0.0)
    step(core)
    assert all(one.phase is Phase.DECODING for one in higher)


def test_a_retraction_frees_tokens_where_decodes_use_them_all() -> None:
    core = scheduler(policy="priority", retract_gap=1, max_running=4, max_batch_tokens=4, num_pages=200)
    for number in range(4):
        core.add(request([number + 1], 50), 0.0)
    while core.num_waiting:
        step(core)
    core.add(high := request([9], 4, priority=1), 0.0)
    step(core)
    assert high.phase is Phase.DECODING


# ---------------------------------------------------------------------- prefixes that are being computed


@pytest.mark.parametrize("options", [{"chunk_tokens": 16}, {"max_prefill_tokens": 16}, {"max_prefill_tokens": 20}])
@pytest.mark.parametrize("policy", ["fair", "lpm", "fcfs", "priority"])
def test_a_prefix_computed_in_small_chunks_is_computed_once(options: dict[str, int], policy: str) -> None:
    """Each chunk is smaller than prefix_wait_tokens: 2,024 tokens were computed for two requests."""
    core = large(policy=policy, **options)
    sharers = [request(prompt(range(1, 1001), [number] * 12), 1) for number in range(4)]
    for one in sharers:
        core.add(one, 0.0)
    passes_until_finished(core, *sharers)
    assert 992 + 4 * 20 <= core.counters.computed_tokens < 992 + 4 * 20 + 3 * 32


def test_a_request_that_shares_little_of_a_long_prompt_is_not_held_back() -> None:
    core = large(chunk_tokens=16)
    core.add(request(prompt(range(1, 1001)), 1), 0.0)
    core.add(other := request(prompt(range(1, 17), 7), 1), 0.0)
    assert passes_until_finished(core, other) == 2, "the shared page, and its own token"


def test_a_sharer_of_higher_priority_computes_the_prefix_itself() -> None:
    core = large(policy="priority", max_prefill_tokens=16)
    core.add(low := request(prompt(range(1, 1001), [1] * 12), 1), 0.0)
    step(core)
    core.add(high := request(prompt(range(1, 1001), [2] * 12), 1, priority=1), 0.0)
    assert passes_until_finished(core, high) == -(-(1012 - 16) // 16)
    passes_until_finished(core, low)
    assert core.counters.computed_tokens <= 992 + 2 * 20 + 32


def test_a_long_prompt_that_gets_no_tokens_holds_no_sharer_back() -> None:
    """Three older prompts leave it only what short ones do not need. A sharer is short: it computes the prefix, and the
    long prompt does not compute the same tokens in that pass."""
    core = large()
    older = long_prompts(core, 3)
    core.add(slow := request(prompt(range(30_000, 50_000)), 1), 0.0)
    step(core)
    assert computed(core, slow) == 2048
    core.add(sharer := request(prompt(range(30_000, 33_600), 7), 1), 0.0)
    assert passes_until_finished(core, sharer) == 1
    passes_until_finished(core, *older, slow)
    assert core.counters.computed_tokens == 4 * 20_000 + 1
