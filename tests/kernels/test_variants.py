"""Kernels are listed and compiled without a GPU, in processes without the interpreter: that compiles nothing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline.kernels
from paceline.cli import app
from paceline.engine.cuda import precompile
from paceline.engine.cuda.variants import kernel_variants
from paceline.kernels.binaries import KernelBinary, KernelStore
from paceline.kernels.variants import KernelVariant
from paceline.model.layout import Shard
from tests.kernels.random_launches import one_of_each_kernel

OF_SOME_FAMILIES = {"_post_norm_kernel", "_soft_cap_kernel"}
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


@cache
def random_launches() -> list[str]:
    return run("-m", "tests.kernels.random_launches").splitlines()


def test_random_requests_launch_nothing_that_is_not_listed() -> None:
    assert random_launches()[:-3] == ["all listed"]


def test_kernels_for_more_than_256_rows_compile() -> None:
    assert random_launches()[-2].split() == ["_decode_units_kernel"]


def test_draft_attention_of_an_fp8_cache_reads_what_was_written() -> None:
    assert random_launches()[-1] == "draft attention reads nothing undefined"


def test_models_use_every_kernel() -> None:
    assert set(random_launches()[-3].split()) == launched_kernels()


@pytest.mark.parametrize("listed", [one_of_each_kernel, pytest.param(kernel_variants, marks=pytest.mark.slow)])
def test_kernels_are_compiled_ahead_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: Callable[..., list[KernelVariant]]
) -> None:
    monkeypatch.setattr(precompile, "kernel_variants", listed)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the command removes it
    options = ("--shape", "tiny-qwen3-moe", "--max-running", "1", "--max-batch-tokens", "64")
    drafts = ("--speculate", "draft", "--draft-model", "tiny-qwen3", "--max-lora-rank", "16")
    command = ["compile", *options, *drafts, "-o", str(tmp_path), "--jobs", "1"]
    first, files = CliRunner().invoke(app, command), list(tmp_path.glob("*.kernel"))
    assert first.exit_code == 0, first.output
    headers, cubins = zip(*(path.read_bytes().split(b"\n", 1) for path in files), strict=True)
    symbols = {json.loads(header)["symbol"] for header in headers}
    fp8 = {"_quantized_linear_kernel", "_quantize_rows_kernel", "_apply_scales_kernel"}
    quantized = {*fp8, "_groupwise_linear_kernel", "_expand_groupwise_kernel"}
    assert symbols == launched_kernels() - {*OF_SOME_FAMILIES, *quantized}
    assert f"{len(files)} kernels for sm_90, 0 of them there before" in first.output
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins)
    num_damaged = int(listed is kernel_variants)  # compiled again, by another process that imports torch
    for damaged in files[:num_damaged]:
        damaged.write_bytes(damaged.read_bytes()[:-1])
    # Another policy or size of the KV cache needs no other kernels.
    again = CliRunner().invoke(app, [*command, "--policy", "lpm", "--context-tokens", "1000"])
    assert f"{len(files)} kernels for sm_90, {len(files) - num_damaged} of them there before" in again.output


def test_kernels_of_all_stages_of_a_pipeline_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards: list[Shard] = []

    def compiling(*_: Any, shard: Shard, **__: Any) -> tuple[list[KernelVariant], int]:
        shards.append(shard)
        return [], 0

    monkeypatch.setattr(precompile, "precompile", compiling)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the command removes it
    command = ["compile", "--shape", "tiny-qwen3", "-o", str(tmp_path)]
    assert CliRunner().invoke(app, [*command, "--pp", "2"]).exit_code == 0
    assert shards == [Shard(stage=0, num_stages=2), Shard(stage=1, num_stages=2)]
    refused = CliRunner().invoke(app, [*command, "--pp", "5"])
    assert refused.exit_code and "num_layers is 4, which 5 stages cannot divide" in refused.output


@pytest.mark.slow
def test_kernel_resources_are_printed_without_a_gpu(tmp_path: Path) -> None:
    lines = run("-m", "tests.kernels.resources", "tiny-qwen3", "_decode_attention_kernel", cache=tmp_path).splitlines()
    assert lines[0] == "registers spilled shared KB warps at once"
    registers, spilled, _, warps, held = lines[lines.index("_decode_attention_kernel") + 1].split()[:5]
    assert 0 < int(registers) <= 255 and int(spilled) >= 0 and int(warps) in (1, 2, 4) and int(held) >= 1


def test_a_binary_is_found_by_variant_source_and_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "v1"
    monkeypatch.setattr("paceline.kernels.binaries.source_digest", lambda: source)
    one = KernelVariant("module", "kernel", ("bfloat16", 17), (("BLOCK", 64),))
    other = KernelVariant("module", "kernel", ("bfloat16", 16), (("BLOCK", 64),))
    binary = KernelBinary(b"cubin", "kernel", 1024, 4)
    KernelStore(tmp_path, 90).write(one, binary)
    assert KernelStore(tmp_path, 90).read(one) == binary
    assert KernelStore(tmp_path, 90).missing([one, other]) == [other] and KernelStore(tmp_path, 90).read(other) is None
    assert KernelStore(tmp_path, 100).read(one) is None
    source = "v2"
    assert KernelStore(tmp_path, 90).read(one) is None, "the kernel was changed"
    assert KernelStore(tmp_path / "none", 90).missing([one]) == [one]


def test_a_damaged_binary_is_missing_and_another_folder_may_have_it(tmp_path: Path) -> None:
    one = KernelVariant("module", "kernel", ("bfloat16", 17), (("BLOCK", 64),))
    binary = KernelBinary(b"cubin", "kernel", 1024, 4)
    for name in ("prepared", "own"):
        KernelStore(tmp_path / name, 90).write(one, binary)
    (damaged,) = (tmp_path / "prepared").iterdir()
    store = KernelStore(tmp_path / "own", 90, [tmp_path / "prepared"])
    whole = damaged.read_bytes()
    for data in (
        b"",
        whole[:-1],
        whole + b"x",
        b"{}\ncubin",
        b"[1]\ncubin",
        b"\xff\xfe\n",
        whole.replace(b"crc", b"cr"),
    ):
        damaged.write_bytes(data)
        assert KernelStore(tmp_path / "prepared", 90).read(one) is None, data
        assert store.read(one) == binary and not store.missing([one])


_NORM_FOR_EACH = """
import sys
from triton import MockTensor
from torch import bfloat16
from paceline.kernels.binaries import compile_for
from paceline.kernels.rms_norm import _rms_norm_kernel
args = *[MockTensor(bfloat16)] * 4, 64, 64, 64, 0.5
for arch in map(int, sys.argv[1:]):
    compile_for(arch)
    _rms_norm_kernel.function.device_caches.clear()  # of the "device" before
    compiled = _rms_norm_kernel.function.warmup(*args, grid=(1,), HAS_RESIDUAL=False, BLOCK=64, num_warps=1)
    assert f".target sm_{arch}" in compiled.asm["ptx"], arch
    print("griddepcontrol" in compiled.asm["ptx"])
"""


def test_gpus_without_programmatic_dependent_launch_get_kernels_without_it(tmp_path: Path) -> None:
    assert run("-c", _NORM_FOR_EACH, "80", "89", "90", cache=tmp_path).split() == ["False", "False", "True"]
    for path in Path(paceline.kernels.__path__[0]).glob("*.py"):
        assert path.name == "_triton.py" or "gdc_" not in path.read_text(), f"{path.name}: use pdl_wait"
