"""The processes of the ranks other than 0: starts them, sends them messages, notices when one dies or hangs.

If one does, all of them are killed. That ends the collectives that this process waits in, and so the pass, and the
engine fails with the reason. In the other direction, a rank exits when its pipes end or its parent is another process:
no rank outlives the engine, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from paceline.codec import encode
from paceline.config import ConfigError
from paceline.engine.executor import Completion
from paceline.engine.output import EngineFailed
from paceline.engine.rank_copies import CopyReports, RankMemory
from paceline.engine.rank_messages import (
    AfterLaunched,
    CopiesEnded,
    ExportPages,
    MessageToRank,
    RankFailed,
    RankReady,
    RankReport,
    RankSetup,
    RankSized,
    RankStarted,
    StopRank,
    UsePages,
    WeightsRead,
)
from paceline.parallel.ring import RingWriter, create_memory
from paceline.request import PacelineError

log = logging.getLogger("paceline.engine")
_BEAT_CHECK_S = 0.5
_MISSED_BEATS = 20  # consecutive checks without a sign of life; counted, since a machine may have been suspended
_STOP_S = 5.0
_Report = TypeVar("_Report", bound=RankReport)


class RankLost(EngineFailed):
    """A rank has died, hangs, or could not be started."""


class RankProcesses:
    """The ranks 1 to `size` - 1 as processes of this machine."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: PacelineError | None = None
        self._on_failure: Callable[[BaseException], None] = lambda _: None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._decoder = msgspec.json.Decoder(RankReport)
        self._copies = CopyReports(size - 1)
        pairs = [socket.socketpair() for _ in range(1, size)]
        self.memory = RankMemory([mine for mine, _ in pairs])
        ring = create_memory()
        try:
            self._processes = [self._start(rank, ring, theirs) for rank, (_, theirs) in enumerate(pairs, 1)]
            doorbells = [one.stdin.fileno() for one in self._processes if one.stdin is not None]
            self._ring = RingWriter(ring, doorbells, self.check)
        finally:
            os.close(ring)
            for _, theirs in pairs:
                theirs.close()
        self._reports: list[SimpleQueue[RankReport | PacelineError]] = [SimpleQueue() for _ in self._processes]
        self._threads = [
            threading.Thread(target=self._listen, args=(index,), name=f"paceline-rank-{index + 1}", daemon=True)
            for index in range(len(self._processes))
        ]
        for thread in self._threads:
            thread.start()

    def _start(self, rank: int, ring: int, memory: socket.socket) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        numbers = map(str, (rank, self.size, ring, memory.fileno()))
        command = [sys.executable, "-P", "-m", "paceline.engine.rank_process", *numbers]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            pass_fds=(ring, memory.fileno()),
        )

    # ------------------------------------------------------------------ building

    def connect(self, setup: RankSetup) -> None:
        """Sends the setup, once all processes run; they connect next."""
        self._wait_for(RankStarted)
        self.send(setup)

    def agree(self, num_pages: int) -> int:
        """The least number of pages, of the KV cache or of host memory, that fits on all ranks: all of them use it."""
        least = min([num_pages, *(report.num_pages for report in self._wait_for(RankSized))])
        self.send(UsePages(least))
        return least

    def wait_ready(self) -> None:
        self._wait_for(RankReady)

    def _wait_for(self, kind: type[_Report]) -> list[_Report]:
        """The next report of every rank, which is of this kind."""
        return [self._next(rank, kind) for rank in range(1, self.size)]

    def _next(self, rank: int, kind: type[_Report]) -> _Report:
        """The next report of a rank, which is of this kind. Raises what it reports instead."""
        report = self._reports[rank - 1].get()
        if isinstance(report, RankFailed):
            raise self._reported(rank, report)
        if isinstance(report, PacelineError):
            raise self.failure or report  # this rank was killed because another was lost
        assert isinstance(report, kind), f"rank {rank} reports {report} instead of {kind.__name__}"
        return report

    def _reported(self, rank: int, report: RankFailed) -> PacelineError:
        return (ConfigError if report.is_usage else RankLost)(f"rank {rank} of {self.size}: {report.message}")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """While the ranks are built. If one cannot be, rank 0 may see its closed connection first: what that rank has
        reported is raised instead."""
        try:
            yield
        except PacelineError:
            raise
        except Exception:
            try:
                self.wait_failure()
            except PacelineError:
                for rank, reports in enumerate(self._reports, 1):
                    while not reports.empty():
                        if isinstance(report := reports.get(), RankFailed):
                            raise self._reported(rank, report) from None
                raise
            raise

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """From now on ranks that hang are noticed, too."""
        self._on_failure = on_failure
        if self.failure is not None:
            on_failure(self.failure)
        thread = threading.Thread(target=self._watch, name="paceline-ranks", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ------------------------------------------------------------------ passes

    def send(self, message: MessageToRank) -> None:
        self.check()
        try:
            self._ring.write(encode(message))
        except BrokenPipeError:
            self.wait_failure()
            raise

    def launch_copies(self, message: ExportPages | AfterLaunched) -> Completion:
        end = self._copies.expect()
        self.send(message)
        return end

    def wait_weights(self, rank: int) -> WeightsRead:
        return self._next(rank, WeightsRead)

    def check(self) -> None:
        """Raises if a rank was lost."""
        if self.failure is not None:
            raise self.failure

    def wait_failure(self) -> None:
        """Raises if a rank was lost, or is found to be within five seconds: a collective that fails is often the first
        sign of it."""
        for _ in range(500):
            self.check()
            self._closing.wait(0.01)

    # ------------------------------------------------------------------ threads

    def _listen(self, index: int) -> None:
        process, rank = self._processes[index], index + 1
        assert process.stdout is not None, "stdout is a pipe"
        for line in process.stdout:
            report = self._decoder.decode(line)
            if isinstance(report, CopiesEnded):
                self._copies.on_report(index, report)
            else:
                self._reports[index].put(report)
        status = process.wait()
        ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        error = RankLost(f"rank {rank} of {self.size} ended unexpectedly ({ended})")
        self._copies.on_lost(index, error)
        self._fail(error)
        self._reports[index].put(error)

    def _watch(self) -> None:
        before, missed = self._ring.beats(), [0] * len(self._processes)
        while not self._closing.wait(_BEAT_CHECK_S) and self.failure is None:
            beats = self._ring.beats()
            missed = [0 if new != old else count + 1 for new, old, count in zip(beats, before, missed, strict=True)]
            before = beats
            for rank, count in enumerate(missed, 1):
                if count >= _MISSED_BEATS:
                    seconds = count * _BEAT_CHECK_S
                    self._fail(RankLost(f"rank {rank} of {self.size} has not responded for {seconds:g} s"))

    def _fail(self, error: PacelineError) -> None:
        with self._lock:
            if self._closing.is_set() or self.failure is not None:
                return
            self.failure = error
        log.error("%s: each rank has a part of the model, so the engine ends", error)
        self._kill()
        self._on_failure(error)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Ends the processes: they finish what was launched, unless this takes long."""
        with self._lock:
            was_closing = self._closing.is_set()
            self._closing.set()
        if was_closing:
            return
        with contextlib.suppress(PacelineError, OSError):
            self.send(StopRank())
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        self._kill()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self.memory.close()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
