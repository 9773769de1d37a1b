"""Strangers at the address of a prefill engine: none of them keeps a peer out, and the log stays short."""

from __future__ import annotations

import itertools

import pytest

from paceline.cluster.handshakes import (
    LOG_INTERVAL_S,
    MAX_HANDSHAKES,
    MAX_PER_SECOND,
    Handshakes,
    RejectionLog,
    group_of,
)


def test_a_peer_gets_the_place_of_the_oldest_handshake_of_the_address_that_has_the_most() -> None:
    subject: Handshakes[str] = Handshakes()
    for number in range(MAX_HANDSHAKES):
        assert subject.admit(str(number), "flood" if number else "other", 0.0) == (True, None)
    assert subject.admit("peer", "peer", 0.0) == (True, "1"), "not that of another address"
    subject.ended("1")
    assert subject.admit("second", "peer", 0.0) == (True, "2")


def test_strangers_at_many_addresses_keep_nobody_out_either() -> None:
    subject: Handshakes[str] = Handshakes()
    for number in range(500):
        assert subject.admit(str(number), f"10.0.0.{number}", 0.0)[0]
    assert subject.admit("peer", "10.1.0.1", 0.0) == (True, str(500 - MAX_HANDSHAKES))


def test_a_handshake_that_has_ended_makes_room() -> None:
    subject: Handshakes[str] = Handshakes()
    for number in range(10 * MAX_HANDSHAKES):
        assert subject.admit(str(number), "peer", float(number)) == (True, None)
        subject.ended(str(number))


def test_an_address_has_a_number_of_handshakes_in_a_second() -> None:
    subject: Handshakes[int] = Handshakes()
    numbers = itertools.count()
    admitted = [subject.admit(next(numbers), "flood", 0.5)[0] for _ in range(1000)]
    assert sum(admitted) == MAX_PER_SECOND
    assert subject.admit(next(numbers), "peer", 0.5)[0], "another address"
    assert subject.admit(next(numbers), "flood", 1.5)[0], "the next second"


def test_addresses_of_one_ipv6_network_count_as_one() -> None:
    assert group_of("2001:db8::1") == group_of("2001:db8::ffff:1") != group_of("2001:db8:0:1::1")
    assert group_of("fe80::1%eth0") == group_of("fe80::2%eth0")
    assert group_of("10.0.0.1") != group_of("10.0.0.2")


def test_rejections_are_logged_at_once_and_then_once_in_an_interval_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    subject = RejectionLog()
    with caplog.at_level("WARNING"):
        for number in range(1000):
            subject.add(f"reason {number}", number / 1000)
        assert [record.getMessage() for record in caplog.records] == ["a decode engine was rejected: reason 0"]
        subject.flush(LOG_INTERVAL_S)
        subject.flush(10 * LOG_INTERVAL_S)
    assert len(caplog.records) == 2
    assert "999 decode engines were rejected; the last one: reason 999" in caplog.text
