"""The experiments reproduce the published results."""

from __future__ import annotations

import math

import pytest

from paceline.bench.scheduler import gsp_hit_rate
from paceline.simulator.experiments import (
    CHAT_POOL,
    host_memory,
    overlap,
    shared_system_prompt,
    slot_utilization,
    small_pool,
    two_prefixes,
    waiting_curve,
)


def test_continuous_batching_fills_the_slots_that_static_batching_leaves_empty() -> None:
    assert slot_utilization("static") == pytest.approx(0.1425)
    assert slot_utilization("mixed") >= 0.95


def test_with_memory_for_one_request_the_policy_decides_the_hit_rate() -> None:
    assert shared_system_prompt("lpm", slots=1, runs=20) == pytest.approx(23 / 24)
    assert shared_system_prompt("fair", slots=1, runs=20) == pytest.approx(23 / 24)
    assert shared_system_prompt("fcfs", slots=1, runs=100) == pytest.approx(0.72, abs=0.01)


def test_with_slots_for_all_fcfs_computes_half_of_the_prefix_again() -> None:
    assert shared_system_prompt("fcfs", slots=16, runs=100) == pytest.approx(0.50, abs=0.01)


def test_two_prefixes_in_a_cache_for_one_thrash_under_fcfs() -> None:
    for policy in ("fcfs", "lpm", "fair"):
        assert two_prefixes(policy, 8_000) == 3_500
    assert two_prefixes("fcfs", 2_600, partial_eviction=False) == 10_500
    assert two_prefixes("lpm", 2_600, partial_eviction=False) == 3_500
    assert two_prefixes("fcfs", 2_600) == 7_500, "partial eviction leaves a part of the prefix to hit"
    assert two_prefixes("fair", 2_600) == two_prefixes("lpm", 2_600) == 3_500


def test_a_small_cache_retracts_and_yields_the_same_tokens() -> None:
    small, large = small_pool(60), small_pool(4_000)
    assert small.retractions > 0
    assert large.retractions == 0
    assert small.outputs == large.outputs


def test_gsp_in_100k_tokens_reaches_almost_the_maximum_hit_rate() -> None:
    assert gsp_hit_rate(math.inf) >= 0.86
    assert gsp_hit_rate(0.2) >= 0.80


def test_a_longer_max_wait_raises_the_hit_rate_and_the_waiting_time() -> None:
    fcfs, cache_first = waiting_curve(0.0).summary(), waiting_curve(math.inf).summary()
    assert fcfs["hit_rate"] < 0.8 * cache_first["hit_rate"]
    assert fcfs["wait_p99_ms"] < cache_first["wait_p99_ms"]
    assert fcfs["hit_rate"] < waiting_curve(0.2).summary()["hit_rate"]


def test_host_memory_lowers_ttft_of_conversations_that_do_not_fit() -> None:
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
