"""Twenty minutes of load and faults: no lost token, no leaked page, constant memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_a_soak_with_faults_loses_and_leaks_nothing() -> None:
    run = subprocess.run([sys.executable, str(SOAK), "--minutes", "20"], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
