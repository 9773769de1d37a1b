"""Finds level and format of the log before the options are parsed, so that errors about options are logged, too."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.cli.options import ENVIRONMENT


def log_options(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """`log_level` and `log_format` of `paceline serve` as far as they are valid, else their defaults."""
    from paceline.config import LOG_FORMATS, LOG_LEVELS, ServerConfig

    file = _server_table(_given("config", arguments, environment))
    defaults = {item.name: item.default for item in dataclasses.fields(ServerConfig)}

    def valid(name: str, choices: Sequence[str]) -> str:
        value = _given(name, arguments, environment) or file.get(name)
        return str(value if value in choices else defaults[name])

    return valid("log_level", LOG_LEVELS), valid("log_format", LOG_FORMATS)


def _given(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The value on the command line, the last one, else in the environment, else empty."""
    option = f"--{name.replace('_', '-')}"
    value = environment.get(ENVIRONMENT + name.upper(), "")
    for index, argument in enumerate(arguments):
        if argument == option and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(f"{option}="):
            value = argument.removeprefix(f"{option}=")
    return value


def _server_table(path: str) -> Mapping[str, object]:
    with contextlib.suppress(OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):  # reported when it is read
        table = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("server") if path else None
        return table if isinstance(table, dict) else {}
    return {}
