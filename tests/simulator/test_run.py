"""A simulation runs the real scheduler and is deterministic."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.cli.sim import load_arrivals
from paceline.config import SchedulerConfig, WorkloadConfig
from paceline.engine.build import build_engine
from paceline.engine.loop import Loop
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.request import Request, SamplingParams
from paceline.scheduler import Plan, Scheduler
from paceline.simulator.compare import Comparison, scheduler_config
from paceline.simulator.profile import LinearCost, ProfileTiming, load_profile, profile_names
from paceline.simulator.run import ServedRequest, SimulationResult, max_min_shares, simulate
from paceline.simulator.workloads import EOS, Arrival, make_workload

H200 = load_profile("h200-qwen3-0.6b")


def run(policy: str = "fair", *, overlap: bool = True, seed: int = 0, **options: Any) -> SimulationResult:
    work = WorkloadConfig(requests=60, rate=300, prompt_tokens=200, output_tokens=20, groups=4, seed=seed)
    config = SchedulerConfig(**{"num_pages": 150, "max_running": 8, "policy": policy} | options)
    return simulate(make_workload("prefixes", work), config, H200, overlap=overlap)


def test_the_same_seed_gives_the_same_decisions() -> None:
    one, two, other = run(), run(), run(seed=1)
    assert one.journal == two.journal
    assert one.served == two.served
    assert one.summary() == two.summary()
    assert one.journal != other.journal


def test_every_request_gets_its_whole_output() -> None:
    work = WorkloadConfig(requests=60, rate=300, prompt_tokens=200, output_tokens=20, groups=4)
    expected = {one.id: len(one.output) for one in make_workload("prefixes", work)}
    assert {one.id: one.output_tokens for one in run().served} == expected


def test_arrival_admission_first_token_and_finish_are_in_order() -> None:
    for one in run().served:
        assert one.arrival <= one.admitted <= one.first_token <= one.finished


def test_a_request_displaced_from_a_full_queue_counts_as_refused() -> None:
    tokens = np.arange(50, dtype=np.int32)
    arrivals = [Arrival(0.001 * n, f"r{n}", tokens, tokens, priority=n) for n in range(5)]
    found = simulate(arrivals, SchedulerConfig(max_running=1, max_waiting=1, full_queue="yield"), H200)
    assert ([one.id for one in found.served], found.refused) == (["r0", "r4"], ["r1", "r2", "r3"])


def test_waiting_time_starts_at_the_arrival_during_a_pass() -> None:
    tokens = np.arange(4000, dtype=np.int32)
    arrivals = [Arrival(0.0, "long", tokens, tokens[:50]), Arrival(0.0005, "late", tokens[:50], tokens[:5])]
    served = {one.id: one for one in simulate(arrivals, SchedulerConfig(), H200).served}
    assert served["late"].arrival == 0.0005
    assert served["late"].admitted > 0.0005


def test_a_request_that_can_never_fit_is_refused_and_the_others_run() -> None:
    tokens = np.arange(5000, dtype=np.int32)
    arrivals = [Arrival(0.0, "huge", tokens, tokens[:5]), Arrival(0.0, "small", tokens[:50], tokens[:5])]
    found = simulate(arrivals, SchedulerConfig(num_pages=100), H200)
    assert found.refused == ["huge"]
    assert [one.id for one in found.served] == ["small"]


def test_an_output_shorter_than_max_tokens_ends_with_eos() -> None:
    tokens = np.arange(50, dtype=np.int32)
    arrival = Arrival(0.0, "one", tokens, np.array([1, 2, EOS], np.int32), max_tokens=100)
    (served,) = simulate([arrival], SchedulerConfig(num_pages=100), H200).served
    assert served.output_tokens == 3


def test_overlap_changes_times_but_not_outputs() -> None:
    on, off = run(overlap=True), run(overlap=False)
    assert on.seconds < off.seconds
    assert {one.id: one.output_tokens for one in on.served} == {one.id: one.output_tokens for one in off.served}


@pytest.mark.parametrize("prompt_tokens", [100, 8000])
def test_without_overlap_host_and_device_add_up(prompt_tokens: int) -> None:
    """Except for the launches of a prefill batch, which overlap with its first kernels."""
    tokens = np.arange(prompt_tokens, dtype=np.int32)
    found = simulate([Arrival(0.0, "one", tokens, tokens[:20])], SchedulerConfig(), H200, overlap=False)
    overlapped = (found.passes - 19) * H200.launch_s
    assert found.seconds == pytest.approx(found.host_s + found.busy_s - overlapped)


def test_a_short_prompt_takes_as_long_as_its_launch() -> None:
    tokens = np.arange(100, dtype=np.int32)
    arrivals = [Arrival(0.0, "one", tokens, tokens[:1])]
    slow, quick = (
        simulate(arrivals, SchedulerConfig(), msgspec.structs.replace(H200, launch_s=seconds))
        for seconds in (0.01, 0.0)
    )
    assert slow.busy_s == pytest.approx(0.01)
    assert 0 < quick.busy_s < 0.01


def test_finished_requests_cost_host_time_before_the_next_launch() -> None:
    tokens = np.arange(100, dtype=np.int32)
    arrivals = [Arrival(0.0, "short", tokens, tokens[:10]), Arrival(0.0, "long", tokens + 1, tokens[:30])]
    free, busy = (
        simulate(
            arrivals,
            SchedulerConfig(),
            msgspec.structs.replace(H200, ended=LinearCost(0.0, {"output_tokens": seconds})),
        )
        for seconds in (0.0, 0.01)
    )
    assert busy.host_s - free.host_s == pytest.approx(10 * 0.01), "no launch follows the last finished request"
    assert 0.09 < busy.seconds - free.seconds < 0.1 + 1e-9


@pytest.mark.parametrize("name", profile_names())
def test_coefficients_of_profiles_are_not_negative(name: str) -> None:
    profile = load_profile(name)
    assert min(profile.bucket_s) > 0
    parts = (profile.decode, profile.prompt, profile.host, profile.ended)
    assert all(value >= 0 for part in parts for value in (part.base, *part.per.values()))
    assert profile.launch_s >= 0


def test_simulations_in_processes_equal_those_in_this_one() -> None:
    arrivals = make_workload("prefixes", WorkloadConfig(requests=40, prompt_tokens=100, output_tokens=5, rate=5))
    config = scheduler_config(arrivals, H200, {"num_pages": 200, "max_running": 4})
    configs = {name: dataclasses.replace(config, policy=name) for name in ("fcfs", "fair")}
    with Comparison(arrivals, H200, processes=2) as comparison:
        apart = dict(comparison.runs(configs))
        speed = comparison.speed_for(4, config)
        queue = dict(comparison.runs({"fcfs": configs["fcfs"]}, speed))["fcfs"].mean_waiting
    here = {name: simulate(arrivals, one, H200) for name, one in configs.items()}
    assert {name: one.journal for name, one in apart.items()} == {name: one.journal for name, one in here.items()}
    assert here["fcfs"].mean_waiting < 4 <= queue


def test_tenants_under_contention_are_served_fairly_by_fair_and_not_by_fcfs() -> None:
    """With the defaults of `paceline sim compare tenants`."""
    arrivals = load_arrivals("tenants", {})
    fcfs, fair = (
        simulate(arrivals, scheduler_config(arrivals, H200, {"policy": policy}), H200) for policy in ("fcfs", "fair")
    )
    assert fcfs.fairness() < 0.85
    assert fair.fairness() > 0.97
    light = "tenant-3"
    assert list(fcfs.tenant_waits())[-1] == light, "the last tenant sends the fewest tokens"
    assert fair.tenant_waits()[light] < 0.25 * fcfs.tenant_waits()[light]
    assert fair.mean_waiting > 20, "requests compete"
    assert fair.seconds == pytest.approx(fcfs.seconds, rel=0.05), "fairness costs no throughput"


def served(tenant: str, arrival: float, admitted: float) -> ServedRequest:
    return ServedRequest("", tenant, 100, 0, 0, 0, arrival, admitted, admitted, admitted)


def fairness(requests: list[ServedRequest], **options: Any) -> float:
    result = run()
    return dataclasses.replace(result, config=SchedulerConfig(**options), served=requests).fairness()


def test_fairness_is_one_if_tenants_in_competition_take_turns() -> None:
    turns = [served("ab"[at % 2], 0.0, float(at)) for at in range(200)]
    assert fairness(turns) == pytest.approx(1.0, abs=0.01)
    queue = [served("a" if at < 100 else "b", 0.0, float(at)) for at in range(200)]
    assert fairness(queue) == pytest.approx(0.5, abs=0.02), "one tenant has it all while both wait"
    assert fairness(queue[:100]) == 1.0, "one tenant competes with no one"


def test_fairness_respects_weights() -> None:
    turns = [served("aab"[at % 3], 0.0, float(at)) for at in range(300)] + [served("b", 0.0, 300.0)] * 100
    assert fairness(turns, tenant_weights={"a": 2.0}) > 0.99
    assert fairness(turns) < 0.95


def test_a_tenant_that_gets_all_it_asks_for_is_served_fairly() -> None:
    busy = [served("busy", 0.0, float(at)) for at in range(200)]
    light = [served("light", float(at), at + 0.5) for at in range(0, 180, 20)]
    assert fairness(busy + light) > 0.95
    late = [served("light", float(at), 199.0) for at in range(0, 180, 20)]
    assert fairness(busy + late) < 0.6


def test_max_min_shares_split_what_small_demands_leave() -> None:
    shares = max_min_shares(np.array([10.0, 1.0, 10.0]), 9.0, np.ones(3))
    assert shares.tolist() == [4.0, 1.0, 4.0]
    assert max_min_shares(np.array([10.0, 10.0]), 9.0, np.array([2.0, 1.0])).tolist() == [6.0, 3.0]
    assert max_min_shares(np.array([1.0, 2.0]), 9.0, np.ones(2)).tolist() == [1.0, 2.0]


@dataclasses.dataclass
class PlanRecorder:
    """An executor that keeps its plans."""

    executor: Any
    plans: list[Plan]

    def launch(self, plan: Plan) -> Any:
        self.plans.append(plan)
        return self.executor.launch(plan)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_virtual_and_the_cpu_executor_get_the_same_plans(overlap: bool) -> None:
    """With the same arrivals by step, the scheduler makes the same decisions in front of a model and a virtual GPU."""
    options: dict[str, Any] = {
        "max_running": 4,
        "chunk_tokens": 32,
        "max_batch_tokens": 64,
        "num_pages": 40,
        "max_wait": math.inf,
    }
    engine = build_engine(load="random", shape="tiny-llama", threads=1, **options)
    try:
        config = engine.scheduler.config
        clock = VirtualClock()
        virtual = VirtualExecutor(clock, ProfileTiming(H200, clock))
        plans = [_plans(config, executor, overlap) for executor in (engine.executor, virtual)]
    finally:
        engine.close()
    real, simulated = plans
    assert len(real) == len(simulated) > 20
    for one, other in zip(real, simulated, strict=True):
        for name in ("slots", "starts", "lengths", "samples", "page_changes"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), f"pass {one.step} differs in {name}"
        assert [(join.slot, join.request_id) for join in one.joins] == [(j.slot, j.request_id) for j in other.joins]


def _plans(config: SchedulerConfig, executor: Any, overlap: bool) -> list[Plan]:
    """A request arrives every second step; the clock counts steps, so that timing makes no difference."""
    scheduler, steps = Scheduler(config), 0
    kept = PlanRecorder(executor, [])
    loop = Loop(scheduler, kept, lambda: float(steps), overlap=overlap)
    tokens = np.random.default_rng(3)
    system = tokens.integers(0, 100, 40)
    coming = [
        Request(
            f"r{number}",
            np.concatenate([system[: 40 * (number % 2)], tokens.integers(0, 100, 5 + number)]),
            SamplingParams(max_tokens=3 + number, temperature=0, ignore_eos=True),
        )
        for number in range(10)
    ]
    while coming or scheduler.has_work:
        if coming and steps % 2 == 0:
            scheduler.add(coming.pop(0), float(steps))
        loop.step()
        steps += 1
    return kept.plans
