"""The HTTP app and the engine meet in one door, so that a process boundary can be put there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.test_imports import PACKAGE, imports

# What may be named on this side of the door: the values that go through it, and the errors.
VALUES = {"paceline.engine.output", "paceline.engine.engine"}


@pytest.mark.parametrize("module", ["front_end", "supervisor", "engine_process"])
def test_serving_needs_no_tensor_library_until_a_model_is_loaded(module: str) -> None:
    code = f"import sys, paceline.server.{module}; print([m for m in ('torch', 'safetensors') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


ENGINE_SIDE = {"answers.py", "engine_metrics.py", "engine_process.py", "local.py"}


def test_only_the_engines_side_knows_an_engine() -> None:
    for path in (PACKAGE / "server").glob("*.py"):
        named = {name for name in imports(path) if name.startswith(("paceline.engine", "paceline.scheduler"))}
        if path.name not in ENGINE_SIDE:
            assert named <= VALUES, f"{path.name} imports {named - VALUES}"
            assert "import Engine\n" not in path.read_text(), f"{path.name} knows the engine itself"


def test_the_server_imports_no_model_and_no_command() -> None:
    for path in (PACKAGE / "server").glob("*.py"):
        for name in imports(path):
            assert not name.startswith(("paceline.model", "paceline.sampling", "paceline.cli")), f"{path.name}: {name}"
