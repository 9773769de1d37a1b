"""Overlap scheduling: planning with one pass in flight does not change any token."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.request import FinishReason
from paceline.scheduler.background import fair_tenants
from paceline.scheduler.invariants import find_faults
from tests.helpers import EOS, harness, prompt, request, scheduler


def outputs(overlap: bool, lazy: bool, **options: object) -> dict[str, list[int]]:
    subject = harness(overlap=overlap, lazy=lazy, vocab=16, **options)
    tokens = np.random.default_rng(5)
    for number in range(24):
        subject.add(
            request(tokens.integers(0, 4, int(tokens.integers(1, 30))), 20, eos_token_ids=(EOS,), id=f"r{number}")
        )
        subject.step()
    subject.run()
    subject.assert_reference()
    return subject.outputs


@pytest.mark.parametrize("options", [{}, {"num_pages": 20}, {"chunk_tokens": 3}, {"page_size": 1, "num_pages": 120}])
def test_serial_and_overlapped_give_the_same_tokens(options: dict) -> None:
    serial = outputs(False, False, **options)
    assert outputs(True, False, **options) == serial
    assert outputs(True, True, **options) == serial


def test_a_pass_is_launched_before_the_previous_one_is_committed() -> None:
    subject = harness(overlap=True)
    subject.add(request(max_tokens=6))
    subject.step()
    assert subject.scheduler.num_in_flight == 1
    assert len(subject.executor.plans) == 2


def test_a_late_stop_token_costs_one_discarded_token() -> None:
    subject = harness(overlap=True, vocab=4)
    one = subject.add(request(max_tokens=50, eos_token_ids=(EOS,)))
    subject.run()
    assert one.finish_reason is FinishReason.STOP
    assert subject.outputs[one.id][-1] == EOS
    assert subject.scheduler.counters.discarded_tokens == 1
    subject.assert_reference()


def test_the_kv_of_a_discarded_row_is_never_cached() -> None:
    """Page size 1: every position that stays cached is one whose token was known and computed."""
    subject = harness(overlap=True, vocab=4, page_size=1)
    one = subject.add(request(max_tokens=50, eos_token_ids=(EOS,)))
    subject.run()
    assert subject.scheduler.memory.tree.num_pages == one.num_tokens - 1


def test_a_finish_by_length_is_known_in_advance_and_costs_no_extra_pass() -> None:
    serial, overlapped = harness(), harness(overlap=True)
    for subject in (serial, overlapped):
        subject.add(request(max_tokens=7))
    assert serial.run() == overlapped.run() == 7
    assert overlapped.scheduler.counters.discarded_tokens == 0


def test_the_slot_of_a_request_that_ends_by_length_is_reused_in_the_next_pass() -> None:
    subject = harness(overlap=True, max_running=1)
    subject.add_all(request([1], 3, id="a"), request([2], 3, id="b"))
    assert subject.run() == 6
    assert subject.reasons == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    subject.assert_reference()


def test_slots_and_pages_are_safely_reused_while_a_discarded_row_still_runs() -> None:
    """The smallest configuration: one slot, pages for one request, early and late stops."""
    for lazy in (False, True):
        subject = harness(overlap=True, lazy=lazy, max_running=1, num_pages=10, page_size=2, vocab=6)
        subject.add_all(*(request(prompt(n, 1, 2), 12, eos_token_ids=(EOS,)) for n in range(30)))
        subject.run()
        assert subject.scheduler.counters.discarded_tokens > 0
        subject.assert_reference()


def test_commits_come_in_order_and_once() -> None:
    core = scheduler()
    core.add(request(max_tokens=5), 0.0)
    first, second = core.plan(0.0), core.plan(0.0)
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError, match="commit the older pass before planning another"):
        core.plan(0.0)
    with pytest.raises(AssertionError, match="in the order they were planned"):
        core.commit(second, np.array([1], np.int32), 0.0, 0.0)
    fresh = scheduler()
    with pytest.raises(AssertionError, match="there is no pass to commit"):
        fresh.commit(first, np.array([1], np.int32), 0.0, 0.0)


def test_a_pass_is_planned_while_drafts_are_in_flight() -> None:
    """With upper bounds; how far the rows got is settled at commit."""
    core = scheduler(draft_tokens=2)
    core.add(request(prompt(1, 2, 3), max_tokens=9), 0.0)
    first, second = core.plan(0.0), core.plan(0.0)
    assert first is not None and first.drafts is not None and not len(first.drafts), "prefill rows have no drafts"
    assert second is not None and second.drafts is not None
    assert (second.starts.tolist(), second.drafts.tolist(), second.num_tokens) == ([3], [2], 3)
    core.commit(first, np.array([5], np.int32), 0.0, 0.0, counts=np.array([1], np.int32))
    third = core.plan(0.0)
    assert third is not None and third.drafts is not None
    assert (third.starts.tolist(), third.drafts.tolist()) == ([6], [2]), "if both drafts are accepted"
    updates = core.commit(second, np.array([6, 7], np.int32), 0.0, 0.0, counts=np.array([2], np.int32))
    assert updates.tokens.tolist() == [6, 7]
    fourth = core.plan(0.0)
    assert fourth is not None and fourth.starts.tolist() == [8], "third began at 5, and is in flight"


def test_a_row_that_reaches_its_end_by_drafts_ends_with_the_pass_in_flight() -> None:
    core = scheduler(draft_tokens=3)
    core.add(request(prompt(1, 2, 3), max_tokens=4), 0.0)
    first, second = core.plan(0.0), core.plan(0.0)
    assert first is not None and second is not None and second.drafts is not None and second.drafts.tolist() == [2]
    core.commit(first, np.array([5], np.int32), 0.0, 0.0, counts=np.array([1], np.int32))
    third = core.plan(0.0)
    assert third is not None
    core.commit(second, np.array([6, 7], np.int32), 0.0, 0.0, counts=np.array([2], np.int32))
    assert core.plan(0.0) is None, "the third pass yields the last token"
    updates = core.commit(third, np.array([8], np.int32), 0.0, 0.0, counts=np.array([1], np.int32))
    assert [one.reason for one in updates.finished] == [FinishReason.LENGTH] and not core.has_work


def test_a_row_that_has_all_its_tokens_yields_none() -> None:
    core = scheduler(draft_tokens=3)
    core.add(request(prompt(1, 2, 3), max_tokens=3), 0.0)
    first, second = core.plan(0.0), core.plan(0.0)
    assert first is not None and second is not None
    core.commit(first, np.array([5], np.int32), 0.0, 0.0, counts=np.array([1], np.int32))
    third = core.plan(0.0)
    updates = core.commit(second, np.array([6, 7], np.int32), 0.0, 0.0, counts=np.array([2], np.int32))
    assert [one.reason for one in updates.finished] == [FinishReason.LENGTH] and third is not None
    assert not len(core.commit(third, np.array([], np.int32), 0.0, 0.0, counts=np.array([0], np.int32)).tokens)
    assert not core.has_work and not find_faults(core)


def test_drafts_are_counted_by_request_as_far_as_it_takes_their_tokens() -> None:
    core = scheduler(draft_tokens=3)
    one = core.add(request(prompt(1, 2, 3), max_tokens=9, eos_token_ids=(EOS,)), 0.0)
    first, second = core.plan(0.0), core.plan(0.0)
    assert first is not None and second is not None
    core.commit(
        first, np.array([5], np.int32), 0.0, 0.0, counts=np.array([1], np.int32), num_drafts=np.array([0], np.int32)
    )
    third = core.plan(0.0)
    assert third is not None
    tokens = np.array([6, EOS, 7, 8], np.int32)
    core.commit(second, tokens, 0.0, 0.0, counts=np.array([4], np.int32), num_drafts=np.array([3], np.int32))
    assert one.finish_reason is FinishReason.STOP
    assert (one.num_drafted, one.num_accepted) == (3, 1), "the tokens after the stop token are discarded"
    core.commit(third, tokens[:1], 0.0, 0.0, counts=np.array([1], np.int32), num_drafts=np.array([2], np.int32))
    assert (one.num_drafted, one.num_accepted) == (3, 1), "it had ended"
    assert (core.counters.drafted_tokens, core.counters.accepted_tokens) == (5, 3)


@pytest.mark.parametrize("draft", [1, 3, 5])
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_several_tokens_per_row_are_the_same_tokens(draft: int, page_size: int, overlap: bool) -> None:
    subject = harness(
        overlap=overlap,
        draft_tokens=draft,
        page_size=page_size,
        num_pages=400 // page_size,
        vocab=16,
        max_batch_tokens=256,
    )
    subject.add_all(*(request(prompt(n, n), 5 + n, eos_token_ids=(EOS,)) for n in range(12)))
    steps = subject.run()
    subject.assert_reference()
    assert steps < 17, "drafts save passes"


def test_plans_do_not_change_after_they_are_launched() -> None:
    subject = harness(overlap=True, max_running=4)
    subject.add_all(*(request(prompt(n, n, n), 12) for n in range(8)))
    copies, names = [], ("slots", "starts", "lengths", "samples", "page_changes")
    while subject.scheduler.has_work:
        subject.step()
        for plan in subject.executor.plans[len(copies) :]:
            copies.append([np.array(getattr(plan, name)) for name in names])
    for plan, copy in zip(subject.executor.plans, copies, strict=True):
        for name, values in zip(names, copy, strict=True):
            assert np.array_equal(getattr(plan, name), values), name


def test_accepted_drafts_are_charged_to_the_tenant() -> None:
    def service(num_tokens: int) -> float:
        core = scheduler(draft_tokens=3, output_weight=2.0)
        core.add(request(prompt(1, 2, 3), max_tokens=9), 0.0)
        first, second = core.plan(0.0), core.plan(0.0)
        assert first is not None and second is not None
        core.commit(first, np.array([5], np.int32), 0.0, 0.0, counts=np.array([1], np.int32))
        core.commit(second, np.arange(num_tokens, dtype=np.int32), 0.0, 0.0, counts=np.array([num_tokens], np.int32))
        (tenant,) = fair_tenants(core.policy).values()
        return tenant.service

    assert service(4) - service(1) == 3 * 2.0


def test_passes_of_a_pipeline_alternate_and_keep_all_stages_busy() -> None:
    """With three stages, a pass has every third row, and four passes are in flight: one for each stage and one that
    waits for its tokens."""
    subject = harness(overlap=True, num_stages=3, max_running=7)
    subject.add_all(*(request(prompt(n, n), 12, id=f"r{n}") for n in range(7)))
    in_flight = []
    while subject.scheduler.has_work:
        subject.step()
        in_flight.append(subject.scheduler.num_in_flight)
    subject.assert_reference()
    plans = [plan.slots.tolist() for plan in subject.executor.plans]
    assert sorted(map(len, plans[1:4])) == [1, 3, 3]
    for index in range(1, 28):
        assert plans[index] == plans[index + 3], "the same rows are together"
        assert not set(plans[index]) & set(plans[index + 1]) and not set(plans[index]) & set(plans[index + 2])
    assert in_flight[8:25] == [3] * 17, "all stages are busy while the host commits"
    assert subject.scheduler.counters.discarded_tokens == 0


def test_rows_of_a_pipeline_are_divided_again_when_requests_leave() -> None:
    subject = harness(overlap=True, num_stages=2)
    lengths = [40, 3, 40, 3, 40, 3, 40, 3]
    subject.add_all(*(request(prompt(n, n), length, id=f"r{n}") for n, length in enumerate(lengths)))
    subject.run()
    subject.assert_reference()
    assert {len(plan.slots) for plan in subject.executor.plans[20:60]} == {2}


def test_a_late_stop_token_in_a_pipeline_costs_one_discarded_token() -> None:
    """A pass that was launched behind it has the row, as without a pipeline; the passes in between have other rows."""
    subject = harness(overlap=True, num_stages=2, vocab=4)
    stopping = request(prompt(1, 2, 3), 50, eos_token_ids=(EOS,))
    stopping, _, _ = subject.add_all(stopping, request(prompt(3, 2), 60), request(prompt(3, 1), 60))
    subject.run()
    subject.assert_reference()
    assert stopping.finish_reason is FinishReason.STOP
    assert subject.scheduler.counters.discarded_tokens == 1


def test_a_request_alone_in_a_pipeline_is_planned_when_its_token_is_known() -> None:
    subject = harness(overlap=True, num_stages=3)
    subject.add(request(max_tokens=6))
    assert subject.run() == 6
    subject.assert_reference()
    assert subject.scheduler.counters.discarded_tokens == 0


def test_chunks_of_a_prompt_follow_each_other_through_a_pipeline() -> None:
    """They need no token, so they need not wait for the pass before."""
    subject = harness(overlap=True, num_stages=3, chunk_tokens=4)
    subject.add(request(range(1, 30), 2))
    subject.step()
    assert [int(plan.starts[0]) for plan in subject.executor.plans] == [0, 4, 8, 12]
    subject.run()
    subject.assert_reference()


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_serial_loop_gives_the_tokens_of_a_pipeline(num_stages: int) -> None:
    for options in ({}, {"num_pages": 20}, {"chunk_tokens": 3}):
        serial = outputs(False, False, **options)
        assert outputs(False, False, num_stages=num_stages, **options) == serial
        assert outputs(True, True, num_stages=num_stages, **options) == serial


def test_every_token_of_a_pipeline_is_charged_once() -> None:
    def services(num_stages: int) -> dict[str, float]:
        subject = harness(overlap=True, num_stages=num_stages)
        subject.add_all(*(request(prompt(n, n), 9, tenant="ab"[n % 2], id=f"r{n}") for n in range(6)))
        tenants = fair_tenants(subject.scheduler.policy)
        found: dict[str, float] = {}
        while subject.scheduler.has_work:
            subject.step()
            found |= {name: tenant.service for name, tenant in tenants.items()}
        return found

    assert services(3) == services(1) and services(1)
