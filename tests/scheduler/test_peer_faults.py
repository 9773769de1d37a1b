"""Regressions known from other engines, each with its issue number."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.request import FinishReason, Refused
from paceline.scheduler import EventKind
from paceline.scheduler.tracked_request import Phase
from tests.helpers import EOS, admissions, events, harness, prompt, request

# ---------------------------------------------------------------------- overlap and memory


def test_two_requests_with_one_prefix_in_one_batch_never_read_freed_pages() -> None:
    """mini-sglang 142: the duplicate's pages were freed while its page table still pointed at them."""
    subject = harness(prefix_wait=False, overlap=True, page_size=2, num_pages=40)
    subject.add_all(*(request(prompt(range(12), n), 10) for n in range(3)))
    subject.step()
    subject.add_all(*(request(prompt([50 + n] * 8), 6) for n in range(3)))  # they allocate whatever is freed
    subject.run()
    assert subject.scheduler.counters.duplicate_pages > 0
    subject.assert_reference()


def test_the_remapped_row_is_in_the_plan_that_can_first_reuse_the_pages() -> None:
    subject = harness(prefix_wait=False, page_size=2)
    subject.add_all(*(request(prompt(range(8), n), 4) for n in range(2)))
    subject.step()
    subject.step()
    survivor, other = (slot for slot in subject.executor.plans[0].slots.tolist())
    (changes,) = subject.executor.plans[1].page_changes
    remapped = changes.pages[(changes.slots == other) & (changes.indices < 4)].tolist()
    assert remapped == subject.scheduler.memory.slots.row(survivor)[:4].tolist()


def test_a_slot_is_not_poisoned_by_the_pass_that_still_writes_to_it() -> None:
    """The slot of a finished request was reused while a pass in flight wrote to it: the new prompt got a wrong token,
    and its KV was cached under the right ids."""
    subject = harness(overlap=True, lazy=True, max_running=1, vocab=4, page_size=1, num_pages=80)
    subject.add_all(*(request(prompt(1, 2, 3, n % 2), 12, eos_token_ids=(EOS,)) for n in range(40)))
    subject.run()
    assert subject.scheduler.counters.discarded_tokens > 3
    subject.assert_reference()


def test_nothing_is_reported_after_the_stop_token() -> None:
    subject = harness(overlap=True, vocab=3)
    subject.add_all(*(request(prompt(n, n), 30, eos_token_ids=(EOS,)) for n in range(8)))
    subject.run()
    for output in subject.outputs.values():
        assert EOS not in output[:-1]


def test_token_rows_are_indexed_by_slot_and_never_wrap() -> None:
    """sglang-jax 1487: a ring of future ids wrapped and corrupted tokens."""
    subject = harness(overlap=True, max_running=2, num_pages=2000, page_size=1, context_tokens=1000)
    subject.add_all(*(request([n + 1], 600) for n in range(2)))
    subject.run()
    subject.assert_reference()


def test_aborting_a_running_request_frees_its_pages_once() -> None:
    """mini-sglang 111."""
    subject = harness(overlap=True)
    subject.add(request(prompt(range(9)), 20, id="gone"))
    for _ in range(3):
        subject.step()
    assert subject.scheduler.abort("gone", subject.clock())
    assert not subject.scheduler.abort("gone", subject.clock())
    assert not subject.scheduler.finish("gone", FinishReason.STOP, subject.clock())
    subject.run()
    memory = subject.scheduler.memory
    assert memory.pool.num_free + memory.tree.num_pages == memory.pool.num_pages


def test_admission_counts_pages_and_not_tokens() -> None:
    """Prompts of 17 tokens with pages of 16: counting tokens would admit twice as many as fit."""
    subject = harness(page_size=16, num_pages=8, max_running=8)
    subject.add_all(*(request(prompt([n] * 17), 8) for n in range(8)))
    most = 0
    while subject.scheduler.has_work:
        subject.step()
        most = max(most, subject.scheduler.num_running)
    assert most == 4
    assert subject.scheduler.counters.retractions == 0


