"""`paceline bench offline` on the CPU: output, trace file, dependencies, errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import first_token, offline, runner, startup
from paceline.bench.parts import PARTS
from paceline.bench.startup import CHILD_PARTS
from paceline.bench.workloads import CHAT_TURNS, gsp_offline, long_prompts, nano
from paceline.checks import CheckResult
from paceline.config import OFFLINE_PARTS, ConfigError, OfflineConfig
from paceline.simulator.fit import Recording

KEYS = {
    "workload", "shape", "seconds", "tokens_per_s", "gpu_idle_share", "host_us_per_step", "hit_rate", "startup_s",
}  # fmt: skip
TINY = ("--shape=tiny-qwen3", "--device=cpu", "--threads=1", "--kv-tokens=8192", "--scale=0.02")


def results(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("RESULT ")) for line in text.splitlines() if line.startswith("RESULT ")]


def test_every_run_prints_a_result_in_both_overlap_modes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "out.json"
    arguments = (
        "nano",
        "gsp",
        "sweep",
        "shared-sweep",
        *TINY,
        "--overlap=both",
        "--repeats=1",
        "--batches=50",
        f"--trace={trace}",
    )
    assert offline.main(arguments) == 0
    printed = capsys.readouterr().out
    found = results(printed)
    assert [(one["workload"], one["overlap"]) for one in found] == [
        (name, mode) for name in ("nano", "gsp", "sweep-50", "shared-sweep-50") for mode in ("on", "off")
    ]
    assert all(one.keys() >= KEYS and one["shape"] == "tiny-qwen3" for one in found)
    assert all(0 <= one["gpu_idle_share"] < 1 and 0 <= one["hidden_share"] <= 1 for one in found)
    assert found[2]["hit_rate"] > found[0]["hit_rate"] == 0, "groups share their beginnings"
    on, off = found[:2]
    assert off["hidden_share"] <= on["hidden_share"] and off["lanes_us"].keys() == {
        "plan",
        "launch",
        "commit",
        "masks",
        "text",
    }
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["pid"] == 2 for event in events) > 20
    assert "measured roofline" in printed and "in steady decode" in printed


@pytest.mark.parametrize("host", [(), ("--host-kv-tokens=16384",)])
def test_chats_reports_cached_fetched_and_computed_tokens(
    capsys: pytest.CaptureFixture[str], host: tuple[str, ...]
) -> None:
    arguments = ("chats", *TINY, "--repeats=1", "--kv-tokens=512", "--context-tokens=512", "--scale=0.06", *host)
    assert offline.main(arguments) == 0
    printed = capsys.readouterr().out
    (found,) = results(printed)
    assert found.keys() >= KEYS and found["workload"] == "chats" and found["computed_tokens"] > 0
    assert bool(found["fetched_tokens"]) == bool(found["fetch_rate"]) == bool(host)
    assert f"{found['fetched_tokens']:,} fetched" in printed


def test_chats_are_recorded_as_one_run(tmp_path: Path) -> None:
    """Later turns use what the first ones cached: a replay begins with the first."""
    path = tmp_path / "run.jsonl"
    assert offline.main(("chats", "nano", *TINY, "--repeats=1", f"--record={path}")) == 0
    recording = Recording.read(path)
    sizes = {run.name: sum(one.at in run for one in recording.requests) for run in recording.runs}
    turns, rest = divmod(sizes["chats 0"], CHAT_TURNS)
    assert sizes.keys() == {"chats 0", "nano 0"} and turns > 0 and not rest and sizes["nano 0"] > 0
    assert all(any(one.at in run for run in recording.runs) for one in recording.passes[-20:])


def test_embed_compares_embeddings_with_one_output_token_of_uncached_texts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[runner.BenchRun] = []
    timed = runner.BenchRunner.timed

    def noting(self: runner.BenchRunner, *args: Any) -> runner.BenchRun:
        runs.append(timed(self, *args))
        return runs[-1]

    monkeypatch.setattr(runner.BenchRunner, "timed", noting)
    assert offline.main(("embed", *TINY, "--repeats=1", "--kv-tokens=65536")) == 0
    printed = capsys.readouterr().out
    found = results(printed)
    assert [one["workload"] for one in found] == ["embed-mean", "embed-last"]
    assert all(one.keys() >= KEYS and one["tokens_per_s"] == 0 and one["requests_per_s"] > 0 for one in found)
    assert all(f"{one['ratio']:.3f}x" in printed for one in found)
    assert len(runs) == 12 and not any(run.hit_rate for run in runs)


@pytest.mark.parametrize(
    ("part", "kinds"), [("prefill-overload", ("stream", "long")), ("small-behind-large", ("large", "small"))]
)
def test_requests_that_arrive_over_time_report_itl_and_ttft_by_kind(
    capsys: pytest.CaptureFixture[str], part: str, kinds: tuple[str, ...]
) -> None:
    assert offline.main((part, *TINY, "--scale=0.05", "--repeats=1", "--itl-target=0.05")) == 0
    printed = capsys.readouterr().out
    (found,) = results(printed)
    assert found.keys() >= KEYS and found["workload"] == part and found["itl_target"] == "0.05"
    assert 0 < found["itl_p50_ms"] <= found["itl_p99_ms"] <= found["itl_max_ms"]
    for kind in kinds:
        assert 0 < found[f"ttft_{kind}_p50_ms"] <= found[f"ttft_{kind}_p99_ms"] <= found[f"ttft_{kind}_max_ms"]
    assert f"{part}, first run" in printed and f"{part}, run 1" in printed


def test_startup_measures_a_new_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two: here the first one is skipped."""
    run, commands = startup._child, []

    def child(command: Sequence[str]) -> dict[str, Any]:
        commands.append(command)
        return run(command) if len(commands) == 2 else {"first_token_s": 1000.0}

    monkeypatch.setattr(startup, "_child", child)
    assert offline.main(("startup", *TINY)) == 0
    assert len(commands) == 2 and commands[0] == commands[1]
    (found,) = results(capsys.readouterr().out)
    assert found.keys() >= KEYS and found["workload"] == "startup"
    assert 0 < found["seconds"] == found["startup_s"] < found["first_start_s"] == 1000


