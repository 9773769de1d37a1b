"""Finding: the result of one check, and how checks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from paceline.request import PacelineError


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it works, but worse than it could
    PROBLEM = "problem"  # it does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. `remedy` says what to do, unless the text does."""

    name: str
    status: Status
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    return Finding(name, Status.OK, text)


def warning(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, Status.WARNING, text, remedy)


def problem(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, Status.PROBLEM, text, remedy)


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """The findings of all checks. One that fails is a finding too, and does not hide those of the others."""
    for name, check in checks:
        try:
            yield from check()
        except ModuleNotFoundError as error:
            yield problem(name, f"not checked: the package {error.name} is missing", f"pip install {error.name}")
        except PacelineError as error:
            yield Finding(name, Status.PROBLEM, str(error).rstrip("."))  # our errors contain the remedy
        except Exception as error:  # a broken installation fails in ways that nobody foresees
            yield problem(name, f"the check failed: {type(error).__name__}: {error}", "fix the cause, and run it again")
