"""The process of one rank of tensor parallelism, or stage of a pipeline, other than 0: executes what rank 0 sends.

It builds the same executor as rank 0, with its own part of the model, and exits when the engine is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from paceline.engine.executor import Executor, Pending
from paceline.engine.rank_copies import RankCopier
from paceline.engine.rank_messages import (
    AddAdapter,
    AfterLaunched,
    DropWeights,
    ExportPages,
    LaunchPass,
    RankFailed,
    RankReady,
    RankReport,
    RankSetup,
    RankSized,
    RankStarted,
    ReadWeights,
    RemoveAdapter,
    RunBackgroundWork,
    SamplePass,
    StopRank,
    UsePages,
    UseWeights,
    WeightsRead,
    to_rank,
)
from paceline.logs import set_up_child_logs
from paceline.model.spec import ModelError
from paceline.parallel.ring import RingReader
from paceline.request import PacelineError
from paceline.sampling.types import Masks
from paceline.scheduler.plan import Plan

if TYPE_CHECKING:
    from paceline.model.decoder import Decoder
    from paceline.model.lora import LoraFile, LoraWeights

log = logging.getLogger("paceline.engine")
_BEAT_S = 0.25


Report = Callable[[RankReport], None]


def run_rank(executor: Executor, read: Callable[[], bytes | None], report: Report, copier: RankCopier) -> bool:
    """Executes passes and copies until rank 0 stops it. False: rank 0 is gone."""
    launched: list[Pending] = []  # the last two
    adapters, weights = RankAdapters(executor), RankWeights(executor, report)
    while (data := read()) is not None:
        message = to_rank.decode(data)
        if isinstance(message, LaunchPass) and len(launched) == 2:
            # As rank 0 did before it sent this one. Passes are waited for in order: their events are used again.
            launched.pop(0).wait()
        if isinstance(message, LaunchPass):
            adapters.add_for(message.plan)
            executor.let_capture(message.may_capture)
        match message:
            case LaunchPass(plan, False):
                launched.append(executor.launch(plan))
            case LaunchPass(plan, True):
                delayed = executor.launch_delayed(plan)
                launched.append(delayed)
            case SamplePass(masks):
                if len(launched) > 1:
                    launched[0].wait()  # it may still read its own masks
                bits = delayed.mask_buffer(*masks.bits.shape)
                bits[:] = masks.bits
                delayed.sample(Masks(masks.rows.copy(), bits))  # what was decoded is read-only
            case RunBackgroundWork():
                executor.run_background_work()
            case AddAdapter():
                adapters.read(message)
            case RemoveAdapter(adapter):
                adapters.remove(adapter)
            case ExportPages() | AfterLaunched():
                copier.launch(message)
            case ReadWeights():
                weights.read(message)
            case UseWeights():
                while launched:
                    launched.pop(0).wait()  # rank 0 has their results; this rank may still be at their end
                adapters.add_all()  # the executor folds the new norms into those that it knows
                weights.use()
            case DropWeights():
                weights.drop()
            case StopRank():
                copier.close()
                executor.close()
                return True
            case other:
                raise AssertionError(f"{type(other).__name__} is no message of a running engine")
    return False


class RankAdapters:
    """The adapters that rank 0 has announced. Each is read on a thread of its own, while passes run; the first pass
    that loads it waits for it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._readers = ThreadPoolExecutor(1, "paceline-adapters")
        self._announced: dict[str, Future[tuple[LoraFile, LoraWeights]]] = {}

    def read(self, message: AddAdapter) -> None:
        self._announced[message.adapter] = self._readers.submit(self._read, message)

    def _read(self, message: AddAdapter) -> tuple[LoraFile, LoraWeights]:
        from paceline.model.lora import read_adapter

        file = read_adapter(message.folder)
        if file.digest != message.digest:
            raise ModelError(f"{message.folder} has changed since rank 0 read it: load the adapter again.")
        return file, self._executor.arrange_adapter(file)

    def add_for(self, plan: Plan) -> None:
        """Adds the adapters that this plan loads for the first time."""
        for load in plan.adapter_loads:
            self._add(load.adapter)

    def add_all(self) -> None:
        for adapter in list(self._announced):
            self._add(adapter)

    def _add(self, adapter: str) -> None:
        if adapter in self._announced:
            self._executor.add_adapter(adapter, *self._announced.pop(adapter).result())

    def remove(self, adapter: str) -> None:
        if self._announced.pop(adapter, None) is None:  # otherwise no pass has used it
            self._executor.remove_adapter(adapter)


