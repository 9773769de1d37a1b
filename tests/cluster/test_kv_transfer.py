"""The state machine of KV transfers, with faults at every message: settled once, released once, never stuck."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.kv_protocol import PagesSent, PrefillDone, PrefillFailed
from paceline.cluster.kv_transfer import GRACE_S, Cause, IncomingTransfers, Outcome, Released, Settled

PAGES = [PagesSent("t", 0, 3), PagesSent("t", 3, 2)]
DONE = PrefillDone("t", 5, 32, "0")


def started(*, is_shared: bool = True) -> IncomingTransfers:
    subject = IncomingTransfers()
    subject.start("t", "p", 5, deadline=10.0, is_shared=is_shared)
    return subject


def feed(subject: IncomingTransfers, *messages: object, peer: str = "p") -> list[Outcome]:
    found: list[Outcome] = []
    for message in messages:
        match message:
            case PagesSent():
                found += subject.on_pages(peer, message)
            case PrefillDone():
                found += subject.on_done(peer, message)
            case PrefillFailed():
                found += subject.on_failed(peer, message)
    return found


def test_a_transfer_with_all_pages_is_complete() -> None:
    subject = started()
    assert feed(subject, *PAGES, DONE) == [Settled("t", None, num_cached_tokens=32)]
    assert (subject.num_completed, subject.num_waiting, subject.next_time) == (1, 0, None)


def test_pages_in_another_order_or_repeated_are_complete_too() -> None:
    subject = started()
    assert not subject.wants("q", PAGES[0]) and subject.wants("p", PAGES[0])
    feed(subject, PAGES[1], PAGES[0], PAGES[0])
    assert not subject.wants("p", PAGES[0]), "it is there"
    assert feed(subject, DONE) == [Settled("t", None, num_cached_tokens=32)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_message_makes_it_incomplete(lost: int) -> None:
    subject = started()
    settled, released = feed(subject, PAGES[1 - lost], DONE)
    assert settled == Settled("t", Cause.INCOMPLETE, f"{(3, 2)[lost]} of 5 pages are missing")
    assert released == Released("t")


@pytest.mark.parametrize("message", [PagesSent("t", 3, 3), PagesSent("t", -1, 2), PagesSent("t", 0, 0)])
def test_pages_outside_of_the_transfer_fail_it(message: PagesSent) -> None:
    subject = started()
    assert not subject.wants("p", message)
    (settled,) = feed(subject, message)
    assert isinstance(settled, Settled) and settled.cause is Cause.DAMAGED


def test_a_damaged_payload_fails_it() -> None:
    subject = started(is_shared=False)
    settled, released = subject.on_pages("p", PAGES[0], is_intact=False)
    assert (settled, released) == (Settled("t", Cause.DAMAGED, "pages 0 to 3 of 5"), Released("t"))
    assert feed(subject, PAGES[1], DONE) == [] and subject.num_stray == 2


def test_messages_of_others_change_nothing() -> None:
    subject = started()
    assert feed(subject, PagesSent("u", 0, 3), PrefillDone("u", 5, 0, "0"), PrefillFailed("u", "?")) == []
    assert feed(subject, *PAGES, DONE, PrefillFailed("t", "?"), peer="q") == []
    assert (subject.num_stray, subject.num_waiting) == (7, 1)


def test_other_weights_fail_it() -> None:
    found = feed(started(), *PAGES, PrefillDone("t", 5, 0, "1"))
    assert found == [Settled("t", Cause.WEIGHTS, "version 1, not 0"), Released("t")]


@pytest.mark.parametrize("end", [DONE, PrefillFailed("t", "cancelled")])
def test_memory_that_the_peer_may_write_is_released_when_the_peer_ends_the_transfer(end: object) -> None:
    subject = started()
    (settled,) = subject.expire(10.0)
    assert settled == Settled("t", Cause.TIMEOUT, "0 of 5 pages came")
    assert subject.expire(1e9) == [], "the peer is alive and may still write"
    assert not subject.wants("p", PAGES[0])
    assert feed(subject, PAGES[0], end) == [Released("t")]
    assert feed(subject, end) == []


def test_memory_that_a_lost_peer_could_write_is_released_after_a_while() -> None:
    subject = started()
    (settled,) = subject.on_disconnect("p", 1.0, "reset")
    assert settled == Settled("t", Cause.CONNECTION, "reset")
    assert subject.on_disconnect("p", 1.5, "reset") == []
    assert subject.next_time == 1.0 + GRACE_S
    assert subject.expire(1.0 + GRACE_S - 0.01) == []
    assert subject.expire(1.0 + GRACE_S) == [Released("t")]
    assert subject.next_time is None


def test_a_transfer_whose_pages_are_sent_is_released_at_once() -> None:
    assert started(is_shared=False).expire(10.0) == [Settled("t", Cause.TIMEOUT, "0 of 5 pages came"), Released("t")]


def test_a_cancelled_transfer_is_settled_once() -> None:
    subject = started()
    assert subject.cancel("t") == [Settled("t", Cause.CANCELLED, "the request has ended")]
    assert subject.cancel("t") == [] and subject.cancel("u") == []
    assert subject.expire(11.0) == []
    assert feed(subject, PrefillFailed("t", "cancelled")) == [Released("t")]


FAULTS = ("none", "lost", "repeated", "late", "wrong id", "wrong peer", "damaged", "disconnect", "cancel", "time")


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_faults_at_any_message_settle_every_transfer_once_and_release_what_failed_once(rng: random.Random) -> None:
    subject, now, found = IncomingTransfers(), 0.0, list[Outcome]()
    queue: list[tuple[str, object]] = []  # messages under way
    written: dict[str, set[int]] = {}  # pages that are known to be right
    sizes = {f"t{number}": rng.randrange(1, 6) for number in range(rng.randrange(1, 5))}
    released: set[str] = set()

    def take(outcomes: list[Outcome]) -> None:
        for one in outcomes:
            if isinstance(one, Released):
                released.add(one.id)
            elif one.cause is None:
                assert written[one.id] == set(range(sizes[one.id])), "complete with a page missing"
        found.extend(outcomes)

    for id, size in sizes.items():
        peer = rng.choice("pq")
        subject.start(id, peer, size, now + rng.choice([1.0, 5.0]), is_shared=rng.random() < 0.5)
        written[id] = set()
        at = 0
        while at < size:
            count = rng.randrange(1, size - at + 1)
            queue.append((peer, PagesSent(id, at, count)))
            at += count
        queue.append((peer, rng.choice([PrefillDone(id, size, 0, "0"), PrefillDone(id, size, 0, "0"),
                                        PrefillFailed(id, "busy")])))  # fmt: skip
    for _ in range(200):
        if not queue:
            break
        peer, message = queue.pop(0)
        fault = rng.choice(FAULTS) if rng.random() < 0.4 else "none"
        if fault == "lost":
            continue
        if fault == "repeated":
            queue.insert(rng.randrange(len(queue) + 1), (peer, message))
        if fault == "late":
            queue.append((peer, message))
            continue
        if fault == "wrong id":
            message = type(message)(
                **{name: getattr(message, name) for name in message.__struct_fields__} | {"id": "x"}
            )  # type: ignore[attr-defined]
        if fault == "wrong peer":
            peer = "z"
        if fault == "disconnect":
            take(subject.on_disconnect(peer, now, "lost"))
        if fault == "cancel":
            take(subject.cancel(rng.choice(list(sizes))))
        if fault == "time":
            now += rng.choice([0.5, 2.0])
            take(subject.expire(now))
        if isinstance(message, PagesSent):
            intact = fault != "damaged"
            if subject.wants(peer, message) and intact:
                assert message.id not in released, "a page is written after its memory was released"
                written[message.id] |= set(range(message.first, message.first + message.count))
            take(subject.on_pages(peer, message, is_intact=intact))
        else:
            take(feed(subject, message, peer=peer))
    take(subject.expire(100.0))
    for peer in "pq":
        take(subject.on_disconnect(peer, 100.0, "end"))
    take(subject.expire(100.0 + GRACE_S))
    settled = Counter(one.id for one in found if isinstance(one, Settled))
    assert settled == Counter(sizes.keys())
    failed = {one.id for one in found if isinstance(one, Settled) and one.cause is not None}
    assert Counter(one.id for one in found if isinstance(one, Released)) == Counter(failed)
    assert subject.num_waiting == 0 and subject.next_time is None
    assert sum(subject.failures.values()) + subject.num_completed == len(sizes)
