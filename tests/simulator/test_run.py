"""A simulated run is the real scheduler's, and the same one every time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.config import SchedulerConfig, WorkloadConfig
from paceline.engine.build import build_engine
from paceline.engine.loop import Loop
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.request import Request, SamplingParams
from paceline.scheduler import Plan, Scheduler
from paceline.simulator.compare import Comparison, scheduler_config
from paceline.simulator.profile import Charged, Linear, load_profile, profile_names
from paceline.simulator.run import SimulationResult, simulate
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


def test_every_request_is_answered_in_full() -> None:
    work = WorkloadConfig(requests=60, rate=300, prompt_tokens=200, output_tokens=20, groups=4)
    expected = {one.id: len(one.output) for one in make_workload("prefixes", work)}
    assert {one.id: one.output_tokens for one in run().served} == expected


def test_times_are_in_order_and_waiting_shows_in_the_first_token() -> None:
    for one in run().served:
        assert one.arrival <= one.admitted <= one.first_token <= one.finished


def test_waiting_begins_when_a_request_comes_not_when_it_is_first_looked_at() -> None:
    """One that comes while a pass runs has waited for the rest of it."""
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


def test_an_answer_that_ends_before_its_limit_ends_by_its_last_token() -> None:
    tokens = np.arange(50, dtype=np.int32)
    arrival = Arrival(0.0, "one", tokens, np.array([1, 2, EOS], np.int32), max_tokens=100)
    (served,) = simulate([arrival], SchedulerConfig(num_pages=100), H200).served
    assert served.output_tokens == 3


def test_overlap_hides_the_host_and_nothing_else() -> None:
    on, off = run(overlap=True), run(overlap=False)
    assert on.seconds < off.seconds
    assert {one.id: one.output_tokens for one in on.served} == {one.id: one.output_tokens for one in off.served}


@pytest.mark.parametrize("prompt_tokens", [100, 8000])
def test_without_overlap_host_and_device_add_up(prompt_tokens: int) -> None:
    """All but the kernels of prompts, which are launched while the first of them run."""
    tokens = np.arange(prompt_tokens, dtype=np.int32)
    found = simulate([Arrival(0.0, "one", tokens, tokens[:20])], SchedulerConfig(), H200, overlap=False)
    beside = (found.passes - 19) * H200.launch_s
    assert found.seconds == pytest.approx(found.host_s + found.busy_s - beside)


def test_a_short_prompt_takes_as_long_as_its_launch() -> None:
    tokens = np.arange(100, dtype=np.int32)
    arrivals = [Arrival(0.0, "one", tokens, tokens[:1])]
    assert simulate(arrivals, SchedulerConfig(), H200).busy_s == pytest.approx(H200.launch_s)
    quick = simulate(arrivals, SchedulerConfig(), msgspec.structs.replace(H200, launch_s=0.0))
    assert 0 < quick.busy_s < H200.launch_s


def test_ended_requests_keep_the_host_busy_before_the_next_launch() -> None:
    tokens = np.arange(100, dtype=np.int32)
    arrivals = [Arrival(0.0, "short", tokens, tokens[:10]), Arrival(0.0, "long", tokens + 1, tokens[:30])]
    free, busy = (
        simulate(
            arrivals, SchedulerConfig(), msgspec.structs.replace(H200, ended=Linear(0.0, {"output_tokens": seconds}))
        )
        for seconds in (0.0, 0.01)
    )
    assert busy.host_s - free.host_s == pytest.approx(10 * 0.01), "nothing is launched after the last one"
    assert 0.09 < busy.seconds - free.seconds <= 0.1


@pytest.mark.parametrize("name", profile_names())
def test_no_profile_gets_faster_with_more_to_do(name: str) -> None:
    profile = load_profile(name)
    assert min(profile.bucket_s) > 0
    parts = (profile.decode, profile.prompt, profile.host, profile.ended)
    assert all(value >= 0 for part in parts for value in (part.base, *part.per.values()))
    assert profile.launch_s >= 0


def test_runs_in_processes_are_the_runs_here() -> None:
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


@dataclasses.dataclass
class Recording:
    """An executor with its plans kept."""

    executor: Any
    plans: list[Plan]

    def launch(self, plan: Plan) -> Any:
        self.plans.append(plan)
        return self.executor.launch(plan)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_simulator_plans_what_the_cpu_runs(overlap: bool) -> None:
    """The same arrivals, by step: the scheduler behind a real model and behind the virtual GPU decides the same."""
    options: dict[str, Any] = {"max_running": 4, "chunk_tokens": 32, "max_batch_tokens": 64, "num_pages": 40,
                               "max_wait": math.inf}  # fmt: skip
    engine = build_engine(load="random", shape="tiny-llama", threads=1, **options)
    try:
        config = engine.scheduler.config
        clock = VirtualClock()
        virtual = VirtualExecutor(clock, Charged(H200, clock))
        plans = [_plans(config, executor, overlap) for executor in (engine.executor, virtual)]
    finally:
        engine.close()
    real, simulated = plans
    assert len(real) == len(simulated) > 20
    for one, other in zip(real, simulated, strict=True):
        for name in ("slots", "starts", "lengths", "samples", "page_slots", "page_indices", "page_ids"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), f"pass {one.step} differs in {name}"
        assert [(join.slot, join.request_id) for join in one.joins] == [(j.slot, j.request_id) for j in other.joins]


def _plans(config: SchedulerConfig, executor: Any, overlap: bool) -> list[Plan]:
    """Requests that come one every second step, on a clock that counts steps: time must not make a difference here."""
    scheduler, steps = Scheduler(config), 0
    kept = Recording(executor, [])
    loop = Loop(scheduler, kept, lambda: float(steps), overlap=overlap)
    tokens = np.random.default_rng(3)
    system = tokens.integers(0, 100, 40)
    coming = [
        Request(f"r{number}", np.concatenate([system[: 40 * (number % 2)], tokens.integers(0, 100, 5 + number)]),
                SamplingParams(max_tokens=3 + number, temperature=0, ignore_eos=True))
        for number in range(10)
    ]  # fmt: skip
    while coming or scheduler.has_work:
        if coming and steps % 2 == 0:
            scheduler.add(coming.pop(0), float(steps))
        loop.step()
        steps += 1
    return kept.plans
