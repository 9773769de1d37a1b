import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One Triton cache for both tests: they compile some of the same variants."""
    return tmp_path_factory.mktemp("triton")


def compiled(cache: Path, *args: str) -> str:
    """The output of compile_all, in a process without the interpreter: that allows what the compiler refuses."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_all", *args]
    env["TRITON_CACHE_DIR"] = str(cache)
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_kernel_compiles_for_a_gpu(cache: Path) -> None:
    assert "not launched: none" in compiled(cache)


@pytest.mark.slow
def test_kernel_resources_are_printed_without_a_gpu(cache: Path) -> None:
    lines = compiled(cache, "tiny-qwen3").splitlines()
    assert lines[0] == "registers spilled shared KB warps at once"
    registers, spilled, _, warps, held = lines[lines.index("_decode_attention_kernel") + 1].split()[:5]
    assert 0 < int(registers) <= 255 and int(spilled) >= 0 and int(warps) in (1, 2, 4) and int(held) >= 1
