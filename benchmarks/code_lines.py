"""Counts lines of code, without comments, docstrings and blank lines, and what the type checker does not see.

    python benchmarks/code_lines.py [FOLDER ...] [--limit 500] [--at COMMIT] [--against COMMIT]

Prints a row per folder, the whole package, and the files with more lines than the limit. --at counts a commit instead
of the working tree; --against also prints the difference to a commit. A line that holds only a part of a statement,
such as a closing bracket, counts.

    any      uses of typing's Any, imports included
    ignores  comments `type: ignore`
    formats  names of weight formats as string constants in Python; mentions in docstrings and comments do not count

In C, `any`, `ignores` and `formats` are 0.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "paceline"
FOLDERS = ("paceline/model", "paceline/engine", "paceline/kernels")
SUFFIXES = (".py", ".c", ".h")
FORMATS = {"fp8", "int4", "mxfp4", "gguf", "q8", "q4"}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# A comment, or what may contain its signs: strings and characters.
_C_TOKEN = re.compile(r"//(?:\\\n|[^\n])*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)


class Count(NamedTuple):
    files: int = 0
    lines: int = 0
    any: int = 0
    ignores: int = 0
    formats: int = 0

    def plus(self, other: Count, sign: int = 1) -> Count:
        return Count(*(one + sign * two for one, two in zip(self, other, strict=True)))


def count_python(source: str) -> Count:
    tree = ast.parse(source)
    docstrings = _docstrings(tree)
    lines, ignores = set[int](), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and re.match(r"#\s*type:\s*ignore", token.string):
            ignores += 1
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for docstring in docstrings:
        # A docstring alone in its body may share a line with the `def`: that line stays.
        lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
        lines.update(_code_lines_beside(docstring, source))
    values = {id(docstring.value) for docstring in docstrings}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    formats = sum(node.value in FORMATS and id(node) not in values for node in strings)
    return Count(1, len(lines), _num_any(tree), ignores, formats)


def _docstrings(tree: ast.Module) -> list[ast.Expr]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found += [first] if isinstance(first.value.value, str) else []
    return found


def _code_lines_beside(docstring: ast.Expr, source: str) -> list[int]:
    before = source.splitlines()[docstring.lineno - 1].encode()[: docstring.col_offset]
    return [docstring.lineno] if before.strip() else []


def _num_any(tree: ast.Module) -> int:
    """Names, attributes such as `typing.Any`, imports, and annotations in quotes."""
    count = 0
    for node in ast.walk(tree):
        match node:
            case ast.Name(id="Any") | ast.Attribute(attr="Any") | ast.alias(name="Any"):
                count += 1
    quoted = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg | ast.AnnAssign)]
    quoted += [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for annotation in quoted:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            count += len(re.findall(r"\bAny\b", annotation.value))
    return count


def count_c(source: str) -> Count:
    def blank(match: re.Match[str]) -> str:
        text = match.group()
        # A comment keeps its line breaks, so that code before and after it stays on lines of its own.
        return text if text[0] in "\"'" else " " + "\n" * text.count("\n")

    return Count(1, sum(bool(line.strip()) for line in _C_TOKEN.sub(blank, source).splitlines()))


def count(path: PurePosixPath, source: str) -> Count:
    return count_python(source) if path.suffix == ".py" else count_c(source)


def read_sources(folders: Iterable[str], commit: str | None) -> dict[PurePosixPath, str]:
    """Every source file in these folders, of a commit or of the working tree."""
    if commit is None:
        paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
        return {PurePosixPath(path.relative_to(ROOT).as_posix()): path.read_text("utf-8") for path in paths}
    listed = _git("ls-tree", "-r", "--name-only", commit, "--", *folders).splitlines()
    paths_of_commit = [PurePosixPath(name) for name in listed if name.endswith(SUFFIXES)]
    return {path: _git("show", f"{commit}:{path}") for path in paths_of_commit}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, encoding="utf-8").stdout


def count_all(folders: Iterable[str], commit: str | None) -> dict[PurePosixPath, Count]:
    return {path: count(path, source) for path, source in read_sources(folders, commit).items()}


def by_folder(counts: Mapping[PurePosixPath, Count]) -> dict[str, Count]:
    found: dict[str, Count] = {}
    for path, one in counts.items():
        folder = str(path.parent)
        found[folder] = found.get(folder, Count()).plus(one)
    return dict(sorted(found.items()))


def total(counts: Iterable[Count]) -> Count:
    found = Count()
    for one in counts:
        found = found.plus(one)
    return found


def print_table(
    rows: dict[str, Count], before: dict[str, Count] | None, package: Count, package_before: Count | None
) -> None:
    """package: all of its folders, since limits for types and names of formats apply to it as a whole."""
    names = list(rows) if before is None else sorted({*rows, *before})
    width = max(map(len, [*names, f"all of {PACKAGE}"]))
    print(f"{'folder':{width}}" + "".join(f"{field:>{16 if before else 9}}" for field in Count._fields))

    def print_row(name: str, now: Count, then: Count | None) -> None:
        cells = [f"{number:,}" for number in now]
        if then is not None:
            cells = [f"{cell} {change:+,}" for cell, change in zip(cells, now.plus(then, -1), strict=True)]
        print(f"{name:{width}}" + "".join(f"{cell:>{16 if before else 9}}" for cell in cells))

    for name in names:
        print_row(name, rows.get(name, Count()), None if before is None else before.get(name, Count()))
    now, then = total(rows.values()), None if before is None else total(before.values())
    print_row("total", now, then)
    print_row(f"all of {PACKAGE}", package, package_before)
    if then is not None and then.lines:
        print(f"lines: {100 * (now.lines / then.lines - 1):+.1f}%")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS, help=f"default: {' '.join(FOLDERS)}")
    parser.add_argument("--limit", type=int, default=500, help="prints files with more lines of code (default: 500)")
    parser.add_argument("--at", metavar="COMMIT", help="counts this commit instead of the working tree")
    parser.add_argument("--against", metavar="COMMIT", help="also prints the difference to this commit")
    options = parser.parse_args()
    counts = count_all(options.folders, options.at)
    before, package_before = None, None
    if options.against is not None:
        before = by_folder(count_all(options.folders, options.against))
        package_before = total(count_all([PACKAGE], options.against).values())
    print_table(by_folder(counts), before, total(count_all([PACKAGE], options.at).values()), package_before)
    longest = sorted((-one.lines, str(path)) for path, one in counts.items() if one.lines > options.limit)
    print(f"\nfiles with more than {options.limit} lines of code: {len(longest) or 'none'}")
    for lines, path in longest:
        print(f"{-lines:7,}  {path}")


if __name__ == "__main__":
    main()