class RankWeights:
    """The weights that rank 0 has announced. They are read on a thread of their own, while passes run."""

    def __init__(self, executor: Executor, report: Report) -> None:
        self._executor, self._report = executor, report
        self._readers = ThreadPoolExecutor(1, "paceline-weights")
        self._reading: Future[Decoder] | None = None  # holds them, or the error

    def read(self, message: ReadWeights) -> None:
        self._reading = self._readers.submit(self._read, message)

    def _read(self, message: ReadWeights) -> Decoder:
        try:
            decoder = self._executor.read_weights(message.source)
        except Exception as error:  # the engine goes on with the old weights: whatever it is, rank 0 reports it
            self._report(WeightsRead(message.number, _text(error)))
            raise
        self._report(WeightsRead(message.number))
        return decoder

    def use(self) -> None:
        assert self._reading is not None, "weights are replaced by those that were announced"
        reading, self._reading = self._reading, None
        self._executor.load_weights(reading.result())

    def drop(self) -> None:
        self._reading = None


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, PacelineError) else repr(error)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends rank 0, and that ends the pipes
    rank, size, ring, memory = map(int, sys.argv[1:])
    set_up_child_logs(f"rank {rank}")
    reports = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no report
    reader = RingReader(ring, rank - 1, 0)
    built: list[Executor] = []
    threading.Thread(target=_live, args=(reader, os.getppid(), built), name="paceline-beat", daemon=True).start()

    def report(message: RankReport) -> None:
        os.write(reports, msgspec.json.encode(message) + b"\n")

    def agree(num_pages: int) -> int:
        report(RankSized(num_pages))
        answer = _read(reader)
        assert isinstance(answer, UsePages), f"the number of pages is expected, not {answer}"
        return answer.num_pages

    try:
        from paceline.engine.build.ranks import (
            build_rank,
        )  # torch takes seconds to import, and the parent may be gone by then

        report(RankStarted())
        setup = _read(reader)
        assert isinstance(setup, RankSetup), f"the setup is expected, not {setup}"
        executor = build_rank(setup, rank, size, agree)
        built.append(executor)
        report(RankReady())
    except Exception as error:  # rank 0 reports it
        is_usage = isinstance(error, PacelineError)
        if not is_usage:
            log.exception("rank %d could not be built", rank)
        report(RankFailed(_text(error), is_usage))
        raise SystemExit(1) from None
    copier = RankCopier(executor, socket.socket(fileno=memory), report)
    has_stopped = run_rank(executor, reader.read, report, copier)
    sys.stderr.flush()
    os._exit(0 if has_stopped else 1)  # device libraries may have threads that never end


def _read(reader: RingReader) -> object:
    data = reader.read()
    if data is None:
        os._exit(1)  # rank 0 is gone
    return to_rank.decode(data)


def _live(reader: RingReader, parent: int, built: list[Executor]) -> None:
    """Shows rank 0 that this process is alive. Ends it with rank 0, and if a pass has failed, whatever the main thread
    waits for: the other ranks would wait for this one."""
    pause = threading.Event()
    try:
        while os.getppid() == parent:
            for executor in built:
                executor.check()
            reader.beat()
            pause.wait(_BEAT_S)
    except Exception:
        log.exception("a pass has failed")
    os._exit(1)


if __name__ == "__main__":
    main()
