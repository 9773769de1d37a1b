"""`paceline doctor`: every check finds its fault, says what to do, and hides no other check."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import ConfigError, ServerConfig
from paceline.doctor import machine, software
from paceline.doctor.finding import Finding, Status, ok, run_checks
from paceline.doctor.model_files import model_checks
from paceline.engine import kv_sizing
from paceline.engine.build import facts
from paceline.engine.cpu.native import native_library
from paceline.engine.cuda.self_test import launch_kernel
from paceline.model.config_json import spec_from_config
from paceline.model.fetch import fetch_default
from paceline.model.layout import stored_parts
from tests.helpers import needs_compiler

GIB = 2**30


def only(found: Any) -> Finding:
    (finding,) = found
    assert isinstance(finding, Finding)
    assert bool(finding.remedy) == (finding.status is not Status.OK) or ": " in finding.text, "a fault has a remedy"
    return finding


def doctor(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", "--port", "0", *arguments])


def test_a_sound_machine_has_one_line_per_check_and_exit_status_0() -> None:
    result = doctor("--model", str(fetch_default()))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert all(line.split()[0] in ("ok", "warning") for line in lines)
    names = "python, packages, llguidance, driver, torch, gpu, triton, cpu kernels, memory, port, clock"
    for name in names.split(", "):
        assert any(line[9:].startswith(name) for line in lines), name
    assert "134.5 M parameters, all files complete" in result.stdout
    assert "49,152 tokens" in result.stdout


def test_a_problem_is_exit_status_1_and_json_has_all_findings() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = doctor("--port", str(port), "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["status"] == "problem"
    (found,) = (one for one in report["findings"] if one["status"] == "problem")
    assert found == {
        "name": "port",
        "status": "problem",
        "text": f"port is {port}, which is already in use: stop that program, or choose another port (0: any)",
        "remedy": "",
    }
    assert len(report["findings"]) > 12


def test_without_torch_the_other_checks_still_run(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"
    environment = {**os.environ, "PACELINE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, "doctor", "--port", "0", "--json", "--model", str(fetch_default())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    report = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert report["torch"]["text"] == "not installed" and report["torch"]["remedy"] == "pip install torch"
    assert report["model"]["text"] == "not checked: the package torch is missing"
    assert {report[name]["status"] for name in ("python", "llguidance", "memory", "port", "clock")} == {"ok"}


def test_a_check_that_fails_is_a_finding_and_hides_no_other() -> None:
    def fails() -> Any:
        yield ok("first", "half of it worked")
        raise RuntimeError("broken\ninstallation")

    def refused() -> Any:
        raise ConfigError("port is 1: choose another.")

    found = list(run_checks([("bad", fails), ("user", refused), ("good", lambda: [ok("good", "fine")])]))
    assert [one.status for one in found] == [Status.OK, Status.PROBLEM, Status.PROBLEM, Status.OK]
    assert "RuntimeError: broken" in found[1].text
    assert found[2].text == "port is 1: choose another"


# ------------------------------------------------------------------------------------------------------------ software


def test_missing_and_old_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ["numpy>=99", "no-such-package>=2", "typer", "x; extra=='y'"])
    old, missing = software.check_packages()
    assert old.text.startswith("numpy has version") and old.remedy == "pip install 'numpy>=99'"
    assert missing.text == "no-such-package is missing" and missing.remedy == "pip install 'no-such-package>=2'"
    monkeypatch.setattr(metadata, "requires", lambda _: ["typer"])
    assert only(software.check_packages()).text == "all 1 dependencies are installed"
    monkeypatch.undo()
    assert only(software.check_packages("not-installed")).status is Status.WARNING


def test_missing_llguidance_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert only(software.check_llguidance()).remedy == "pip install llguidance"


def fake_torch(
    cuda: str | None = "12.8", available: bool = True, free: float = 100 * GIB, capability: Any = (9, 0)
) -> Any:
    fake = ModuleType("torch")
    about = SimpleNamespace(
        is_available=lambda: available,
        get_device_capability=lambda: capability,
        mem_get_info=lambda: (free, 140 * GIB),
        get_device_name=lambda: "NVIDIA H200",
    )
    vars(fake).update(__version__="2.11.0", version=SimpleNamespace(cuda=cuda), cuda=about, get_num_threads=lambda: 8)
    return fake


@pytest.mark.parametrize(
    ("torch", "driver", "status", "text"),
    [
        (fake_torch(), True, Status.OK, "NVIDIA H200, compute capability 9.0, 100.0 of 140.0 GiB free"),
        (fake_torch(free=5 * GIB), True, Status.WARNING, "5.0 of 140.0 GiB free"),
        (fake_torch(capability=(7, 5)), True, Status.WARNING, "compute capability 7.5"),
        (fake_torch(available=False), True, Status.PROBLEM, "torch finds none, though there is a driver"),
        (fake_torch(available=False), False, Status.OK, "none"),
        (fake_torch(cuda=None, available=False), True, Status.OK, "none"),
    ],
)
def test_the_gpu_is_described(
    monkeypatch: pytest.MonkeyPatch, torch: Any, driver: bool, status: Status, text: str
) -> None:
    monkeypatch.setattr(software, "_import_torch", lambda: torch)
    monkeypatch.setattr(software, "has_driver", lambda: driver)
    found = only(software.check_gpu())
    assert found.status is status and text in found.text


def test_a_cpu_build_of_torch_beside_a_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_import_torch", lambda: fake_torch(cuda=None, available=False))
    for driver, status in ((True, Status.WARNING), (False, Status.OK)):
        monkeypatch.setattr(software, "has_driver", lambda driver=driver: driver)
        assert only(software.check_torch()).status is status


def test_a_kernel_that_does_not_compile_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> float:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(software, "_import_torch", fake_torch)
    monkeypatch.setattr("paceline.engine.cuda.self_test.launch_kernel", fails)
    found = only(software.check_triton())
    assert "Failed to find C compiler. Please specify" in found.text and "gcc" in found.remedy
    monkeypatch.setattr("paceline.engine.cuda.self_test.launch_kernel", lambda: 1.25)
    assert only(software.check_triton()).text.endswith("a kernel was compiled and run in 1.2 s")


def test_the_kernel_of_the_check_agrees_with_its_reference() -> None:
    """In Triton's interpreter, which the tests use where there is no GPU."""
    assert launch_kernel("cuda" if torch.cuda.is_available() else "cpu") > 0


