from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app

RANDOM = ("--load", "random", "--shape", "tiny-qwen3", "--kv-tokens", "4096", "--threads", "1")


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs `paceline` in this process."""

    def call(*arguments: str, said: str | None = None) -> Any:
        return CliRunner().invoke(app, list(arguments), input=said)

    return call
