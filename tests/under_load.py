"""Runs tests several times beside a CPU load (`make test-flaky`): tests that depend on being scheduled in time fail.

usage: python -m tests.under_load RUNS PATH...
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with its parent, even if killed


def main(runs: int, paths: list[str]) -> int:
    load = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for run in range(1, runs + 1):
            began = time.monotonic()
            # Longer than pytest's usual limit: the machine is busy on purpose.
            status = subprocess.call([sys.executable, "-m", "pytest", "--timeout", "900", *paths])
            print(f"run {run} of {runs}: exit status {status} after {time.monotonic() - began:.0f} s", flush=True)
            if status:
                return status
    finally:
        for process in load:
            process.kill()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), sys.argv[2:]))
