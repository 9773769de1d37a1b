"""Processes that compile kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.engine.cuda.compile_workers import CompileWorkers, WorkerDied

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def workers() -> Iterator[CompileWorkers]:
    with closing(CompileWorkers(3)) as found:
        yield found


def test_functions_run_in_other_processes(workers: CompileWorkers) -> None:
    pids = {task.result() for task in [workers.submit(os.getpid) for _ in range(12)]}
    assert os.getpid() not in pids and 1 <= len(pids) <= 3


def test_an_error_of_a_function_is_raised_by_the_caller(workers: CompileWorkers) -> None:
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 1, 0).result()
    assert workers.submit(divmod, 7, 2).result() == (3, 1), "the process goes on"


def test_processes_that_were_killed_can_be_closed() -> None:
    """The engine starts without them: it compiles kernels as they are used."""
    workers = CompileWorkers(1)
    workers._process.kill()
    workers._process.wait()
    with pytest.raises(WorkerDied):
        workers.submit(divmod, 7, 2).result()
    workers.close()


def test_the_callers_script_is_not_run_again_and_a_process_that_ends_is_noticed(tmp_path: Path) -> None:
    """A script that has no `if __name__ == "__main__"`."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from contextlib import closing\n"
        "from paceline.engine.cuda.compile_workers import CompileWorkers, WorkerDied\n"
        "with closing(CompileWorkers(2)) as workers:\n"
        "    print(workers.submit(divmod, 7, 2).result())\n"
        "    try:\n"
        "        workers.submit(os._exit, 3).result()\n"
        "    except WorkerDied:\n"
        "        print('noticed')\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "(3, 1)\nnoticed\n"
