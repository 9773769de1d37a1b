"""Background tenants: admitted only while no other tenant's request waits, and retracted first."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import POLICIES
from paceline.request import FinishReason, Refused, Request
from paceline.scheduler import EventKind
from paceline.scheduler.background import fair_tenants
from paceline.scheduler.invariants import check
from paceline.scheduler.now import Now
from paceline.scheduler.retraction import MAX_RETRACTIONS, choose_victim
from paceline.scheduler.snapshot import snapshot
from paceline.scheduler.tracked_request import Phase
from paceline.testing import Harness
from tests.helpers import EOS, admissions, events, harness, prompt, request, slots_of
from tests.scheduler.test_state_machine import random_run

BACKGROUND = ("batch", "batch2")


def with_background(**options: Any) -> Harness:
    return harness(**{"background_tenants": ",".join(BACKGROUND), "num_pages": 256, "vocab": 4096} | options)


def background(tokens: Any, max_tokens: int = 4, *, tenant: str = "batch", **fields: Any) -> Request:
    return request(tokens, max_tokens, tenant=tenant, **fields)


@pytest.mark.parametrize("max_wait", [0.0, 0.001, float("inf")])
@pytest.mark.parametrize("policy", POLICIES)
def test_background_requests_wait_for_all_others_under_every_policy(policy: str, max_wait: float) -> None:
    subject = with_background(policy=policy, max_wait=max_wait, max_running=1)
    shared = list(range(8))
    subject.add_all(*(background(prompt(shared, n), id=f"background-{n}", priority=5) for n in range(4)))
    subject.add_all(*(request(prompt(shared, n), id=f"foreground-{n}") for n in range(4)))
    subject.add(background(prompt(shared), id="background-4"))
    subject.run()
    classes = [name.split("-")[0] for name in admissions(subject.scheduler)]
    assert classes == ["foreground"] * 4 + ["background"] * 5
    subject.assert_reference()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cached_prefix_does_not_help_a_background_request_past_others(policy: str) -> None:
    subject = with_background(policy=policy, max_wait=float("inf"), max_running=1)
    shared = list(range(16))
    subject.add(background(prompt(shared, 20), id="background-0"))
    subject.run()
    count = 60  # more than are skipped in a step
    subject.add_all(*(background(prompt(shared, 20 + n), id=f"background-{n}") for n in range(1, count)))
    subject.add_all(*(request(prompt(n), id=f"foreground-{n}") for n in (3, 4)))
    subject.run()
    classes = [name.split("-")[0] for name in admissions(subject.scheduler)]
    assert classes == ["background", "foreground", "foreground"] + ["background"] * (count - 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_foreground_request_that_does_not_fit_still_waits(policy: str) -> None:
    subject = with_background(policy=policy, num_pages=16, page_size=4)
    subject.add(request(prompt(range(30)), 20, id="running"))
    subject.step()
    subject.add_all(request(prompt(range(100, 130)), 10, id="large"), background([7], 2, id="small"))
    subject.run()
    assert admissions(subject.scheduler) == ["running", "large", "small"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_background_request_gives_its_slot_to_a_waiting_foreground_request(policy: str, overlap: bool) -> None:
    subject = with_background(policy=policy, max_running=2, overlap=overlap)
    subject.add_all(*(background([n, n + 1], 30, id=f"background-{n}") for n in range(2)))
    for _ in range(4):
        subject.step()
    subject.add(request([9], 3, id="foreground"))
    subject.step()
    assert subject.scheduler.requests["foreground"].phase is not Phase.WAITING
    assert len(events(subject.scheduler, EventKind.RETRACT)) == 1
    check(subject.scheduler)
    subject.run()
    assert next(iter(subject.reasons)) == "foreground"
    subject.assert_reference()


def test_a_background_request_gives_its_memory_to_a_waiting_foreground_request() -> None:
    subject = with_background(num_pages=16, page_size=4)
    subject.add_all(*(background(prompt(range(20 * n, 20 * n + 10)), 20, id=f"background-{n}") for n in range(2)))
    for _ in range(3):
        subject.step()
    assert subject.scheduler.num_running == 2
    subject.add(request(prompt(range(100, 130)), 10, id="foreground"))
    subject.step()
    assert subject.scheduler.requests["foreground"].phase is not Phase.WAITING
    subject.run()
    subject.assert_reference()


def test_a_background_request_gives_the_prefix_that_only_it_holds_any_more() -> None:
    """Two have read it, and one has ended: its pages are still counted as shared."""
    subject = with_background(num_pages=16, page_size=4)
    shared = list(range(40))
    subject.add(background(prompt(shared, 50), 1))
    subject.run()
    subject.add_all(background(prompt(shared, 51), 2, id="ended"), background(prompt(shared, 52), 20, id="background"))
    for _ in range(3):
        subject.step()
    assert list(subject.scheduler.requests) == ["background"]
    subject.add(request([60], 3, id="running"))
    subject.step()
    subject.add(request(prompt(range(100, 140)), 4, id="foreground"))
    subject.step()
    assert subject.scheduler.requests["foreground"].phase is not Phase.WAITING
    subject.run()
    subject.assert_reference()


def test_a_foreground_prompt_that_lacks_a_page_gets_it_from_a_background_request() -> None:
    """The background request was expected to end soon, and has taken the last page."""
    subject = with_background(num_pages=5, page_size=16, chunk_tokens=4)
    claims = {"eos_token_ids": (EOS,), "expected_tokens": 1}
    subject.add(background(prompt(range(30)), 40, id="background", **claims))
    for _ in range(9):
        subject.step()
    subject.add(request(prompt(range(100, 140)), 2, id="foreground"))
    for _ in range(10):
        before = subject.scheduler.counters.computed_tokens
        subject.step()
        assert subject.scheduler.counters.computed_tokens == before + 4, "its prompt waits for a background request"
    subject.run()
    subject.assert_reference()


def test_a_background_prompt_gets_the_tokens_that_others_leave() -> None:
    subject = with_background(max_batch_tokens=16, chunk_tokens=16, page_size=1)
    subject.add(background(prompt(range(100)), id="background"))
    subject.step()
    subject.add(request(prompt(range(200, 240)), id="foreground"))
    subject.step()
    planned = subject.scheduler.memory.slots.computed
    slots = {name: one.slot for name, one in subject.scheduler.requests.items()}
    assert planned[slots["foreground"]] == 16
    assert planned[slots["background"]] == 16  # of the first step: the second had none left
    subject.run()
    subject.assert_reference()


def test_background_requests_are_retracted_first_when_memory_is_short() -> None:
    subject = with_background(num_pages=14, page_size=2, max_running=6)
    claims = {"eos_token_ids": (EOS,), "expected_tokens": 1}
    subject.add(background(prompt(1, 2, 3), 14, id="background", priority=9, **claims))
    subject.step()  # the most senior, and of the highest priority
    subject.add_all(*(request(prompt(n, n + 1, n + 2), 14, id=f"foreground-{n}", **claims) for n in (10, 20)))
    subject.run()
    retracted = [event.request_id for event in events(subject.scheduler, EventKind.RETRACT)]
    assert retracted and retracted[0] == "background"
    subject.assert_reference()


def test_retractions_for_others_do_not_protect_a_background_request() -> None:
    subject = with_background(max_running=1)
    subject.add(background([1], 40, id="background"))
    for number in range(MAX_RETRACTIONS + 3):
        subject.step()
        subject.step()
        subject.add(request([number + 2], 1, id=f"foreground-{number}"))
        subject.step()
        assert subject.scheduler.requests["background"].phase is Phase.WAITING
    assert subject.scheduler.requests["background"].retractions == 0
    subject.run()
    subject.assert_reference()


def test_protection_from_other_background_requests_does_not_hold_against_foreground_requests() -> None:
    subject = with_background()
    subject.add_all(background([1], 40, id="background"), request([2], 40, id="foreground"))
    subject.step()
    subject.step()
    protected = subject.scheduler.requests["background"]
    protected.retractions = MAX_RETRACTIONS
    running, memory = subject.scheduler.running.requests, subject.scheduler.memory
    memory.slots.is_protected[protected.slot] = True
    assert choose_victim(slots_of(protected), memory) is None
    assert choose_victim(slots_of(*running), memory, for_foreground=True) is protected


def test_background_tenants_share_what_is_left_by_weight() -> None:
    subject = with_background(max_running=1, fair_quantum=1, tenant_weights={"batch2": 3.0})
    for number in range(40):
        for tenant in BACKGROUND:
            subject.add(background([number], 4, tenant=tenant, id=f"{tenant}/{number}"))
    subject.run()
    first = admissions(subject.scheduler)[:40]
    assert sum(name.startswith("batch2/") for name in first) == pytest.approx(30, abs=1)
    assert set(fair_tenants(subject.scheduler.policy)) == set(BACKGROUND)


def test_memory_is_not_kept_for_a_background_request_once_another_waits() -> None:
    subject = with_background(num_pages=16, page_size=4, max_overtakes=0)
    subject.add(background(prompt(range(30)), 20, id="running"))
    subject.step()
    subject.add(background(prompt(range(100, 140)), 4, id="large"))
    subject.step()
    assert subject.scheduler.admission.reserved is subject.scheduler.requests["large"]
    subject.add(request(prompt(range(200, 230)), 10, id="foreground"))
    assert subject.scheduler.admission.reserved is None
    subject.step()
    assert subject.scheduler.requests["foreground"].phase is not Phase.WAITING
    subject.run()
    subject.assert_reference()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_background_request_gives_its_adapter_slot_to_a_waiting_foreground_request(
    policy: str, overlap: bool
) -> None:
    subject = with_background(policy=policy, adapter_slots=1, overlap=overlap)
    subject.add_all(background([1] * 5, 200, adapter="x", id="background"), background([2] * 5, 200, id="without"))
    for _ in range(3):
        subject.step()
    subject.add(request([2] * 5, 3, adapter="y", id="foreground"))
    subject.step()
    assert subject.scheduler.requests["foreground"].phase is not Phase.WAITING
    assert [event.request_id for event in events(subject.scheduler, EventKind.RETRACT)] == ["background"]
    subject.run()
    assert next(iter(subject.reasons)) == "foreground"
    subject.assert_reference()


def test_the_adapter_with_the_fewest_requests_gives_its_slot_and_none_that_a_foreground_request_uses() -> None:
    subject = with_background(adapter_slots=3)
    subject.add_all(*(background([n], 50, adapter="x", id=f"x{n}") for n in range(3)))
    subject.add_all(*(background([n], 50, adapter="y", id=f"y{n}") for n in range(2)))
    subject.add(background([1], 50, adapter="z", id="z0"))
    subject.step()
    subject.add(request([2], 50, adapter="z", id="z1"))
    subject.step()
    subject.add(request([3], 3, adapter="w", id="foreground"))
    subject.step()
    assert subject.scheduler.requests["foreground"].phase is not Phase.WAITING
    assert {event.request_id for event in events(subject.scheduler, EventKind.RETRACT)} == {"y0", "y1"}
    subject.run()
    subject.assert_reference()


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_kept_for_a_background_request_that_others_overtake(policy: str) -> None:
    """It waits for a slot for its adapter. Foreground requests with adapters, admitted before it, do not delay it."""
    subject = with_background(policy=policy, adapter_slots=1, max_overtakes=2, max_running=2)
    subject.add(background([1], 40, adapter="x", id="running"))
    subject.step()
    subject.add(background([2], 200, adapter="y", id="background"))
    subject.step()
    waiting = subject.add_all(*(request([n], 4, adapter="x", id=f"foreground-{n}") for n in range(8)))
    for _ in range(50):
        if all(one.was_admitted for one in waiting):
            break
        subject.step()
        assert subject.scheduler.admission.reserved in (None, *waiting)
    assert all(one.was_admitted for one in waiting)
    assert subject.scheduler.requests["background"].overtaken == 0
    subject.run()
    assert list(subject.reasons)[-1] == "background"
    subject.assert_reference()


def paused_with_a_reservation(policy: str) -> Harness:
    """The engine is resumed. Before, memory was kept for a background request, while a foreground one could not start;
    the prompt of another background request is being computed."""
    subject = with_background(policy=policy, num_pages=16, page_size=4, chunk_tokens=4)
    subject.add(background(prompt(range(8)), 40, id="retracted"))
    subject.step()
    subject.scheduler.retract("retracted", subject.clock(), "a test")
    subject.add(background(prompt(range(50, 110)), 2, id="prompt"))
    subject.step()
    subject.scheduler.hold_new_requests(True)
    subject.add(request(prompt(range(200, 212)), 2, id="foreground"))
    for _ in range(12):
        subject.step()
    assert subject.scheduler.requests["foreground"].phase is Phase.WAITING
    subject.scheduler.hold_new_requests(False)
    return subject


@pytest.mark.parametrize("policy", POLICIES)
def test_a_reservation_of_a_background_request_ends_when_the_engine_resumes(policy: str) -> None:
    subject = paused_with_a_reservation(policy)
    subject.step()
    assert subject.scheduler.requests["foreground"].phase is not Phase.WAITING
    subject.run()
    assert next(iter(subject.reasons)) == "foreground"
    subject.assert_reference()


def test_a_background_request_does_not_stay_in_what_is_left_beside_a_reserved_foreground_request() -> None:
    """Memory is kept for a large request. What the small one may take beside it, a background request has."""
    subject = with_background(num_pages=80, page_size=4, max_overtakes=0)
    subject.add(request(prompt(range(120)), 8, id="running"))  # 32 pages
    subject.add(background(prompt(range(500, 508)), 100, id="background"))  # 27 pages, and it runs longer
    subject.step()
    subject.step()
    subject.add(request(prompt(range(200, 400)), 4, id="large"))  # 51 pages
    subject.step()
    assert subject.scheduler.admission.reserved is subject.scheduler.requests["large"]
    subject.add(request(prompt(range(400, 420)), 8, id="small"))  # 7 pages
    subject.step()
    assert subject.scheduler.requests["small"].phase is not Phase.WAITING
    assert subject.scheduler.requests["background"].phase is Phase.WAITING
    subject.run()
    subject.assert_reference()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retracted_background_request_finishes_before_a_pause_although_a_foreground_one_waits(policy: str) -> None:
    subject = with_background(policy=policy, max_overtakes=0, num_pages=16, page_size=4)
    subject.add(background(prompt(range(30)), 10, id="background"))
    subject.step()
    subject.scheduler.hold_new_requests(True)
    subject.add(request([1], 3, id="foreground"))
    subject.scheduler.retract("background", subject.clock(), "a test")
    for _ in range(50):
        subject.step()
    assert list(subject.reasons) == ["background"] and not subject.scheduler.started
    subject.scheduler.hold_new_requests(False)
    subject.run()
    subject.assert_reference()


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_kept_for_a_new_request_while_the_engine_pauses(policy: str) -> None:
    """It could not start, and those that are to finish first would wait for what is kept for it."""
    subject = with_background(policy=policy, num_pages=16, page_size=4, max_overtakes=0)
    subject.add(request(prompt(range(24)), 20, id="running"))
    subject.step()
    subject.add(request(prompt(range(100, 140)), 4, id="large"))
    subject.step()
    assert subject.scheduler.admission.reserved is subject.scheduler.requests["large"]
    subject.scheduler.hold_new_requests(True)
    subject.scheduler.retract("running", subject.clock(), "a test")
    for _ in range(100):
        subject.step()
    assert list(subject.reasons) == ["running"]
    subject.scheduler.hold_new_requests(False)
    subject.run()
    subject.assert_reference()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_request_that_memory_is_kept_for_is_first_while_the_engine_pauses(policy: str) -> None:
    subject = with_background(policy=policy)
    subject.add_all(request(prompt(range(24)), 20, id="older"), request(prompt(range(50, 74)), 20, id="kept"))
    subject.step()
    core = subject.scheduler
    core.hold_new_requests(True)
    for name in ("kept", "older"):
        core.retract(name, subject.clock(), "a test")
    core.admission.reserve(core.requests["kept"], Now(core.step, subject.clock()))
    for _ in range(3):
        subject.step()
    assert admissions(core)[2:] == ["kept", "older"]
    core.hold_new_requests(False)
    subject.run()
    subject.assert_reference()


def test_the_servers_time_limits_do_not_end_background_requests() -> None:
    subject = with_background(max_running=1, queue_timeout_s=0.01, running_timeout_s=0.01)
    subject.add_all(background([1], id="patient"), background([2], id="own limit", queue_timeout_s=0.01))
    subject.clock.advance(1.0)
    subject.step()
    subject.clock.advance(1.0)
    subject.run()
    assert subject.reasons == {"patient": FinishReason.LENGTH, "own limit": FinishReason.QUEUE_TIMEOUT}


def test_background_requests_leave_a_full_queue_first() -> None:
    subject = with_background(max_waiting=2, full_queue="yield")
    subject.add_all(background([1], id="background", priority=5), request([2], id="foreground"))
    subject.add(request([3], id="new"))
    assert subject.scheduler.requests.keys() == {"foreground", "new"}
    with pytest.raises(Refused, match="2 requests are waiting"):
        subject.add(background([4], priority=9))


def test_a_waiting_background_request_is_explained() -> None:
    subject = with_background(max_running=1)
    subject.add_all(request([1], 20), request([2]), background([3], id="background"))
    subject.step()
    assert "waits for requests of other tenants: as a background request" in subject.scheduler.explain("background")


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "admission"), ("fair", "arrival")])
def test_the_pages_show_background_requests_behind_the_others(policy: str, order: str) -> None:
    subject = with_background(policy=policy, max_running=1)
    subject.add(request([1], 20))
    subject.step()
    subject.add_all(background([2], id="c"), request([3], id="a"), background([4], id="d"), request([5], id="b"))
    found = snapshot(subject.scheduler, subject.clock())
    assert found["order"] == order and [one["id"] for one in found["waiting"]] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("policy", POLICIES)
def test_without_background_requests_every_decision_is_the_same(policy: str) -> None:
    def journal(names: str) -> list[Any]:
        options = {"num_pages": 40, "page_size": 2, "max_running": 4, "policy": policy, "background_tenants": names}
        subject = harness(**options)
        for number in range(30):
            tokens = prompt([number % 3] * 6, number)
            subject.add(request(tokens, 6, id=str(number), tenant="ab"[number % 2], priority=number % 4))
            subject.step()
        subject.run()
        return list(subject.scheduler.journal.events)

    assert journal("") == journal(",".join(BACKGROUND))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_foreground_request_waits_for_a_background_one_in_random_runs(policy: str) -> None:
    """`ForegroundFirst` checks it after every plan."""
    runs = [random_run(seed, background_tenants="b, c", policy=policy, pauses=0.02) for seed in range(500, 503)]
    assert sum(run.scheduler.num_checked for run in runs) > 10, "background requests were admitted"
