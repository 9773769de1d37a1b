"""What a refused client is told about when to come back is about right."""

from __future__ import annotations

import pytest

from paceline.request import Refused
from paceline.scheduler.wait_estimate import seconds_until_admitted
from paceline.testing import Harness
from tests.helpers import harness, request


def full(max_waiting: int = 8) -> Harness:
    """Eight running with 20 to 160 tokens to go, and a queue that takes no more."""
    subject = harness(num_pages=512, max_waiting=max_waiting)
    for number in range(8):
        subject.add(request(range(10), 20 * (number + 1)))
    for _ in range(12):
        subject.step()
    for _ in range(max_waiting):
        subject.add(request(range(10), 80))
    subject.step()
    return subject


def test_nothing_is_said_while_nothing_is_known() -> None:
    assert seconds_until_admitted(harness().scheduler, 1) is None


@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_time_until_so_many_run_is_about_right(count: int) -> None:
    subject = full()
    promised = seconds_until_admitted(subject.scheduler, count)
    assert promised is not None
    began, before = subject.clock(), subject.scheduler.num_waiting
    while subject.scheduler.num_waiting > before - count:
        subject.step()
    took = subject.clock() - began
    assert 0.7 * took <= promised <= 1.4 * took


def test_a_client_that_comes_back_when_told_is_taken() -> None:
    subject = full()
    with pytest.raises(Refused):
        subject.add(request(range(10), 5))
    promised = seconds_until_admitted(subject.scheduler, 1)
    assert promised is not None
    until = subject.clock() + promised * 1.05
    while subject.clock() < until:
        subject.step()
    subject.add(request(range(10), 5))


def test_later_places_come_later() -> None:
    scheduler = full().scheduler
    times = [seconds_until_admitted(scheduler, count) or 0.0 for count in range(1, 40)]
    assert times == sorted(times) and times[-1] > 2 * times[0]
