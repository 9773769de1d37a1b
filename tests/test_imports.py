"""The rooms keep their doors: who may import whom, and how quickly."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "paceline"
HEAVY = ("torch", "triton", "transformers", "safetensors", "tokenizers", "rich", "typer")


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("module", ["paceline", "paceline.scheduler", "paceline.request", "paceline.config"])
def test_deciding_needs_no_tensor_library(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    assert fresh(code).strip() == "[]"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_the_scheduler_imports_nothing_of_ours_but_request_and_config() -> None:
    allowed = ("paceline.scheduler", "paceline.request", "paceline.config")
    for path in (PACKAGE / "scheduler").glob("*.py"):
        ours = {name for name in imports(path) if name.startswith("paceline")}
        assert all(name.startswith(allowed) for name in ours), f"{path.name} imports {ours}"


def test_the_scheduler_reads_no_clock_and_does_no_io() -> None:
    forbidden = {"time", "datetime", "threading", "asyncio", "socket", "os", "io", "torch", "logging"}
    for path in (PACKAGE / "scheduler").glob("*.py"):
        assert not imports(path) & forbidden, f"{path.name} imports {imports(path) & forbidden}"


@pytest.mark.parametrize("room", ["scheduler", "engine"])
def test_dependencies_point_one_way(room: str) -> None:
    above = {"scheduler": ("engine", "server", "cli", "bench", "simulator"), "engine": ("server", "cli", "bench")}[room]
    for path in (PACKAGE / room).rglob("*.py"):
        for name in imports(path):
            assert not name.startswith(tuple(f"paceline.{upper}" for upper in above)), f"{path} imports {name}"
