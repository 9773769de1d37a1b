"""The HTTP code and the engine meet in one interface, so that a process boundary fits between them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import PACKAGE, imports

# Modules on the engine's side of the interface.
ENGINE_SIDE = {
    "engine_device.py",
    "engine_kv_events.py",
    "engine_kv_transfer.py",
    "engine_metrics.py",
    "engine_process.py",
    "engine_queries.py",
    "engine_reports.py",
    "local_client.py",
}
# What the other modules may import: the values that cross the interface, and errors.
VALUES = {"paceline.engine.output", "paceline.engine.job"}


def modules() -> list[Path]:
    return list((PACKAGE / "server").rglob("*.py"))


@pytest.mark.parametrize("module", ["front_end", "supervisor", "engine_process"])
def test_serving_imports_no_tensor_library_before_a_model_is_loaded(module: str) -> None:
    code = f"import sys, paceline.server.{module}; print([m for m in ('torch', 'safetensors') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_only_the_engine_side_imports_the_engine() -> None:
    for path in modules():
        found = {name for name in imports(path) if name.startswith(("paceline.engine", "paceline.scheduler"))}
        if path.name not in ENGINE_SIDE:
            assert found <= VALUES, f"{path.name} imports {found - VALUES}"


def test_the_server_imports_no_model_and_no_command() -> None:
    for path in modules():
        for name in imports(path):
            assert not name.startswith(("paceline.model", "paceline.sampling", "paceline.cli")), f"{path.name}: {name}"


def test_the_server_has_no_import_cycle() -> None:
    graph = {
        f"paceline.server.{path.stem}": {name for name in imports(path) if name.startswith("paceline.server.")}
        for path in (PACKAGE / "server").glob("*.py")
    }
    graph |= {
        f"paceline.server.{folder}.{path.stem}": {name for name in imports(path) if name.startswith("paceline.server.")}
        for folder in ("handlers", "batches")
        for path in (PACKAGE / "server" / folder).glob("*.py")
    }
    graph["paceline.server.handlers"] = {name for name in graph if name.startswith("paceline.server.handlers.")}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_decoders_are_made_at_import_where_threads_use_them() -> None:
    """msgspec crashes if two threads use a type for the first time at once (tests/server/test_parsing.py)."""
    one_thread = {"process_messages.py", "remote_client.py"}
    for path in modules():
        if path.name not in one_thread:
            assert not re.search(r"\.decode\([^\n]*\btype=", path.read_text()), f"{path.name}: make a Decoder at import"
