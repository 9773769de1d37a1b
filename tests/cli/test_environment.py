"""`PACELINE_*` variables: a misspelled one is reported at the start of every command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.cli.environment import warnings
from paceline.config import ConfigError


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("PACELINE_MAX_RUNNIN", "there is no such option: did you mean PACELINE_MAX_RUNNING"),
        ("PACELINE_MAX_MODEL_LEN", "there is no such option: here it is called PACELINE_CONTEXT_TOKENS"),
        ("PACELINE_XQZ", "there is no such option: `paceline serve --help` lists them."),
        ("PACELINE_DRAFT_TOKENS", "there is no such option"),  # hidden: users cannot set it
    ],
)
def test_an_unknown_variable_is_reported_with_the_nearest_name(variable: str, expected: str) -> None:
    (found,) = warnings({variable: "1", "PATH": "/bin"})
    assert found.startswith(f"{variable} is set, but {expected}")


def test_known_variables_are_not_reported() -> None:
    options = ("PORT", "MAX_RUNNING", "OVERLAP", "ADMIN_KEY", "KV_TOKENS", "REPEATS", "RATE")
    others = ("HOME", "MODEL", "LOAD", "SHAPE", "CONFIG")
    of_kubernetes = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
    assert not list(warnings({f"PACELINE_{name}": "1" for name in (*options, *others, *of_kubernetes)}))


def test_a_port_that_kubernetes_has_set_is_explained() -> None:
    with pytest.raises(ConfigError, match="as Kubernetes sets it for a Service named paceline: rename the Service"):
        list(warnings({"PACELINE_PORT": "tcp://10.0.0.1:8000"}))


def test_a_command_warns_once_and_runs(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MAX_RUNNIN", "3")
    result = run("models")
    assert result.exit_code == 0 and "tiny-qwen3" in result.stdout
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("paceline: warning: PACELINE_MAX_RUNNIN is set")


def test_the_model_can_be_set_in_the_environment(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MODEL", "/no/such/model")
    for command in (("generate", "hi"), ("chat",), ("serve", "--port", "0")):
        result = run(*command)
        assert result.exit_code == 75 and "model is '/no/such/model', which does not exist" in result.stderr, command