def test_no_stale_flag_says_the_batch_is_full() -> None:
    """SGLang 35537, 22518, 28530: a 'batch is full' flag went stale. The next plan sees all freed memory."""
    subject = harness(num_pages=8, page_size=4, max_running=4, max_overtakes=0)
    subject.add(request(prompt(range(12)), 16, id="big"))
    subject.step()
    subject.add(request(prompt(range(50, 62)), 16, id="blocked"))
    for _ in range(3):
        subject.step()
    assert subject.requests["blocked"].phase is Phase.WAITING
    subject.scheduler.abort("big", subject.clock())
    subject.step()
    assert subject.requests["blocked"].phase is Phase.DECODING
    subject.add(request(prompt(range(80, 92)), 16, id="reserved"))
    subject.step()
    assert subject.scheduler.admission.reserved is subject.requests["reserved"]
    subject.scheduler.abort("reserved", subject.clock())
    subject.add(request([1, 2], 2, id="small"))
    subject.step()
    assert subject.requests["small"].phase is not Phase.WAITING, "the reservation ended with its owner"
    subject.run()


def test_a_plan_in_flight_owns_its_buffers() -> None:
    """mini-sglang 103: a host buffer was overwritten while its copy was in flight; batch tensors were freed in use."""
    subject = harness(overlap=True, lazy=True, max_running=3, vocab=16)  # passes read their plan as late as possible
    subject.add_all(*(request(prompt(n, n, n), 12, eos_token_ids=(EOS,)) for n in range(9)))
    subject.run()
    subject.assert_reference()


def test_a_leak_is_reported_and_repaired_and_the_scheduler_continues() -> None:
    """SGLang 6888 and many more: the leak check ended the server."""
    subject = harness()
    subject.add(request(prompt(range(9)), 3))
    subject.run()
    core = subject.scheduler
    assert core.check_idle(1.0) == []
    core.memory.pool.allocate(3)  # without an owner
    one = core.add(request(prompt(range(9)), 3), 1.0)
    assert core.check_idle(1.0) == [], "not while there is work"
    core.abort(one.id, 1.0)
    assert "pages with no owner" in core.check_idle(1.0)[0]
    assert (core.counters.repairs, len(events(core, EventKind.REPAIR))) == (1, 1)
    assert core.check_idle(1.0) == []
    assert core.memory.pool.num_free == 64
    core.take_ended()
    fresh = harness()
    fresh.scheduler = core
    fresh.loop.scheduler = core
    fresh.add(request(prompt(range(9)), 3))
    fresh.run()
    fresh.assert_reference()


# ---------------------------------------------------------------------- queueing


def test_a_request_that_does_not_fit_neither_blocks_others_nor_starves() -> None:
    """vLLM 31731, SGLang 23152."""
    subject = harness(num_pages=20, page_size=4, max_running=8, look_ahead=4, max_overtakes=6, policy="fcfs")
    subject.add(request(prompt([1] * 8), 40, id="runner"))
    subject.step()
    big = subject.add(request(prompt([2] * 60), 16, id="big"))
    for number in range(40):
        subject.add(request(prompt([3 + number] * 3), 3, id=f"small-{number}"))
        subject.step()
        if big.first_admitted is not None:
            break
    subject.run()
    ids = admissions(subject.scheduler)
    passed = ids[1 : ids.index("big")]
    assert 1 <= len(passed) <= 6, "at most max_overtakes requests overtake it"
    assert events(subject.scheduler, EventKind.RESERVE, "big")


def test_the_look_ahead_continues_with_other_tenants() -> None:
    subject = harness(num_pages=20, page_size=4, max_running=8)
    subject.add(request(prompt([1] * 8), 40, tenant="a"))
    subject.step()
    subject.add_all(request(prompt([2] * 60), 16, tenant="a", id="big"), request([7], 2, tenant="b", id="other"))
    subject.step()
    assert subject.requests["other"].phase is not Phase.WAITING


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    """SGLang 10063, 22831: 454 times worse p99 to the first token."""
    subject = harness(chunk_tokens=16, max_batch_tokens=64, max_prefill_tokens=64, num_pages=4000, context_tokens=8000)
    subject.add_all(*(request(prompt(n, range(2000)), 1) for n in range(5)))
    subject.step()
    short = subject.add(request([7, 7, 7], 1))
    subject.step()
    assert short.is_finished


def test_a_prompt_does_not_stall_decodes() -> None:
    """SGLang 31395: 200 to 320 ms without a token."""
    subject = harness(max_batch_tokens=32, chunk_tokens=32, num_pages=2000)
    runner = subject.add(request([1, 2], 80))
    subject.step()
    subject.add_all(*(request(prompt(n, range(200)), 1) for n in range(4)))
    for _ in range(30):
        before = len(runner.output)
        subject.step()
        assert len(runner.output) == before + 1


