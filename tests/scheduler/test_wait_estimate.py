"""The wait estimate for refused requests is about right."""

from __future__ import annotations

import pytest

from paceline.request import Refused
from paceline.scheduler.wait_estimate import seconds_until_admitted
from paceline.testing import Harness
from tests.helpers import harness, request


def full(max_waiting: int = 8) -> Harness:
    """Eight running requests with 20 to 160 tokens left, and a full queue."""
    subject = harness(num_pages=512, max_waiting=max_waiting)
    for number in range(8):
        subject.add(request(range(10), 20 * (number + 1)))
    for _ in range(12):
        subject.step()
    for _ in range(max_waiting):
        subject.add(request(range(10), 80))
    subject.step()
    return subject


def test_there_is_no_estimate_before_step_times_are_known() -> None:
    assert seconds_until_admitted(harness().scheduler, 1) is None


@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_estimate_is_about_right(count: int) -> None:
    subject = full()
    promised = seconds_until_admitted(subject.scheduler, count)
    assert promised is not None
    began, before = subject.clock(), subject.scheduler.num_waiting
    while subject.scheduler.num_waiting > before - count:
        subject.step()
    took = subject.clock() - began
    assert 0.7 * took <= promised <= 1.4 * took


def test_a_client_that_retries_after_the_estimate_is_accepted() -> None:
    subject = full()
    with pytest.raises(Refused):
        subject.add(request(range(10), 5))
    promised = seconds_until_admitted(subject.scheduler, 1)
    assert promised is not None
    until = subject.clock() + promised * 1.05
    while subject.clock() < until:
        subject.step()
    subject.add(request(range(10), 5))


def test_the_estimate_grows_with_the_position_in_the_queue() -> None:
    scheduler = full().scheduler
    times = [seconds_until_admitted(scheduler, count) or 0.0 for count in range(1, 40)]
    assert times == sorted(times) and times[-1] > 2 * times[0]
