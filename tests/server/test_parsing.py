"""Request structs may be used by several threads from the start."""

from __future__ import annotations

import subprocess
import sys

# The type of `value` is known only when the second thread has used `Outer`, or after a while if it has to wait.
_TWO_THREADS_USE_A_NEW_TYPE = """
import sys
import threading

from msgspec import defstruct
from paceline.server.parsing import convert

first_is_inside, second_is_done = threading.Event(), threading.Event()


def slow_type():
    first_is_inside.set()
    second_is_done.wait(0.5)
    return int


Inner = defstruct("Inner", [("value", "slow_type()")], module="__main__")
Outer = defstruct("Outer", [("inner", "Inner"), ("name", str, "")], module="__main__")
found = []


def use():
    found.append(convert({"inner": {"value": 3}, "name": "x"}, Outer))


first = threading.Thread(target=use)
first.start()
first_is_inside.wait()
second = threading.Thread(target=lambda: (use(), second_is_done.set()))
second.start()
first.join()
second.join()
assert found == [Outer(Inner(3), "x")] * 2, found
"""


def test_two_threads_may_use_a_request_type_for_the_first_time() -> None:
    """msgspec alone crashes the process: the second thread reads the first one's unfinished list of fields."""
    command = [sys.executable, "-c", _TWO_THREADS_USE_A_NEW_TYPE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
