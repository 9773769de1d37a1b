"""Processes that compile kernels: each runs one function at a time, as it is told through a pipe.

`multiprocessing` would import the caller's main module again in every process, which starts a second engine in a script
that has no `if __name__ == "__main__"`. These processes import this package alone. They end when their pipe is closed.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerDied(RuntimeError):
    """A process ended while it worked."""


class CompileWorkers:
    """`num` processes in which Triton compiles for an architecture such as 90, and keeps its cache in `scratch`."""

    def __init__(self, num: int, arch: int, scratch: str) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        drop = "TRITON_INTERPRET"  # its interpreter compiles nothing
        environment = {name: value for name, value in os.environ.items() if name != drop}
        environment |= {"PYTHONPATH": paths, "TRITON_CACHE_DIR": scratch, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", __name__, str(arch)]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(num)
        ]
        self._free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(num, "paceline-compile")

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Calls a function of this package in a free process."""
        return self._threads.submit(self._call, function, args)

    def _call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        process = self._free.get()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            pickle.dump((function, args), process.stdin)
            process.stdin.flush()
            result, error = pickle.load(process.stdout)
        except (EOFError, OSError) as broken:
            raise WorkerDied(f"a process that compiles kernels ended with status {process.poll()}") from broken
        finally:
            self._free.put(process)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """Gives up what has not begun, and ends the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown()
        for process in self._processes:
            with process:  # closes the pipes and waits
                pass


@contextmanager
def compile_workers(num: int, arch: int, scratch: str) -> Iterator[CompileWorkers]:
    workers = CompileWorkers(num, arch, scratch)
    try:
        yield workers
    finally:
        workers.close()


def _serve(arch: int) -> None:
    requests, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints must not be mistaken for a result
    from paceline.kernels.binaries import compile_for

    compile_for(arch)
    while True:
        try:
            function, args = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = function(*args), None
        except Exception as error:  # the caller raises it
            answer = None, error
        pickle.dump(answer, results)
        results.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
