"""A peer that has failed is tried again by one probe at a time, ever more rarely."""

from __future__ import annotations

from paceline.cluster.breaker import FIRST_DELAY_S, MAX_DELAY_S, CircuitBreaker


def test_a_peer_that_works_is_used_by_everybody() -> None:
    breaker = CircuitBreaker()
    assert [breaker.begin(0.0) for _ in range(3)] == [True] * 3


def test_after_a_failure_one_probe_is_let_through_when_the_delay_is_over() -> None:
    breaker = CircuitBreaker()
    breaker.failed(0.0)
    assert not breaker.begin(FIRST_DELAY_S - 0.01)
    assert [breaker.begin(FIRST_DELAY_S) for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert [breaker.begin(FIRST_DELAY_S) for _ in range(3)] == [True] * 3


def test_the_delay_doubles_up_to_a_limit_and_begins_anew_after_a_success() -> None:
    breaker, now, delays = CircuitBreaker(), 0.0, []
    breaker.failed(now)
    for _ in range(8):
        began = now
        while not breaker.begin(now):
            now += 0.5
        delays.append(now - began)
        breaker.failed(now)
    assert delays == [1, 2, 4, 8, 16, 30, 30, 30] and delays[-1] == MAX_DELAY_S
    breaker.succeeded()
    breaker.failed(now)
    assert breaker.begin(now + FIRST_DELAY_S)


def test_failures_of_what_began_before_do_not_lengthen_the_delay() -> None:
    breaker = CircuitBreaker()
    for _ in range(20):
        breaker.failed(0.0)
    assert breaker.begin(FIRST_DELAY_S)


def test_a_probe_that_is_abandoned_makes_room_for_the_next() -> None:
    breaker = CircuitBreaker()
    breaker.failed(0.0)
    assert breaker.begin(5.0) and not breaker.may_begin(5.0)
    breaker.abandoned()
    assert breaker.may_begin(5.0) and not breaker.is_closed