def test_two_requests_that_do_not_fit_together_do_not_retract_each_other_forever() -> None:
    """vLLM 49675: preemption livelock."""
    for overlap in (False, True):
        subject = harness(num_pages=9, page_size=2, max_running=2, vocab=4096, overlap=overlap)
        for n in range(2):
            subject.add(request(prompt([n] * 4), 14, eos_token_ids=(EOS,), expected_tokens=1))
        assert subject.run(max_steps=60) < 60
        assert subject.scheduler.counters.retractions <= 2
        subject.assert_reference()


def test_the_queue_is_bounded_in_requests_and_tokens() -> None:
    """vLLM 2901: an unbounded queue, and no 429."""
    for options in ({"max_waiting": 3}, {"max_waiting_tokens": 9}):
        subject = harness(max_running=1, **options)
        for _ in range(3):
            subject.add(request([1, 2, 3], 2))
        with pytest.raises(Refused, match="retry later") as caught:
            subject.add(request([1, 2, 3], 2))
        assert caught.value.retry
        subject.step()
        subject.add(request([1, 2, 3], 2))
        subject.run()
        assert len(subject.reasons) == 4


def test_a_cold_request_is_not_starved_by_cached_ones() -> None:
    """SGLang 31954: longest-prefix order gave 5% of requests 75% of all waiting."""
    subject = harness(policy="lpm", max_running=1, max_wait=0.02, num_pages=400)
    subject.add(request(prompt([5] * 40), 1))
    subject.run()
    cold = subject.add(request(prompt([9] * 24), 1))
    for number in range(400):
        subject.add(request(prompt([5] * 40, number % 5), 1))
        subject.step()
    assert cold.is_finished


def test_a_retracted_request_keeps_its_place_and_is_never_refused() -> None:
    """SGLang 37260: retracted requests went to the tail of the queue, or failed with 503."""
    subject = harness(num_pages=10, page_size=2, max_running=4, max_waiting=3, vocab=4096)
    for n in range(3):
        subject.add(request(prompt([n] * 4), 12, eos_token_ids=(EOS,), expected_tokens=1, id=f"old-{n}"))
    while not subject.scheduler.counters.retractions:
        subject.step()
    while subject.scheduler.num_waiting < 3:
        subject.add(request([77], 5, id=f"new-{subject.scheduler.num_waiting}"))
    subject.run()
    ids = admissions(subject.scheduler)
    back = [position for position, one in enumerate(ids) if one.startswith("old")]
    assert max(back) < min(position for position, one in enumerate(ids) if one.startswith("new"))
    assert len(subject.reasons) == len(subject.requests)


def test_throughput_does_not_collapse_after_a_retraction() -> None:
    """SGLang 26248: after one retraction admission stayed too cautious forever."""
    subject = harness(num_pages=60, page_size=2, max_running=8, vocab=16)
    for number in range(60):
        subject.add(request(prompt([number % 5] * 3), 40, eos_token_ids=(EOS,)))
    subject.run()
    early = [plan.num_rows for plan in subject.executor.plans if plan.num_rows]
    assert np.mean(early[-40:-15]) >= 0.5 * np.mean(early[:40])


def test_an_oversized_request_is_refused_and_blocks_nothing() -> None:
    """vLLM 35541: it stayed at the head of the queue forever."""
    subject = harness(num_pages=8, page_size=4)
    with pytest.raises(Refused, match="more than the KV memory for 32"):
        subject.add(request(prompt(range(60)), 16))
    one = subject.add(request())
    subject.run()
    assert one.is_finished


def test_an_unfinished_request_always_has_a_next_pass() -> None:
    """vLLM 53130: admission stalled while health said ok. Here, work without a plan fails the test."""
    subject = harness(num_pages=9, page_size=4, max_running=3)
    subject.add_all(*(request(prompt([n] * 20), 16) for n in range(5)))
    while subject.scheduler.has_work:
        updates = subject.step()
        assert updates is not None or not subject.scheduler.has_work
    assert len(subject.reasons) == 5


def test_tenants_never_share_a_cache_nor_wait_for_each_others_prefix() -> None:
    subject = harness(prefix_wait_tokens=4)
    same = prompt(range(20))
    subject.add_all(
        request(same, 1, tenant="a", id="first"),
        request(same, 1, tenant="b", id="other tenant"),
        request(same, 1, tenant="a", cache_salt="x", id="other salt"),
        request(same, 1, tenant="a", adapter="x", id="other adapter"),
    )
    subject.step()
    assert all(one.is_finished for one in subject.requests.values()), (
        "no request waited for the prefix of another tenant"
    )
    assert all(one.num_cached == 0 for one in subject.requests.values())
    subject.add(request(same, 1, tenant="b", id="again"))
    subject.run()
    assert subject.requests["again"].num_cached == 16
    subject.assert_reference()
