"""Adapter slots: which adapters are loaded, and that no request waits for ever for one, nor holds up others."""

from __future__ import annotations

import pytest

from paceline.config import POLICIES
from paceline.request import Request
from paceline.scheduler.adapter_slots import AdapterSlots
from paceline.scheduler.plan import AdapterLoad
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.testing import Harness
from tests.helpers import admissions, harness, request


def of(adapter: str, number: int, max_tokens: int = 6, **fields: object) -> Request:
    return request([number % 50 + 1] * 5, max_tokens, id=f"{adapter}{number}", adapter=adapter, **fields)


def test_the_least_recently_used_adapter_is_replaced_and_never_one_in_use() -> None:
    slots = AdapterSlots(2)
    assert [slots.acquire(name) for name in ("a", "b", "a")] == [0, 1, 0]
    assert slots.take_loads() == (AdapterLoad(0, "a"), AdapterLoad(1, "b"))
    assert slots.num_available == 0
    for name in ("a", "b", "a"):
        slots.release(name)
    assert (slots.num_available, slots.acquire("a")) == (2, 0)  # still loaded
    assert (slots.acquire("c"), slots.take_loads()) == (1, (AdapterLoad(1, "c"),))  # b is the only one unused
    slots.release("a")
    slots.release("c")
    assert (slots.acquire("d"), slots.is_loaded("a"), slots.faults()) == (0, False, [])
    slots.release("d")
    slots.forget("d")  # with what is not loaded yet
    assert (slots.take_loads(), slots.acquire("e")) == ((), 0)


def test_plans_load_adapters_and_rows_name_their_slots() -> None:
    subject = harness(adapter_slots=2)
    subject.add_all(of("x", 1), of("y", 2), of("", 3), of("x", 4))
    plan = subject.scheduler.plan(0.0)
    assert plan is not None
    assert {load.adapter: load.slot for load in plan.adapter_loads} == {"x": 0, "y": 1}
    assert {join.request_id: join.adapter_slot for join in plan.joins} == {"x1": 0, "y2": 1, "3": None, "x4": 0}


def keep_adding(subject: Harness, adapter: str, count: int, until: TrackedRequest) -> int:
    """Adds a request with `adapter` before every step, until `until` has begun. Returns how many."""
    for number in range(count):
        subject.add(of(adapter, number))
        subject.step()
        if until.was_admitted:
            return number
    raise AssertionError(f"{until.id} still waits after {count} steps")


@pytest.mark.parametrize("policy", list(POLICIES))
def test_adapters_in_use_cannot_keep_another_one_waiting_for_ever(policy: str) -> None:
    subject = harness(adapter_slots=1, max_overtakes=5, policy=policy, num_pages=256, max_wait=float("inf"))
    subject.add_all(of("x", 900), of("x", 901))
    subject.step()
    waits = subject.add(of("y", 1))
    keep_adding(subject, "x", 60, waits)
    subject.run()
    subject.assert_reference()
    assert subject.scheduler.explain("y1").startswith("Request y1 is unknown")


def test_while_a_slot_drains_other_adapters_and_the_base_model_are_served() -> None:
    subject = harness(adapter_slots=2, max_overtakes=0, max_running=16, num_pages=256)
    subject.add_all(of("x", 1, 8), of("z", 1, 30))
    subject.step()
    subject.add(of("y", 1))
    subject.step()
    assert "a slot for its adapter" in subject.scheduler.explain("y1")
    subject.add_all(of("x", 2), of("z", 2), of("", 2))
    for _ in range(3):
        subject.step()
    # x ends first, so it gets no new requests; z goes on.
    assert set(admissions(subject.scheduler)) == {"x1", "z1", "z2", "2"}
    counts = {name: subject.scheduler.num_adapter_requests(name) for name in "xyz"}
    assert counts == {"x": 2, "y": 1, "z": 2}
    subject.run()
    assert not any(subject.scheduler.num_adapter_requests(name) for name in "xyz")
    assert admissions(subject.scheduler)[-2:] == ["y1", "x2"]
    subject.assert_reference()


def test_a_long_queue_of_an_adapter_without_a_slot_holds_up_nobody() -> None:
    subject = harness(adapter_slots=1, max_overtakes=1000, num_pages=256)
    subject.add(of("x", 1, 40))
    subject.step()
    subject.add_all(*(of("y", number) for number in range(200)), of("", 1), of("x", 2), of("", 3, tenant="other"))
    subject.step()
    assert sorted(admissions(subject.scheduler)) == ["1", "3", "x1", "x2"]
    subject.run()
    subject.assert_reference()


def test_a_retracted_request_gets_its_adapter_back_before_new_requests() -> None:
    subject = harness(adapter_slots=1, num_pages=256)
    subject.add(of("x", 0, 12))
    subject.step()
    subject.scheduler.retract("x0", subject.clock(), "a test")
    subject.add_all(*(of("y", number) for number in range(20)))
    subject.run()
    # In the step that retracted it, it was no candidate.
    assert admissions(subject.scheduler) == ["x0", *(f"y{n}" for n in range(8)), "x0", *(f"y{n}" for n in range(8, 20))]
    subject.assert_reference()


def test_the_slot_of_a_request_that_waits_for_memory_is_kept_for_it() -> None:
    subject = harness(adapter_slots=1, num_pages=10, max_overtakes=0)
    subject.add(of("", 0, 20))
    subject.step()
    subject.add(request([7] * 20, 16, id="large", adapter="y"))
    subject.step()
    subject.add_all(request([8, 8], 2, id="small", adapter="z"), request([9, 9], 2, id="base"))
    subject.run()
    assert admissions(subject.scheduler) == ["0", "base", "large", "small"]
