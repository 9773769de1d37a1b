"""The experiments give the figures that were published for them."""

from __future__ import annotations

import math

import pytest

from paceline.bench.scheduler import gsp_hit_rate
from paceline.simulator.experiments import (
    CHAT_POOL,
    host_memory,
    overlap,
    seats_used,
    shared_system_prompt,
    small_pool,
    two_prefixes,
    waiting_curve,
)


def test_continuous_batching_fills_the_seats_that_static_batching_leaves_empty() -> None:
    assert seats_used("static") == pytest.approx(0.1425)
    assert seats_used("mixed") >= 0.95


def test_with_room_for_one_the_order_decides_the_hit_rate() -> None:
    assert shared_system_prompt("lpm", seats=1, runs=20) == pytest.approx(23 / 24)
    assert shared_system_prompt("fair", seats=1, runs=20) == pytest.approx(23 / 24)
    assert shared_system_prompt("fcfs", seats=1, runs=100) == pytest.approx(0.72, abs=0.01)


def test_with_seats_for_all_first_come_computes_half_of_it_again() -> None:
    assert shared_system_prompt("fcfs", seats=16, runs=100) == pytest.approx(0.50, abs=0.01)


def test_two_prefixes_in_a_pool_for_one() -> None:
    for policy in ("fcfs", "lpm", "fair"):
        assert two_prefixes(policy, 8_000) == 3_500
    assert two_prefixes("fcfs", 2_600, partial_eviction=False) == 10_500
    assert two_prefixes("lpm", 2_600, partial_eviction=False) == 3_500
    assert two_prefixes("fcfs", 2_600) == 7_500, "taking only the pages needed leaves something to hit"
    assert two_prefixes("fair", 2_600) == two_prefixes("lpm", 2_600) == 3_500


def test_a_pool_too_small_retracts_and_yields_the_same_tokens() -> None:
    small, large = small_pool(60), small_pool(4_000)
    assert small.retractions > 0
    assert large.retractions == 0
    assert small.outputs == large.outputs


def test_gsp_with_100k_tokens_of_memory_hits_almost_all_that_can_be_hit() -> None:
    assert gsp_hit_rate(math.inf) >= 0.86
    assert gsp_hit_rate(0.2) >= 0.80


def test_waiting_longer_buys_hits_and_the_ends_of_the_curve_are_in_order() -> None:
    first_come, cache_first = waiting_curve(0.0).summary(), waiting_curve(math.inf).summary()
    assert first_come["hit_rate"] < 0.8 * cache_first["hit_rate"]
    assert first_come["wait_p99_ms"] < cache_first["wait_p99_ms"]
    assert first_come["hit_rate"] < waiting_curve(0.2).summary()["hit_rate"]


def test_chats_that_do_not_fit_come_back_from_host_memory() -> None:
    without, some = (host_memory(size) for size in (0, 2 * CHAT_POOL))
    assert without.counters.fetched_tokens == 0 < some.counters.fetched_tokens
    assert some.counters.computed_tokens < 0.75 * without.counters.computed_tokens
    assert some.summary()["ttft_p50_ms"] < 0.6 * without.summary()["ttft_p50_ms"]
    assert some.summary()["ttft_p99_ms"] < 0.5 * without.summary()["ttft_p99_ms"]


@pytest.mark.parametrize("rows", [1, 64])
def test_overlap_keeps_the_gpu_busy(rows: int) -> None:
    on, off = overlap(rows, True), overlap(rows, False)
    assert 1 - on.busy_s / on.seconds < 0.08
    assert 1 - off.busy_s / off.seconds > 0.2
    assert on.seconds < off.seconds
    assert on.counters.decoded_tokens == off.counters.decoded_tokens
