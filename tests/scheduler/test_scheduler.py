"""The scheduler step by step: which requests run, on which memory, within which budgets."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from paceline.config import BATCHING
from paceline.request import FinishReason, InvalidRequest, Refused
from paceline.scheduler import EventKind, PinError, validation
from paceline.scheduler.tracked_request import Phase
from tests.helpers import EOS, admissions, events, harness, prompt, request, scheduler


def test_a_request_passes_through_its_phases() -> None:
    subject = harness()
    one = subject.add(request(prompt(range(1, 11)), max_tokens=3))
    seen = [one.phase]
    while subject.scheduler.has_work:
        subject.step()
        if seen[-1] is not one.phase:
            seen.append(one.phase)
    assert seen == [Phase.WAITING, Phase.DECODING, Phase.FINISHED]
    assert one.finish_reason is FinishReason.LENGTH
    subject.assert_reference()


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    subject = harness(chunk_tokens=4)
    subject.add(request(prompt(range(10)), max_tokens=1))
    subject.run()
    assert [plan.lengths.tolist() for plan in subject.executor.plans] == [[4], [4], [2]]
    assert [plan.samples.tolist() for plan in subject.executor.plans] == [[False], [False], [True]]


def test_one_requested_token_is_one_pass() -> None:
    subject = harness()
    subject.add(request(max_tokens=1))
    assert subject.run() == 1


def test_a_prefill_only_request_samples_nothing_and_ends_with_its_prefill() -> None:
    subject = harness(chunk_tokens=4)
    one = subject.add(request(prompt(range(6)), prefill_only=True))
    assert subject.run() == 2
    assert (one.finish_reason, len(one.output)) == (FinishReason.LENGTH, 0)


def test_positions_that_must_be_computed_are_not_taken_from_the_cache() -> None:
    subject = harness(page_size=1)
    subject.add(request(prompt(range(8)), max_tokens=1))
    subject.run()
    again = subject.add(request(prompt(range(8)), max_tokens=1, compute_from=3))
    subject.run()
    assert (again.num_cached, subject.executor.plans[-1].lengths.tolist()) == (3, [5])
    subject.assert_reference()


def test_the_last_prompt_token_is_always_computed() -> None:
    subject = harness(page_size=1)
    for _ in range(2):
        one = subject.add(request(prompt(range(8)), max_tokens=2))
        subject.run()
    assert one.num_cached == 7
    assert subject.executor.plans[-2].lengths.tolist() == [1]


def test_output_is_cached_for_the_next_turn_of_a_chat() -> None:
    subject = harness(page_size=1)
    first = subject.add(request(prompt(range(8)), max_tokens=6))
    subject.run()
    second = subject.add(request(prompt(range(8), first.output, 9), max_tokens=2))
    subject.run()
    assert second.num_cached == 8 + 5, "all but the last token, whose KV was never computed"
    subject.assert_reference()


@pytest.mark.parametrize("batching", BATCHING)
def test_token_budgets_hold_in_every_pass(batching: str) -> None:
    subject = harness(
        max_running=6, max_batch_tokens=24, max_prefill_tokens=16, chunk_tokens=5, batching=batching, num_pages=200
    )
    for size in (3, 30, 7, 22, 1, 16, 9, 12):
        subject.add(request(prompt(size, range(size)), max_tokens=6))
    subject.run()
    for plan in subject.executor.plans:
        assert plan.num_tokens <= 24
        assert plan.num_prefill_tokens <= 16
        assert all(length <= 5 for length in plan.lengths.tolist())
        assert plan.num_rows <= 6
    subject.assert_reference()


def test_mixed_batching_never_stalls_a_decode() -> None:
    subject = harness(max_batch_tokens=16, chunk_tokens=8, num_pages=400)
    runner = subject.add(request(max_tokens=60))
    subject.step()
    for number in range(4):
        subject.add(request(prompt(number, range(100)), max_tokens=2))
    while not runner.is_finished:
        before = len(runner.output)
        subject.step()
        assert len(runner.output) == before + 1


def test_prefill_first_runs_prefill_batches_before_decode_batches() -> None:
    subject = harness(batching="prefill-first", chunk_tokens=4)
    subject.add(request(max_tokens=8))
    subject.step()
    subject.add(request(prompt(range(8)), max_tokens=2))
    subject.run()
    kinds = ["prefill" if plan.num_decodes == 0 else "decode" for plan in subject.executor.plans[:5]]
    assert kinds == ["prefill", "prefill", "prefill", "decode", "decode"]
    assert all(plan.num_decodes in (0, plan.num_rows) for plan in subject.executor.plans)


@pytest.mark.parametrize("overlap", [False, True])
def test_prefill_first_does_not_starve_decodes(overlap: bool) -> None:
    """An endless stream of prompts: every ninth batch is a decode batch."""
    subject = harness(batching="prefill-first", overlap=overlap, max_running=4, num_pages=400)
    runner = subject.add(request([1, 2], max_tokens=100))
    for number in range(2000):
        if runner.is_finished:
            break
        if subject.scheduler.num_waiting < 2:
            subject.add(request(prompt(number % 50, number % 49), max_tokens=1))
        subject.step()
    decodes = [number for number, plan in enumerate(subject.executor.plans) if plan.num_decodes]
    assert runner.is_finished
    assert all(plan.num_decodes in (0, plan.num_rows) for plan in subject.executor.plans), "never mixed"
    assert max(np.diff(decodes)) == 9


def test_prefill_first_counts_only_batches_that_delay_a_decode() -> None:
    """A burst of eight prefill batches runs before the first decode batch, however long the prompt before it was."""
    subject = harness(batching="prefill-first", chunk_tokens=4, max_prefill_tokens=4, max_running=16, num_pages=400)
    subject.add(request(prompt(range(40)), max_tokens=2))
    for _ in range(10):
        subject.step()
    subject.add_all(*(request(prompt([number] * 4), max_tokens=2) for number in range(10)))
    subject.run()
    kinds = [plan.num_decodes > 0 for plan in subject.executor.plans]
    assert kinds[:22] == [False] * 18 + [True] + [False] * 2 + [True]


def test_static_batching_admits_only_after_the_slowest_request_has_ended() -> None:
    subject = harness(batching="static", max_running=2)
    for length in (2, 9, 2):
        subject.add(request(max_tokens=length))
    subject.run()
    joined = [len(plan.joins) for plan in subject.executor.plans]
    assert joined[0] == 2
    assert joined[1:9] == [0] * 8
    assert joined[9] == 1


def test_memory_of_a_finished_request_is_reused_in_the_next_pass() -> None:
    subject = harness(num_pages=4, page_size=4, max_running=4)
    subject.add_all(request(prompt(range(12)), max_tokens=2), request(prompt(range(20, 32)), max_tokens=2))
    subject.run()
    plans = subject.executor.plans
    assert [len(plan.joins) for plan in plans] == [1, 0, 1, 0], "the second joins the pass after the first ended"


def test_short_prompts_do_not_wait_behind_long_ones() -> None:
    subject = harness(chunk_tokens=8, max_batch_tokens=32, max_prefill_tokens=32, num_pages=2000)
    for number in range(8):
        subject.add(request(prompt(number, range(300)), max_tokens=1))
    subject.step()
    short = subject.add(request([7, 7, 7], max_tokens=1))
    subject.step()
    assert short.is_finished


def test_several_prompts_are_prefilled_at_once() -> None:
    subject = harness(chunk_tokens=8, max_batch_tokens=32, max_prefill_tokens=32, num_pages=2000)
    subject.add_all(*(request(prompt(number, range(40)), max_tokens=1) for number in range(3)))
    subject.step()
    assert subject.executor.plans[0].lengths.tolist() == [8, 8, 8]


def test_chunks_after_a_long_context_are_shorter_while_others_decode() -> None:
    """Half of chunk_tokens, a third of that after 2 * chunk_context tokens; rounded up to whole tiles."""
    options: dict[str, Any] = {
        "chunk_tokens": 600,
        "chunk_context": 500,
        "num_pages": 9000,
        "context_tokens": 8000,
        "max_batch_tokens": 1000,
        "max_prefill_tokens": 1000,
        "itl_target": math.inf,
    }
    beside, alone = harness(**options), harness(**options)
    beside.add(request(max_tokens=40))
    beside.step()
    for subject in (beside, alone):
        subject.add(request(prompt(1, range(2999)), max_tokens=1))
        subject.run()
    chunks = [plan.num_prefill_tokens for plan in beside.executor.plans[1:] if plan.num_prefill_tokens]
    starts = [sum(chunks[:index]) for index in range(len(chunks))]
    assert sum(chunks) == 3000
    assert chunks[:3] == [320, 192, 192]  # of 300, 182 and 148
    assert chunks[:-1] == [64 * math.ceil(600 * 500 // (2 * (500 + start)) / 64) for start in starts[:-1]]
    assert [plan.num_prefill_tokens for plan in alone.executor.plans if plan.num_prefill_tokens] == [600] * 5


def test_chunks_are_full_while_requests_wait() -> None:
    subject = harness(chunk_tokens=60, chunk_context=50, max_running=2, num_pages=2000, context_tokens=8000)
    subject.add(request(max_tokens=40))
    subject.step()
    subject.add_all(*(request(prompt(number, range(299)), max_tokens=1) for number in (1, 2)))
    subject.run()
    assert [plan.num_prefill_tokens for plan in subject.executor.plans[1:] if plan.num_prefill_tokens][:5] == [60] * 5


def test_itl_target_bounds_the_prefill_tokens_of_a_mixed_batch() -> None:
    # The toy device takes 1 ms + 10 µs a token: 149 prompt tokens beside one decode stay within 2.5 ms.
    limited = harness(itl_target=0.0025, chunk_tokens=200, num_pages=4000, prefix_cache=False)
    limited.add(request(max_tokens=200))
    limited.step()
    limited.add_all(*(request(prompt(number, range(400)), max_tokens=1) for number in range(6)))
    limited.run()
    chunks = [plan.num_prefill_tokens for plan in limited.executor.plans[1:] if plan.num_prefill_tokens]
    assert max(chunks) <= 149 and sorted(chunks)[len(chunks) // 2] >= 110


def test_a_prompt_after_a_long_cached_context_gets_fewer_tokens_of_a_limited_pass() -> None:
    subject = harness(itl_target=0.0025, chunk_context=100, chunk_tokens=400, num_pages=4000, context_tokens=2000)
    context = range(800)
    subject.add_all(request(max_tokens=200), request(prompt(context), max_tokens=1))
    for _ in range(3):
        subject.step()
    subject.add_all(*(request(prompt(number, range(100)), max_tokens=1) for number in range(20)))
    while subject.scheduler.num_running > 1 or subject.scheduler.num_waiting:
        subject.step()
    subject.add(request(prompt(context, 7, range(300)), max_tokens=1))
    subject.step()
    plan = subject.executor.plans[-1]
    assert plan.starts[-1] == 800
    assert plan.num_prefill_tokens < 30, "about a ninth of 149"


def test_decodes_that_are_slower_than_itl_target_leave_half_of_the_pass_to_prompts() -> None:
    limited = harness(itl_target=0.001, chunk_tokens=1000, num_pages=4000, context_tokens=2000)
    limited.add(request(prompt(range(1000)), max_tokens=200))
    limited.step()
    limited.add_all(*(request(prompt(number, range(400)), max_tokens=1) for number in range(6)))
    limited.run()
    chunks = [plan.num_prefill_tokens for plan in limited.executor.plans[1:] if plan.num_prefill_tokens]
    assert sorted(chunks)[len(chunks) // 2] >= 60, "100 tokens take as long as the decode"


@pytest.mark.parametrize("itl_target", [0.0015, 0.0025, 0.005])
def test_a_latency_target_delays_no_short_prompt_behind_long_ones(itl_target: float) -> None:
    """The budget is smaller than the chunks of the prompts that are being prefilled."""
    subject = harness(
        itl_target=itl_target, chunk_tokens=256, max_batch_tokens=1024, max_prefill_tokens=1024, num_pages=9000,
        context_tokens=8000, max_running=32,
    )  # fmt: skip
    subject.add(request(max_tokens=200))
    subject.step()
    subject.add_all(*(request(prompt(number, range(2000)), max_tokens=1) for number in range(8)))
    for _ in range(8):
        subject.step()
    assert subject.scheduler.running.prefilling
    shorts = subject.add_all(*[request(prompt(99, number), max_tokens=1) for number in range(4)])
    subject.step()
    assert all(short.is_finished for short in shorts)


# ---------------------------------------------------------------------- validation


def test_a_request_that_can_never_fit_is_refused() -> None:
    subject = scheduler(num_pages=8, page_size=4)
    with pytest.raises(
        Refused, match="prompt and max_tokens are 30 \\+ 4 tokens, more than the KV memory for 32"
    ) as caught:
        subject.add(request(prompt(range(30)), max_tokens=4), 0.0)
    assert not caught.value.retry
    assert events(subject, EventKind.REFUSE)
    assert not subject.has_work


def test_the_pin_quota_is_not_promised_to_requests() -> None:
    subject = scheduler(num_pages=8, page_size=4, pin_quota_pages=2)
    with pytest.raises(Refused, match="more than the KV memory for 24"):
        subject.add(request(prompt(range(20)), max_tokens=8), 0.0)


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    subject = scheduler(context_tokens=16)
    with pytest.raises(Refused, match="17 tokens, which leaves none for output in a context of 16"):
        subject.add(request(prompt(range(17)), max_tokens=None), 0.0)
    with pytest.raises(Refused, match="more than the context of 16"):
        subject.add(request(prompt(range(10)), max_tokens=10), 0.0)


def test_without_max_tokens_the_output_is_limited_by_context_and_memory() -> None:
    for options, expected in (({"context_tokens": 20}, 10), ({"num_pages": 4, "page_size": 4}, 6)):
        subject = harness(**options)
        one = subject.add(request(prompt(range(10)), max_tokens=None))
        subject.run()
        assert (len(one.output), one.finish_reason) == (expected, FinishReason.LENGTH)


def test_max_tokens_is_clipped_to_what_fits_only_if_asked_for() -> None:
    for options, expected in (({"context_tokens": 20}, 10), ({"num_pages": 4, "page_size": 4}, 6)):
        with pytest.raises(Refused):
            harness(**options).add(request(prompt(range(10)), max_tokens=11))
        subject = harness(clip_max_tokens=True, **options)
        one, fits = subject.add_all(
            request(prompt(range(10)), max_tokens=2**40), request(prompt(range(5, 15)), max_tokens=6)
        )
        subject.run()
        assert (len(one.output), one.finish_reason, one.clipped_max_tokens) == (expected, FinishReason.LENGTH, expected)
        assert (len(fits.output), fits.clipped_max_tokens) == (6, None)
        with pytest.raises(Refused, match="leaves none for output") as caught:
            subject.add(request(prompt(range(20)), max_tokens=5))
        assert not caught.value.retry
        whole = subject.add(request(prompt(range(16)), max_tokens=0))
        subject.run()
        assert (whole.finish_reason, whole.clipped_max_tokens) == (FinishReason.LENGTH, None)
        subject.assert_reference()


def test_a_full_queue_refuses_and_says_to_retry() -> None:
    subject = scheduler(max_waiting=2)
    for _ in range(2):
        subject.add(request(), 0.0)
    with pytest.raises(Refused, match="2 requests are waiting") as caught:
        subject.add(request(), 0.0)
    assert caught.value.retry
    subject = scheduler(max_waiting_tokens=5)
    subject.add(request([1, 2, 3]), 0.0)
    with pytest.raises(Refused, match="3 prompt tokens are waiting"):
        subject.add(request([1, 2, 3]), 0.0)


def test_a_full_queue_yields_to_a_higher_priority() -> None:
    subject = harness(max_running=1, max_waiting=3, full_queue="yield", policy="priority")
    subject.add(request(max_tokens=9, id="running", priority=-9))
    subject.step()
    subject.add_all(
        *(request(id=name, priority=priority) for name, priority in (("low", 0), ("mid", 1), ("low too", 0)))
    )
    with pytest.raises(Refused, match="3 requests are waiting"):
        subject.add(request(id="same", priority=0))
    subject.add_all(request(id="high", priority=5), request(id="higher", priority=6), request(id="highest", priority=7))
    with pytest.raises(Refused, match="3 requests are waiting"):
        subject.add(request(id="late", priority=5))
    subject.run()
    displaced = [name for name, reason in subject.reasons.items() if reason is FinishReason.DISPLACED]
    assert displaced == ["low too", "low", "mid"], "the lowest priority first, and of equals the youngest"
    assert admissions(subject.scheduler) == ["running", "highest", "higher", "high"]
    subject.assert_reference()


def test_a_full_queue_refuses_higher_priorities_by_default() -> None:
    subject = scheduler(max_waiting=1)
    subject.add(request(priority=0), 0.0)
    with pytest.raises(Refused, match="1 requests are waiting"):
        subject.add(request(priority=9), 0.0)


def test_a_queue_with_too_many_tokens_yields_as_many_requests_as_needed_or_none() -> None:
    subject = scheduler(max_running=1, max_waiting_tokens=30, full_queue="yield")
    names = [("a", 10, 1), ("b", 10, 0), ("c", 10, 2)]
    for name, length, priority in names:
        subject.add(request([1] * length, id=name, priority=priority), 0.0)
    with pytest.raises(Refused, match="30 prompt tokens are waiting"):
        subject.add(request([1] * 25, id="too long", priority=2), 0.0)
    assert list(subject.requests) == ["a", "b", "c"], "b and a would not have been enough"
    subject.add(request([1] * 15, id="d", priority=2), 0.0)
    assert list(subject.requests) == ["c", "d"]
    with pytest.raises(Refused, match="more than the context"):
        subject.add(request([1] * 9, 40_000, id="never", priority=9), 0.0)
    assert list(subject.requests) == ["c", "d"], "none gives way to a request that can never run"


def test_a_request_that_was_admitted_once_is_never_displaced() -> None:
    """Under policy priority a retracted request waits in the same queue as new ones."""
    subject = harness(max_running=2, max_waiting=1, full_queue="yield", policy="priority")
    for name in ("other", "retracted"):
        subject.add(request(max_tokens=9, id=name))
        subject.step()
    subject.scheduler.retract("retracted", subject.clock(), "a test")
    with pytest.raises(Refused):
        subject.add(request(priority=9))
    subject.run()
    assert set(subject.reasons.values()) == {FinishReason.LENGTH}


def test_displacing_costs_the_same_with_many_waiting_requests() -> None:
    """Counted in heap entries looked at: a push and a pop each, however many wait."""
    subject = scheduler(max_running=1, max_waiting=5000, full_queue="yield", num_pages=4096)
    for number in range(5000):
        subject.add(request([1], 1, priority=number % 7), 0.0)
    looked_at = []
    original = validation._has_not_begun
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "_has_not_begun", lambda one: looked_at.append(one) or original(one))
        for _ in range(500):
            subject.add(request([1], 1, priority=9), 0.0)
    assert len(looked_at) == 500
    assert subject.num_waiting == 5000
    assert subject.counters.finished[FinishReason.DISPLACED] == 500


def test_retracted_requests_are_not_refused_by_a_full_queue() -> None:
    subject = harness(num_pages=10, page_size=2, max_running=4, max_waiting=4, vocab=4096)
    subject.add_all(
        *(request(prompt(n, n, n), max_tokens=12, eos_token_ids=(EOS,), expected_tokens=1) for n in range(4))
    )
    subject.run()
    assert subject.scheduler.counters.retractions
    assert len(subject.reasons) == 4
    subject.assert_reference()


def test_an_id_that_is_in_use_cannot_be_added_again() -> None:
    subject = scheduler()
    one = request(id="same")
    subject.add(one, 0.0)
    with pytest.raises(InvalidRequest, match="'same' is in use"):
        subject.add(request(id="same"), 0.0)
    with pytest.raises(InvalidRequest, match="'same' is in use"):
        subject.add(one, 0.0)


def test_the_same_request_can_be_added_again() -> None:
    """Once it has ended, or at any time under another id: the scheduler writes nothing into it."""
    subject = harness(overlap=True)
    one = request(prompt(range(8)), max_tokens=5)
    first, copy = subject.add(one), subject.add(replace(one, id="copy"))
    subject.run()
    again = subject.scheduler.add(one, subject.clock())
    assert again is not first and not again.output and again.phase is Phase.WAITING
    while not again.is_finished:
        subject.loop.step()
    assert again.output == first.output == copy.output and len(again.output) == 5
    with pytest.raises(FrozenInstanceError):
        one.tenant = "other"  # type: ignore[misc]


# ---------------------------------------------------------------------- ending


def test_abort_matches_ids_exactly() -> None:
    subject = harness()
    subject.add_all(request(id="a-1"), request(id="a-10"))
    assert not subject.scheduler.abort("a-", 0.0)
    assert subject.scheduler.abort("a-1", 0.0)
    subject.run()
    assert subject.reasons == {"a-1": FinishReason.ABORT, "a-10": FinishReason.LENGTH}


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("overlap", [False, True])
def test_abort_in_every_state_frees_everything_once(steps: int, overlap: bool) -> None:
    subject = harness(chunk_tokens=4, overlap=overlap)
    subject.add_all(request(prompt(range(9)), max_tokens=4, id="victim"), request(prompt(range(5)), max_tokens=4))
    for _ in range(steps):
        subject.step()
    subject.scheduler.abort("victim", subject.clock())
    subject.run()
    memory = subject.scheduler.memory
    assert memory.pool.num_free + memory.tree.num_evictable_pages == memory.pool.num_pages
    subject.assert_reference()


def test_a_deadline_ends_a_request_waiting_or_running() -> None:
    subject = harness(max_running=1)
    subject.add_all(
        request(max_tokens=50, id="running", deadline=0.02), request(max_tokens=50, id="waiting", deadline=0.01)
    )
    subject.run()
    assert set(subject.reasons.values()) == {FinishReason.DEADLINE}
    assert subject.outputs["waiting"] == []
    assert 0 < len(subject.outputs["running"]) < 50


@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_and_running_time_are_limited_separately(overlap: bool) -> None:
    """A step takes about a millisecond."""
    subject = harness(max_running=1, queue_timeout_s=0.06, running_timeout_s=0.04, overlap=overlap)
    subject.add_all(
        request(max_tokens=100, id="running"),
        request(max_tokens=5, id="in time"),
        request(max_tokens=100, id="own limit", running_timeout_s=0.005),
        request(max_tokens=5, id="impatient", queue_timeout_s=0.01),
        request(max_tokens=30, id="all of it"),
        request(max_tokens=5, id="waiting", queue_timeout_s=9.0),
    )
    subject.run()
    assert subject.reasons == {
        "impatient": FinishReason.QUEUE_TIMEOUT,
        "running": FinishReason.RUNNING_TIMEOUT,
        "in time": FinishReason.LENGTH,
        "own limit": FinishReason.RUNNING_TIMEOUT,
        "waiting": FinishReason.QUEUE_TIMEOUT,  # a request cannot wait longer than the scheduler allows
        "all of it": FinishReason.LENGTH,
    }
    times = {name: (one.first_admitted, one.finished) for name, one in subject.requests.items()}
    assert times["running"][1] == pytest.approx(0.04, abs=0.003)
    assert times["impatient"] == (None, pytest.approx(0.01, abs=0.003))
    assert times["waiting"] == (None, pytest.approx(0.06, abs=0.003))
    assert 0 < len(subject.outputs["own limit"]) < 10
    subject.assert_reference()


def test_a_retracted_request_has_no_queue_timeout_and_keeps_its_running_time() -> None:
    subject = harness(max_running=2, queue_timeout_s=0.01, running_timeout_s=0.05)
    for name in ("other", "retracted"):
        subject.add(request(max_tokens=40, id=name))
        subject.step()
    one = subject.requests["retracted"]
    subject.scheduler.retract(one.id, subject.clock(), "a test")
    one.num_in_flight = 1  # it is not admitted again until this is 0
    while subject.clock() < 0.03:
        subject.step()
    assert one.phase is Phase.WAITING
    one.num_in_flight = 0
    subject.run()
    assert subject.reasons == {"other": FinishReason.LENGTH, "retracted": FinishReason.RUNNING_TIMEOUT}
    assert one.finished == pytest.approx(0.051, abs=0.002), "waiting again counts"


def test_deadlines_of_requests_that_have_ended_take_no_memory() -> None:
    subject = harness(max_running=4, queue_timeout_s=1e6, running_timeout_s=1e6)
    for number in range(300):
        subject.add(request([number % 50], max_tokens=1, deadline=1e6))
        subject.step()
    assert len(subject.scheduler._deadlines) < 100


def test_a_stop_token_ends_a_request_and_is_part_of_its_output() -> None:
    subject = harness(vocab=4)
    one = subject.add(request(max_tokens=100, eos_token_ids=(EOS,)))
    subject.run()
    assert (one.finish_reason, one.output[-1]) == (FinishReason.STOP, EOS)
    assert EOS not in one.output[:-1]


def test_min_tokens_outlasts_a_stop_token() -> None:
    subject = harness(vocab=4)
    one = subject.add(request(max_tokens=100, eos_token_ids=(EOS,), min_tokens=30))
    subject.run()
    assert len(one.output) >= 30
    assert EOS in one.output[:30]


def test_finish_ends_a_request_with_the_given_reason() -> None:
    subject = harness(overlap=True)
    subject.add(request(max_tokens=50, id="one"))
    for _ in range(4):
        subject.step()
    assert subject.scheduler.finish("one", FinishReason.STOP, subject.clock())
    subject.run()
    assert subject.reasons == {"one": FinishReason.STOP}


# ---------------------------------------------------------------------- cache


def test_a_pinned_prefix_is_not_evicted_until_it_expires() -> None:
    subject = harness(num_pages=16, page_size=4, pin_quota_pages=4)
    shared = prompt(range(100, 116))
    subject.add(request(shared, max_tokens=1))
    subject.run()
    assert subject.scheduler.pin("system", shared, subject.clock(), expires=1.0) == 16
    for number in range(6):
        subject.add(request(prompt(number, range(40)), max_tokens=4))
        subject.run()
    probe = request(prompt(shared.tolist(), 5))
    assert subject.scheduler.match(probe) == 16
    subject.clock.advance(1.0)
    for number in range(10, 16):
        subject.add(request(prompt(number, range(43)), max_tokens=4))
        subject.run()
    assert subject.scheduler.match(probe) < 16
    assert events(subject.scheduler, EventKind.UNPIN)


def test_pin_errors_name_the_pin_and_the_remedy() -> None:
    subject = harness(num_pages=16, page_size=4, pin_quota_pages=2)
    subject.add(request(prompt(range(16)), max_tokens=1))
    subject.run()
    core = subject.scheduler
    with pytest.raises(PinError, match="takes 4 pages and 2 are left of pin_quota_pages"):
        core.pin("big", range(16), 0.0)
    core.pin("small", range(8), 0.0)
    with pytest.raises(PinError, match="a pin named 'small' exists"):
        core.pin("small", range(8), 0.0)
    with pytest.raises(PinError, match="no pin named 'other'; existing pins: small"):
        core.unpin("other", 0.0)
    with pytest.raises(PinError, match=r"expires at 1\.0, but the time is 2\.0"):
        core.pin("late", range(4), 2.0, expires=1.0)
    with pytest.raises(PinError, match="no part of the prompt of pin 'cold' is cached"):
        core.pin("cold", range(70, 90), 0.0, tenant="unknown")
    assert "unknown" not in core.memory.tree.root.children
    core.unpin("small", 0.0)
    assert core.flush_cache() == 4


def test_without_a_prefix_cache_nothing_is_cached_and_tokens_are_the_same() -> None:
    subject = harness(prefix_cache=False)
    subject.add_all(*(request(prompt(range(20)), max_tokens=5) for _ in range(4)))
    subject.run()
    assert subject.scheduler.counters.hit_tokens == 0
    assert subject.scheduler.memory.pool.num_free == 64
    subject.assert_reference()


def test_requests_wait_one_step_for_a_prefix_that_is_being_computed() -> None:
    subject = harness(prefix_wait_tokens=8)
    sharers = subject.add_all(*(request(prompt(range(16), n), max_tokens=1) for n in range(4)))
    subject.step()
    assert [one.is_finished for one in sharers] == [True, False, False, False]
    subject.run()
    assert [one.num_cached for one in sharers] == [0, 16, 16, 16]
    assert subject.scheduler.counters.duplicate_pages == 0


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority", "hrrn", "random", "lpm", "dfs"])
def test_every_policy_waits_for_prefixes_in_flight(policy: str) -> None:
    subject = harness(prefix_wait_tokens=8, policy=policy)
    subject.add_all(*(request(prompt(range(16), n), max_tokens=1) for n in range(4)))
    subject.run()
    assert subject.scheduler.counters.computed_tokens == 16 + 4


def test_a_short_prefix_is_not_waited_for() -> None:
    subject = harness(prefix_wait_tokens=17)
    subject.add_all(*(request(prompt(range(16), n), max_tokens=1) for n in range(2)))
    subject.step()
    assert len(subject.executor.plans[0].joins) == 2


def test_a_request_is_admitted_when_the_owner_of_its_prefix_is_aborted() -> None:
    subject = harness(prefix_wait_tokens=8, chunk_tokens=8, overlap=True)
    subject.add(request(prompt(range(32), 1), max_tokens=1, id="owner"))
    subject.add(request(prompt(range(32), 2), max_tokens=1, id="waiter"))
    subject.step()
    subject.scheduler.abort("owner", subject.clock())
    subject.run()
    assert subject.reasons == {"owner": FinishReason.ABORT, "waiter": FinishReason.LENGTH}
    subject.assert_reference()


def test_a_shared_prefix_is_counted_once_and_not_per_sharer() -> None:
    """16 sharers of a 40-page prefix, 2 own pages each: 72 pages hold all of them at once."""
    subject = harness(num_pages=80, page_size=4, max_running=16, max_batch_tokens=1024)
    subject.add_all(*(request(prompt(range(160), n), max_tokens=4) for n in range(16)))
    most = 0
    while subject.scheduler.has_work:
        subject.step()
        most = max(most, subject.scheduler.num_running)
    assert most >= 15, "the first one computes the prefix, the others run together"
    assert subject.scheduler.counters.retractions == 0


# ---------------------------------------------------------------------- determinism


def run_recorded(seed: int) -> tuple[str, list[str]]:
    subject = harness(policy="random", order_seed=3, num_pages=24, overlap=True)
    tokens = np.random.default_rng(seed)
    for _ in range(30):
        subject.add(
            request(
                tokens.integers(0, 3, 12),
                max_tokens=8,
                tenant=str(tokens.integers(2)),
                id=f"r{tokens.integers(1 << 40)}",
            )
        )
        subject.step()
    subject.run()
    return subject.scheduler.journal.digest(), admissions(subject.scheduler)


def test_same_inputs_and_seed_give_the_same_journal() -> None:
    assert run_recorded(1) == run_recorded(1)
    assert run_recorded(1) != run_recorded(2)
