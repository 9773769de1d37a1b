"""KV offloading on a virtual GPU: copies to and from host memory take time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.cli.sim import app
from paceline.config import ConfigError, WorkloadConfig
from paceline.engine.executor import Executor
from paceline.engine.loop import Loop
from paceline.engine.recording import RecordedPass, Recorder, read_recording
from paceline.engine.virtual.executor import HostLink, VirtualClock, VirtualExecutor
from paceline.scheduler import Plan, Scheduler
from paceline.scheduler.plan import Swap
from paceline.simulator.compare import scheduler_config
from paceline.simulator.fit import Recording, fit
from paceline.simulator.profile import ProfileTiming, keep_measured, load_profile
from paceline.simulator.replay import recorded_config, replay
from paceline.simulator.run import SimulationResult, simulate
from paceline.simulator.workloads import make_workload

H200 = load_profile("h200-qwen3-14b")


def swap(spills: list[int], fetches: list[int]) -> Swap:
    none = np.empty(0, np.int32)
    ids = {name: np.array(hosts, np.int32) if hosts else none for name, hosts in (("s", spills), ("f", fetches))}
    return Swap(ids["s"], ids["s"], ids["f"], ids["f"])


def test_spills_delay_a_pass_only_when_both_buffers_are_full() -> None:
    link = HostLink(1.0)
    assert link.starts(swap([0, 1, 2], []), now=10.0, idle_from=5.0) == 10.0  # spills until 13
    assert link.starts(swap([3], []), now=10.0, idle_from=11.0) == 11.0  # behind it, until 14
    assert link.starts(swap([4], []), now=11.0, idle_from=12.0) == 13.0, "the first buffer is empty then"


def test_a_pass_waits_for_its_fetches_which_overlap_with_the_previous_pass() -> None:
    link = HostLink(1.0)
    link.starts(swap([0, 1], []), now=0.0, idle_from=0.0)
    assert link.starts(swap([], [0, 1]), now=10.0, idle_from=15.0) == 15.0, "it has been fetched by then"
    assert link.starts(swap([], [0, 1]), now=20.0, idle_from=15.0) == 22.0
    assert link.starts(swap([], [0]), now=20.0, idle_from=22.5) == 23.0, "one after the other"


def test_a_fetch_waits_for_the_spill_of_the_same_page() -> None:
    link = HostLink(1.0)
    link.starts(swap([0, 1, 2, 3], []), now=0.0, idle_from=0.0)
    assert link.starts(swap([], [3]), now=1.0, idle_from=1.0) == 5.0


def run(num_host_pages: int, profile: Any = H200, **options: Any) -> SimulationResult:
    """Conversations in a KV cache too small for them."""
    work = WorkloadConfig(requests=60, rate=1.0, prompt_tokens=3000, shared=0.1, output_tokens=100, seed=2)
    arrivals = make_workload("chat", work)
    config = scheduler_config(arrivals, profile, {"num_pages": 1200, "num_host_pages": num_host_pages, **options})
    return simulate(arrivals, config, profile)


def test_host_memory_lowers_ttft_unless_the_link_is_slow() -> None:
    one, two, without = run(8000), run(8000), run(0)
    assert one.journal == two.journal and one.summary() == two.summary()
    assert one.counters.fetched_tokens > 0 == without.counters.fetched_tokens
    assert one.counters.computed_tokens < 0.8 * without.counters.computed_tokens
    assert sum(one.ttft) < 0.8 * sum(without.ttft)
    slow = msgspec.structs.replace(H200, swap_token_s=100 * (H200.swap_token_s or 0.0))
    assert sum(run(8000, slow, host_page_cost=1.0).ttft) > 2 * sum(without.ttft)


def test_a_link_so_slow_that_nothing_is_worth_fetching_is_refused() -> None:
    slow = msgspec.structs.replace(H200, swap_token_s=1e-2)
    with pytest.raises(ConfigError, match="is faster to recompute than to fetch"):
        run(8000, slow)


def test_a_profile_without_a_link_is_refused_with_host_memory() -> None:
    unknown = msgspec.structs.replace(H200, swap_token_s=None)
    with pytest.raises(ConfigError, match=r"has no swap_token_s .*: set it, or fit the profile"):
        run(8000, unknown)
    assert run(0, unknown).counters.fetched_tokens == 0


def test_shipped_profiles_have_the_link_that_was_measured() -> None:
    for name, kv_bytes, rate in (("h200-qwen3-0.6b", 114_688, 52.5e9), ("h200-qwen3-14b", 163_840, 51.4e9)):
        profile = load_profile(name)
        assert profile.swap_token_s == pytest.approx(kv_bytes / rate, rel=0.01)
        assert "measured" in profile.swap_source


class Timed(Executor):
    """A virtual executor that reports the time of its fetches, as a GPU does."""

    def __init__(self, executor: VirtualExecutor, page_s: float) -> None:
        self._executor, self._page_s = executor, page_s

    def launch(self, plan: Plan) -> Any:
        pending = self._executor.launch(plan)
        count = 0 if plan.swap is None else len(plan.swap.fetch_pages)
        pending.result = pending.result._replace(fetch_s=count * self._page_s if count else None)
        return pending


def test_a_fit_finds_the_speed_of_the_link(tmp_path: Path) -> None:
    path, clock = tmp_path / "rec.jsonl", VirtualClock()
    work = WorkloadConfig(requests=80, rate=2.0, prompt_tokens=3000, shared=0.1, output_tokens=40, seed=2)
    arrivals = make_workload("chat", work)
    config = scheduler_config(arrivals, H200, {"num_pages": 1200, "num_host_pages": 8000, "max_swap_pages": 64})
    scheduler, timing = Scheduler(config), ProfileTiming(H200, clock)
    executor = VirtualExecutor(clock, timing, launching=timing.launching, link=HostLink(H200.swap_page_s(16)))
    recorder = Recorder(path, scheduler, clock, device="toy", model="toy", overlap="on", buckets=H200.buckets)
    loop = Loop(scheduler, recorder.watch(Timed(executor, H200.swap_page_s(16))), clock)
    for arrival in arrivals:
        scheduler.add(arrival.request(), clock())
        loop.drain()
    recorder.close()
    lines = [line for line in read_recording(path) if isinstance(line, RecordedPass)]
    assert sum(line.features.num_fetched_pages for line in lines) * 16 == scheduler.counters.fetched_tokens > 0
    assert sum(line.features.num_spilled_pages for line in lines) == scheduler.counters.spilled_pages > 0
    recording = Recording.read(path)
    assert recorded_config(recording.header) == config
    found = fit([recording], "toy").profile
    assert found.swap_token_s == pytest.approx(H200.swap_token_s)
    assert found.swap_source == "measured: toy"


def test_a_recording_of_a_device_that_does_not_time_its_fetches_is_replayed(tmp_path: Path) -> None:
    path, clock = tmp_path / "rec.jsonl", VirtualClock()
    work = WorkloadConfig(requests=40, rate=2.0, prompt_tokens=3000, shared=0.1, output_tokens=40, seed=2)
    arrivals = make_workload("chat", work)
    config = scheduler_config(arrivals, H200, {"num_pages": 1200, "num_host_pages": 8000})
    scheduler, timing = Scheduler(config), ProfileTiming(H200, clock)
    executor = VirtualExecutor(clock, timing, launching=timing.launching)
    recorder = Recorder(path, scheduler, clock, device="toy", model="toy", overlap="on", buckets=H200.buckets)
    loop = Loop(scheduler, recorder.watch(executor), clock)
    recorder.mark("chats")
    for arrival in arrivals:
        scheduler.add(arrival.request(), clock())
        loop.drain()
    recorder.mark("end of chats")
    recorder.close()
    recording = Recording.read(path)
    profile = fit([recording], "toy").profile
    assert scheduler.counters.fetched_tokens > 0 and profile.swap_token_s is None
    (replayed,) = replay(path, recording, profile)
    assert replayed.measured_passes > 0


def test_saving_a_fit_without_fetches_keeps_the_stored_link(tmp_path: Path) -> None:
    path, fitted = tmp_path / "gpu.json", msgspec.structs.replace(H200, swap_token_s=None, swap_source="")
    assert keep_measured(fitted, path).swap_token_s is None
    H200.save(path)
    assert keep_measured(fitted, path) == H200
    measured = msgspec.structs.replace(H200, swap_token_s=1.0, swap_source="measured: now")
    assert keep_measured(measured, path) == measured
    path.write_text("no profile")
    with pytest.raises(ConfigError, match=r"gpu\.json exists and is not a profile"):
        keep_measured(fitted, path)


def test_sim_run_accepts_host_memory() -> None:
    from typer.testing import CliRunner

    options = ["--requests", "30", "--prompt-tokens", "2000", "--num-pages", "500", "--gpu", "h200-qwen3-14b"]
    said = CliRunner().invoke(app, ["run", "chat", *options, "--num-host-pages", "4000"])
    assert said.exit_code == 0, said.output
    (line,) = (line for line in said.output.splitlines() if "fetch_rate" in line)
    assert float(line.split("│")[2]) > 0