# Runs the module that follows on the command line as `python -m` does, without the packages of command line and server.
_WITHOUT_PACKAGES = """
import runpy, sys
for name in ("typer", "rich", "msgspec", "starlette", "uvicorn", "httpx", "transformers"):
    sys.modules[name] = None
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.cluster
def test_cold_compares_first_and_later_uses_in_a_new_process_that_needs_no_package_of_command_line_and_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its processes this one runs: `startup` runs the others, too."""
    run, others = startup._child, []

    def child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        if command[-1] in ("first-uses", "mix"):
            python, option, *rest = command
            assert option == "-m"
            return run([python, "-c", _WITHOUT_PACKAGES, *rest], environment)
        others.append((command[-1], environment or {}))
        return {"torch_s": 0.5, "ready_s": 0.25}

    monkeypatch.setattr(startup, "_child", child)
    exec(startup._TORCH)
    assert offline.main(("cold", *TINY[:-1], "--scale=0.004", "--mix-seconds=0.1")) == 0
    printed = capsys.readouterr().out
    (found,) = results(printed)
    assert found["workload"] == "cold" and found["prepared_ready_s"] > 0 and found["mix_requests"] > 0
    assert found["uses"].keys() >= {"nano", "gsp", "zipf", "penalties", "prompt logprobs", "embeddings"}
    assert all(use["first_s"] > 0 and use["later_s"] > 0 for use in found["uses"].values())
    assert "ready after" in printed and "mix of all features" in printed
    assert json.loads(printed.splitlines()[0].removeprefix(first_token.FOUND))["torch_s"] >= 0
    (_, second), (options, prepared) = (other for other in others if other[0] != startup._TORCH)
    assert json.loads(options)["kernel_folder"] == f"{second['PACELINE_HOME']}/kernels"
    assert second["PACELINE_HOME"] != prepared["PACELINE_HOME"] and len(others) == 4


@pytest.mark.cluster
def test_prefill_and_decode_engines_in_two_processes_are_measured_and_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert offline.main(("pd", "--shape=tiny-llama", "--threads=1")) == 0
    printed = capsys.readouterr().out
    (found,) = results(printed)
    assert found["workload"] == "pd" and found["bytes"] > 1e6 and found["bytes_per_s"] > 0
    assert "failures: none" in printed and "4 of 4 outputs equal those of one engine" in printed


