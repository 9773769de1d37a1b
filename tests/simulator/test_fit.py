"""A fit finds the device that made the recording."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from paceline.config import ConfigError, SchedulerConfig, WorkloadConfig
from paceline.engine.loop import Loop
from paceline.engine.recording import Recorder
from paceline.engine.virtual import VirtualClock, VirtualExecutor
from paceline.scheduler import Scheduler
from paceline.simulator.fit import Recording, error, fit, non_negative
from paceline.simulator.profile import Charged, Profile, load_profile
from paceline.simulator.replay import recorded_config, replay
from paceline.simulator.run import simulate
from paceline.simulator.workloads import SIZES, make_workload

TRUTH = load_profile("h200-qwen3-0.6b")


def record(path: Path, *, noise: float = 0.0, requests: int = 400, gap_s: float = 0.0) -> None:
    """A recording of the virtual GPU itself, its times shaken by `noise`. All is added before the first pass."""
    clock, rng = VirtualClock(), np.random.default_rng(0)
    config = SchedulerConfig(num_pages=4000, max_running=96, max_wait=math.inf)
    scheduler = Scheduler(config)

    class Shaken(Charged):
        def of(self, plan: object) -> float:
            return super().of(plan) * float(rng.normal(1, noise))  # type: ignore[arg-type]

    executor = VirtualExecutor(clock, Shaken(TRUTH, clock))
    recorder = Recorder(path, scheduler, clock, device="toy", model="toy", overlap="on", buckets=TRUTH.buckets)
    work = WorkloadConfig(requests=requests, arrivals="once", prompt_tokens=300, output_tokens=60)
    recorder.mark("all")
    for one in make_workload("prefixes", work):
        scheduler.add(one.request(), clock())
        clock.advance(gap_s)
    Loop(scheduler, recorder.watch(executor), clock).drain()
    recorder.mark("end of all")
    recorder.close()


def test_a_noisy_recording_gives_the_times_of_its_device(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", noise=0.03)
    read = Recording.read(tmp_path / "run.jsonl")
    fitted = fit([read], "run")
    assert abs(fitted.held_out["all"].total) < 0.02
    assert fitted.held_out["all"].mean_absolute < 0.06
    truth = error(TRUTH.device_s, read.passes), error(fitted.profile.device_s, read.passes)
    assert truth[1].predicted_s == pytest.approx(truth[0].predicted_s, rel=0.01)
    (run,) = replay(tmp_path / "run.jsonl", read, fitted.profile)
    assert run.simulated_passes == pytest.approx(run.measured_passes, rel=0.01)
    assert abs(run.total_error) < 0.05
    assert abs(run.pass_error) < 0.03


def test_what_came_before_the_first_pass_is_replayed_as_planned_with_it(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", requests=12, gap_s=0.05)
    (run,) = replay(tmp_path / "run.jsonl", Recording.read(tmp_path / "run.jsonl"), TRUTH)
    assert run.simulated_passes == run.measured_passes


H200 = Path(__file__).parent / "data" / "h200-qwen3-0.6b.jsonl.gz"  # one run of nano and one of gsp, their passes alone


def test_held_out_passes_of_an_h200_are_predicted() -> None:
    found = fit([Recording.read(H200)], "H200").held_out
    assert abs(found["all"].total) < 0.01
    assert found["decodes"].mean_absolute < 0.02
    assert found["decodes that share a prefix"].mean_absolute < 0.03
    assert found["with prompts"].mean_absolute < 0.10


@pytest.mark.parametrize(("name", "seconds"), [("nano", 4.973), ("gsp", 6.762)])
def test_the_shipped_profile_predicts_whole_runs(name: str, seconds: float) -> None:
    """Simulated from the workload alone, against what the H200 took: all of it within 5%, a pass within 3%."""
    read = Recording.read(H200)
    config = recorded_config(read.header)
    found = simulate(make_workload(name, WorkloadConfig(requests=SIZES[name])), config, TRUTH)
    shares = name == "gsp"
    passes = [one for one in read.passes if (one.step > 4000) == shares]
    assert found.passes == len(passes)
    assert found.seconds == pytest.approx(seconds, rel=0.05)
    measured = sum(one.device_s or 0.0 for one in passes) / len(passes)
    assert found.busy_s / found.passes == pytest.approx(measured, rel=0.03)


def test_a_profile_survives_being_saved(tmp_path: Path) -> None:
    TRUTH.save(tmp_path / "mine.json")
    found = load_profile(str(tmp_path / "mine.json"))
    assert isinstance(found, Profile)
    assert (found.buckets, found.decode.per, found.host) == (TRUTH.buckets, TRUTH.decode.per, TRUTH.host)


def test_least_squares_without_negative_coefficients() -> None:
    rng = np.random.default_rng(0)
    features = rng.uniform(0, 1, (200, 4)) * [1, 1e3, 1e-6, 10]
    exact = np.array([2.0, 0.003, 5e4, 0.0])
    assert non_negative(features, features @ exact) == pytest.approx(exact, abs=1e-6)
    # Where the best fit would have negative ones: nothing is gained by raising a zero or moving another.
    scale = features.max(0)
    target = features @ np.array([2.0, -0.001, 5e4, 0.1])
    found = non_negative(features, target)
    gain = (features / scale).T @ (target - features @ found)
    assert (found >= 0).all() and (found == 0).any() and (found > 0).any()
    assert gain[found > 0] == pytest.approx(0, abs=1e-8)
    assert (gain[found == 0] <= 1e-8).all()


def test_too_little_to_fit_is_said(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", requests=1)
    with pytest.raises(ConfigError, match="a fit needs 20 and 5"):
        fit([Recording.read(tmp_path / "run.jsonl")], "run.jsonl")
    with pytest.raises(ConfigError, match=r"gpu is 'h100': choose one of h200-qwen3-0\.6b"):
        load_profile("h100")
