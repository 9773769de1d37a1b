import os
import subprocess
import sys
from pathlib import Path


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """In a process that does not interpret. The interpreter takes much that the compiler refuses."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_all"]
    done = subprocess.run(
        command, env=env | {"TRITON_CACHE_DIR": str(tmp_path)}, cwd=Path(__file__).parents[2], capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not launched: none" in done.stdout
