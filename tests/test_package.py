"""What importing Paceline settles for the process: how long torch's threads spin for each other."""

import os
import platform
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="elsewhere torch's threads are left as they are"
)

PATIENT = 300_000  # libgomp's own: 22 ms of a core that the awaited thread may need


def spins(code: str, **environment: str) -> int:
    """What libgomp itself says it was told, in a fresh interpreter."""
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", run.stderr)
    assert found, f"no libgomp was loaded: {run.stderr}"
    return int(found[1])


@pytest.mark.parametrize("code", ["from paceline import LLM", "import paceline.server.engine_process, torch"])
def test_threads_sleep_soon_when_they_wait_for_each_other(code: str) -> None:
    assert 0 < spins(code) <= PATIENT // 50


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"GOMP_SPINCOUNT": "7"}, 7),
        ({"OMP_WAIT_POLICY": "passive"}, 0),
        ({"OMP_WAIT_POLICY": "active"}, 30_000_000_000),
        ({"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "7"}, 7),
    ],
)
def test_what_the_user_says_of_waiting_wins(environment: dict[str, str], expected: int) -> None:
    assert spins("import paceline, torch", **environment) == expected


def test_torch_alone_would_spin_for_long() -> None:
    """If this fails, torch has another OpenMP or another default, and the choice in `paceline/__init__.py` is to be
    looked at again."""
    assert spins("import torch") == PATIENT
