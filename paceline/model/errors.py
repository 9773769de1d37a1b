"""ModelError, and the checks that raise it: each message names the field, its value and a remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.request import PacelineError


class ModelError(PacelineError, ValueError):
    """A model cannot be used. The message names the file or field, its value and a remedy."""


def require_at_least(value: object, least: int, *names: str) -> None:
    """value: has fields of these names. None is allowed in one: it stands for the default, here and below."""
    for name in names:
        number = getattr(value, name)
        if number is not None and number < least:
            raise ModelError(f"{_field(value, name)}: give at least {least}.")


def require_positive(value: object, *names: str) -> None:
    for name in names:
        number = getattr(value, name)
        if number is not None and not 0 < number < math.inf:
            raise ModelError(f"{_field(value, name)}: give a positive number.")


def require_choice(value: object, name: str, choices: Sequence[str]) -> None:
    if getattr(value, name) not in choices:
        raise ModelError(f"{_field(value, name)}: choose one of {', '.join(choices)}.")


def _field(value: object, name: str) -> str:
    return f"{type(value).__name__}.{name} is {getattr(value, name)!r}"
