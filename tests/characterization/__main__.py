"""Records what every family gives in every weight format on every device, and compares two records.

A refactoring must not change a token, a refusal or a silent fallback. Record before it, compare after every step:

    python -m tests.characterization record FILE [--only TEXT] [-j 2]
    python -m tests.characterization compare FILE [--only TEXT] [-j 2] [--atol 0] [--ignore FIELD]
    python -m tests.characterization summary FILE

A case is named family/format/device/option; --only selects those whose names contain all of the given texts. Equal code
on the same machine gives equal bits. `summary` counts the cases of a record, and groups what is refused by its text.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from tests.characterization.worker import run_cases

Record = Mapping[str, Any]
_OUTCOMES = ("runs", "built", "resolved", "refused", "failed")
_CASES_AT_ONCE = 20  # most of them with the same few checkpoints


def names_of(only: Sequence[str]) -> list[str]:
    from tests.characterization.cases import all_cases

    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names)), "two cases have the same name"
    return [name for name in names if all(text in name for text in only)]


def run_all(only: Sequence[str], num_processes: int) -> Iterator[dict[str, Any]]:
    names, began = names_of(only), time.perf_counter()
    jobs = [names[first : first + _CASES_AT_ONCE] for first in range(0, len(names), _CASES_AT_ONCE)]
    times: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-characterization-") as folder:
        pool = ProcessPoolExecutor(max(1, min(num_processes, len(jobs))), get_context("spawn"))
        with pool:
            for found in pool.map(run_cases, [(folder, job) for job in jobs]):
                for record, seconds in found:
                    times.append((seconds, record["case"]))
                    yield record
                print(f"{len(times)} of {len(names)} cases, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print(f"{sum(seconds for seconds, _ in times):.0f} s of CPU time, of which:", file=sys.stderr)
    for seconds, name in sorted(times, reverse=True)[:5]:
        print(f"{seconds:6.1f} s  {name}", file=sys.stderr)


def read(path: str) -> dict[str, Record]:
    with open(path, encoding="utf-8") as lines:
        return {record["case"]: record for record in map(json.loads, lines)}


def differences(before: Record, after: Record, atol: float, ignored: Sequence[str]) -> Iterator[str]:
    for field in sorted({*before, *after} - {"case", *ignored}):
        old: Any = before.get(field)
        new: Any = after.get(field)
        if old == new:
            continue
        is_output = field in ("tokens", "logprobs")
        if is_output and (old is None or new is None):
            if field == "tokens":
                yield "tokens are gone" if new is None else "tokens are new"
        elif field == "tokens":
            pairs = enumerate(zip(old, new, strict=False))
            places = [f"prompt {index} at {_first_difference(*pair)}" for index, pair in pairs if pair[0] != pair[1]]
            yield f"tokens differ: {', '.join(places) or 'another number of prompts'}"
        elif field == "logprobs":
            if before.get("tokens") == after.get("tokens") and (error := largest_difference(old, new)) > atol:
                yield f"logprobs differ by {error:.3g}"
        else:
            yield f"{field} was {short(old)}, is {short(new)}"


def largest_difference(old: Any, new: Any) -> float:
    pairs = [(a, b) for x, y in zip(old, new, strict=True) for a, b in zip(x, y, strict=True)]
    return max((abs(a - b) for a, b in pairs), default=0.0)


def _first_difference(old: Sequence[int], new: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def short(value: Any) -> str:
    text = "missing" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) < 300 else f"{text[:300]}..."


def record(path: str, only: Sequence[str], num_processes: int) -> int:
    records = []
    with open(path, "w", encoding="utf-8") as file:  # as they come, for who cannot wait
        for one in run_all(only, num_processes):
            records.append(one)
            file.write(json.dumps(one) + "\n")
            file.flush()
    summarise(records)
    return 0


def compare(path: str, only: Sequence[str], num_processes: int, atol: float, ignored: Sequence[str]) -> int:
    before = {name: one for name, one in read(path).items() if all(text in name for text in only)}
    after = {one["case"]: one for one in run_all(only, num_processes)}
    count = 0
    for name in sorted({*before, *after}):
        if name not in after or name not in before:
            found = ["is gone" if name not in after else "is new"]
        else:
            found = list(differences(before[name], after[name], atol, ignored))
        count += bool(found)
        if found:
            print(name, *found, sep="\n    ")
    print(f"{len(after)} cases, {count} differ")
    return 1 if count else 0


def summarise(records: Iterable[Record]) -> None:
    records = list(records)
    outcomes: Counter[tuple[str, str]] = Counter()
    groups: dict[str, list[str]] = defaultdict(list)
    for one in records:
        name = str(one["case"])
        outcome = next((kind for kind in _OUTCOMES if kind in one), "runs")
        outcomes[name.split("/")[-2], outcome] += 1
        outcomes["all", outcome] += 1
        for kind in ("refused", "failed"):
            if kind in one:
                groups[f"{kind}: {general(one[kind])}"].append(name)
        if is_expanded_silently(one):
            groups[f"expanded without a line in the log: {name.split('/')[1]} on {name.split('/')[2]}"].append(name)
        for line in one.get("log", ()):
            groups[f"logged: {general(line)}"].append(name)
    for device in ("reference", "cpu", "cuda", "all"):
        print(
            f"{device:10}",
            *(f"{kind} {outcomes[device, kind]:5}" for kind in _OUTCOMES),
        )
    for text, names in sorted(groups.items()):
        print(f"\n{len(names):5}  {text}")
        for name in (names[0], names[-1])[: len(names)]:
            print(f"         {name}")


def is_expanded_silently(one: Record) -> bool:
    _, stored, device, _ = str(one["case"]).split("/")
    is_expanded = one.get("quantization") == "none" and stored != "plain" and " as " not in stored
    return is_expanded and device != "reference" and not {"refused", "failed", "log"} & set(one)


def general(text: str) -> str:
    """Without what differs between models."""
    return re.sub(r"ROOT/[^\s:,']*", "MODEL", re.sub(r"\d+(, \d+)+", "#", text))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.characterization", description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("record", "compare", "summary"))
    parser.add_argument("file")
    parser.add_argument("--only", action="append", default=[], help="only cases whose names contain this; repeatable")
    parser.add_argument("-j", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--atol", type=float, default=0.0, help="how much logprobs may differ (default: 0)")
    parser.add_argument("--ignore", action="append", default=[], help="a field that may differ, such as loaded_bytes")
    options = parser.parse_args()
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}  # before torch and Triton are imported
    match options.command:
        case "record":
            return record(options.file, options.only, options.j)
        case "compare":
            return compare(options.file, options.only, options.j, options.atol, options.ignore)
    summarise(one for name, one in read(options.file).items() if all(text in name for text in options.only))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
