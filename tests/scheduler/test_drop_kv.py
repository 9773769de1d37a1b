"""New weights make all KV invalid: none of it is read again, and requests continue with their tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.request import FinishReason
from paceline.scheduler import EventKind
from paceline.scheduler.invariants import check
from paceline.scheduler.now import Now
from tests.helpers import events, harness, prompt, request
from tests.scheduler.test_state_machine import Run

A = range(1, 17)


def test_a_cached_prefix_is_computed_again() -> None:
    subject = harness()
    subject.add(request(prompt(A, 91)))
    subject.run()
    subject.replace_weights()
    again = subject.add(request(prompt(A, 92)))
    subject.run()
    assert again.num_cached == 0
    subject.assert_reference()


def test_a_pinned_prefix_is_unpinned() -> None:
    subject = harness(pin_quota_pages=8)
    subject.add(request(prompt(A, 91)))
    subject.run()
    subject.scheduler.pin("system", list(A), subject.clock())
    subject.replace_weights()
    assert not subject.scheduler.memory.pins
    assert len(events(subject.scheduler, EventKind.UNPIN)) == 1
    assert subject.scheduler.memory.num_available_pages == subject.scheduler.config.num_pages


def test_host_memory_is_emptied() -> None:
    subject = harness(num_pages=6, num_host_pages=16)
    for number, first in enumerate((1, 21, 41)):
        subject.add(request(prompt(range(first, first + 16), 91 + number), 2))
        subject.run()
    host = subject.scheduler.memory.host
    assert host is not None and host.num_pages_used
    subject.replace_weights()
    assert host.num_pages_used == 0
    again = subject.add(request(prompt(A, 95), 2))
    subject.run()
    assert again.num_fetched == 0
    subject.assert_reference()


def test_copies_of_a_plan_that_was_not_returned_are_dropped() -> None:
    """`plan` may return None after it has evicted pages: their copies wait for the next plan."""
    subject = harness(num_pages=6, num_host_pages=16)
    subject.add(request(prompt(A, 91), 2))
    subject.run()
    memory = subject.scheduler.memory
    memory.pool.free(memory.allocate(6, Now(subject.scheduler.step, subject.clock())))
    assert memory.host is not None and memory.host.num_pages_used
    subject.replace_weights()
    assert memory.host.num_pages_used == 0 and memory.host.take_swap() is None


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_running_requests_continue_and_it_counts_as_no_retraction(policy: str) -> None:
    subject = harness(overlap=True, policy=policy)
    ones = subject.add_all(*(request(prompt(A, number), 40) for number in range(60, 64)))
    for _ in range(5):
        for _ in range(6):
            subject.step()
        subject.replace_weights()
    subject.run()
    subject.assert_reference()
    assert all(one.retractions == 0 for one in ones)
    assert subject.scheduler.counters.retractions == 0


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_while_new_requests_are_held_only_started_ones_run(policy: str) -> None:
    subject = harness(max_running=2, policy=policy, num_pages=12)
    started = subject.add_all(*(request(prompt(A, number), 20) for number in (60, 61)))
    while len(subject.scheduler.started) < 2:
        subject.step()
    subject.scheduler.hold_new_requests(True)
    subject.scheduler.retract(started[0].id, subject.clock(), "a test")  # has started, and waits again
    late = subject.add(request(prompt(A, 62), 3, priority=9))
    while subject.scheduler.started:
        subject.step()
    assert subject.reasons == {one.id: FinishReason.LENGTH for one in started}
    assert subject.step() is None and late.id in subject.scheduler.requests
    assert subject.scheduler.explain(late.id).startswith(
        f"Request {late.id} waits for the engine to resume: it is paused"
    )
    subject.scheduler.hold_new_requests(False)
    subject.run()
    subject.assert_reference()


@pytest.mark.parametrize("options", [{}, {"num_host_pages": 30, "prefix_cache": True}], ids=["device", "host"])
def test_random_runs_read_no_old_kv(options: dict[str, Any]) -> None:
    for seed in range(15):
        rng = random.Random(seed)
        run = Run(rng.choice, **options)
        for _ in range(80):
            while rng.random() < 0.35 and len(run.harness.requests) < 30:
                run.add(rng.choice)
            if rng.random() < 0.05:
                run.abort(rng.randrange(50))
            if rng.random() < 0.1:
                run.harness.replace_weights()
            run.harness.step()
        run.end()
        check(run.harness.scheduler)
