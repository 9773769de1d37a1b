"""The experiments reproduce the published results."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.bench.scheduler import gsp_hit_rate
from paceline.config import SchedulerConfig, WorkloadConfig
from paceline.simulator.compare import scheduler_config
from paceline.simulator.experiments import EXPERIMENTS, run_experiments
from paceline.simulator.profile import load_profile
from paceline.simulator.report import Report
from paceline.simulator.run import simulate
from paceline.simulator.scenarios import (
    CHAT_POOL,
    CONDITIONS,
    LARGE,
    PREFIX_POLICIES,
    SMALL,
    batching,
    cold_and_cached,
    host_memory,
    long_prompts,
    overlap,
    prefill_overload,
    shared_prefixes,
    small_behind_large,
    small_pool,
    speculation,
    two_prefixes,
    waiting_curve,
)
from paceline.simulator.workloads import SIZES, make_workload

CACHE_AWARE = ("lpm", "dfs", "fair")


def prefix_hit_rate(policy: str, condition: str, *, share: float = 0.75, runs: int = 4) -> float:
    return shared_prefixes(policy, share, runs=runs, **CONDITIONS[condition]).shared_hit_rate


def test_continuous_batching_fills_the_slots_that_static_batching_leaves_empty() -> None:
    static, continuous = batching("static"), batching("mixed")
    assert np.mean(static.utilization[:500]) == pytest.approx(0.1425)
    assert set(static.utilization[:10]) == {1.0}
    assert set(static.utilization[10:500]) == {1 / 8}, "seven slots wait for the long request"
    assert set(continuous.utilization[:500]) == {1.0}
    assert (static.finished_after(500), continuous.finished_after(500)) == (8, 351)
    assert continuous.result.summary()["latency_mean_ms"] < 0.5 * static.result.summary()["latency_mean_ms"]


def test_continuous_batching_serves_5_to_10_times_the_requests_if_every_batch_has_a_long_one() -> None:
    static, continuous = (batching(mode, copies=8).result.summary() for mode in ("static", "mixed"))
    assert 5 < continuous["requests_per_s"] / static["requests_per_s"] < 10
    assert continuous["latency_p99_ms"] < static["latency_p99_ms"] / 4


def test_chunks_shorten_the_stalls_of_decodes_and_delay_the_long_prompt() -> None:
    whole = {"chunk_tokens": 16_384, "max_batch_tokens": 16_384, "max_prefill_tokens": 16_384}
    first = long_prompts(batching="prefill-first", **whole)
    large, default, small = (long_prompts(chunk_tokens=tokens, itl_target=math.inf) for tokens in (8192, 2048, 512))
    target = long_prompts(itl_target=0.03)
    assert first.itl.max() > 1.5 * large.itl.max() > 3 * default.itl.max()
    assert default.ttft.mean() < small.ttft.mean()
    assert target.itl.max() < 0.04 < default.itl.max()
    assert first.ttft.mean() < default.ttft.mean()


def test_decodes_get_a_token_every_200_ms_while_more_prompts_arrive_than_the_gpu_computes() -> None:
    """From the first pass of a new server on, which has measured nothing."""
    unlimited, default = prefill_overload(itl_target=math.inf), prefill_overload()
    assert unlimited.itl.max() > 0.3
    assert np.percentile(default.itl, 99) < 0.13 and default.itl.max() < 0.15
    assert default.result.seconds < 1.06 * unlimited.result.seconds
    assert default.result.counters.retractions == 0


def test_prefill_first_delays_decodes() -> None:
    assert prefill_overload(batching="prefill-first", chunk_tokens=8192).itl.max() > 2


def test_short_prompts_overtake_the_long_ones_before_them() -> None:
    unlimited, default = small_behind_large(LARGE, itl_target=math.inf), small_behind_large(LARGE)
    assert np.percentile(default.small, 99) < 0.48
    assert np.percentile(unlimited.small, 99) > 0.7, "passes of 8,192 tokens"
    assert default.large.mean() < unlimited.large.mean()
    assert np.percentile(default.large, 99) < 1.07 * np.percentile(unlimited.large, 99)
    assert np.percentile(small_behind_large(SMALL).small, 99) < 0.05


def test_itl_target_costs_a_batch_of_requests_less_than_one_percent() -> None:
    """nano on the 14B model; offline there is no target at all."""
    work = make_workload("nano", WorkloadConfig(requests=SIZES["nano"]))
    default, offline = (
        simulate(work, config, load_profile(LARGE)).seconds
        for config in (SchedulerConfig(num_pages=40_000), scheduler_config(work, load_profile(LARGE), {}))
    )
    assert offline < default < 1.01 * offline


def test_with_memory_for_one_request_the_policy_decides_the_hit_rate() -> None:
    for policy in CACHE_AWARE:
        assert prefix_hit_rate(policy, "1 slot") == pytest.approx(23 / 24)
    for policy in ("fcfs", "sjf"):
        # A request hits if the one before it shares the prefix: 23 of 31 others do, and the first has none before it.
        assert prefix_hit_rate(policy, "1 slot", runs=12) == pytest.approx(23 / 32, abs=0.06)


def test_with_many_slots_and_a_cold_cache_prefix_wait_makes_the_gain_and_the_order_none() -> None:
    """Requests that start together compute the prefix together: the more of them the order puts first, the more."""
    fcfs = prefix_hit_rate("fcfs", "16, no wait", runs=12)
    assert fcfs == pytest.approx(0.5, abs=0.04)
    for policy in PREFIX_POLICIES:
        assert prefix_hit_rate(policy, "16, wait", runs=2) == pytest.approx(23 / 24)
    for policy in CACHE_AWARE:
        assert prefix_hit_rate(policy, "16, no wait") == pytest.approx(8 / 24), "16 of 24 compute it"


def test_prefix_wait_shortens_the_waits_of_a_cold_cache() -> None:
    off, on = (shared_prefixes("fcfs", 0.75, runs=2, **CONDITIONS[name]).waits for name in ("16, no wait", "16, wait"))
    assert on.mean() < 0.7 * off.mean()
    assert np.percentile(on, 99) < 0.7 * np.percentile(off, 99)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_hit_rate_grows_with_the_share_of_requests_that_have_the_prefix(condition: str) -> None:
    rates = [shared_prefixes("fcfs", share, runs=2, **CONDITIONS[condition]).hit_rate for share in (0.0, 0.5, 1.0)]
    assert 0 == rates[0] < rates[1] < rates[2]


def test_two_prefixes_in_a_cache_for_one_thrash_under_fcfs() -> None:
    for policy in ("fcfs", "lpm", "fair"):
        assert two_prefixes(policy, 8_000) == 3_500
    assert two_prefixes("fcfs", 2_600, partial_eviction=False) == 10_500
    assert two_prefixes("lpm", 2_600, partial_eviction=False) == 3_500
    assert two_prefixes("fcfs", 2_600) == 7_500, "partial eviction leaves a part of the prefix to hit"
    assert two_prefixes("fair", 2_600) == two_prefixes("lpm", 2_600) == 3_500


def test_a_small_cache_retracts_and_yields_the_same_tokens() -> None:
    large = small_pool(4_000)
    lengths = {name: len(tokens) for name, tokens in large.outputs.items()}
    short, learned, exact = (small_pool(60, expected) for expected in (dict.fromkeys(lengths, 2), None, lengths))
    assert short.retractions > 10 * learned.retractions
    assert short.retractions > 10
    assert exact.retractions == large.retractions == 0
    assert short.outputs == learned.outputs == exact.outputs == large.outputs


def test_gsp_in_100k_tokens_reaches_almost_the_maximum_hit_rate() -> None:
    assert gsp_hit_rate(math.inf) >= 0.86
    assert gsp_hit_rate(0.2) >= 0.87


def test_a_longer_max_wait_raises_the_hit_rate_and_the_waiting_time() -> None:
    fcfs, cache_first = waiting_curve(0.0).summary(), waiting_curve(math.inf).summary()
    assert fcfs["hit_rate"] < 0.8 * cache_first["hit_rate"]
    assert fcfs["wait_p99_ms"] < cache_first["wait_p99_ms"]
    assert waiting_curve(0.2).summary()["hit_rate"] >= 0.5


@pytest.mark.parametrize("policy", ["lpm", "fair"])
def test_the_fairness_curve_has_its_corner_at_the_default(policy: str) -> None:
    """First come, first served wastes the cache; cache hits alone starve the rare prefixes; 200 ms has most of both."""
    fcfs, default, cache_first = (cold_and_cached(at, policy).summary() for at in (0.0, 0.2, math.inf))
    assert fcfs["hit_rate"] + 0.05 < default["hit_rate"] < cache_first["hit_rate"]
    assert default["hit_rate"] > 0.98 * cache_first["hit_rate"]
    assert default["wait_p99_ms"] < 0.9 * fcfs["wait_p99_ms"] < 0.9 * cache_first["wait_p99_ms"]


@pytest.mark.slow  # test_swap.py has a shorter run
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


@pytest.mark.parametrize("rows", [1, 64])
def test_overlap_helps_less_with_a_large_model(rows: int) -> None:
    ratios = [overlap(rows, False, gpu).seconds / overlap(rows, True, gpu).seconds for gpu in (SMALL, LARGE)]
    assert ratios[0] > 1.2
    assert 1.03 < ratios[1] < 1.2


def speedup(rows: int, draft_tokens: int, acceptance: float, gpu: str = LARGE) -> float:
    plain, drafted = (speculation(rows, drafts, acceptance, gpu) for drafts in (0, draft_tokens))
    return float(plain.tpot.mean() / drafted.tpot.mean())


def test_drafts_pay_off_in_small_batches_and_cost_time_in_large_ones() -> None:
    small, middle, large = (speedup(rows, 4, 0.6) for rows in (4, 64, 256))
    assert 2 < small < 2.3 and 0.8 < middle < 0.5 * small and large < 0.7
    assert speedup(256, 4, 0.6, SMALL) > 1.1, "a small model is limited by memory at 256 rows, too"


def test_the_best_number_of_drafts_falls_with_the_batch_size() -> None:
    best = [max((2, 4, 7), key=lambda drafts: speedup(rows, drafts, 0.6, SMALL)) for rows in (1, 256)]
    assert best == [7, 2]


def test_tokens_per_row_are_those_of_the_formula() -> None:
    """(1 - a^(k+1)) / (1 - a) for k drafts with an acceptance of a."""
    found = speculation(64, 4, 0.8).summary()["tokens_per_decode"]
    assert found == pytest.approx((1 - 0.8**5) / (1 - 0.8), rel=0.05), "the last pass of a request has fewer drafts"
    assert speculation(8, 4, 0.0).summary()["tokens_per_decode"] == 1


def test_reports_of_several_processes_come_in_order() -> None:
    names = ["two-prefixes", "chunked-prefill"]
    reports = dict(run_experiments(names))
    assert list(reports) == names
    for report in reports.values():
        check_report(report)


def check_report(report: Report) -> None:
    """Tables are rectangular, and a plot has a value for every label and place."""
    assert {len(row) for row in report.rows} == {len(report.columns)}
    assert len({len(row) for row in report.panels}) == 1
    for panel in (panel for row in report.panels for panel in row):
        assert len(panel.y) == len(panel.labels)
        assert {len(values) for values in panel.y} == {len(panel.x)}


def test_every_experiment_names_what_it_can_be_compared_with() -> None:
    for name, experiment in EXPERIMENTS.items():
        assert ":" in experiment.answers, f"{name} names no source and what it says"
