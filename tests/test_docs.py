"""The documents match the code.

Parts of them are generated: a block between `<!-- generated: NAME -->` and `<!-- end -->`. After a change that
they show, run `python -m tests.test_docs`.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline import config, weight_formats
from paceline.config import BATCHING, EVICTION, POLICIES, EngineConfig, RayConfig, SchedulerConfig, ServerConfig
from paceline.model.family_table import HEAD, family_rows
from tests import combinations
from tests.mutants import MUTANTS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paceline"
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]
DOCS = [document for document in DOCUMENTS if "results" not in document.parts]  # these describe the code as it is
LOG = ROOT / "docs" / "log"
LOG_PAGES = [
    "end-to-end", "scheduler", "prefix-cache", "shared-prefix-attention", "decode-attention", "prefill-attention",
    "gemms", "experts", "lora", "cuda-graphs", "sampling", "grammars", "host-memory", "cpu", "server", "simulator",
    "hardware", "correctness", "startup", "speculation", "routing",
]  # fmt: skip


def read(name: str) -> str:
    return (ROOT / name).read_text()


# ---------------------------------------------------------------------------------------------------- generated blocks


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines)
        .replace("| --- |", "|---|")
        .replace(" --- |", "---|")
    )


def choices(name: str, mapping: Mapping[str, str]) -> str:
    return table((name, "what it does"), ((f"`{key}`", sentence) for key, sentence in mapping.items()))


def default(value: Any) -> str:
    if value is None or value == {} or value is dataclasses.MISSING:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else "inf" if value == math.inf else str(value)


def visible(kind: type) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(kind) if not item.metadata["hidden"]]


def options(kind: type) -> str:
    rows = []
    for item in visible(kind):
        one_of = ", ".join(f"`{choice}`" for choice in item.metadata["choices"])
        rows.append((f"`{item.name}`", default(item.default), item.metadata["help"].replace("|", "\\|"), one_of))
    return table(("option", "default", "what it sets", "choices"), rows)


def log_index() -> str:
    rows = []
    assert {page.stem for page in LOG.glob("*.md")} == {"README", *LOG_PAGES}, "a page of docs/log is not in LOG_PAGES"
    for name in LOG_PAGES:
        text = (LOG / f"{name}.md").read_text()
        title = re.match(r"# Log: (.*)", text)
        assert title, f"docs/log/{name}.md has no title"
        lead = next(block for block in text.split("\n\n") if block.startswith("| "))
        for line in lead.splitlines()[2:]:
            rows.append((*(cell.strip() for cell in line.strip().strip("|").split("|")), f"[{title[1]}]({name}.md)"))
    return table(("what was tried", "figure", "decision", "page"), rows)


def experiments() -> str:
    from paceline.simulator.experiments import EXPERIMENTS

    rows = ((f"`{name}`", one.title, one.answers) for name, one in EXPERIMENTS.items())
    return table(("experiment", "what it shows", "compare with"), rows)


def routes() -> str:
    from paceline.server.routes import documentation

    return documentation()


def first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.split(r"(?<=[a-z0-9`)…\"])\.(?:\s|$)|\n\n", text)[0].replace("\n", " ").rstrip(".")


PACKAGES = [  # roughly in order of execution
    "server", "cluster", "scheduler", "engine", "parallel", "model", "kernels", "sampling", "text", "bench", "checks",
    "simulator", "web", "doctor", "cli",
]  # fmt: skip


def tree() -> str:
    """The files of the package, each with the first sentence of its docstring."""
    lines = ["```"]

    def add(path: Path, depth: int, sentence: str) -> None:
        name = f"{path.name}/" if path.is_dir() else path.name
        lines.append(f"{'  ' * depth}{name:<{25 - 2 * depth}} {sentence}".rstrip())

    def walk(folder: Path, depth: int) -> None:
        add(folder, depth, first_sentence(folder / "__init__.py"))
        for path in sorted(folder.glob("[!_]*.py")) + sorted(folder.glob("_[!_]*.py")):
            add(path, depth + 1, first_sentence(path))
        packages = [path.parent for path in folder.glob("*/__init__.py")]
        assert depth or {path.name for path in packages} == set(PACKAGES), "PACKAGES does not list every package"
        for path in sorted(packages, key=lambda path: (PACKAGES.index(path.name) if not depth else 0, path)):
            walk(path, depth + 1)

    walk(PACKAGE, 0)
    return "\n".join([*lines, "```"])


GENERATED: dict[str, Callable[[], str]] = {
    "policies": lambda: choices("policy", POLICIES),
    "batching": lambda: choices("batching", BATCHING),
    "eviction": lambda: choices("eviction", EVICTION),
    "scheduler-options": lambda: options(SchedulerConfig),
    "engine-options": lambda: options(EngineConfig),
    "server-options": lambda: options(ServerConfig),
    "ray-options": lambda: options(RayConfig),
    "offline-parts": lambda: choices("part", config.OFFLINE_PARTS),
    "families": lambda: table(HEAD, family_rows()),
    "combinations": lambda: table(combinations.HEAD, combinations.combination_rows()),
    "formats": lambda: table(weight_formats.HEAD, weight_formats.format_rows()),
    "experiments": experiments,
    "routes": routes,
    "tree": tree,
    "log": log_index,
}
BLOCK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def regenerated(text: str) -> str:
    return BLOCK.sub(lambda match: f"{match[1]}{GENERATED[match[2]]()}\n{match[3]}", text)


@pytest.mark.parametrize("document", DOCS, ids=lambda document: str(document.relative_to(ROOT)))
def test_generated_tables_are_up_to_date(document: Path) -> None:
    text = document.read_text()
    assert text == regenerated(text), f"{document.name} is out of date: run `python -m tests.test_docs`"


def test_every_generated_table_is_in_the_docs() -> None:
    found = {match[2] for document in DOCS for match in BLOCK.finditer(document.read_text())}
    assert found == set(GENERATED)


# ----------------------------------------------------------------------------------------------------- files and links


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", document.read_text()):
            path = document.parent / target if target else document
            where = f"{document.relative_to(ROOT)} links to {target}#{anchor}"
            assert path.exists(), where
            assert not anchor or anchor in anchors(path), where


def test_every_source_file_named_in_the_docs_exists() -> None:
    """In backticks: a path below the repository or below paceline/, such as `scheduler/plan.py`."""
    suffixes = "py|c|h|md|toml|json|service|svg|js"
    for document in DOCS:
        if document.name == "CHANGELOG.md":
            continue  # it may name files that were moved
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for name in re.findall(rf"`((?:[\w.-]+/)+[\w.-]+\.(?:{suffixes}))(?:::\w+)?`", text):
            is_there = (ROOT / name).exists() or (PACKAGE / name).exists()
            assert is_there, f"{document.relative_to(ROOT)} names {name}, which does not exist"


def test_documents_named_in_comments_exist() -> None:
    for folder in ("paceline", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text()):
                assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}, which does not exist"


def test_examples_of_changes_apply_to_the_code() -> None:
    """In the diffs of CONTRIBUTING, the lines that are not added are lines of the named file, in this order."""
    diffs = re.findall(r"^   ```diff\n   --- (\S+)\n(.*?)^   ```", read("CONTRIBUTING.md"), re.DOTALL | re.MULTILINE)
    assert len(diffs) >= 8
    for name, diff in diffs:
        lines = [line.removeprefix("   ") for line in diff.splitlines()]
        present = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        assert present and present in read(name), f"the example changes lines that {name} does not have:\n{present}"


# --------------------------------------------------------------------------------------------------- names in the docs


def test_concepts_name_every_policy_option_and_experiment() -> None:
    from paceline.simulator.experiments import EXPERIMENTS

    text = read("docs/concepts.md")
    names = [*POLICIES, *BATCHING, *EVICTION]
    names += [item.name for kind in (SchedulerConfig, EngineConfig) for item in visible(kind)]
    missing = [name for name in names if f"`{name}`" not in text]
    missing += [name for name in EXPERIMENTS if f"sim experiment {name}" not in text and f"`{name}`" not in text]
    assert not missing, f"not in docs/concepts.md: {missing}"


def test_experiments_named_in_the_docs_exist() -> None:
    from paceline.simulator.experiments import EXPERIMENTS

    for document in DOCS:
        for name in re.findall(r"paceline sim experiment ([a-z-]+)", document.read_text()):
            assert name in {*EXPERIMENTS, "all"}, f"{document.relative_to(ROOT)} names the experiment {name}"


def terms(heading: str) -> dict[str, list[str]]:
    """The cells of the rows below a heading of docs/concepts.md, by term."""
    section = read("docs/concepts.md").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("| **")]
    return {row[0].strip(): [cell.strip() for cell in row] for row in rows}


def test_options_named_in_the_concepts_exist() -> None:
    """The column `option` of the terms."""
    known = {item.name for kind in (SchedulerConfig, EngineConfig, ServerConfig, RayConfig) for item in visible(kind)}
    for term, cells in terms("Terms").items():
        for name in re.findall(r"`([a-z_]+)(?: [a-z0-9.-]+)?`", cells[4]):
            assert name in known, f"{term} names the option {name}"


def test_concepts_have_a_cell_for_every_engine() -> None:
    ours, theirs = terms("Terms"), terms("Terms in other engines")
    assert len(ours) >= 40
    assert list(ours) == list(theirs), "both tables have the same terms"
    for cells in (*ours.values(), *theirs.values()):
        assert len(cells) == 6 and all(cells), cells


def test_every_parameter_of_a_request_is_in_the_table() -> None:
    from paceline.server.fields import IGNORED_FIELDS, UNSUPPORTED_FIELDS
    from paceline.server.request_types import ChatRequest, CompletionRequest

    documented = set(re.findall(r"`([a-z_]+)[`:.]", read("docs/parameters.md")))
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *IGNORED_FIELDS, *UNSUPPORTED_FIELDS}
    assert known <= documented, f"not in docs/parameters.md: {sorted(known - documented)}"


# ------------------------------------------------------------------------------------------------------------ the rest


def test_the_example_in_the_readme_prints_what_it_says() -> None:
    code = re.search(r"```python\n(.*?)```", read("README.md"), re.DOTALL)
    assert code, "the README has no example"
    expected = re.search(r"# (\[.*\])$", code[1], re.MULTILINE)
    assert expected, "the example does not say what it prints"
    run = subprocess.run([sys.executable, "-c", code[1]], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == expected[1]


def test_every_planted_fault_still_applies() -> None:
    """`make mutants` takes minutes; that its mutations still apply is checked here."""
    for mutant in MUTANTS:
        text = (PACKAGE / mutant.file).read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: the code to mutate occurs {text.count(mutant.old)} times"


def main() -> None:
    for document in DOCS:
        text = document.read_text()
        if (new := regenerated(text)) != text:
            document.write_text(new)
            print(f"{document.relative_to(ROOT)} updated")


if __name__ == "__main__":
    main()
