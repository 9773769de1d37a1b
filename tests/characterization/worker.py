"""Runs cases in a process of its own, whose environment is set before torch and Triton are imported."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lazy import Lazy

transformers = Lazy("transformers")


def run_cases(job: tuple[str, Sequence[str]]) -> list[tuple[dict[str, Any], float]]:
    """The records of some cases, and the CPU seconds of each. Imports what it needs only now."""
    folder, names = job
    from tests.characterization.cases import all_cases, run
    from tests.kernels.faster_interpreter import faster_interpreter

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    root = Path(folder) / str(os.getpid())  # processes do not wait for each other's checkpoints
    root.mkdir(exist_ok=True)
    wanted, found = set(names), []
    with faster_interpreter():
        for case in all_cases():
            if case.name in wanted:
                began = time.process_time()
                record = run(case, root)
                found.append((record, time.process_time() - began))
    return found
