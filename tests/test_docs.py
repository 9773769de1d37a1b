"""The documents tell the truth about the house."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.mutants import MUTANTS

ROOT = Path(__file__).parent.parent


def documented_files() -> set[str]:
    """Paths in the tree drawn in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```\npaceline/\n(.*?)```", text, re.DOTALL)
    assert block, "docs/architecture.md has no tree"
    files, folders = set(), list[str]()
    for line in block[1].splitlines():
        name, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2 - 1
        del folders[depth:]
        if name.endswith("/"):
            folders.append(name)
        else:
            files.add("".join(folders) + name)
    return files


def test_the_tree_in_the_architecture_is_the_real_one() -> None:
    real = {str(path.relative_to(ROOT / "paceline")) for path in (ROOT / "paceline").rglob("*.py")}
    assert documented_files() == real


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_example_in_the_readme_does_what_it_says() -> None:
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code, "the README has no example"
    expected = re.search(r"# (\[.*\])$", code[1], re.MULTILINE)
    assert expected, "the example does not say what it prints"
    run = subprocess.run([sys.executable, "-c", code[1]], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == expected[1]


def test_every_parameter_of_a_request_is_in_the_table() -> None:
    from paceline.server.fields import IGNORED_FIELDS, UNSUPPORTED_FIELDS
    from paceline.server.request_types import ChatRequest, CompletionRequest

    told = set(re.findall(r"`([a-z_]+)[`:.]", (ROOT / "docs" / "parameters.md").read_text()))
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *IGNORED_FIELDS, *UNSUPPORTED_FIELDS}
    assert known <= told, f"not in docs/parameters.md: {sorted(known - told)}"


def test_every_planted_fault_still_finds_its_place() -> None:
    """`make mutants` takes minutes; that its mutations still apply is checked here."""
    for mutant in MUTANTS:
        text = (ROOT / "paceline" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: the code to mutate stands {text.count(mutant.old)} times"
