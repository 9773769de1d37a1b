"""`paceline sim`: printed tables, result files, error messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from tests.simulator.test_fit import record

SMALL = ("--requests", "30", "--prompt-tokens", "100", "--output-tokens", "10", "--num-pages", "60", "--rate", "500")


def sim(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sim", *arguments])


def test_run_is_deterministic_and_writes_its_results(tmp_path: Path) -> None:
    found = []
    for name in ("one.json", "two.json"):
        result = sim("run", "prefixes", *SMALL, "--policy", "lpm", "--json", str(tmp_path / name))
        assert result.exit_code == 0, result.output
        assert "hit_rate" in result.output
        found.append(json.loads((tmp_path / name).read_text()))
    assert found[0] == found[1]
    assert found[0]["runs"]["lpm"]["summary"]["requests"] == 30


def test_compare_prints_and_plots_each_policy(tmp_path: Path) -> None:
    result = sim("compare", "tenants", *SMALL, "--policies", "fcfs,fair", "--plot", str(tmp_path / "plot.svg"))
    assert result.exit_code == 0, result.output
    assert "fcfs" in result.output and "fair" in result.output and "waiting time p99, s" in result.output
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_replicas_are_named_in_the_title_and_share_the_work() -> None:
    alone, shared = (sim("run", "prefixes", *SMALL, *more) for more in ((), ("--replicas", "3", "--router", "random")))
    assert alone.exit_code == shared.exit_code == 0, shared.output
    assert "on 3 h200-qwen3-0.6b, router random" in " ".join(shared.output.split())
    compared = sim("compare", "prefixes", *SMALL, "--policies", "fcfs,fair", "--replicas", "2")
    assert compared.exit_code == 0, compared.output


def test_tensor_parallelism_is_labelled_as_predicted(tmp_path: Path) -> None:
    label = "Tensor parallelism on 4 GPUs is predicted, not measured."
    one, four = (sim("run", *SMALL, "--tp", count, "--json", str(tmp_path / f"{count}.json")) for count in ("1", "4"))
    assert one.exit_code == four.exit_code == 0, four.output
    assert label in " ".join(four.output.split()) and "predicted" not in one.output
    alone, divided = (json.loads((tmp_path / f"{count}.json").read_text()) for count in (1, 4))
    assert (divided["tp"], divided["note"]) == (4, label) and "note" not in alone
    plain = sim("run", *SMALL, "--json", str(tmp_path / "plain.json"))
    assert plain.exit_code == 0 and json.loads((tmp_path / "plain.json").read_text()) == alone
    assert label in " ".join(sim("compare", *SMALL, "--tp", "4", "--policies", "fcfs").output.split())


def test_fit_prints_the_held_out_error_and_saves_a_usable_profile(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", noise=0.02, runs=3, requests=200, compile_s=0.3)
    result = sim(
        "fit",
        str(tmp_path / "run.jsonl"),
        "--source",
        "here and today",
        "--save",
        str(tmp_path / "gpu.json"),
        "--json",
        str(tmp_path / "fit.json"),
    )
    assert result.exit_code == 0, result.output
    assert "held-out" in result.output and "simulated from their requests alone" in " ".join(result.output.split())
    assert "Skipped, because kernels were compiled during the run: run 0." in " ".join(result.output.split())
    runs = json.loads((tmp_path / "fit.json").read_text())["runs"]
    assert [(run["recording"], run["name"], run["held_out"]["name"]) for run in runs] == [
        ("run", "run 1", "run 1"),
        ("run", "run 2", "run 2"),
    ]
    assert all(run["simulated_s"] != run["held_out"]["simulated_s"] for run in runs)
    assert json.loads((tmp_path / "gpu.json").read_text())["source"] == "here and today"
    assert sim("run", str(tmp_path / "run.jsonl"), "--gpu", str(tmp_path / "gpu.json")).exit_code == 0


def test_fit_names_a_run_that_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, runs=2, requests=200)
    text = path.read_bytes()
    path.write_bytes(text[: text.index(b'"end of run 1"') - 3000])
    result = sim("fit", str(path))
    assert result.exit_code == 0, result.output
    assert "Skipped, because the recording ends before the run: run 1." in " ".join(result.output.split())
    path.write_bytes(text[: text.index(b'"end of run 0"') - 3000])
    assert "Skipped" not in sim("fit", str(path)).output, "the only run is used although it is truncated"


def test_an_experiment_is_a_table_and_a_plot(tmp_path: Path) -> None:
    result = sim("experiment", "continuous-batching", "--plots", str(tmp_path), "--json", str(tmp_path / "all.json"))
    assert result.exit_code == 0, result.output
    assert "0.1425" in result.output and "Compare with nano-vLLM deep dive, chapter 5" in result.output
    assert (tmp_path / "experiment-continuous-batching.svg").stat().st_size > 1000
    written = json.loads((tmp_path / "all.json").read_text())["continuous-batching"]
    assert written["rows"][0][:4] == ["1 long", "static", 0.1425, 8]
    assert len(written["panels"][0][0]["y"][0]) == 500, "the curve of the plot"


def test_compare_prints_the_waiting_time_of_each_tenant() -> None:
    result = sim("compare", "tenants", *SMALL, "--policies", "fcfs,fair")
    assert result.exit_code == 0, result.output
    assert [f"mean wait of tenant-{number}, s" in result.output for number in range(5)] == [True] * 4 + [False]
    assert "mean wait of" not in sim("compare", "prefixes", *SMALL, "--policies", "fcfs").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "nonsense"), "workload is 'nonsense': choose one of prefixes, chat"),
        (("run", "nano", "--rate", "3"), "workload 'nano' is fixed: remove rate."),
        (("run", "prefixes", "--speed", "3"), "speed and limit are for traces"),
        (("run", "--gpu", "abacus"), "gpu is 'abacus': choose one of h200"),
        (("run", "--requests", "0"), "requests is 0: must be at least 1."),
        (("run", "--router", "random"), "router is 'random', but there is one replica: give replicas, too."),
        (("run", "--tp", "9"), "tp is 9: must be at most 8."),
        (("compare", "--tp", "0"), "tp is 0: must be at least 1."),
        (("compare", "--policies", "fcfs,best"), "policies has 'best': choose from fair"),
        (("compare", "--policies", ","), "policies is empty: choose from fair"),
        (("experiment", "two-prefixes", "--plots", "plots", "--form", "pdf"), "expected a .png or .svg file."),
        (("experiment", "cold-fusion"), "experiment is 'cold-fusion': choose from continuous-batching"),
        (("fit", "/nowhere.jsonl"), "/nowhere.jsonl"),
    ],
)
def test_an_invalid_argument_is_reported_in_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    result = sim(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
