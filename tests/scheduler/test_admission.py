"""Admission: who gets the prompt tokens of a pass, who may go first, and who waits for whom."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.scheduler import EventKind, Plan, Scheduler
from paceline.scheduler.admission import MAX_MOVES_PER_STEP
from paceline.scheduler.retraction import MAX_RETRACTIONS
from paceline.scheduler.tracked_request import Phase, TrackedRequest
from tests.helpers import EOS, admissions, events, harness, prompt, request, scheduler


def large(**options: Any) -> Scheduler:
    """Memory and slots for everything; driven without a model, since prompts are long, and without measured times."""
    settings: dict[str, Any] = {"num_pages": 40_000, "page_size": 16, "max_running": 64, "max_batch_tokens": 8192}
    settings["itl_target"] = math.inf
    return scheduler(**settings | options)


def step(core: Scheduler) -> Plan:
    plan = core.plan(0.0)
    assert plan is not None, "requests are left and none can be planned"
    core.commit(plan, np.ones(int(plan.samples.sum()), np.int32), 0.0, 0.0)
    return plan


def passes_until_finished(core: Scheduler, *requests: TrackedRequest) -> int:
    count = 0
    while not all(one.is_finished for one in requests):
        step(core)
        count += 1
    return count


def long_prompts(core: Scheduler, count: int, num_tokens: int = 20_000, **fields: Any) -> list[TrackedRequest]:
    prompts = [prompt([number + 1] * num_tokens) for number in range(count)]
    return [core.add(request(tokens, 1, **fields), 0.0) for tokens in prompts]


def test_a_burst_of_short_requests_is_admitted_over_several_steps() -> None:
    """The next token of running requests does not wait for all of them."""
    core = large(max_running=256)
    for number in range(200):
        core.add(request([number + 1], 20), 0.0)
    joins = []
    while core.num_waiting:
        joins.append(len(step(core).joins))
    assert joins == [MAX_MOVES_PER_STEP] * 6 + [200 - 6 * MAX_MOVES_PER_STEP]


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
    while core.num_waiting:
        step(core)
    long_prompts(core, 12)
    for _ in range(5):
        assert step(core).num_prefill_tokens == 8192 - num_decodes
        short = core.add(request(prompt([99] * 300), 1), 0.0)
        plan = step(core)
        assert short.is_finished
        assert plan.num_prefill_tokens == 8192 - num_decodes


@pytest.mark.parametrize("policy", ["fair", "lpm", "dfs"])
def test_a_short_prompt_of_another_tenant_is_admitted_at_once(policy: str) -> None:
    """More long prompts are in front of it than are tried in a step, and under policy fair it is not its turn."""
    core = large(policy=policy, max_prefill_tokens=512, chunk_tokens=512)
    long_prompts(core, 200, tenant="long")
    for number in range(60):
        assert step(core).num_prefill_tokens == 512
        short = core.add(request(prompt([99] * 100, number), 1, tenant="short"), 0.0)
        assert step(core).num_prefill_tokens == 512 and short.is_finished


def test_a_row_has_one_chunk_in_a_pass() -> None:
    """What is left is added to the chunk that a prompt already has."""
    core = large(chunk_tokens=8192)
    long_prompts(core, 2)
    assert step(core).lengths.tolist() == [8192]
    core.add(request(prompt([99] * 300), 1), 0.0)
    plan = step(core)
    assert sorted(plan.lengths.tolist()) == [300, 7892]
    assert len(set(plan.slots.tolist())) == plan.num_rows


def test_long_prompts_leave_three_quarters_of_a_small_pass_to_short_ones() -> None:
    core = large(chunk_tokens=100, max_prefill_tokens=100)
    long_prompts(core, 2)
    assert step(core).lengths.tolist() == [100]
    short = [core.add(request(prompt([90 + number] * 25), 1), 0.0) for number in range(3)]
    assert step(core).lengths.tolist() == [25] * 4
    assert all(one.is_finished for one in short)


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
    alive: list[TrackedRequest] = []
    for number, (priority, num_tokens, pause) in enumerate(arrivals):
        one = core.add(request(prompt([number + 1] * num_tokens), 1, priority=priority), 0.0)
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
            core.commit(plan, np.ones(int(plan.samples.sum()), np.int32), 0.0, 0.0)
            alive = [one for one in alive if not one.is_finished]
    assert not alive


def computed(core: Scheduler, one: TrackedRequest) -> int:
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
    first = core.add(request(prompt([1] * 400), 1), 0.0)
    numbers = itertools.count(3)
    for _ in range(6):
        core.add(request([next(numbers)], 20), 0.0)
    for _ in range(3):
        step(core)
    long = core.add(request(prompt([2] * 60), 20), 0.0)
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
        core.add(request([6], 6, priority=priority, id=f"after{priority}"), 0.0)
    high = core.add(request([7], 6, priority=1, id="high"), 0.0)
    assert passes_until_finished(core, high) == 6
    passes_until_finished(core, *core.requests.values())
    assert admissions(core) == ["runner", "high", "reserved", "after0", "after-1"]


@pytest.mark.parametrize("chunk_tokens", [2048, 8192])
@pytest.mark.parametrize("num_running", [3, 6])
def test_a_long_prompt_of_higher_priority_does_not_wait_for_lower_ones(chunk_tokens: int, num_running: int) -> None:
    core = large(policy="priority", chunk_tokens=chunk_tokens)
    lower = long_prompts(core, num_running)
    step(core)
    high = core.add(request(prompt([99] * 12_000), 1, priority=1), 0.0)
    assert passes_until_finished(core, high) == -(-12_000 // chunk_tokens)
    passes_until_finished(core, *lower)


def test_a_reserved_request_does_not_put_prompts_of_its_priority_before_higher_ones() -> None:
    core = large(policy="priority", chunk_tokens=8192, max_overtakes=0, num_pages=4000, context_tokens=60_000)
    runner = core.add(request(prompt([97] * 16_000), 4000), 0.0)
    while not runner.output:
        step(core)
    core.add(request(prompt([98] * 49_000), 1, id="reserved"), 0.0)
    step(core)
    assert events(core, EventKind.RESERVE, "reserved")
    long_prompts(core, 1, 14_000)
    step(core)
    high = core.add(request(prompt([99] * 12_000), 1, priority=1), 0.0)
    assert passes_until_finished(core, high) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_are_retracted_for_a_higher_priority(overlap: bool) -> None:
    """Prompts had a chunk in every pass and were never retracted: the higher priority waited until they were done."""
    subject = harness(policy="priority", retract_gap=1, max_running=2, chunk_tokens=8, num_pages=400, overlap=overlap)
    subject.add_all(*(request(prompt([number + 1] * 200), 4) for number in range(2)))
    subject.step()
    high = subject.add(request(prompt([9] * 4), 4, priority=1))
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
    higher = [core.add(request([number + 11], 4, priority=1), 0.0) for number in range(4)]
    step(core)
    assert all(one.phase is Phase.DECODING for one in higher)


def test_a_retraction_frees_tokens_where_decodes_use_them_all() -> None:
    core = scheduler(policy="priority", retract_gap=1, max_running=4, max_batch_tokens=4, num_pages=200)
    for number in range(4):
        core.add(request([number + 1], 50), 0.0)
    while core.num_waiting:
        step(core)
    high = core.add(request([9], 4, priority=1), 0.0)
    step(core)
    assert high.phase is Phase.DECODING


# ---------------------------------------------------------------------- reservations


def behind_a_long_one(retracted: bool, **options: Any) -> tuple[Scheduler, TrackedRequest, TrackedRequest]:
    """4,800 tokens of memory: a running request of 2,800 tokens, and one of 3,100 that waits for it to end."""
    core = large(num_pages=300, max_overtakes=0, max_prefill_tokens=4096, chunk_tokens=4096, **options)
    late = request(prompt([2] * 2500), 600, id="waiting")
    if retracted:
        waiting = core.add(late, 0.0)
        for _ in range(MAX_RETRACTIONS - 1):
            step(core)
            core.retract("waiting", 0.0, "a test")
            assert core.plan(0.0) is None, "it is not a candidate in this step"
        step(core)
        core.retract("waiting", 0.0, "a test")
    runner = core.add(request(prompt([1] * 1400), 1400, id="runner"), 0.0)
    step(core)
    if not retracted:
        waiting = core.add(late, 0.0)
    step(core)
    assert runner.slot is not None
    assert events(core, EventKind.RESERVE, "waiting")
    return core, runner, waiting


@pytest.mark.parametrize("retracted", [False, True])
def test_requests_that_fit_beside_a_reservation_are_admitted_at_once(retracted: bool) -> None:
    """Nothing was admitted for as long as the runner ran: here 1,400 passes. It still starts when the runner ends."""
    core, runner, waiting = behind_a_long_one(retracted)
    while not runner.is_finished:
        small = core.add(request(prompt([3] * 20), 10), 0.0)
        step(core)
        assert small.slot is not None
    step(core)
    assert waiting.slot is not None


@pytest.mark.parametrize("retracted", [False, True])
def test_requests_that_would_delay_a_reserved_one_wait(retracted: bool) -> None:
    """Each fits beside the runner now, but the third not beside the reserved request when the runner ends."""
    core, runner, waiting = behind_a_long_one(retracted)
    others = []
    for number in range(3):
        others.append(core.add(request(prompt([3 + number]), 700), 0.0))  # of 44 pages; 106 are left
        step(core)
    assert [one.slot is not None for one in others] == [True, True, False]
    passes_until_finished(core, runner)
    step(core)
    assert waiting.slot is not None


def test_the_last_slot_is_kept_for_a_reserved_request() -> None:
    core, runner, waiting = behind_a_long_one(retracted=False, max_running=3)
    others = []
    for number in range(2):
        others.append(core.add(request(prompt([3 + number]), 700), 0.0))
        step(core)
    assert [one.slot is not None for one in others] == [True, False]
    passes_until_finished(core, runner)
    step(core)
    assert waiting.slot is not None


@settings(max_examples=60)
@given(
    running=st.lists(st.tuples(st.integers(1, 30), st.integers(2, 60)), min_size=1, max_size=6),
    size=st.integers(60, 200),
    others=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 80)), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_a_reserved_request_starts_before_requests_that_ran_earlier_can_have_ended(
    running: list[tuple[int, int]], size: int, others: list[tuple[int, int]], seed: int
) -> None:
    """Whatever arrives later, and whichever running requests end early: it starts at the latest when so many of them
    have reached their full length that it fits beside the rest."""
    core = scheduler(num_pages=60, page_size=4, max_running=12, max_overtakes=0, policy="fcfs")
    numbers, rng = itertools.count(1), random.Random(seed)
    for sizes in running:
        core.add(request(prompt([next(numbers)] * sizes[0]), sizes[1]), 0.0)
    step(core)
    before = core.running.requests
    for one in [one for one in core.requests.values() if one.slot is None]:
        core.abort(one.id, 0.0)
    reserved = core.add(request(prompt([next(numbers)] * (size - 10)), 10), 0.0)
    longest_first = sorted(before, key=lambda one: len(one.output) - one.max_tokens)
    bound, left = 0, 60 - core.memory.full_pages(reserved)
    for one in longest_first:
        left -= core.memory.full_pages(one)
        if left < 0:
            bound = one.max_tokens - len(one.output)
            break
    for _ in range(bound + 1):
        while core.num_waiting < 6:
            sizes = rng.choice(others)
            core.add(request(prompt([next(numbers)] * sizes[0]), sizes[1]), 0.0)
        step(core)
        if reserved.slot is not None or reserved.is_finished:
            return
        if before and rng.random() < 0.05:
            core.abort(before.pop(rng.randrange(len(before))).id, 0.0)
    raise AssertionError(f"it still waits after {bound + 1} passes")


def test_a_protected_request_returns_beside_requests_that_may_be_retracted() -> None:
    """It waited until everything running and itself fitted at full length, however short others were expected to be:
    here 2,899 passes."""
    core = large(num_pages=300)
    fields: dict[str, Any] = {"eos_token_ids": (EOS,), "expected_tokens": 10}
    one = core.add(request(prompt([2] * 100), 2900, id="protected", **fields), 0.0)
    core.add(request(prompt([1] * 100), 2900, id="runner", **fields), 0.0)
    step(core)
    for _ in range(MAX_RETRACTIONS):
        core.retract("protected", 0.0, "a test")
        step(core)
        step(core)
        assert one.slot is not None
    passes_until_finished(core, *core.requests.values())
    assert one.retractions == MAX_RETRACTIONS


# ---------------------------------------------------------------------- prefixes that are being computed


@pytest.mark.parametrize("options", [{"chunk_tokens": 16}, {"max_prefill_tokens": 16}, {"max_prefill_tokens": 20}])
@pytest.mark.parametrize("policy", ["fair", "lpm", "fcfs", "priority"])
def test_a_prefix_computed_in_small_chunks_is_computed_once(options: dict[str, int], policy: str) -> None:
    """Each chunk is smaller than prefix_wait_tokens: 2,024 tokens were computed for two requests."""
    core = large(policy=policy, **options)
    sharers = [core.add(request(prompt(range(1, 1001), [number] * 12), 1), 0.0) for number in range(4)]
    passes_until_finished(core, *sharers)
    assert 992 + 4 * 20 <= core.counters.computed_tokens < 992 + 4 * 20 + 3 * 32


def test_a_request_that_shares_little_of_a_long_prompt_is_not_held_back() -> None:
    core = large(chunk_tokens=16)
    core.add(request(prompt(range(1, 1001)), 1), 0.0)
    other = core.add(request(prompt(range(1, 17), 7), 1), 0.0)
    assert passes_until_finished(core, other) == 2, "the shared page, and its own token"


def test_a_sharer_of_higher_priority_computes_the_prefix_itself() -> None:
    core = large(policy="priority", max_prefill_tokens=16)
    low = core.add(request(prompt(range(1, 1001), [1] * 12), 1), 0.0)
    step(core)
    high = core.add(request(prompt(range(1, 1001), [2] * 12), 1, priority=1), 0.0)
    assert passes_until_finished(core, high) == -(-(1012 - 16) // 16)
    passes_until_finished(core, low)
    assert core.counters.computed_tokens <= 992 + 2 * 20 + 32


def test_a_long_prompt_that_gets_no_tokens_holds_no_sharer_back() -> None:
    """Three older prompts leave it only what short ones do not need. A sharer is short: it computes the prefix, and the
    long prompt does not compute the same tokens in that pass."""
    core = large()
    older = long_prompts(core, 3)
    slow = core.add(request(prompt(range(30_000, 50_000)), 1), 0.0)
    step(core)
    assert computed(core, slow) == 2048
    sharer = core.add(request(prompt(range(30_000, 33_600), 7), 1), 0.0)
    assert passes_until_finished(core, sharer) == 1
    passes_until_finished(core, *older, slow)
    assert core.counters.computed_tokens == 4 * 20_000 + 1