@needs_compiler
def test_the_kernels_of_quantized_weights_are_compiled_and_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(software, "_import_torch", lambda: fake_torch(available=False))
    found = only(software.check_cpu_kernels())
    assert found.status is Status.OK and f"checked ({native_library().isa}" in found.text
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    native_library.cache_clear()
    try:
        found = only(software.check_cpu_kernels())
        assert found.status is Status.WARNING
        assert found.text.endswith("expanded to float32, which is slower: there is no C compiler: install gcc or clang")
        *_, memory, why = check(fetch_default())
        assert "0.50 GiB fit on the CPU (float32)" in memory.text and "there is no C compiler" in why.text
    finally:
        native_library.cache_clear()
    monkeypatch.setattr(software, "_import_torch", fake_torch)
    assert only(software.check_cpu_kernels()).text == "not tried: the model runs on the GPU"


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        ("echo '570.1, NVIDIA H200'", Status.OK, "570.1, 1 GPU: NVIDIA H200"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", Status.PROBLEM, "nvidia-smi fails: NVIDIA-SMI has failed"),
    ],
)
def test_the_driver_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, status: Status, text: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = only(software.check_driver())
    assert found.status is status and found.text == text


# ------------------------------------------------------------------------------------------------------------- machine


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, status in ((GIB // 2, Status.WARNING), (4 * GIB, Status.OK)):
        monkeypatch.setattr(kv_sizing, "free_memory", lambda free=free: free)
        assert only(machine.check_memory()).status is status


@pytest.mark.parametrize(
    ("free", "status"), [(2**20, Status.PROBLEM), (GIB, Status.WARNING), (50 * GIB, Status.OK)], ids=str
)
def test_a_full_disk_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, status: Status) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    found = only(machine.check_cache("hub cache", tmp_path / "not" / "made", "HF_HOME"))
    assert found.status is status and str(tmp_path / "not" / "made") in found.text
    assert not list(tmp_path.iterdir()), "the check leaves nothing behind"


def test_a_folder_that_is_not_writable_is_found() -> None:
    found = only(machine.check_cache("hub cache", Path("/proc/no/folder"), "HF_HOME"))  # also for root
    assert found.status is Status.WARNING and "/proc/no/folder is not writable" in found.text
    assert found.remedy == "set HF_HOME to a folder that this user may write to"


def test_a_long_temporary_path_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (long := tmp_path / ("x" * 100)).mkdir()
    for folder, status in ((long, Status.PROBLEM), (Path("/tmp"), Status.OK), (Path("/proc"), Status.PROBLEM)):
        monkeypatch.setattr(machine.tempfile, "tempdir", str(folder))
        assert only(machine.check_temporary_folder()).status is status


def test_few_open_files_are_a_warning() -> None:
    found = only(machine.check_open_files(ServerConfig(), limit=1024))
    assert found.status is Status.WARNING and "ulimit -Hn 4224" in found.remedy
    assert only(machine.check_open_files(ServerConfig(max_connections=100), limit=1024)).status is Status.OK
    assert only(machine.check_open_files(ServerConfig(), limit=machine.resource.RLIM_INFINITY)).text == "unlimited"


def test_a_clock_before_the_release_is_a_warning() -> None:
    assert only(machine.check_clock(0.0)).status is Status.WARNING
    assert only(machine.check_clock(1_790_000_000.0)).status is Status.OK


# --------------------------------------------------------------------------------------------------------- model files


def check(model: Path | str) -> list[Finding]:
    return list(run_checks(model_checks(str(model))))


def test_a_truncated_file_is_a_problem(tmp_path: Path) -> None:
    data = fetch_default().read_bytes()
    for size in (10, 1000, len(data) // 2):
        path = tmp_path / "model.gguf"
        path.write_bytes(data[:size])
        found = check(path)[-1]
        assert found.status is Status.PROBLEM and "fetch it again" in found.text, found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model of a tiny shape."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    parts = stored_parts(spec_from_config(config))
    save_file({name: torch.zeros(part.shape) for name, part in parts.items()}, tmp_path / "model.safetensors")
    tokens = {f"t{index}": index for index in range(32)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "has no .safetensors files"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text('{"architectures": ["Mamba"]}'), "Mamba"),
    ],
)
def test_a_damaged_folder_is_a_problem(folder: Path, damage: Callable[[Path], Any], text: str) -> None:
    assert [one for one in check(folder) if one.status is not Status.OK] == []
    damage(folder)
    found = check(folder)[-1]
    assert found.status is Status.PROBLEM and text in found.text, found


def test_a_model_that_does_not_fit_is_a_problem(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    expected = "0.09 GiB fit on the CPU (float32, weights in 4 and 8 bits)"
    assert check(fetch_default())[-1] == ok("model memory", expected)
    assert check(folder)[-1] == ok("model memory", "0.00 GiB fit on the CPU (float32)")
    monkeypatch.setattr(facts, "free_memory", lambda: 2**20)
    found = check(fetch_default())[-1]
    assert found.status is Status.PROBLEM and "parameters take 0.09 GiB" in found.text


def test_a_model_that_is_not_on_the_machine_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    for model in ("some-org/some-model", "smollm2-135m-instruct"):
        found = only(check(model))
        assert found == Finding("model", Status.WARNING, f"{model} is not on this machine", f"paceline pull {model}")
    assert only(check("/no/such/folder")).status is Status.PROBLEM
    assert not list(tmp_path.iterdir())
