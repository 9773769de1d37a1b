"""KV events: replaying them gives exactly the cached pages, whatever happens to them.

`test_state_machine.py` replays them too, in all of its runs.
"""

from __future__ import annotations

from collections import Counter

from paceline.scheduler.kv_events import Medium
from tests.helpers import ReplayedEvents, harness, prompt, request
from tests.scheduler.test_state_machine import random_run

A, B, C = range(1, 17), range(21, 37), range(41, 57)  # four pages each


def media(events: ReplayedEvents) -> Counter[Medium]:
    return Counter(medium for medium, _, _ in events.pages)


def test_pages_are_stored_when_their_pass_is_planned() -> None:
    subject = harness()
    events = ReplayedEvents(subject.scheduler)
    subject.add(request(prompt(A, 91), max_tokens=6))
    assert not events.pages, "a waiting request has no pages"
    assert subject.scheduler.plan(subject.clock()) is not None
    assert media(events) == {Medium.GPU: 4}
    events.check()


def test_output_pages_are_stored_when_the_request_ends() -> None:
    subject = harness()
    events = ReplayedEvents(subject.scheduler)
    one = subject.add(request(prompt(A), max_tokens=9))
    subject.run()
    events.check()
    assert media(events) == {Medium.GPU: 6}
    longest = max((tokens for _, _, tokens in events.pages), key=len)
    known = one.prompt.tobytes() + one.output.tobytes()
    assert longest == known[: len(longest)] and len(longest) == 24 * 4


def test_splitting_a_node_reports_nothing() -> None:
    subject = harness()
    events = ReplayedEvents(subject.scheduler)
    subject.add(request(prompt(A, 91), max_tokens=1))
    subject.run()
    before = events.num_stored
    subject.add(request(prompt(range(1, 9), range(61, 69), 92), max_tokens=1))
    subject.run()
    events.check()
    assert (events.num_stored, events.num_removed) == (before + 2, 0)


def test_a_listener_hears_of_what_was_cached_before() -> None:
    subject = harness(num_pages=6, num_host_pages=16)
    for first in (A, B, C):
        subject.add(request(prompt(first, 91), max_tokens=1))
        subject.run()
    events = ReplayedEvents(subject.scheduler)
    events.check()
    assert media(events)[Medium.CPU] and media(events)[Medium.GPU]


def test_a_spilled_page_is_stored_on_the_cpu_before_it_leaves_the_gpu() -> None:
    subject = harness(num_pages=6, num_host_pages=16)
    order: list[tuple[str, Medium]] = []

    class Order(ReplayedEvents):
        def stored(self, node, medium) -> None:
            super().stored(node, medium)
            order.append(("stored", medium))

        def removed(self, node, medium) -> None:
            super().removed(node, medium)
            order.append(("removed", medium))

    events = Order(subject.scheduler)
    for first in (A, B):
        subject.add(request(prompt(first, 91), max_tokens=1))
        subject.run()
    assert order.index(("stored", Medium.CPU)) < order.index(("removed", Medium.GPU))
    before = media(events)[Medium.CPU]
    again = subject.add(request(prompt(A, 92), max_tokens=1))
    subject.run()
    events.check()
    assert again.num_fetched, "it came back to the GPU"
    assert media(events)[Medium.CPU] >= before, "the copy on the CPU stays"


def test_flush_and_new_weights_remove_every_page() -> None:
    for drop in (lambda one: one.scheduler.flush_cache(), lambda one: one.replace_weights()):
        subject = harness(num_pages=6, num_host_pages=16)
        events = ReplayedEvents(subject.scheduler)
        for first in (A, B, C):
            subject.add(request(prompt(first, 91), max_tokens=1))
            subject.run()
        assert len(events.pages) > 6
        drop(subject)
        assert not events.pages
        events.check()


def test_pages_that_contain_nan_are_removed() -> None:
    subject = harness()
    events = ReplayedEvents(subject.scheduler)
    subject.executor.inject_fault()
    subject.add(request(prompt(A, 91), max_tokens=4))
    subject.run()
    assert events.num_stored == events.num_removed == 4
    assert not events.pages
    events.check()


def test_a_reset_of_the_scheduler_state_clears_everything() -> None:
    subject = harness()
    events = ReplayedEvents(subject.scheduler)
    subject.add(request(prompt(A, 91), max_tokens=1))
    subject.run()
    subject.scheduler.memory.tree.num_pages += 1  # a fault
    assert subject.scheduler.check_idle(subject.clock())
    assert not events.pages and events.num_cleared == 2
    subject.add(request(prompt(A, 92), max_tokens=1))
    subject.run()
    events.check()
    assert media(events) == {Medium.GPU: 4}, "the new state is listened to"


def test_namespaces_have_pages_of_their_own() -> None:
    subject = harness()
    events = ReplayedEvents(subject.scheduler)
    fields = [{}, {"tenant": "b"}, {"cache_salt": "salt"}, {"adapter": "lora"}]
    for each in fields:
        subject.add(request(prompt(A, 91), max_tokens=1, **each))
        subject.run()
    assert len({namespace for _, namespace, _ in events.pages}) == 4
    assert media(events) == {Medium.GPU: 16}


def test_random_runs_with_host_memory_and_faults_replay_exactly() -> None:
    reached: Counter[str] = Counter()
    for seed in range(16):
        options = {"prefix_cache": True, "num_host_pages": 12, "max_swap_pages": 3}
        counters = random_run(seed, 20, 60, faults=0.05, **options).harness.scheduler.counters
        for name in ("spilled_pages", "forgotten_pages", "fetched_tokens", "nan_dropped_pages", "retractions"):
            reached[name] += getattr(counters, name)
    assert min(reached.values()) > 5, reached


def test_nobody_listens_by_default() -> None:
    subject = harness()
    subject.add(request(prompt(A, 91), max_tokens=1))
    subject.run()
    assert all(node.hashes is None for node in subject.scheduler.memory.tree.nodes())
