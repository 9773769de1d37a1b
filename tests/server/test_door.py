"""The HTTP app and the engine meet in one door, so that a process boundary can be put there."""

from __future__ import annotations

import subprocess
import sys

from tests.test_imports import PACKAGE, imports

# What may be named on the other side of the door: the values that go through it, and the errors.
VALUES = {"paceline.engine.output", "paceline.engine.engine"}


def test_the_app_needs_no_tensor_library() -> None:
    code = "import sys, paceline.server.app; print([m for m in ('torch', 'safetensors', 'gguf') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_only_the_client_knows_an_engine() -> None:
    for path in (PACKAGE / "server").glob("*.py"):
        named = {name for name in imports(path) if name.startswith(("paceline.engine", "paceline.scheduler"))}
        if path.name != "client.py":
            assert named <= VALUES, f"{path.name} imports {named - VALUES}"
            assert "import Engine\n" not in path.read_text(), f"{path.name} knows the engine itself"


def test_the_server_imports_no_model_and_no_command() -> None:
    for path in (PACKAGE / "server").glob("*.py"):
        for name in imports(path):
            assert not name.startswith(("paceline.model", "paceline.sampling", "paceline.cli")), f"{path.name}: {name}"
