"""Retraction: which request is chosen, what it costs, and that there is no livelock."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import FinishReason, Request
from paceline.scheduler import EventKind
from paceline.scheduler.admission import MAX_MOVES_PER_STEP
from paceline.scheduler.memory import Memory
from paceline.scheduler.retraction import MAX_RETRACTIONS, choose_victim, is_protected, victims
from paceline.scheduler.tracked_request import Phase, TrackedRequest
from paceline.testing import Harness
from tests.helpers import EOS, admissions, events, harness, prompt, request, scheduler, slots_of


def crowded(num_pages: int = 14, **options: Any) -> Harness:
    """For requests that are longer than they claim, in a pool that cannot hold them."""
    settings: dict[str, Any] = {"num_pages": num_pages, "page_size": 2, "max_running": 6, "vocab": 4096}
    return harness(**settings | options)


def underestimated(*tokens: int, max_tokens: int = 14, **fields: Any) -> Any:
    return request(prompt(*tokens), max_tokens, eos_token_ids=(EOS,), expected_tokens=1, **fields)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", range(9, 20))
def test_retraction_is_invisible_to_the_client(num_pages: int, overlap: bool) -> None:
    subject = crowded(num_pages, overlap=overlap)
    subject.add_all(*(underestimated(n, n + 1, n + 2) for n in range(6)))
    subject.run()
    if num_pages < 16:
        assert subject.scheduler.counters.retractions > 0
    assert set(subject.reasons.values()) <= {FinishReason.LENGTH, FinishReason.STOP}
    subject.assert_reference()


def test_the_kv_of_a_retracted_request_stays_cached() -> None:
    subject = crowded(12)
    subject.add_all(*(underestimated(n, n + 1, n + 2, n + 3, n + 4) for n in range(4)))
    subject.run()
    returns = [event for event in events(subject.scheduler, EventKind.ADMIT) if event.detail[0] > 0]
    assert subject.scheduler.counters.retractions > 0
    assert returns, "readmission hits the cache"


def test_a_retracted_request_is_readmitted_before_new_ones() -> None:
    subject = crowded(12)
    subject.add_all(*(underestimated(n, n + 1, n + 2) for n in range(4)))
    while not subject.scheduler.counters.retractions:
        subject.step()
    victim = events(subject.scheduler, EventKind.RETRACT)[0].request_id
    newcomers = subject.add_all(*(request([50 + n], 2, id=f"new-{n}") for n in range(4)))
    subject.run()
    ids = admissions(subject.scheduler)
    again = len(ids) - 1 - ids[::-1].index(victim)
    assert all(ids.index(one.id) > ids.index(victim, ids.index(victim) + 1) for one in newcomers), (ids, again)


def test_the_lowest_priority_is_retracted_first() -> None:
    subject = crowded(12, policy="fcfs")
    subject.add_all(
        underestimated(1, 2, 3, priority=0, id="low"),
        underestimated(4, 5, 6, priority=5, id="high"),
        underestimated(7, 8, 9, priority=5),
    )
    subject.run()
    assert events(subject.scheduler, EventKind.RETRACT)[0].request_id == "low"
    subject.assert_reference()


def test_the_cheapest_to_recompute_is_retracted_first_and_the_most_senior_is_spared() -> None:
    core = scheduler(
        num_pages=4096,
        page_size=16,
        context_tokens=20_000,
        max_batch_tokens=30_000,
        max_prefill_tokens=30_000,
        chunk_tokens=30_000,
    )
    for name, size in (("senior", 40), ("long", 9000), ("short", 64), ("middle", 3000)):
        core.add(request(prompt([size] * size), 100, id=name), 0.0)
    core.plan(0.0)
    running = {one.id: one for one in core.running.requests}
    assert choose_victim(slots_of(*running.values()), core.memory) is running["short"]
    assert (
        choose_victim(slots_of(running["senior"], running["long"], running["middle"]), core.memory) is running["middle"]
    )
    assert choose_victim(slots_of(running["senior"]), core.memory) is running["senior"]


def test_among_equals_the_newest_is_retracted() -> None:
    core = scheduler(num_pages=64)
    for name in ("a", "b", "c"):
        core.add(request(prompt([ord(name)] * 12), 10, id=name), 0.0)
    core.plan(0.0)
    victim = choose_victim(core.running.slots, core.memory)
    assert victim is not None
    assert victim.id == "c"


def test_only_as_many_as_needed_are_retracted() -> None:
    """A peer retracted its whole queue for lack of this."""
    subject = harness(num_pages=42, page_size=2, max_running=8, vocab=4096)
    subject.add_all(*(underestimated(n, n + 1, n + 2, n + 3, max_tokens=30) for n in range(8)))
    most = 0
    while subject.scheduler.has_work:
        before = subject.scheduler.counters.retractions
        subject.step()
        most = max(most, subject.scheduler.counters.retractions - before)
    assert 1 <= most <= 2, "the pages of one or two of the eight were enough"


@settings(max_examples=15)
@given(seed=st.integers(0, 100_000), overlap=st.booleans())
def test_no_request_is_retracted_more_than_twice(seed: int, overlap: bool) -> None:
    """A pool barely larger than one request, and requests that are all longer than they claim."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4])
    smallest = -(-32 // page_size)
    subject = harness(
        num_pages=smallest + rng.randrange(3),
        page_size=page_size,
        max_running=8,
        vocab=4096,
        overlap=overlap,
        policy=rng.choice(["fair", "fcfs", "lpm", "priority"]),
        retract_gap=rng.choice([1, 100]),
    )
    everyone = [
        underestimated(
            *(rng.randrange(3) for _ in range(rng.randrange(1, 12))), max_tokens=20, priority=rng.randrange(3)
        )
        for _ in range(12)
    ]
    everyone = subject.add_all(*everyone)
    # Each pass computes a token or a chunk of a prompt for some request; twelve requests of at most 32 tokens, each
    # computed at most three times, bound the number of passes.
    assert subject.run(max_steps=12 * 32 * (1 + MAX_RETRACTIONS)) > 0
    assert max(one.retractions for one in everyone) <= MAX_RETRACTIONS
    subject.assert_reference()


def late_tokens(subject: Harness) -> list[str]:
    """Ids of requests that got a token while they waited; filled as the harness runs."""
    late: list[str] = []
    original = subject.scheduler._keep_late_token

    def noted(one: Any, token: int) -> None:
        assert one.phase is Phase.WAITING
        original(one, token)
        assert one.output[-1] == token
        late.append(one.id)

    subject.scheduler._keep_late_token = noted  # type: ignore[method-assign]
    return late


def test_a_request_retracted_with_its_token_in_flight_keeps_that_token() -> None:
    subject = crowded(12, overlap=True)
    late = late_tokens(subject)
    subject.add_all(*(underestimated(n, n + 1, n + 2) for n in range(4)))
    subject.run()
    assert late
    subject.assert_reference()


def test_a_retracted_request_may_finish_while_it_waits() -> None:
    """Found by search: some run in which the token in flight is the stop token."""
    for seed in range(100):
        rng = random.Random(seed)
        subject = harness(num_pages=12, page_size=2, max_running=6, vocab=5, overlap=True)
        late = late_tokens(subject)
        subject.add_all(*(underestimated(*(rng.randrange(5) for _ in range(4))) for n in range(6)))
        subject.run()
        subject.assert_reference()
        story = [(event.request_id, event.kind) for event in subject.scheduler.journal.events]
        for one in set(late):
            kinds = [kind for request_id, kind in story if request_id == one]
            if kinds[-2:] == [EventKind.RETRACT, EventKind.FINISH]:
                return
    raise AssertionError("no such run was found: the test no longer tests anything")


def test_a_prompt_that_cannot_continue_is_retracted() -> None:
    """Long prompts that were admitted together by an optimistic estimate, with no decode to wait for."""
    subject = harness(num_pages=20, page_size=1, max_running=4, chunk_tokens=2, max_batch_tokens=8, vocab=4096)
    subject.add_all(*(underestimated(n, *range(9), max_tokens=9) for n in range(4)))
    subject.run()
    subject.assert_reference()


def test_priority_retracts_requests_below_the_gap() -> None:
    subject = harness(policy="priority", retract_gap=3, max_running=2)
    subject.add_all(request([1], 40, priority=0, id="low"), request([2], 40, priority=1, id="mid"))
    subject.step()
    subject.add(request([3], 4, priority=3, id="high"))
    subject.step()
    assert [event.request_id for event in events(subject.scheduler, EventKind.RETRACT)] == ["low"]
    assert subject.requests["high"].phase is Phase.DECODING
    subject.run()
    subject.assert_reference()


def test_priority_does_not_retract_within_the_gap_or_without_effect() -> None:
    subject = harness(policy="priority", retract_gap=3, max_running=2)
    subject.add_all(request([1], 20, priority=0), request([2], 20, priority=5))
    subject.step()
    subject.add(request([3], 4, priority=2))
    subject.step()
    assert subject.scheduler.counters.retractions == 0
    small = harness(policy="priority", retract_gap=1, num_pages=16, max_running=4)
    small.add_all(request(prompt([1] * 40), 16, priority=9), request(prompt([2] * 4), 2, priority=0))
    small.step()
    small.add(request(prompt([3] * 40), 8, priority=5))
    small.step()
    assert small.scheduler.counters.retractions == 0, "the page of the low-priority request would not have been enough"


def test_a_request_is_not_readmitted_while_a_token_of_it_is_in_flight() -> None:
    """With two passes in flight at most, the commit precedes the next plan; deeper pipelines would rely on this."""
    core = scheduler()
    one = core.add(request(id="back"), 0.0)
    one.num_in_flight = 1
    assert core.plan(0.0) is None
    assert "the token it was computing when it was retracted" in core.explain("back")
    one.num_in_flight = 0
    assert core.plan(0.0) is not None


def test_cached_tokens_never_exceed_the_prompt() -> None:
    """After a retraction a request finds what it, or a sharer, has computed: that is no cache hit of its prompt."""
    subject = harness(num_pages=40, chunk_tokens=8)
    prefix = list(range(1, 33))
    subject.add(request(prompt(prefix, 90), 2))
    subject.run()
    one = subject.add(request(prompt(prefix, 91), 20))
    subject.step()
    assert one.num_cached == 32
    subject.scheduler.retract(one.id, subject.clock(), "a test")
    subject.scheduler.flush_cache()
    subject.add_all(*(request(prompt(prefix, 92 + number), 20) for number in range(3)))
    subject.run()
    assert one.num_cached == 32 <= len(one.prompt)
    subject.assert_reference()


def test_an_absurd_expected_length_is_capped_by_max_tokens() -> None:
    subject = harness(num_pages=16)
    one, _ = subject.add_all(request([1, 2, 3], 5, expected_tokens=2**40, stop_token_ids=(63,)), request([4, 5], 5))
    subject.run()
    assert len(one.output) <= 5
    subject.assert_reference()


# ---------------------------------------------------------------------- a step is bounded


def naive_victim(running: list[TrackedRequest], memory: Memory) -> TrackedRequest | None:
    """The reference implementation of `victims`: looks at all requests again for each."""
    allowed = [one for one in running if not is_protected(one)]

    def own_pages(one: TrackedRequest) -> int:
        assert one.slot is not None
        prefix_pages = memory.locked_nodes[one].depth // memory.page_size
        return int(memory.slots.num_pages[one.slot]) - prefix_pages + one.exclusive_pages

    candidates = [one for one in allowed if own_pages(one) > 0] or allowed
    senior = min(candidates, key=lambda one: one.seniority, default=None)

    def order(one: TrackedRequest) -> tuple[bool, int, bool, float, int]:
        pages, computed = max(1, own_pages(one)), int(memory.slots.computed[one.slot])
        tokens = min(computed, pages * memory.page_size)
        cost = tokens * (1 + (computed - tokens / 2) / 4096) / pages
        return not one.background, one.priority, one is senior, cost, -one.seniority

    return min(candidates, key=order, default=None)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_victims_have_the_order_of_choosing_each_among_all(seed: int) -> None:
    rng = random.Random(seed)
    core = scheduler(num_pages=512, page_size=2, max_running=16, background_tenants="b", max_prefill_tokens=64)
    for number in range(16):
        tokens = [1, 2] * rng.randrange(6) + [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        one = request(tokens, 30, id=str(number), tenant=rng.choice("ab"), priority=rng.choice([0, 0, 1]))
        core.add(one, 0.0)
    for _ in range(rng.randrange(1, 12)):
        plan = core.plan(0.0)
        assert plan is not None
        core.commit(plan, np.array([rng.randrange(3) for _ in range(int(plan.samples.sum()))], np.int32), 0.0, 0.0)
    for one in core.running.requests:
        one.retractions = rng.choice([0, 0, 0, MAX_RETRACTIONS])
        core.memory.slots.is_protected[one.slot] = is_protected(one)
    in_order = victims(core.running.slots, core.memory)
    while (expected := naive_victim(core.running.requests, core.memory)) is not None:
        assert next(in_order) is expected
        core.retract(expected.id, 0.0, "the test")
    assert next(in_order, None) is None


def storm(**options: Any) -> Harness:
    """Requests of one length that all need another page in the same pass, in a pool without one."""
    subject = crowded(36, max_running=12, overlap=True, **options)
    subject.add_all(*(underestimated(n, n + 1, n + 2, n + 3, max_tokens=10) for n in range(12)))
    return subject


@pytest.mark.parametrize("max_moves", [0, 2, 4])
def test_a_step_retracts_a_bounded_number_and_other_rows_wait_for_a_page(max_moves: int) -> None:
    subject = storm()
    core = subject.scheduler
    while core.num_waiting:
        subject.step()
    core.admission.max_moves = max_moves
    left_out = 0
    while core.counters.retractions < 3:
        before = core.counters.retractions
        subject.step()
        assert core.counters.retractions - before <= max(1, max_moves // 2)
        left_out += len(core.running.decoding) - len(core._decode_rows)
    assert left_out, "some rows had no page in some passes"
    core.admission.max_moves = MAX_MOVES_PER_STEP
    subject.run()
    assert set(subject.reasons.values()) <= {FinishReason.LENGTH, FinishReason.STOP}
    subject.assert_reference()


def test_requests_of_higher_priority_get_memory_over_several_steps() -> None:
    """One that needs more retractions than a step has is admitted once the last of them is done."""
    subject = harness(num_pages=40, page_size=2, max_running=12, policy="priority", retract_gap=1, vocab=4096)
    subject.add_all(*(request([n + 1] * 4, 4, id=f"low-{n}") for n in range(10)))
    subject.step()
    subject.add(request(prompt([50] * 40), 6, priority=9, id="high"))
    subject.scheduler.admission.max_moves = 4
    per_step = []
    while "high" not in admissions(subject.scheduler):
        before, reserved = subject.scheduler.counters.retractions, subject.scheduler.admission.reserved
        assert reserved is (subject.scheduler.requests["high"] if per_step else None)
        subject.step()
        per_step.append(subject.scheduler.counters.retractions - before)
    assert max(per_step) == 2 and sum(per_step) > 2, per_step
    subject.scheduler.admission.max_moves = MAX_MOVES_PER_STEP
    subject.run()
    subject.assert_reference()


def by_priority(**options: Any) -> Harness:
    return harness(policy="priority", retract_gap=1, page_size=4, vocab=4096, **options)


def retracted(subject: Harness) -> list[str]:
    return [event.request_id for event in events(subject.scheduler, EventKind.RETRACT)]


def test_a_retraction_for_a_higher_priority_does_not_change_what_outputs_are_expected_to_be() -> None:
    """No expectation was wrong."""
    subject = by_priority(num_pages=16)
    subject.add(request(prompt(range(30)), 20, id="low"))
    subject.step()
    before = subject.scheduler._lengths.caution
    subject.add(request(prompt(range(100, 130)), 20, priority=5, id="high"))
    subject.step()
    assert retracted(subject) == ["low"] and subject.scheduler._lengths.caution <= before


def test_a_higher_priority_gets_the_adapter_slot_of_a_lower_one() -> None:
    subject = by_priority(num_pages=256, adapter_slots=1)
    subject.add_all(request([1] * 5, 200, adapter="x", id="low"), request([2] * 5, 200, id="without"))
    for _ in range(3):
        subject.step()
    subject.add(request([2] * 5, 3, adapter="y", priority=5, id="high"))
    subject.step()
    assert subject.scheduler.requests["high"].phase is not Phase.WAITING and retracted(subject) == ["low"]
    subject.run()
    subject.assert_reference()


def shares_prefix(number: int, max_tokens: int = 7, **fields: Any) -> Request:
    """Ten pages that it shares with others of these, and two of its own."""
    return request(prompt(range(40), number), max_tokens, id=f"shares-{number}", **fields)


def test_a_shared_prefix_that_only_victims_hold_is_free_without_them() -> None:
    subject = by_priority(num_pages=20)
    subject.add(request([60], 60, expected_tokens=1, priority=9, id="stays"))
    subject.step()
    subject.add_all(shares_prefix(50), shares_prefix(51))
    for _ in range(4):
        subject.step()
    assert [one.id for one in subject.scheduler.running.decoding] == ["stays", "shares-50"]
    subject.add(request(prompt(range(100, 140)), 3, priority=5, id="high"))
    subject.step()
    assert subject.scheduler.requests["high"].phase is not Phase.WAITING and retracted(subject) == ["shares-50"]
    subject.run()
    subject.assert_reference()


def test_no_request_is_retracted_for_a_prefix_that_others_use_too() -> None:
    subject = by_priority(num_pages=20)
    subject.add_all(shares_prefix(50), shares_prefix(51, priority=9))
    for _ in range(3):
        subject.step()
    assert len(subject.scheduler.running.decoding) == 2
    subject.add(request(prompt(range(100, 140)), 3, priority=5, id="waits"))
    subject.step()
    assert subject.scheduler.requests["waits"].phase is Phase.WAITING and not retracted(subject)
    subject.run()
    subject.assert_reference()
