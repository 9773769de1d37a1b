"""Pages that another engine computes: accounted for in transit, found by the request, lost without a leak."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from paceline.request import FinishReason, Refused, Request
from paceline.scheduler import EventKind
from paceline.scheduler.host_tier import Reservation
from paceline.scheduler.invariants import check
from paceline.testing import Harness, reference_kv
from tests.helpers import events, harness, prompt, request, seeds
from tests.scheduler.test_state_machine import Run, make_request

LONG = range(1, 33)  # eight pages of four


def send(subject: Harness, one: Reservation, *, damaged: bool = False) -> None:
    """The other engine writes the pages."""
    size = subject.scheduler.config.page_size
    kv = reference_kv(one.request, one.end_page * size).reshape(-1, size)[one.first_page :]
    subject.executor.write_host(one.pages.tolist(), kv ^ np.uint64(damaged))


def receive(subject: Harness, tokens: Any, name: str = "t", **fields: Any) -> Request:
    """A request whose prompt comes from another engine, added."""
    wanted = request(tokens, 2, **fields)
    reservation = subject.scheduler.reserve_received(name, wanted)
    assert reservation is not None
    send(subject, reservation)
    subject.scheduler.place_received(name, subject.clock())
    check(subject.scheduler)
    return subject.add(wanted)


def test_a_received_prompt_is_fetched_and_only_its_last_tokens_are_computed() -> None:
    subject = harness(num_pages=20, num_host_pages=16)
    one = receive(subject, prompt(LONG, 91, 92))
    subject.run()
    subject.assert_reference()
    assert (one.num_cached, one.num_fetched) == (32, 32)
    assert subject.scheduler.counters.computed_tokens == 2
    assert subject.scheduler.counters.received_pages == 8
    assert [event.detail for event in events(subject.scheduler, EventKind.RECEIVE, one.id)] == [(8,)]


def test_short_received_pages_are_fetched_whatever_fetching_costs() -> None:
    """Tokens that are cheaper to compute than to fetch are not spilled; but those that came are used."""
    subject = harness(num_pages=20, num_host_pages=16, host_page_cost=12.0, chunk_context=8, prefix_wait_tokens=24)
    assert subject.scheduler.memory.host.from_token >= 16
    one = receive(subject, prompt(range(1, 9), 91))
    subject.run()
    assert one.num_fetched == 8
    subject.assert_reference()


def test_only_pages_that_are_not_cached_are_reserved() -> None:
    subject = harness(num_pages=20, num_host_pages=16)
    subject.add(request(prompt(range(1, 17), 91), 1))
    subject.run()
    reservation = subject.scheduler.reserve_received("t", request(prompt(LONG, 92), 2))
    assert reservation is not None and (reservation.first_page, reservation.end_page) == (4, 8)
    assert subject.scheduler.reserve_received("u", request(prompt(range(1, 17), 93), 2)) is None, "all of it is cached"


def test_reserved_pages_are_in_use_until_they_are_released() -> None:
    subject = harness(num_pages=20, num_host_pages=10)
    scheduler, host = subject.scheduler, subject.scheduler.memory.host
    first = scheduler.reserve_received("a", request(prompt(LONG, 91), 2))
    assert first is not None and (host.num_pages_used, host.num_pages_reserved) == (8, 8)
    assert scheduler.reserve_received("b", request(prompt(LONG, 91), 2, tenant="other")) is None
    check(scheduler)
    scheduler.release_received("a")
    assert (host.num_pages_used, host.num_pages_reserved) == (0, 0)
    check(scheduler)


def test_a_reservation_that_does_not_fit_forgets_nothing() -> None:
    subject = harness(num_pages=20, num_host_pages=10)
    receive(subject, prompt(LONG, 91))
    subject.run()
    assert subject.scheduler.reserve_received("b", request(prompt(range(40, 90)), 2)) is None
    assert subject.scheduler.memory.host.num_pages_used == 8


def test_a_request_whose_pages_never_come_computes_them() -> None:
    subject = harness(num_pages=20, num_host_pages=16)
    wanted = request(prompt(LONG, 91), 2)
    assert subject.scheduler.reserve_received("t", wanted) is not None
    subject.scheduler.release_received("t")
    added = subject.add(wanted)
    subject.run()
    subject.assert_reference()
    assert added.num_cached == 0


def test_pages_that_were_computed_here_meanwhile_are_freed() -> None:
    subject = harness(num_pages=20, num_host_pages=16)
    wanted = request(prompt(LONG, 91), 2)
    reservation = subject.scheduler.reserve_received("t", wanted)
    assert reservation is not None
    subject.add(request(prompt(range(1, 17), 70), 1))
    subject.run()
    send(subject, reservation)
    assert subject.scheduler.place_received("t", subject.clock()) == 4
    check(subject.scheduler)
    added = subject.add(wanted)
    subject.run()
    subject.assert_reference()
    assert (added.num_cached, added.num_fetched) == (32, 16)


def test_pages_of_replaced_weights_are_not_placed() -> None:
    subject = harness(num_pages=20, num_host_pages=16)
    reservation = subject.scheduler.reserve_received("t", request(prompt(LONG, 91), 2))
    assert reservation is not None
    send(subject, reservation)
    subject.replace_weights()
    assert subject.scheduler.place_received("t", subject.clock()) == 0
    assert subject.scheduler.memory.host.num_pages_used == 0
    check(subject.scheduler)


def test_received_nan_is_dropped_and_the_request_is_computed_again() -> None:
    subject = harness(num_pages=20, num_host_pages=16)
    wanted = request(prompt(LONG, 91), 2)
    reservation = subject.scheduler.reserve_received("t", wanted)
    assert reservation is not None
    nan = np.full((8, 4), (1 << 64) - 1, np.uint64)
    subject.executor.write_host(reservation.pages.tolist(), nan)
    subject.scheduler.place_received("t", subject.clock())
    added = subject.add(wanted)
    subject.run()
    assert subject.reasons[added.id] is FinishReason.LENGTH
    subject.assert_reference()
    assert added.recomputations == 1 and subject.scheduler.memory.host.num_pages_used == 0


def test_a_damaged_page_changes_the_tokens() -> None:
    """Shows that the tests here can fail."""
    subject = harness(num_pages=20, num_host_pages=16)
    wanted = request(prompt(LONG, 91), 8, eos_token_ids=())
    reservation = subject.scheduler.reserve_received("t", wanted)
    assert reservation is not None
    send(subject, reservation, damaged=True)
    subject.scheduler.place_received("t", subject.clock())
    subject.add(wanted)
    subject.run()
    with pytest.raises(AssertionError, match="differs from the reference"):
        subject.assert_reference()


# ---------------------------------------------------------------------- the engine that sends


@dataclass
class Exporter:
    """Copies the pages of exported requests after every step, and compares them with the reference."""

    subject: Harness
    num_exported: int = 0

    def after_step(self) -> None:
        scheduler, size = self.subject.scheduler, self.subject.scheduler.config.page_size
        for one in self.subject.requests.values():
            if not one.is_exported:
                continue
            pages = scheduler.memory.exported_pages(one)[: len(one.prompt) // size]
            found = self.subject.executor.read_pages(pages.tolist())
            expected = reference_kv(one, len(pages) * size).reshape(-1, size)
            if not self.subject.executor.faulty_ids:  # else it may have read their KV
                assert np.array_equal(found, expected), f"the pages of {one.id} are not its KV"
            self.num_exported = max(self.num_exported, len(pages))
            if one.id in scheduler.memory.holds:
                scheduler.memory.release_hold(one.id)
                check(scheduler)


@pytest.mark.parametrize("overlap", [False, True])
def test_pages_of_a_prompt_can_be_read_after_each_of_its_passes_and_after_its_end(overlap: bool) -> None:
    subject = harness(num_pages=10, chunk_tokens=8, overlap=overlap)
    exporter, seen = Exporter(subject), []
    subject.add_all(request(prompt(LONG), 1, is_exported=True, id="sent"), request(prompt(range(50, 70)), 4))
    while subject.scheduler.has_work:
        subject.step()
        exporter.after_step()
        seen.append(exporter.num_exported)
    assert seen[-1] == 8 and 0 < seen[0] < 8, "while it is computed, and all of it"
    assert not subject.scheduler.memory.holds
    subject.assert_reference()


class TransferRun(Run):
    """Random runs in which some prompts come from another engine, and some are sent to one."""

    def __init__(self, draw: Any) -> None:
        super().__init__(draw, prefix_cache=True, num_host_pages=draw([4, 16, 64]), max_swap_pages=draw([1, 3, 64]))
        self.in_transit: dict[str, Reservation] = {}
        self.num_transfers = self.num_received = 0
        self.exporter = Exporter(self.harness)

    def add(self, draw: Any) -> None:
        number = len(self.harness.requests) + 1000 * self.num_transfers
        one = make_request(draw, number, self.harness.clock())
        one = replace(one, is_exported=draw(range(4)) == 0)
        if draw(range(2)):
            self.num_transfers += 1
            name = f"transfer-{self.num_transfers}"
            reservation = self.harness.scheduler.reserve_received(name, one)
            self.check()
            if reservation is not None:
                self.in_transit[name] = reservation
                return
        self._add(one)

    def _add(self, one: Request) -> None:
        try:
            self.harness.add(one)
        except Refused:
            return

    def settle(self, draw: Any) -> None:
        """A transfer completes, or is lost, or its request is aborted meanwhile."""
        if not self.in_transit:
            return
        name = draw(list(self.in_transit))
        reservation = self.in_transit.pop(name)
        fate = draw(["complete", "complete", "lost", "aborted"])
        if fate == "complete":
            send(self.harness, reservation)
            self.num_received += self.harness.scheduler.place_received(name, self.harness.clock())
        else:
            self.harness.scheduler.release_received(name)
        self.check()
        if fate != "aborted":
            self._add(reservation.request)

    def step(self) -> None:
        super().step()
        self.exporter.after_step()

    def end(self) -> None:
        while self.in_transit:
            self.settle(lambda choices: next(iter(choices)))
        while self.harness.scheduler.has_work:
            self.step()
        super().end()
        host = self.harness.scheduler.memory.host
        assert host.num_pages_reserved == 0 and not self.harness.scheduler.memory.holds


class TransferMachine(RuleBasedStateMachine):
    @initialize(seed=st.randoms(use_true_random=False))
    def start(self, seed: random.Random) -> None:
        self.draw = lambda choices: seed.choice(list(choices))
        self.run = TransferRun(self.draw)

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        for _ in range(count):
            self.run.add(self.draw)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.run.step()

    @rule()
    def settle(self) -> None:
        self.run.settle(self.draw)

    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        self.run.abort(which)

    @rule()
    def fault(self) -> None:
        self.run.inject_fault(self.draw)

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.end()


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(max_examples=25, stateful_step_count=25)


@seeds(12, 400)
def test_random_runs_with_transfers_end_with_the_tokens_of_the_reference(seeds: range) -> None:
    received = exported = fetched = 0
    for seed in seeds:
        rng = random.Random(seed)
        run = TransferRun(lambda choices, rng=rng: rng.choice(list(choices)))
        draw = lambda choices, rng=rng: rng.choice(list(choices))  # noqa: E731
        for _ in range(80):
            while rng.random() < 0.4 and run.num_transfers + len(run.harness.requests) < 40:
                run.add(draw)
            if rng.random() < 0.4:
                run.settle(draw)
            if rng.random() < 0.05:
                run.abort(rng.randrange(50))
            run.step()
        run.end()
        received, exported = received + run.num_received, exported + run.exporter.num_exported
        fetched += run.harness.scheduler.counters.fetched_tokens
    assert received > 50 and exported > 50 and fetched > 50
