"""Processes that compile kernels: each runs one function at a time, as it is told through a pipe.

`multiprocessing` would import the caller's main module again in every process, which starts a second engine in a script
that has no `if __name__ == "__main__"`. Here one process imports this package alone and forks the others. All of them
end when their pipes are closed.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, NamedTuple, TypeVar

from paceline.logs import set_up_child_logs

_MAX_PROCESSES = 32  # a process needs some 300 MB, and more save no time

T = TypeVar("T")


class WorkerDied(RuntimeError):
    """A process ended while it worked."""


class _Pipes(NamedTuple):
    """The caller's ends of the pipes of a process."""

    requests: IO[bytes]
    results: IO[bytes]


class CompileWorkers:
    """Processes in which Triton compiles: one per core, unless their number is given."""

    def __init__(self, count: int | None = None) -> None:
        count = count or min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
        self._scratch = tempfile.TemporaryDirectory(prefix="paceline-triton-")  # Triton's own cache
        pipes = [(*os.pipe(), *os.pipe()) for _ in range(count)]
        theirs = [(read, write) for read, _, _, write in pipes]
        self._all = [_Pipes(os.fdopen(write, "wb"), os.fdopen(read, "rb")) for _, write, read, _ in pipes]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TRITON_CACHE_DIR": self._scratch.name,
            "OMP_NUM_THREADS": "1",
        }
        ends = [end for pair in theirs for end in pair]
        command = [sys.executable, "-P", "-m", __name__, *map(str, ends)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=ends)
        for end in ends:
            os.close(end)
        self._free: SimpleQueue[_Pipes] = SimpleQueue()
        for one in self._all:
            self._free.put(one)
        self._threads = ThreadPoolExecutor(count, "paceline-compile")

    def submit(self, function: Callable[..., T], *args: object) -> Future[T]:
        """Calls a function of this package in a free process."""
        return self._threads.submit(self._call, function, args)

    def _call(self, function: Callable[..., T], args: tuple[object, ...]) -> T:
        pipes = self._free.get()
        try:
            pickle.dump((function, args), pipes.requests)
            pipes.requests.flush()
            answer: tuple[T, Exception | None] = pickle.load(pipes.results)
        except (EOFError, OSError) as broken:
            raise WorkerDied("a process that compiles kernels ended unexpectedly") from broken
        finally:
            self._free.put(pipes)
        result, error = answer
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Ends the processes. What they do not know yet is not done; what they are doing is finished and ignored."""
        self._threads.shutdown(cancel_futures=True)
        for pipes in self._all:
            with suppress(BrokenPipeError):  # of a process that was killed; `submit` has reported it
                pipes.requests.close()
            pipes.results.close()
        self._process.wait()
        self._scratch.cleanup()


def _serve(ends: Sequence[int]) -> None:
    """In the first process: forks one for every other pair of pipes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the caller, and that ends the pipes
    set_up_child_logs("kernels")
    os.dup2(2, 1)  # what a compiler prints is not for the caller's standard output
    # Imported once, before the others are forked: what the functions that they call need.
    from paceline.engine.cuda import variants  # noqa: F401
    from paceline.kernels import binaries  # noqa: F401

    mine = list(zip(ends[::2], ends[1::2], strict=True))
    while len(mine) > 1:
        last = mine.pop()
        if os.fork() == 0:
            for end in (end for pair in mine for end in pair):
                os.close(end)  # a caller notices that a process has ended when nobody has the pipe open
            mine = [last]
        else:
            for end in last:
                os.close(end)
    _work(*mine[0])


def _work(requests_end: int, results_end: int) -> None:
    with os.fdopen(requests_end, "rb") as requests, os.fdopen(results_end, "wb") as results:
        while True:
            try:
                function, args = pickle.load(requests)
            except EOFError:
                return
            answer: tuple[object, Exception | None]
            try:
                answer = function(*args), None
            except Exception as error:  # the caller raises it
                answer = None, error
            pickle.dump(answer, results)
            results.flush()


if __name__ == "__main__":
    _serve(list(map(int, sys.argv[1:])))
