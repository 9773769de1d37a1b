"""Speculative decoding in the simulator: deterministic, charged by the profile, and replayed as it was recorded."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.cli.sim import app, split_options
from paceline.config import ConfigError, SchedulerConfig, WorkloadConfig
from paceline.engine.loop import Loop
from paceline.engine.pass_features import PassFeatures
from paceline.engine.recording import RecordedRequest, Recorder, read_recording
from paceline.engine.virtual.drafts import DraftVerifier, RandomDrafts
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.scheduler import Scheduler
from paceline.simulator.compare import Comparison, scheduler_config
from paceline.simulator.drafts import DraftScript
from paceline.simulator.fit import Recording, fit, fit_drafts
from paceline.simulator.profile import Profile, ProfileTiming, keep_measured, load_profile
from paceline.simulator.replay import replay
from paceline.simulator.run import SimulationResult, simulate
from paceline.simulator.traces import read_trace
from paceline.simulator.workloads import make_workload

H200 = load_profile("h200-qwen3-14b")
UNMEASURED = msgspec.structs.replace(H200, draft_s={})
QUICK = msgspec.structs.replace(UNMEASURED, launch_s=0.0005)
WORK = WorkloadConfig(requests=40, rate=100, prompt_tokens=200, output_tokens=40, groups=4)


def run(acceptance: float | None = 0.7, *, overlap: bool = True, **options: Any) -> SimulationResult:
    arrivals = make_workload("prefixes", WORK)
    settings = {"num_pages": 200, "max_running": 8, "draft_tokens": 4} | options
    return simulate(arrivals, SchedulerConfig(**settings), H200, overlap=overlap, acceptance=acceptance)


def test_the_same_acceptance_gives_the_same_decisions() -> None:
    one, two, other = run(), run(), run(0.3)
    assert one.journal == two.journal and one.served == two.served and one.summary() == two.summary()
    assert one.journal != other.journal


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_give_the_same_outputs_in_fewer_passes(overlap: bool) -> None:
    plain, drafted = run(draft_tokens=0, overlap=overlap), run(overlap=overlap)
    assert [one.output_tokens for one in drafted.served] == [one.output_tokens for one in plain.served]
    assert drafted.passes < 0.8 * plain.passes and drafted.seconds < plain.seconds
    summary, counters = drafted.summary(), drafted.counters
    assert (summary["drafted_tokens"], summary["accepted_tokens"]) == (
        counters.drafted_tokens,
        counters.accepted_tokens,
    )
    assert summary["tokens_per_decode"] == pytest.approx(2.7, abs=0.4), "1 + 0.7 + 0.49 + 0.343 + 0.24"
    assert "drafted_tokens" not in plain.summary()


def test_a_comparison_has_the_acceptance_of_a_single_run() -> None:
    arrivals = make_workload("prefixes", WORK)
    config = SchedulerConfig(num_pages=200, max_running=8, draft_tokens=4)
    with Comparison(arrivals, H200, acceptance=0.3, processes=1) as comparison:
        ((_, found),) = comparison.runs({"fair": config})
    assert found.journal == run(0.3).journal


def test_a_decode_batch_of_all_drafts_fits_into_a_pass() -> None:
    arrivals = make_workload("prefixes", WORK)
    assert scheduler_config(arrivals, H200, {"max_running": 2000, "draft_tokens": 7}).max_batch_tokens == 16_000
    assert scheduler_config(arrivals, H200, {"draft_tokens": 63}).max_batch_tokens == 64 * SchedulerConfig().max_running


# ---------------------------------------------------------------------- the time of drafts


def features(rows: int, num_drafts: int, num_prompts: int = 0) -> PassFeatures:
    bucket = 0 if num_prompts else next((size for size in H200.buckets if size >= rows), rows)
    return PassFeatures(rows, num_prompts, 10 * num_prompts, rows, bucket, 100 * rows, 0, 100, 0, 0, 0, 0, 0,
                        num_drafts=num_drafts)  # fmt: skip


@pytest.mark.parametrize("rows", [1, 8, 48, 100, 256, 512, 600])
def test_a_draft_is_cheaper_than_a_row_and_never_free_of_cost_in_a_large_batch(rows: int) -> None:
    """Where their time was not measured. Unlike a prompt token, a row has logits."""
    token_s = UNMEASURED.prompt.per["num_prompt_tokens"]
    before = UNMEASURED.device_s(features(rows, 0))
    for drafts in (rows, 4 * rows, 7 * rows):
        more_s = UNMEASURED.device_s(features(rows, drafts)) - before
        assert 0 <= more_s <= drafts * token_s * 1.7 + 0.1 * before, "graphs of few rows differ by noise"
        last = UNMEASURED.buckets[-1]
        if rows + drafts > last:
            assert more_s >= (rows + drafts - max(rows, last)) * token_s * 0.99, (
                "past the weights, compute is the limit"
            )


def test_beside_prompts_a_draft_takes_as_long_as_a_prompt_token() -> None:
    more_s = H200.device_s(features(8, 32, 1)) - H200.device_s(features(8, 0, 1))
    assert more_s == pytest.approx(32 * H200.prompt.per["num_prompt_tokens"])


def planted(profile: Profile) -> Profile:
    """A device that charges more for drafts than for rows, and not in proportion."""
    times = {depth: [1e-3 * depth**0.5 + 1e-4 * rows for rows in profile.buckets] for depth in (2, 4)}
    return msgspec.structs.replace(profile, draft_s=times)


def test_drafts_add_the_time_of_their_graph() -> None:
    profile = planted(H200)
    assert profile.device_s(features(64, 0)) == H200.device_s(features(64, 0))
    added = {drafts: profile.device_s(features(64, drafts)) - profile.device_s(features(64, 0)) for drafts in
             (32, 64, 128, 192, 256, 448)}  # fmt: skip
    index = H200.buckets.index(64)
    two, four = (profile.draft_s[depth][index] for depth in (2, 4))
    assert added[128] == pytest.approx(two) and added[256] == pytest.approx(four)
    assert added[192] == pytest.approx((two + four) / 2) and added[64] == pytest.approx(two / 2), "interpolated"
    more_s = H200.draft_rows_s(64, 448) - H200.draft_rows_s(64, 256)
    assert added[448] == pytest.approx(four + more_s) and more_s > 0, "deeper than measured: as more rows"
    assert sorted(added.values()) == list(added.values())


def test_more_rows_than_any_graph_has_are_charged_as_without_a_table() -> None:
    assert planted(H200).device_s(features(600, 1200)) == UNMEASURED.device_s(features(600, 1200))


def record(path: Path, draft_tokens: int, profile: Profile, seed: int = 0, chance: float = 0.5) -> SimulationResult:
    """Records a device with the timing of `profile`."""
    clock, size = VirtualClock(), 24
    scheduler = Scheduler(
        SchedulerConfig(num_pages=2000, max_running=size, draft_tokens=draft_tokens, itl_target=math.inf)
    )
    drafts = DraftVerifier(size, RandomDrafts(size, chance)) if draft_tokens else None
    timing = ProfileTiming(profile, clock)
    device = VirtualExecutor(clock, timing, launching=timing.launching, drafts=drafts)
    recorder = Recorder(path, scheduler, clock, device="toy", model="toy", overlap="on", buckets=profile.buckets)
    loop = Loop(scheduler, recorder.watch(device), clock)
    recorder.mark("run")
    clock.advance(0.001)
    work = WorkloadConfig(requests=96, arrivals="once", prompt_tokens=300, output_tokens=60, shared=0.0, seed=seed)
    for one in make_workload("prefixes", work):
        scheduler.add(one.request(), clock())
        clock.advance(1e-5)  # requests that arrive at the same time are recorded in the order in which they finish
    while scheduler.has_work:
        loop.step()
    recorder.mark("end of run")
    recorder.close()
    arrivals = read_trace(path)
    return simulate(arrivals, scheduler.config, profile)


def test_a_fit_recovers_the_time_of_drafts(tmp_path: Path) -> None:
    truth = planted(QUICK)
    read = []
    for depth in (0, 2, 4):
        record(tmp_path / f"{depth}.jsonl", depth, truth)
        read.append(Recording.read(tmp_path / f"{depth}.jsonl"))
    found = fit(read, "all")
    assert sorted(found.profile.draft_s) == [2, 4]
    for depth, times in found.profile.draft_s.items():
        passes = [one.features for one in read[depth // 2].passes]
        full = Counter(one.bucket for one in passes if one.num_drafts == depth * one.num_decodes and one.bucket)
        measured = [rows for rows, count in full.items() if count >= 5]
        assert len(measured) >= 3 and max(measured) == 32
        for rows in measured:
            index = truth.buckets.index(rows)
            assert times[index] == pytest.approx(truth.draft_s[depth][index], rel=0.03), (depth, rows)
        assert times[-1] > times[truth.buckets.index(32)], "larger graphs than were recorded take longer"
    assert found.held_out["with drafts"].mean_absolute < 0.05
    assert fit(read[:1], "plain").profile.draft_s == {}
    with pytest.raises(ConfigError, match="drafts has 0 decode batches and 1 prefill or mixed batches without drafts"):
        fit(read[2:], "drafts")


def test_drafts_alone_are_fitted_on_top_of_a_profile(tmp_path: Path) -> None:
    truth, base = planted(QUICK), msgspec.structs.replace(QUICK, device="toy", model="toy", draft_s={7: [1.0] * 99})
    record(tmp_path / "drafts.jsonl", 4, truth)
    read = Recording.read(tmp_path / "drafts.jsonl")
    found = fit_drafts([read], base, "new")
    times, index = found.profile.draft_s, truth.buckets.index(16)
    assert sorted(times) == [4] and times[4][index] == pytest.approx(truth.draft_s[4][index], rel=1e-3)
    assert found.profile == msgspec.structs.replace(base, draft_s=times, source=f"{base.source}; drafts: new")
    assert found.held_out["with drafts"].mean_absolute < 0.05
    with pytest.raises(ConfigError, match="different devices, models or CUDA graph sizes"):
        fit_drafts([read], QUICK, "new")
    record(tmp_path / "plain.jsonl", 0, truth)
    with pytest.raises(ConfigError, match="new has 0 decode batches with drafts: a fit needs 20"):
        fit_drafts([Recording.read(tmp_path / "plain.jsonl")], base, "new")


def test_a_recording_with_drafts_says_nothing_about_passes_without(tmp_path: Path) -> None:
    """An engine with drafts runs more kernels in them."""
    record(tmp_path / "plain.jsonl", 0, QUICK)
    slower = {term: 1.2 * seconds for term, seconds in QUICK.prompt.per.items()}
    slow = msgspec.structs.replace(QUICK, prompt=msgspec.structs.replace(QUICK.prompt, per=slower))
    record(tmp_path / "drafts.jsonl", 4, slow)
    plain, drafts = (Recording.read(tmp_path / f"{name}.jsonl") for name in ("plain", "drafts"))
    alone, both = fit([plain], "x").profile, fit([plain, drafts], "x").profile
    assert both.draft_s and msgspec.structs.replace(both, draft_s={}) == alone


def test_passes_with_more_tokens_than_the_largest_graph_are_left_out(tmp_path: Path) -> None:
    """An engine has no graph for their drafts and verifies fewer than planned."""
    last = UNMEASURED.buckets.index(32) + 1
    small = msgspec.structs.replace(QUICK, buckets=QUICK.buckets[:last], bucket_s=QUICK.bucket_s[:last])
    record(tmp_path / "plain.jsonl", 0, small)
    record(tmp_path / "drafts.jsonl", 4, small)
    plain, drafts = (Recording.read(tmp_path / f"{name}.jsonl") for name in ("plain", "drafts"))
    beyond = {
        one.step
        for one in drafts.passes
        if one.features.num_drafts == 4 * one.features.num_decodes and one.features.bucket * 5 > 32
    }
    assert len(beyond) > 20
    slow = [
        msgspec.structs.replace(one, device_s=1.2 * (one.device_s or 0.0)) if one.step in beyond else one
        for one in drafts.passes
    ]
    assert fit([plain, drafts], "x") == fit([plain, dataclasses.replace(drafts, passes=slow)], "x")


def test_a_fit_without_drafts_keeps_what_was_measured_before(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    planted(H200).save(path)
    kept = load_profile(str(path)).draft_s
    assert kept[4] == pytest.approx(planted(H200).draft_s[4])
    assert keep_measured(UNMEASURED, path).draft_s == kept
    times = {depth: times[:6] for depth, times in planted(H200).draft_s.items()}
    fewer = msgspec.structs.replace(H200, buckets=H200.buckets[:6], bucket_s=H200.bucket_s[:6], draft_s=times)
    fewer.save(path)
    found = keep_measured(UNMEASURED, path).draft_s[4]
    assert found[:6] == pytest.approx(kept[4][:6]) and len(found) == len(H200.buckets), "graphs of other sizes"
    assert all(after >= before for before, after in itertools.pairwise(found[5:])), "as with more rows"
    newer = msgspec.structs.replace(H200, draft_s={2: [1e-3] * len(H200.buckets)})
    assert keep_measured(newer, path) == newer


def test_profiles_from_before_the_field_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    fields = msgspec.to_builtins(UNMEASURED)
    del fields["draft_s"]
    for old in (fields, fields | {"draft_factor": None}):
        path.write_bytes(msgspec.json.encode(old))
        assert load_profile(str(path)) == UNMEASURED


def test_a_measured_draft_factor_is_refused_and_not_ignored(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(H200) | {"draft_factor": 1.5}))
    with pytest.raises(ConfigError, match=r"old\.json has a draft_factor of 1\.5, which draft_s replaces: fit"):
        load_profile(str(path))
    assert keep_measured(H200, path).draft_s == H200.draft_s, "fitting it again works"


# ---------------------------------------------------------------------- recordings


def test_a_recording_is_replayed_with_its_drafts(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    simulated = record(path, 4, QUICK, chance=0.5)
    recording = Recording.read(path)
    assert simulated.counters.drafted_tokens == sum(one.drafted_tokens for one in recording.passes)
    assert simulated.counters.accepted_tokens == sum(one.accepted_tokens for one in recording.passes)
    (replayed,) = replay(path, recording, QUICK)
    assert replayed.simulated_passes == replayed.measured_passes
    assert abs(replayed.total_error) < 1e-4 and abs(replayed.pass_error) < 1e-4
    arrivals = read_trace(path)
    config = SchedulerConfig(num_pages=2000, max_running=24, draft_tokens=4, itl_target=math.inf)
    assert simulate(arrivals, config, QUICK, acceptance=0.0).counters.accepted_tokens == 0, "given for all"


def test_a_recorded_request_has_an_entry_for_each_of_its_passes(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", 4, QUICK)
    requests = [line for line in read_recording(tmp_path / "run.jsonl") if isinstance(line, RecordedRequest)]
    assert len(requests) == 96
    for one in requests:
        assert one.drafted[0] == 0, "the prompt"
        assert len(one.drafted) + sum(one.accepted) == one.output_tokens
        assert all(accepted <= drafted <= 4 for drafted, accepted in zip(one.drafted, one.accepted, strict=True))
    record(tmp_path / "plain.jsonl", 0, QUICK)
    plain = [line for line in read_recording(tmp_path / "plain.jsonl") if isinstance(line, RecordedRequest)]
    assert {(*one.drafted, *one.accepted) for one in plain} == {()}


def test_a_script_applies_to_other_passes_than_the_recorded_ones() -> None:
    script = DraftScript([0, 4, 2, 3], [0, 4, 0, 1])  # tokens 0 | 1 to 5 | 6 | 7, 8
    assert [script.verify(at, 4) for at in (0, 1, 6, 7, 9)] == [(0, 0), (4, 4), (2, 0), (3, 1), (0, 0)]
    assert [script.verify(at, 2) for at in (1, 4, 7)] == [(2, 2), (1, 1), (2, 1)]
    assert script.verify(5, 4) == (0, 0), "the token after the accepted drafts was not drafted"


def test_an_old_recording_has_no_drafts(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    record(path, 0, QUICK)
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        for name in ("drafted", "accepted", "drafted_tokens", "accepted_tokens"):
            line.pop(name, None)
        line.get("features", {}).pop("num_drafts", None)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert all(not one.drafted for one in read_trace(path))
    assert Recording.read(path).passes[-1].accepted_tokens == 0


# ---------------------------------------------------------------------- the command line


def test_the_command_line_simulates_drafts(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    found = {}
    for name, options in {"off": [], "on": ["--drafts", "4", "--acceptance", "0.9"]}.items():
        file = tmp_path / f"{name}.json"
        ran = CliRunner().invoke(app, ["run", "prefixes", "--requests", "20", *options, "--json", str(file)])
        assert ran.exit_code == 0, ran.output
        found[name] = msgspec.json.decode(file.read_bytes())["runs"]["fair"]["summary"]
    assert found["on"]["passes"] < 0.6 * found["off"]["passes"]
    assert found["on"]["tokens_per_decode"] > 3


def test_an_acceptance_needs_drafts() -> None:
    with pytest.raises(ConfigError, match=r"acceptance is 0\.5, but there are no drafts: give drafts, too"):
        split_options({"acceptance": 0.5})
    with pytest.raises(ConfigError, match="drafts is -1: must be at least 0"):
        split_options({"drafts": -1})
    found = split_options({"acceptance": 0.5, "drafts": 2, "max_running": 3, "rate": 4.0})
    assert found == (0.5, {"max_running": 3, "draft_tokens": 2})
    assert split_options({"drafts": 2})[0] is None
