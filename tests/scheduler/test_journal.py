"""The journal: every decision with its reason, and explain()."""

from __future__ import annotations

from paceline.scheduler import Event, EventKind
from tests.helpers import EOS, events, harness, prompt, request


def test_every_decision_is_written_with_its_reason() -> None:
    subject = harness(num_pages=14, page_size=2, max_running=4, vocab=4096, prefix_wait=False)
    subject.add_all(*(request(prompt([1] * 4, n), 14, eos_token_ids=(EOS,), expected_tokens=1) for n in range(6)))
    subject.run()
    for kind in (
        EventKind.ADD,
        EventKind.ADMIT,
        EventKind.WAIT,
        EventKind.EVICT,
        EventKind.RETRACT,
        EventKind.DUPLICATE,
        EventKind.FINISH,
    ):
        assert events(subject.scheduler, kind), f"no {kind.value} was written"
    assert {event.detail for event in events(subject.scheduler, EventKind.WAIT)} == {("memory",)}


def test_a_wait_is_written_when_its_reason_changes_and_not_every_step() -> None:
    subject = harness(num_pages=8, page_size=4)
    subject.add_all(request(prompt(range(12)), 16), request(prompt(range(20, 32)), 16, id="second"))
    subject.run()
    assert len(events(subject.scheduler, EventKind.WAIT, "second")) == 1


def test_a_steady_decode_step_writes_nothing() -> None:
    subject = harness(page_size=64)
    subject.add_all(*(request([n], 40) for n in range(4)))
    for _ in range(3):
        subject.step()
    before = len(subject.scheduler.journal.events)
    for _ in range(20):
        subject.step()
    assert len(subject.scheduler.journal.events) == before


def test_the_ring_is_bounded_and_listeners_get_every_event() -> None:
    received: list[Event] = []
    subject = harness(journal_events=5)
    subject.scheduler.journal.listeners.append(received.append)
    subject.add_all(*(request([n], 2) for n in range(10)))
    subject.run()
    assert len(subject.scheduler.journal.events) == 5
    assert sum(event.kind is EventKind.FINISH for event in received) == 10


def test_counters_add_up() -> None:
    subject = harness(page_size=1)
    for _ in range(2):
        subject.add(request(prompt(range(9)), 3))
        subject.run()
    counters = subject.scheduler.counters
    assert (counters.prompt_tokens, counters.hit_tokens, counters.computed_tokens) == (18, 8, 10)
    assert counters.hit_rate == 8 / 18
    assert counters.decoded_tokens == 4, "the first token of each comes with its prefill"


def test_a_scheduler_that_forgets_its_history_decides_as_a_new_one() -> None:
    new, used = harness(page_size=1), harness(page_size=1)
    used.add(request(prompt(range(9)), 3, id="before"))
    used.run()
    used.scheduler.forget_history()
    assert used.scheduler.counters == new.scheduler.counters and not used.scheduler.journal.events
    for subject in (new, used):
        subject.add(request(prompt(range(9)), 3, id="after"))
        subject.run()
    kinds = [
        [(event.kind, event.request_id, event.detail) for event in one.scheduler.journal.events] for one in (new, used)
    ]
    assert kinds[0] == kinds[1] and used.scheduler.counters.hit_tokens == 0


def test_explain_says_why_a_request_waits_and_what_must_happen_first() -> None:
    subject = harness(num_pages=8, page_size=4, max_running=2)
    subject.add_all(request(prompt(range(12)), 16, id="first"), request(prompt(range(20, 32)), 16, id="second"))
    explain = subject.scheduler.explain
    assert explain("second") == "Request second waits for its turn; 1 other request waits, policy fair."
    subject.step()
    assert explain("first") == "Request first is decoding: 1 of at most 16 tokens."
    assert explain("second") == (
        "Request second waits for 6 more pages of KV memory: running requests must finish first; "
        "0 other requests wait, policy fair."
    )
    subject.run()
    assert explain("second") == "Request second is unknown: it has finished, or was never added."


def test_explain_names_slots_prompts_prefixes_and_reservations() -> None:
    subject = harness(max_running=1)
    subject.add_all(request([1], 9), request([2], 1, id="waiting"))
    subject.step()
    assert "one of 1 slots (max_running), all in use" in subject.scheduler.explain("waiting")
    subject = harness(chunk_tokens=4)
    subject.add(request(prompt(range(20)), 1, id="long"))
    subject.step()
    assert subject.scheduler.explain("long") == "Request long is prefilling: 4 of 20 prompt tokens are planned."
    subject = harness(prefix_wait_tokens=4, policy="fcfs")
    subject.add_all(request(prompt(range(16), 1), 4), request(prompt(range(16), 2), 4, id="sharer"))
    subject.scheduler.plan(0.0)
    assert "waits for a prefix that is being computed" in subject.scheduler.explain("sharer")
    subject = harness(num_pages=8, page_size=4, max_running=4, max_overtakes=0)
    subject.add_all(
        request(prompt(range(12)), 12),
        request(prompt(range(20, 32)), 16, id="big"),
        request(prompt(range(60, 66)), 2, id="small"),
    )
    subject.step()
    assert subject.scheduler.explain("big").endswith("freed memory is reserved for it.")
    assert subject.scheduler.explain("small").endswith("freed memory is reserved for request big.")


def test_explain_names_the_batch_under_static_batching() -> None:
    subject = harness(batching="static", max_running=4)
    subject.add(request([1], 9))
    subject.step()
    subject.add(request([2], 1, id="late"))
    assert subject.scheduler.explain("late").startswith(
        "Request late waits for the batch to finish: batching is static, all of its requests must end;"
    )


def test_a_retracted_request_does_not_name_the_pages_it_lacked_at_first() -> None:
    subject = harness(num_pages=8, page_size=4, max_running=3)
    subject.add_all(request(prompt(range(12)), 16, id="first"), request(prompt(range(20, 32)), 16, id="second"))
    subject.step()
    assert "6 more pages" in subject.scheduler.explain("second")
    subject.scheduler.abort("first", 0.0)
    subject.step()
    subject.scheduler.retract("second", 0.0, "a test")
    assert subject.scheduler.explain("second") == (
        "Request second waits for memory; it was retracted once and is tried before new requests; "
        "0 other requests wait, policy fair."
    )
