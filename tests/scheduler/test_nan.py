"""Logits that contain NaN: one faulty pass fails the requests that it computed and none after them, and a prompt that
always gives NaN harms no other request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.request import FinishReason, Request
from paceline.scheduler import EventKind
from paceline.scheduler.now import Now
from paceline.scheduler.retraction import MAX_RECOMPUTATIONS
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.testing import Harness
from tests.helpers import events, harness, prompt, request, seeds
from tests.scheduler.test_state_machine import random_run

SYSTEM = range(1, 33)  # a system prompt of eight pages
BAD = 99  # the token whose KV is NaN in tests of prompts that always fail
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])


def later(count: int = 46) -> list[Request]:
    """Requests with the system prompt."""
    return [request(prompt(SYSTEM, 40 + number % 20), 3) for number in range(count)]


def run_each(subject: Harness, requests: list[Request]) -> list[TrackedRequest]:
    added = []
    for one in requests:
        added.append(subject.add(one))
        subject.run()
    return added


def errors(subject: Harness) -> list[str]:
    return [request_id for request_id, reason in subject.reasons.items() if reason is FinishReason.ERROR]


# ---------------------------------------------------------------------------------------------------- a faulty pass


@OVERLAP
@pytest.mark.parametrize("at_once", [False, True], ids=["afterwards", "at once"])
def test_one_faulty_pass_fails_one_request(overlap: bool, at_once: bool) -> None:
    """At once: the others are admitted while the token of the first is in flight, and share its prefix."""
    subject = harness(overlap=overlap)
    first = subject.add(request(prompt(SYSTEM, 40), 3))
    subject.executor.inject_fault()
    if at_once:
        subject.add_all(*later())
        subject.run()
    else:
        subject.run()
        run_each(subject, later())
    assert errors(subject) == [first.id] and len(subject.reasons) == 47
    assert subject.scheduler.counters.retractions == 0
    subject.assert_reference()


@OVERLAP
def test_a_faulty_chunk_in_the_middle_of_a_prompt_fails_nobody_who_shares_it(overlap: bool) -> None:
    """The first request that samples from it has not computed it: both are computed again."""
    subject = harness(overlap=overlap, chunk_tokens=32, max_prefill_tokens=64, num_pages=128)
    long = subject.add(request(prompt(SYSTEM, range(100, 228)), 3))
    subject.executor.inject_fault()
    subject.step()
    subject.add_all(*later())
    subject.run()
    assert errors(subject) == [] and len(subject.reasons) == 47
    assert long.recomputations == 1 and long.retractions == 0
    subject.assert_reference()


@OVERLAP
def test_a_faulty_chunk_that_nobody_shares_fails_its_request_and_leaves_the_cache(overlap: bool) -> None:
    subject = harness(overlap=overlap, chunk_tokens=8)
    first = subject.add(request(prompt(SYSTEM, 40), 3))
    for _ in range(2):
        subject.step()
    subject.executor.inject_fault()
    subject.run()
    assert errors(subject) == [first.id]
    assert subject.scheduler.memory.tree.num_pages == 0
    run_each(subject, later())
    assert errors(subject) == [first.id]
    subject.assert_reference()


@OVERLAP
@pytest.mark.parametrize("ends", ["prefill only", "aborted", "aborted in flight"])
def test_a_faulty_prompt_that_never_sampled_fails_nobody(overlap: bool, ends: str) -> None:
    subject = harness(overlap=overlap, chunk_tokens=16)
    first = subject.add(request(prompt(SYSTEM, 40), 3, prefill_only=ends == "prefill only"))
    subject.executor.inject_fault()
    if ends == "aborted in flight":
        plan = subject.scheduler.plan(subject.clock())
        assert plan is not None
        pending = subject.executor.launch(plan)
        subject.scheduler.abort(first.id, subject.clock())
        subject.scheduler.commit(plan, pending.wait().tokens, subject.clock(), 0.0)
    elif ends == "aborted":
        subject.step()
        subject.scheduler.abort(first.id, subject.clock())
    subject.run()
    run_each(subject, later())
    assert errors(subject) == []
    subject.assert_reference()


@OVERLAP
def test_a_sharer_continues_behind_the_tokens_it_has(overlap: bool) -> None:
    """Two rows compute the same prefix in one pass. The tree keeps the faulty copy, of a prompt that is not complete;
    the other row samples from its own copy and then reads that of the tree."""
    subject = harness(overlap=overlap, policy="fcfs", prefix_wait=False, chunk_tokens=36)
    long, short = request(prompt(SYSTEM, range(100, 200)), 5), request(prompt(SYSTEM, 40), 5)
    long, short = subject.add_all(long, short)
    subject.executor.inject_fault(lambda row: row == 0)
    subject.run()
    assert errors(subject) == []
    (recomputed,) = events(subject.scheduler, EventKind.RETRACT, short.id)
    assert (long.recomputations, short.recomputations) == (1, 1) and recomputed.step > 2
    subject.assert_reference()


@OVERLAP
def test_a_faulty_decode_pass_leaves_the_prompts_cached(overlap: bool) -> None:
    subject = harness(overlap=overlap)
    run_each(subject, later(1))
    running = subject.add_all(*(request(prompt(SYSTEM, 60 + number), 20) for number in range(4)))
    while any(len(one.output) < 3 for one in running):
        subject.step()
    subject.executor.inject_fault(lambda row: row == 0)
    subject.run()
    assert errors(subject) == [running[0].id]
    assert subject.scheduler.counters.nan_recomputations == 0
    last = run_each(subject, later(2))
    assert [one.num_cached for one in last] == [32, 32]
    subject.assert_reference()


def test_a_request_that_was_released_before_its_faulty_last_token_leaves_no_kv() -> None:
    """It ends by length with a pass in flight, so its KV is in the tree when the token of that pass is known."""
    subject = harness(overlap=True, page_size=1)
    first = subject.add(request(prompt(range(1, 9)), 3))
    subject.step()  # two passes are launched, one is committed
    subject.executor.inject_fault()
    subject.run()
    assert errors(subject) == [first.id] and len(first.output) == 2
    tokens = first.prompt.tolist() + first.output.tolist()
    run_each(subject, [request([*tokens, number], 3) for number in range(3)])
    assert errors(subject) == [first.id]
    subject.assert_reference()


def test_a_retracted_request_with_a_faulty_token_in_flight_leaves_no_kv() -> None:
    subject = harness(page_size=1)
    first = subject.add(request(prompt(range(1, 9)), 9))
    subject.step()
    subject.executor.inject_fault()
    scheduler, now = subject.scheduler, subject.clock()
    plan = scheduler.plan(now)
    assert plan is not None
    pending = subject.executor.launch(plan)
    scheduler.retract(first.id, now, "a test")
    assert scheduler.match(request(prompt(range(1, 9), first.output.tolist(), 50))) == 9, "KV that is in flight too"
    scheduler.commit(plan, pending.wait().tokens, now, 0.0)
    assert first.finish_reason is FinishReason.ERROR
    run_each(subject, [request(prompt(range(1, 9), first.output.tolist(), number), 3) for number in range(3)])
    assert errors(subject) == []
    subject.assert_reference()


def test_a_request_that_read_an_evicted_faulty_prefix_is_computed_again() -> None:
    """It ends with its first token. While that is in flight, its memory is given to another request."""
    subject = harness(overlap=True, num_pages=12)
    subject.add(request(prompt(SYSTEM, 40), prefill_only=True))
    subject.executor.inject_fault()
    subject.run()
    reader, _ = subject.add_all(request(prompt(SYSTEM, 41), 1), request(prompt(range(100, 146)), 2))
    subject.run()
    assert errors(subject) == [] and reader.recomputations == 1
    subject.assert_reference()


def test_a_request_that_computed_an_evicted_faulty_prefix_fails() -> None:
    """As above, and nobody else computed what it has read."""
    subject = harness(overlap=True, num_pages=12)
    subject.executor.inject_fault()
    first, _ = subject.add_all(request(prompt(SYSTEM, 41), 1), request(prompt(range(100, 146)), 2))
    subject.run()
    assert errors(subject) == [first.id] and first.recomputations == 0
    subject.assert_reference()


@pytest.mark.parametrize("ends", ["with its first token", "retracted"])
def test_a_request_that_has_left_when_the_prefix_it_read_is_dropped_is_computed_again(ends: str) -> None:
    """In a pipeline: the request that computed the prefix fails while a pass that read it is in flight."""
    subject = harness(overlap=True, num_stages=2, num_pages=128)
    scheduler, executor = subject.scheduler, subject.executor
    first = subject.add(request(prompt(SYSTEM, 40), 3))
    executor.inject_fault()
    plans = [scheduler.plan(0.0)]
    reader = subject.add(request(prompt(SYSTEM, 41), 1 if ends == "with its first token" else 5))
    plans.append(scheduler.plan(0.0))
    if ends == "retracted":
        scheduler.retract(reader.id, 0.0, "a test")
    subject.add(request(prompt(range(100, 110)), 1))
    plans.append(scheduler.plan(0.0))
    assert reader.slot is None
    for plan in plans:
        assert plan is not None
        result = executor.launch(plan).wait()
        updates = scheduler.commit(plan, result.tokens, 0.0, 0.0)
        assert reader.finish_reason is not FinishReason.ERROR, "it is blamed for the prefix"
        for one, token in zip(updates.requests, updates.tokens.tolist(), strict=True):
            subject.outputs[one.id].append(token)
    subject.run()
    assert first.finish_reason is FinishReason.ERROR
    assert reader.recomputations == 1 and reader.finish_reason is FinishReason.LENGTH


# ---------------------------------------------------------------------------------------------------- what is dropped


def test_what_is_dropped_is_counted_and_in_the_journal() -> None:
    subject = harness(overlap=True)
    first, *_ = subject.add_all(request(prompt(SYSTEM, 40), 3), *later(4))
    subject.executor.inject_fault()
    subject.run()
    counters = subject.scheduler.counters
    (event,) = events(subject.scheduler, EventKind.DROP)
    assert (event.request_id, *event.detail) == (first.id, counters.nan_dropped_pages, counters.nan_recomputations)
    assert event.detail == (8, 4)


def test_a_pin_of_dropped_kv_is_removed() -> None:
    subject = harness(overlap=True, pin_quota_pages=16)
    run_each(subject, [request(prompt(range(70, 86), 40), 2)])
    subject.scheduler.pin("other", list(range(70, 86)), subject.clock())
    subject.add(request(prompt(SYSTEM, 40), 1, prefill_only=True))
    subject.executor.inject_fault()
    subject.run()
    subject.scheduler.pin("system", list(SYSTEM), subject.clock())
    run_each(subject, later(2))
    assert errors(subject) == []
    assert [event.request_id for event in events(subject.scheduler, EventKind.UNPIN)] == ["system"]
    assert list(subject.scheduler.memory.pins) == ["other"]


def test_copies_in_host_memory_are_dropped_too() -> None:
    """The faulty prefix is spilled, and fetched again before a token is sampled from it."""
    subject = harness(overlap=True, num_pages=12, num_host_pages=32)
    subject.add(request(prompt(SYSTEM, 40), prefill_only=True))
    subject.executor.inject_fault()
    subject.run()
    counters = subject.scheduler.counters
    for one in later(3):
        run_each(subject, [request(prompt(range(50, 82), 83), 2)])  # takes its memory
        fetched = counters.fetched_tokens
        run_each(subject, [one])
        assert counters.fetched_tokens > fetched
    assert errors(subject) == []
    subject.assert_reference()


def test_a_copy_in_host_memory_is_not_proven_by_kv_that_was_computed_again() -> None:
    """The faulty prefix is spilled. A request computes it again without fetching it, and its KV is evicted."""
    subject = harness(overlap=True, num_pages=12, num_host_pages=32)
    subject.add(request(prompt(SYSTEM, 40), prefill_only=True))
    subject.executor.inject_fault()
    subject.run()
    for one in (request(prompt(SYSTEM, 41), 2, compute_from=0), *later(3)):
        run_each(subject, [request(prompt(range(50, 82), 83), 2), one])
    assert subject.scheduler.counters.fetched_tokens > 0 and errors(subject) == []
    subject.assert_reference()


def test_a_copy_for_a_plan_that_was_not_returned_is_dropped_too() -> None:
    """`plan` may return None after it has evicted pages: their copies wait for the next plan."""
    subject = harness(num_pages=16, num_host_pages=16)
    subject.add(request(prompt(SYSTEM, 40, 41, 42, 43), prefill_only=True))
    subject.executor.inject_fault()
    subject.run()
    subject.add(request(prompt(SYSTEM, 50), 3))
    scheduler, now = subject.scheduler, subject.clock()
    plan = scheduler.plan(now)
    assert plan is not None
    memory, host = scheduler.memory, scheduler.memory.host
    memory.pool.free(memory.allocate(memory.pool.num_free + 1, Now(scheduler.step, now)))
    assert host is not None and host.num_pages_used == 1
    scheduler.commit(plan, subject.executor.launch(plan).wait().tokens, now, 0.0)
    assert host.num_pages_used == 0
    subject.run()
    assert all(plan.swap is None or not len(plan.swap.spill_pages) for plan in subject.executor.plans)
    subject.assert_reference()


def test_waiting_requests_still_find_what_is_computed_again() -> None:
    subject = harness(overlap=True, max_running=2)
    _, *waiting = subject.add_all(request(prompt(SYSTEM, 40), 3), *later(8))
    subject.executor.inject_fault()
    subject.run()
    assert sum(one.num_cached == 32 for one in waiting) >= 6
    subject.assert_reference()


# ---------------------------------------------------------------------------------------------------- prompts that fail


def test_a_prompt_that_always_fails_drops_no_prefix_from_which_others_sample() -> None:
    subject = harness(overlap=True, num_pages=256)
    subject.executor.bad_tokens = frozenset({BAD})
    run_each(subject, [request(prompt(SYSTEM, 40), prefill_only=True)])  # samples nothing: those who read it do
    running = subject.add_all(*(request(prompt(SYSTEM, 60 + number), 30) for number in range(4)))
    attacks = []
    while not all(one.is_finished for one in running):
        attacks.append(subject.add(request(prompt(SYSTEM, len(attacks) % 20, BAD, 5), 3)))
        subject.step()
    subject.run()
    (last,) = run_each(subject, later(1))
    assert errors(subject) == [one.id for one in attacks]
    assert all(one.num_cached == 32 for one in (*running, *attacks, last))
    counters = subject.scheduler.counters
    assert counters.nan_recomputations == counters.nan_dropped_pages == 0, "their last page is not full"
    subject.assert_reference()


def test_a_prompt_that_always_fails_fails_alone() -> None:
    """It computes the system prompt, and the first request after it."""
    subject = harness(overlap=True)
    subject.executor.bad_tokens = frozenset({BAD})
    bad, *_ = subject.add_all(request(prompt(SYSTEM, range(60, 70), BAD), 3), *later(4))
    subject.run()
    again = run_each(subject, [request(prompt(SYSTEM, range(60, 70), BAD, number), 3) for number in range(3)])
    assert errors(subject) == [one.id for one in (bad, *again)]
    subject.assert_reference()


@OVERLAP
def test_nobody_is_made_to_start_over_for_ever(overlap: bool) -> None:
    """While a long prompt is computed, requests that always fail read its beginning, from which no token was sampled
    yet."""
    subject = harness(overlap=overlap, chunk_tokens=8, max_prefill_tokens=32, num_pages=256)
    subject.executor.bad_tokens = frozenset({BAD})
    long = subject.add(request(prompt(range(100, 228), 40), 3))
    attacks = 0
    while not long.is_finished:
        assert attacks < 200, "it does not get to its first token"
        planned = 0 if long.slot is None else int(subject.scheduler.memory.slots.computed[long.slot])
        subject.add(request(prompt(range(100, 100 + planned), BAD), 1))
        attacks += 1
        subject.step()
    subject.run()
    assert long.recomputations == MAX_RECOMPUTATIONS and long.finish_reason is FinishReason.LENGTH
    assert len(errors(subject)) == attacks
    subject.assert_reference()


# ---------------------------------------------------------------------------------------------------- random runs


@seeds(10, 400)
@pytest.mark.parametrize("options", [{}, {"num_host_pages": 30, "prefix_cache": True}], ids=["device", "host"])
def test_random_runs_with_faulty_passes(options: dict[str, Any], seeds: range) -> None:
    """`Run.end` compares with the reference, and knows who may fail."""
    dropped = sum(
        random_run(seed, faults=0.05, **options).harness.scheduler.counters.nan_dropped_pages for seed in seeds
    )
    assert dropped > 25


@seeds(15, 400)
@pytest.mark.parametrize("overlap", [False, True])
def test_random_runs_of_one_system_prompt_with_one_faulty_pass(overlap: bool, seeds: range) -> None:
    recomputed = 0
    for seed in seeds:
        rng = random.Random(seed)
        subject = harness(
            overlap=overlap,
            lazy=rng.random() < 0.5,
            page_size=rng.choice([1, 4]),
            num_pages=rng.choice([100, 200]),
            chunk_tokens=rng.choice([4, 16, 64]),
            max_prefill_tokens=32,
            prefix_wait=rng.random() < 0.7,
            num_host_pages=rng.choice([0, 40]),
            policy=rng.choice(["fair", "fcfs", "lpm", "priority"]),
        )
        fault = rng.randrange(6)
        for step in range(25):
            while rng.random() < 0.6:
                tokens = prompt(range(1, 1 + rng.choice([8, 32])), *(rng.randrange(3) for _ in range(rng.randrange(9))))
                fields = {"prefill_only": True} if rng.random() < 0.2 else {}
                subject.add(request(tokens, rng.choice([1, 2, 9]), **fields))
            if step == fault:
                subject.executor.inject_fault(rng.choice([lambda row: True, lambda row: row == 0]))
            if rng.random() < 0.05 and subject.scheduler.requests:
                subject.scheduler.abort(rng.choice(list(subject.scheduler.requests)), subject.clock())
            subject.step()
        subject.run()
        assert set(errors(subject)) <= subject.executor.faulty_ids, f"seed {seed}: another request failed"
        subject.assert_reference()
        recomputed += subject.scheduler.counters.nan_recomputations
    assert recomputed > 5
