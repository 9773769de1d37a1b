"""The experiments give the figures that were published for them."""

from __future__ import annotations

import math

import pytest

from paceline.bench.scheduler import gsp_hit_rate
from paceline.simulator.experiments import seats_used, shared_system_prompt, small_pool, two_prefixes


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