def test_a_failed_check_is_printed_and_sets_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(setup: Any) -> CheckResult:
        raise RuntimeError("no such luck")

    monkeypatch.setitem(offline.checks.CHECKS, "alone", lambda setup: CheckResult(False, "three are off"))
    monkeypatch.setitem(offline.checks.CHECKS, "check", broken)
    monkeypatch.setitem(offline.checks.CHECKS, "tiny", lambda setup: CheckResult(True, "1.5x"))
    monkeypatch.setattr(offline.checks, "run_sanitizer", lambda command: CheckResult(None, "no such tool"))
    assert offline.main(("alone", "check", "tiny", "sanitizer", *TINY)) == 1
    printed = capsys.readouterr().out
    assert "FAIL alone: three are off" in printed and "PASS tiny: 1.5x" in printed
    assert "FAIL check: RuntimeError: no such luck" in printed and "FAILED: alone, check\n" in printed
    assert "NOT RUN sanitizer: no such tool" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fly",), "part is 'fly': choose from nano, gsp, zipf, prompts"),
        (("nano", "--batches=1,x"), "batches is '1,x': expected positive integers"),
        (("nano", "--scale=2"), "scale is 2.0: must be at most 1.0."),
        (("nano", "--shape=huge"), "shape is 'huge', which is not known"),
        (("nano", "--trace=/no/such/folder/x.json"), "trace is '/no/such/folder/x.json', which cannot be written"),
        (("profile", *TINY), "part profile needs a GPU"),
        (("check", "--model=x"), "give a shape and no model"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    assert offline.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_every_part_exists() -> None:
    assert {*PARTS, *CHILD_PARTS, *offline.checks.CHECKS, "startup", "cold", "sanitizer", "pd", "pd-prefill"} == set(
        OFFLINE_PARTS
    )
    with pytest.raises(ConfigError, match="overlap is 'maybe'"):
        OfflineConfig(overlap="maybe")


def test_a_scaled_workload_shares_in_proportion() -> None:
    whole, part = gsp_offline(), gsp_offline().scaled(0.1)
    assert len(part.prompts) == 102 and {len(prompt) for prompt in part.prompts} == {218}
    starts = {tuple(prompt[:200]) for prompt in part.prompts}
    assert len(starts) == len({tuple(prompt[:2000]) for prompt in whole.prompts[:102]})
    assert len({tuple(prompt) for prompt in part.prompts}) == 102
    assert nano().scaled(1).prompts == nano().prompts


def test_without_a_scale_a_cpu_runs_a_part_of_the_workload(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CPU_SECONDS", 0.5)
    assert offline.main(("nano", *TINY[:-1], "--repeats=1")) == 0
    printed = capsys.readouterr().out
    (result,) = results(printed)
    assert 0 < result["scale"] < 0.5 and f"scale {result['scale']:g}: chosen to take about two minutes" in printed


def test_long_prompts_are_of_all_lengths() -> None:
    lengths = sorted(map(len, long_prompts().prompts))
    assert lengths[0] == 256 and lengths[-1] == 24_000 and 2_000 < lengths[16] < 3_000


def test_speculate_reports_each_task_and_batch_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"category": "riddles", "turns": ["What is it?", "Why?"], "question_id": 1}\n')
    arguments = ("speculate", *TINY, "--repeats=1", "--batches=1,3,256", f"--questions={questions}")
    assert offline.main(arguments) == 0
    found = results(capsys.readouterr().out)
    tasks = ["copy", "edit", "summarise", "story", "code", "riddles"]
    assert [(one["task"], one["batch"]) for one in found] == [(task, size) for size in (1, 3) for task in tasks]
    for one in found:
        assert one["equal_outputs"] == one["outputs"], "drafts do not change the output"
        assert one["tokens_per_pass"] > 0 and one["speed_up"] > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "which cannot be read: No such file or directory"),
        ("{}", "whose line 1 is not a question: it needs a category and turns"),
        ('{"category": "a", "turns": []}', "whose line 1 is not a question: it needs a category and turns"),
    ],
)
def test_speculate_rejects_a_file_without_questions(
    text: str | None, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "questions.jsonl"
    if text is not None:
        path.write_text(text)
    assert offline.main(("speculate", *TINY, f"--questions={path}")) == 2
    assert message in capsys.readouterr().err
