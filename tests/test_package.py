"""What importing Paceline settles for the process: when torch is imported, how long its threads spin for each other."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def gomp() -> str:
    """Loads the library as torch does. Importing torch takes seconds."""
    (library,) = Path(torch.__file__).parent.glob("lib/libgomp*")
    return f"import ctypes; ctypes.CDLL({str(library)!r})"


def test_torch_is_imported_by_the_engine_alone_and_its_threads_sleep_soon_when_they_wait_for_each_other() -> None:
    code = (
        "import sys, paceline; from paceline import SamplingParams; assert 'torch' not in sys.modules; "
        "import paceline.engine.loop; assert 'torch' not in sys.modules; "
        "from paceline import LLM; assert 'torch' not in sys.modules; "
        "import paceline.engine.build; assert 'torch' in sys.modules; "
        "assert 'transformers' not in sys.modules"
    )
    assert 0 < spins(code) <= PATIENT // 50


def test_threads_of_an_engine_process_sleep_soon_when_they_wait_for_each_other() -> None:
    assert 0 < spins(f"import paceline.server.engine_process; {gomp()}") <= PATIENT // 50


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
    """libgomp alone reads the variables, as it does when torch loads it."""
    assert spins(f"import paceline; {gomp()}", **environment) == expected


def test_torch_alone_would_spin_for_long() -> None:
    """If this fails, torch has another OpenMP or another default, and the choice in `paceline/__init__.py` is to be
    looked at again."""
    assert spins("import torch") == PATIENT
