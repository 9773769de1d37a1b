"""A fit recovers the profile of the device that made a recording."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.config import ConfigError, SchedulerConfig, WorkloadConfig
from paceline.engine.executor import Executor, Pending
from paceline.engine.loop import Loop
from paceline.engine.pass_features import FinishedRequests, PassFeatures, read_features
from paceline.engine.recording import Mark, RecordedPass, Recorder, read_recording
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.scheduler import Scheduler
from paceline.scheduler.plan import Finished, Plan
from paceline.simulator.fit import Recording, error, fit, halves, non_negative
from paceline.simulator.profile import Profile, load_profile
from paceline.simulator.replay import recorded_config, replay, replay_held_out, span_of
from paceline.simulator.run import simulate
from paceline.simulator.workloads import SIZES, make_workload

TRUTH = load_profile("h200-qwen3-0.6b")


# With a long launch time, passes with few prompt tokens only wait for their launch.
QUICK, SLOW = (msgspec.structs.replace(TRUTH, launch_s=seconds) for seconds in (0.0005, 0.01))


class Device:
    """A toy device with the timing of `profile` plus `noise`. As on a real one, the host works before a launch."""

    def __init__(self, profile: Profile, clock: VirtualClock, noise: float, compile_s: float) -> None:
        self._profile, self._clock, self._noise, self._compile_s = profile, clock, noise, compile_s
        self._rng = np.random.default_rng(0)
        self._ended = FinishedRequests()
        self.virtual = VirtualExecutor(clock, self, launching=self.launching)
        self.launched: Executor = self.virtual

    def ended(self, finished: Sequence[Finished]) -> None:
        self._ended = FinishedRequests.of(one.request for one in finished)

    def launch(self, plan: Plan) -> Pending:
        self._clock.advance(self._profile.host_s(self._features(plan), self._ended))
        self._ended = FinishedRequests()
        return self.launched.launch(plan)

    def of(self, plan: Plan) -> float:
        return self._profile.device_s(self._features(plan)) * float(self._rng.normal(1, self._noise))

    def launching(self, plan: Plan) -> float:
        compiling = self._compile_s if plan.step < 5 else 0.0
        return compiling + (self._profile.launch_s if plan.num_prefill_tokens else 0.0)

    def _features(self, plan: Plan) -> PassFeatures:
        return read_features(plan, self._profile.buckets)


def record(
    path: Path,
    *,
    profile: Profile = QUICK,
    noise: float = 0.0,
    requests: int = 400,
    gap_s: float = 0.0,
    runs: int = 1,
    compile_s: float = 0.0,
) -> None:
    """Records the toy device, whose first launches take `compile_s` longer. Requests of a run arrive before its first
    pass."""
    clock = VirtualClock()
    offline = {"max_wait": math.inf, "itl_target": math.inf}  # as in LLM.generate
    scheduler = Scheduler(SchedulerConfig(num_pages=4000, max_running=96, **offline))
    device = Device(profile, clock, noise, compile_s)
    recorder = Recorder(path, scheduler, clock, device="toy", model="toy", overlap="on", buckets=profile.buckets)
    device.launched = recorder.watch(device.virtual)
    loop = Loop(scheduler, device, clock)
    for run in range(runs):
        work = WorkloadConfig(requests=requests, arrivals="once", prompt_tokens=300, output_tokens=60, seed=run)
        recorder.mark(f"run {run}")
        clock.advance(0.001)
        for index, one in enumerate(make_workload("prefixes", work)):
            scheduler.add(dataclasses.replace(one, id=f"{run}-{index}").request(), clock())
            clock.advance(gap_s)
        while scheduler.has_work:
            output = loop.step()
            assert output is not None, "there is work"
            device.ended(output.updates.finished)
        recorder.mark(f"end of run {run}")
        clock.advance(1.0)
    recorder.close()


def test_a_fit_to_a_noisy_recording_predicts_its_device(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", noise=0.03)
    read = Recording.read(tmp_path / "run.jsonl")
    fitted = fit([read], "run")
    assert abs(fitted.held_out["all"].total) < 0.02
    assert fitted.held_out["all"].mean_absolute < 0.06
    truth = error(QUICK.device_s, read.passes), error(fitted.profile.device_s, read.passes)
    assert truth[1].predicted_s == pytest.approx(truth[0].predicted_s, rel=0.01)
    (run,) = replay(tmp_path / "run.jsonl", read, fitted.profile)
    assert run.simulated_passes == pytest.approx(run.measured_passes, rel=0.01)
    assert abs(run.total_error) < 0.05
    assert abs(run.pass_error) < 0.03


def test_a_fit_recovers_the_host_times(tmp_path: Path) -> None:
    """Per step, per finished request, and of launches that overlap with the device."""
    record(tmp_path / "run.jsonl", profile=SLOW)
    read = Recording.read(tmp_path / "run.jsonl")
    found = fit([read], "run").profile
    assert found.launch_s == pytest.approx(SLOW.launch_s, rel=0.02)
    assert sum(one.num_requests for one in read.ended.values()) > 300, "all but the last ones finish before a launch"
    for one in read.passes:
        ended = read.ended.get(one.step, FinishedRequests())
        assert found.host_s(one.features, ended) == pytest.approx(SLOW.host_s(one.features, ended), rel=0.05, abs=1e-4)


def test_a_fit_recovers_what_a_shared_prefix_costs(tmp_path: Path) -> None:
    """A fixed cost of each CUDA graph. In every second pass no row shares anything."""
    truth = msgspec.structs.replace(QUICK, sharing_s=[1e-3 + 1e-5 * bucket for bucket in QUICK.buckets])
    record(tmp_path / "run.jsonl")
    read = Recording.read(tmp_path / "run.jsonl")
    passes = []
    for index, line in enumerate(read.passes):
        features = line.features
        if index % 2:
            alone = features.context_tokens - features.repeated_tokens
            features = msgspec.structs.replace(features, context_tokens=alone, repeated_tokens=0)
        passes.append(msgspec.structs.replace(line, features=features, device_s=truth.device_s(features)))
    fitted = fit([dataclasses.replace(read, passes=passes)], "run").profile
    for one in (line.features for line in passes if not line.features.has_prompts):
        assert fitted.device_s(one) == pytest.approx(truth.device_s(one), rel=0.02)
        index = truth.buckets.index(one.bucket)
        assert fitted.sharing_s[index] == pytest.approx(truth.sharing_s[index], rel=0.1)


def test_a_graph_that_always_shares_takes_at_least_as_long_as_a_smaller_one(tmp_path: Path) -> None:
    """What sharing costs in other graphs is charged there first, and may be more than it costs."""
    last = QUICK.buckets.index(96)
    costs = [3e-4 if bucket == 96 else 8e-4 for bucket in QUICK.buckets]
    truth = msgspec.structs.replace(QUICK, sharing_s=costs)
    record(tmp_path / "run.jsonl")
    read = Recording.read(tmp_path / "run.jsonl")
    passes = []
    for index, line in enumerate(read.passes):
        features = line.features
        if index % 2 and features.bucket != 96:
            features = msgspec.structs.replace(features, context_tokens=features.own_tokens, repeated_tokens=0)
        passes.append(msgspec.structs.replace(line, features=features, device_s=truth.device_s(features)))
    fitted = fit([dataclasses.replace(read, passes=passes)], "run").profile
    assert fitted.bucket_s[last] >= max(fitted.bucket_s[:last]) > 0
    shared = [line.features for line in passes if line.features.bucket == 96 and not line.features.has_prompts]
    assert len(shared) > 20
    for one in shared:
        assert fitted.device_s(one) == pytest.approx(truth.device_s(one), rel=0.05)


def test_passes_that_wait_for_their_launch_do_not_count_as_errors(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", profile=SLOW)
    read = Recording.read(tmp_path / "run.jsonl")
    waiting = [
        one for one in read.passes if one.features.has_prompts and (one.device_s or 0) > 2 * SLOW.device_s(one.features)
    ]
    assert len(waiting) > 10, "their device time is the launch's"
    assert fit([read], "run").held_out["prefill or mixed"].mean_absolute < 0.05


def test_a_run_that_compiles_kernels_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, runs=2, compile_s=0.3, requests=400)
    read = Recording.read(path)
    assert [(run.name, run.compiles) for run in read.runs] == [("run 0", True), ("run 1", False)]
    warm = read.warm()
    assert [run.name for run in warm.runs] == ["run 1"]
    cold = read.only(read.runs[:1])
    assert cold.warm() == cold, "a cold run is used if there is no other"
    assert {one.step for one in warm.passes} < {one.step for one in read.passes}
    for one in replay(path, warm, fit([warm], "run").profile):
        assert abs(one.total_error) < 0.02 and abs(one.pass_error) < 0.03


@pytest.mark.parametrize(("launch_s", "compiles"), [(0.1, False), (1.0, True)])
def test_a_long_launch_counts_as_compiling_only_if_the_device_waits(
    tmp_path: Path, launch_s: float, compiles: bool
) -> None:
    """Prefill batches of the 14B take 0.1 to 0.4 s: they hide a launch of 0.1 s, but not one of 1 s."""
    record(tmp_path / "run.jsonl", profile=load_profile("h200-qwen3-14b"), runs=3, compile_s=launch_s)
    read = Recording.read(tmp_path / "run.jsonl")
    assert max(one.launch_s for one in read.passes if one.at in read.runs[0]) > launch_s
    assert [run.compiles for run in read.runs] == [compiles, False, False]


@pytest.mark.parametrize(("launch_s", "device_s", "compiles"), [(0.15, 0.103, False), (1.0, 1.0, True)])
def test_a_long_launch_of_a_unique_pass_is_compared_with_the_nearest_size(
    tmp_path: Path, launch_s: float, device_s: float, compiles: bool
) -> None:
    """The third has 2,142 prompt tokens; the second has 8,184, and the others fewer than 1,024."""
    path = tmp_path / "run.jsonl"
    record(path, profile=load_profile("h200-qwen3-14b"))
    lines = list(read_recording(path))
    (index,) = (at for at, line in enumerate(lines) if isinstance(line, RecordedPass) and line.step == 3)
    lines[index] = msgspec.structs.replace(lines[index], launch_s=launch_s, device_s=device_s)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert [run.compiles for run in Recording.read(path).runs] == [compiles]


def test_complete_runs_of_a_truncated_recording_are_used(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, runs=2, requests=200)
    whole = Recording.read(path)
    text = path.read_bytes()
    path.write_bytes(text[: text.index(b'"end of run 1"') - 3000])  # in the middle of a line
    cut = Recording.read(path)
    assert [run.name for run in cut.runs] == ["run 0"] and cut.cut_off == ["run 1"]
    assert len(cut.warm().passes) < len(cut.passes) < len(whole.passes)
    assert fit([cut.warm()], "run") == fit([whole.only(whole.runs[:1])], "run")
    assert [one.name for one in replay(path, cut.warm(), QUICK)] == ["run 0"]


def test_the_only_run_of_a_truncated_recording_is_used(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path)
    text = path.read_bytes()
    path.write_bytes(text[: text.index(b'"end of run 0"') - 3000])
    cut = Recording.read(path)
    assert cut.runs == [] and cut.warm() == cut
    assert fit([cut.warm()], "run").held_out["all"].mean_absolute < 0.01


def test_both_halves_have_runs_of_each_workload(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, runs=5, requests=10)
    names = ["nano 0", "gsp 0", "sweep 1 0", "gsp 1", "sweep 1 1"]
    read = Recording.read(path)
    read = read.only(dataclasses.replace(run, name=name) for run, name in zip(read.runs, names, strict=True))
    first, second = halves([read])
    assert [run.name for run in first[0].runs] == ["nano 0", "gsp 0", "sweep 1 0"]
    assert [run.name for run in second[0].runs] == ["gsp 1", "sweep 1 1"]


def test_a_run_is_held_out_by_a_fit_to_the_others(tmp_path: Path) -> None:
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    record(paths[0], runs=3, noise=0.03, requests=200)
    record(paths[1], runs=2, noise=0.03, requests=200)
    read = [Recording.read(path) for path in paths]
    first, second = halves(read)
    assert [[run.name for run in one.runs] for one in first] == [["run 0", "run 2"], ["run 1"]]
    assert [[run.name for run in one.runs] for one in second] == [["run 1"], ["run 0"]]
    assert all(sum(line.at in run for run in one.runs) == 1 for one in first for line in one.passes)
    found = replay_held_out(paths, read)
    assert [one.name for one in found] == ["run 0", "run 1", "run 2", "run 0", "run 1"]
    third = replay(paths[0], read[0].only(read[0].runs[2:]), fit(second, "others").profile)
    assert found[2] == third[0], "the third is simulated by what the second and fourth say"
    assert all(abs(one.total_error) < 0.05 and abs(one.pass_error) < 0.03 for one in found)
    assert replay_held_out(paths[:1], [read[0].only(read[0].runs[:1])]) == [], "one run cannot be held out"


def test_requests_before_the_first_pass_are_replayed_together(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", requests=12, gap_s=0.05)
    (run,) = replay(tmp_path / "run.jsonl", Recording.read(tmp_path / "run.jsonl"), QUICK)
    assert run.simulated_passes == run.measured_passes


def test_a_replay_waits_where_the_caller_waited(tmp_path: Path) -> None:
    """Two turns within one run are each simulated faster than recorded if the profile is that of a faster device, and
    as far apart as recorded."""
    path = tmp_path / "run.jsonl"
    record(path, runs=2, requests=100)
    faster = msgspec.structs.replace(QUICK, bucket_s=[seconds / 2 for seconds in QUICK.bucket_s])
    apart = replay(path, Recording.read(path), faster)
    lines = []
    for line in read_recording(path):
        if not isinstance(line, Mark) or line.name == "run 0":
            lines.append(line)
        elif line.name == "end of run 1":
            lines.append(msgspec.structs.replace(line, name="end of run 0"))
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    (whole,) = replay(path, Recording.read(path), faster)
    gap_s = whole.measured_s - sum(one.measured_s for one in apart)
    assert gap_s == pytest.approx(1.0, abs=0.01)
    assert all(one.total_error < -0.1 for one in apart)
    assert whole.simulated_s == pytest.approx(sum(one.simulated_s for one in apart) + gap_s, rel=0.005)
    assert whole.simulated_passes == sum(one.simulated_passes for one in apart)


H200 = Path(__file__).parent / "data" / "h200-qwen3-0.6b.jsonl.gz"  # a run of nano and one of gsp; see cut_data.py


def test_held_out_passes_of_an_h200_are_predicted() -> None:
    found = fit([Recording.read(H200)], "H200").held_out
    assert abs(found["all"].total) < 0.01
    assert found["decode"].mean_absolute < 0.02
    assert found["decode, shared prefix"].mean_absolute < 0.03
    assert found["prefill or mixed"].mean_absolute < 0.10


@pytest.mark.parametrize("name", ["nano", "gsp"])
def test_the_shipped_profile_predicts_whole_runs(name: str) -> None:
    """Simulated from the workload alone: total time within 5% of the H200, a pass within 3%."""
    read = Recording.read(H200)
    (run,) = (run for run in read.runs if run.name.startswith(name))
    first, last = span_of(read, run)
    found = simulate(make_workload(name, WorkloadConfig(requests=SIZES[name])), recorded_config(read.header), TRUTH)
    passes = [one for one in read.passes if one.at in run]
    # Admission divides a pass a little differently than when it was recorded.
    assert found.passes == pytest.approx(len(passes), rel=0.01)
    assert found.seconds == pytest.approx(last - first, rel=0.05)
    measured = sum(one.device_s or 0.0 for one in passes) / len(passes)
    assert found.busy_s / found.passes == pytest.approx(measured, rel=0.03)


def test_the_shipped_14b_predicts_nano() -> None:
    """Two recorded runs took 21.78 and 21.61 s, 1,024 passes each, 21.20 and 21.10 ms a pass on the device."""
    offline = {"max_wait": math.inf, "itl_target": math.inf}
    config = SchedulerConfig(num_pages=40_427, max_running=256, context_tokens=40_960, **offline)
    work = make_workload("nano", WorkloadConfig(requests=SIZES["nano"]))
    found = simulate(work, config, load_profile("h200-qwen3-14b"))
    assert found.passes == 1024
    assert found.seconds == pytest.approx(20.87, rel=0.05)
    assert found.busy_s / found.passes == pytest.approx(20.37e-3, rel=0.03)


def test_a_profile_round_trips_through_a_file(tmp_path: Path) -> None:
    TRUTH.save(tmp_path / "mine.json")
    found = load_profile(str(tmp_path / "mine.json"))
    assert isinstance(found, Profile)
    assert found == TRUTH


def test_least_squares_without_negative_coefficients() -> None:
    rng = np.random.default_rng(0)
    features = rng.uniform(0, 1, (200, 4)) * [1, 1e3, 1e-6, 10]
    exact = np.array([2.0, 0.003, 5e4, 0.0])
    assert non_negative(features, features @ exact) == pytest.approx(exact, abs=1e-6)
    # Where the unconstrained fit has negative coefficients: the KKT conditions hold.
    scale = features.max(0)
    target = features @ np.array([2.0, -0.001, 5e4, 0.1])
    found = non_negative(features, target)
    gain = (features / scale).T @ (target - features @ found)
    assert (found >= 0).all() and (found == 0).any() and (found > 0).any()
    assert gain[found > 0] == pytest.approx(0, abs=1e-8)
    assert (gain[found == 0] <= 1e-8).all()


def test_a_recording_that_is_too_short_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", requests=1)
    with pytest.raises(ConfigError, match="a fit needs 20 and 5"):
        fit([Recording.read(tmp_path / "run.jsonl")], "run.jsonl")
    with pytest.raises(ConfigError, match=r"gpu is 'h100': choose one of h200-qwen3-0\.6b"):
        load_profile("h100")
