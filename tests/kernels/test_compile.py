import os
import subprocess
import sys
from pathlib import Path


def compiled(tmp_path: Path, *args: str) -> str:
    """What a process that does not interpret says of the kernels: the interpreter takes what the compiler refuses."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_all", *args]
    done = subprocess.run(
        command, env=env | {"TRITON_CACHE_DIR": str(tmp_path)}, cwd=Path(__file__).parents[2], capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    assert "not launched: none" in compiled(tmp_path)


def test_what_kernels_take_is_printed_without_a_gpu(tmp_path: Path) -> None:
    lines = compiled(tmp_path, "tiny-qwen3").splitlines()
    assert lines[0] == "registers spilled shared KB warps at once"
    registers, spilled, _, warps, held = lines[lines.index("_decode_attention_kernel") + 1].split()[:5]
    assert 0 < int(registers) <= 255 and int(spilled) >= 0 and int(warps) in (1, 2, 4) and int(held) >= 1
