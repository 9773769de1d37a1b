"""Kernels are listed and compiled without a GPU. In processes without the interpreter, which compiles nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline.kernels
from paceline.kernels.binaries import KernelBinary, KernelStore
from paceline.kernels.variants import KernelVariant

ROOT = Path(__file__).parents[2]


def run(*args: str, cache: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if cache is not None:
        env["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, *args], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launched_kernels() -> set[str]:
    """All functions that are decorated as kernels which the host launches."""
    return {
        node.name
        for path in Path(paceline.kernels.__path__[0]).glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(one, ast.Name) and one.id == "launched" for one in node.decorator_list)
    }


def test_random_requests_launch_nothing_that_is_not_listed() -> None:
    assert run("-m", "tests.kernels.random_launches") == "all listed\n"


def test_every_kernel_is_compiled_ahead_without_a_gpu(tmp_path: Path) -> None:
    command = ("-m", "paceline.cli", "compile", "--shape", "tiny-qwen3", "--max-running", "4", "-o", str(tmp_path))
    first = run(*command)
    symbols = {path.read_text().split('"symbol": "')[1].split('"')[0] for path in tmp_path.glob("*.json")}
    assert symbols == launched_kernels()
    count = len(list(tmp_path.glob("*.cubin")))
    assert f"{count} kernels for sm_90, 0 of them there before" in first
    assert all(path.read_bytes().startswith(b"\x7fELF") for path in tmp_path.glob("*.cubin"))
    assert f"{count} kernels for sm_90, {count} of them there before" in run(*command)


@pytest.mark.slow
def test_kernel_resources_are_printed_without_a_gpu(tmp_path: Path) -> None:
    lines = run("-m", "tests.kernels.resources", "tiny-qwen3", "_decode_attention_kernel", cache=tmp_path).splitlines()
    assert lines[0] == "registers spilled shared KB warps at once"
    registers, spilled, _, warps, held = lines[lines.index("_decode_attention_kernel") + 1].split()[:5]
    assert 0 < int(registers) <= 255 and int(spilled) >= 0 and int(warps) in (1, 2, 4) and int(held) >= 1


def test_a_binary_is_found_by_variant_source_and_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "v1"
    monkeypatch.setattr(
        "paceline.kernels.binaries.function_of", lambda variant: type("Function", (), {"cache_key": source})
    )
    one = KernelVariant("module", "kernel", ("bfloat16", 17), (("BLOCK", 64),))
    other = KernelVariant("module", "kernel", ("bfloat16", 16), (("BLOCK", 64),))
    binary = KernelBinary(b"cubin", "kernel", 1024, 4, False)
    KernelStore(tmp_path, 90).write(one, binary)
    assert KernelStore(tmp_path, 90).read(one) == binary
    assert KernelStore(tmp_path, 90).missing([one, other]) == [other] and KernelStore(tmp_path, 90).read(other) is None
    assert KernelStore(tmp_path, 100).read(one) is None
    source = "v2"
    assert KernelStore(tmp_path, 90).read(one) is None, "the kernel was changed"
    assert KernelStore(tmp_path / "none", 90).missing([one]) == [one]
