"""The import rules of docs/architecture.md: who may import whom, no cycles, and what a bare import loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paceline"
HEAVY = ("torch", "triton", "transformers", "safetensors", "tokenizers", "rich", "typer")


def rules() -> dict[str, set[str]]:
    """The documented rules: for each package or top-level module, what it may import."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text[text.index("## Import rules") :].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE)
    assert rows, "docs/architecture.md has no import rules"
    return {name: set(re.findall(r"`(\w+)`", allowed)) for name, allowed in rows}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("paceline", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Imports and classes of a file, inside functions and under TYPE_CHECKING too."""
    wanted = (ast.Import, ast.ImportFrom, ast.ClassDef)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, wanted)]


def imports(path: Path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (submodules & set(MODULES)) or {node.module}
    return found


@cache
def graph() -> dict[str, set[str]]:
    """Which module imports which, without paceline/__init__.py: that only names what a library user needs and holds the
    version."""
    return {
        name: {one for one in imports(path) if one in MODULES and one not in (name, "paceline")}
        for name, path in MODULES.items()
        if name != "paceline"
    }


def part_of(module: str) -> str:
    """The package or top-level module that a module belongs to."""
    return module.split(".")[1]


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_every_package_imports_only_what_the_rules_allow() -> None:
    allowed = rules()
    assert set(allowed) == {part_of(name) for name in graph()}, "the rules name exactly the packages there are"
    broken = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if part_of(other) not in allowed[part_of(name)] | {part_of(name)}
    ]
    assert not broken, broken


def test_every_rule_is_used() -> None:
    used = {(part_of(name), part_of(other)) for name, others in graph().items() for other in others}
    unused = [f"{name}: {other}" for name, others in rules().items() for other in others if (name, other) not in used]
    assert not unused, f"the rules allow imports that nothing needs: {unused}"


def test_there_is_no_import_cycle() -> None:
    """Removes modules that import nothing that is left, until none can be removed."""
    left = {name: set(others) for name, others in graph().items()}
    while removable := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in removable}
    in_cycles = {name: sorted(others & left.keys()) for name, others in left.items()}
    assert not left, f"import cycles among: {in_cycles}"


def test_packages_form_layers() -> None:
    """The rules themselves have no cycle, so every package has a place above all that it imports."""
    left = rules()
    while removable := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in removable}
    assert not left, f"packages that import each other: {left}"


def test_nothing_is_unpickled_but_what_a_process_of_ours_wrote_to_a_pipe() -> None:
    """A pickle runs code, and model files come from anyone."""
    formats = ("pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing")
    users = {module for module in MODULES for name in imports(MODULES[module]) if name.partition(".")[0] in formats}
    assert users == {
        "paceline.server.body_workers",  # bodies of requests
        "paceline.engine.cuda.compile_workers",  # kernels to compile
        "paceline.simulator.compare",  # simulations
        "paceline.bench.serve",  # the clients of a benchmark
        "paceline.bench.stall",  # its attackers
    }
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called, given = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
            is_torch = called in ("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter")
            assert not is_torch or given.get("weights_only") == "True", f"{module}: {called}"
            assert given.get("allow_pickle", "False") == "False", f"{module}: {called}"


def test_no_class_name_is_defined_twice() -> None:
    names = Counter(node.name for path in MODULES.values() for node in nodes(path) if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("module", ["paceline", "paceline.scheduler", "paceline.request", "paceline.config"])
def test_the_scheduler_needs_no_tensor_library(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    assert fresh(code).strip() == "[]"


def test_the_scheduler_reads_no_clock_and_does_no_io() -> None:
    forbidden = {"time", "datetime", "threading", "asyncio", "socket", "os", "io", "torch", "logging"}
    for path in (PACKAGE / "scheduler").glob("*.py"):
        assert not imports(path) & forbidden, f"{path.name} imports {imports(path) & forbidden}"
