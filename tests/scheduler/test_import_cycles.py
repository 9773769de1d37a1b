"""No import cycle inside the scheduler or with request.py, counting imports under TYPE_CHECKING too."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "paceline"


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """The modules of one import cycle, or an empty list."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(imports[module]):
            if cycle := visit(other, [*path, module]):
                return cycle
        done.add(module)
        return []

    for module in sorted(imports):
        if cycle := visit(module, []):
            return cycle
    return []


def test_scheduler_and_request_have_no_import_cycle() -> None:
    paths = [*(PACKAGE / "scheduler").glob("*.py"), PACKAGE / "request.py", PACKAGE / "config.py"]
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths}
    imports = {name: imported_modules(path) & (set(names.values()) - {name}) for path, name in names.items()}
    assert find_cycle(imports) == []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
