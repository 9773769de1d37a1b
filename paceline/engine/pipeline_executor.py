"""Pipeline parallelism: executes plans on the first stage and sends them to the other stages.

    engine ── plan ─┬─▶ executor of stage 0 ─ hidden states ─▶ stage 1 ... ─▶ last stage
                    └─▶ ring ─▶ executor of stage 1 ...                          │
    engine ◀─ result ─ thread of this file ◀───────── result ────────────────────┘
                         └─ tokens ─▶ executor of stage 0

Every stage executes all passes in launch order. Passes that follow each other have different decode rows, so that all
stages are busy: see `RunningSet.due_slots`.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from queue import SimpleQueue

import numpy as np

from paceline.codec import TypedDecoder
from paceline.engine.cpu.executor import CpuExecutor
from paceline.engine.cpu.stages import StageRunner
from paceline.engine.executor import Executor, Pending, Result
from paceline.engine.parallel_executor import RankedExecutor, RankLink, rank_errors
from paceline.engine.rank_messages import LaunchPass, SamplePass
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler.plan import Plan


class PipelineExecutor(RankedExecutor):
    def __init__(self, local: CpuExecutor, ranks: RankLink) -> None:
        """local: the executor of the first stage."""
        assert isinstance(local.runner, StageRunner) and local.runner.late_tokens is not None, "the first stage plans"
        self._local, self._ranks = local, ranks
        self._pipe, self._late_tokens = local.runner.pipe, local.runner.late_tokens
        self.capabilities = replace(local.capabilities, kv_transfer=False)
        self._results: TypedDecoder[Result] = TypedDecoder(Result)
        self._launched: SimpleQueue[_PipelinePending | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._receive, name="paceline-results", daemon=True)
        self._thread.start()

    @property
    def local(self) -> Executor:
        return self._local

    def launch(self, plan: Plan) -> _PipelinePending:
        return self._launch(LaunchPass(plan))

    def launch_delayed(self, plan: Plan) -> _PipelinePending:
        return self._launch(LaunchPass(plan, delayed=True))  # the last stage alone waits for the masks

    def _launch(self, message: LaunchPass) -> _PipelinePending:
        self._ranks.send(message)
        pending = _PipelinePending(message.plan, self._local.launch(message.plan), self._ranks)
        self._launched.put(pending)
        return pending

    def _receive(self) -> None:
        """Receives the results of all passes, one after the other."""
        error: Exception | None = None
        while (pending := self._launched.get()) is not None:
            if error is None:
                try:
                    result = self._results.decode(self._pipe.receive_result())
                except Exception as failure:  # of this pass and all behind it
                    error = failure
                    self._late_tokens.fail(failure)
                else:
                    self._late_tokens.put(pending.plan, result.tokens)
                    pending.settle(result)
            if error is not None:
                pending.fail(error)

    def check(self) -> None:
        self._local.check()

    def close(self) -> None:
        # Stages stop behind the passes that were launched; this one computes the same passes.
        self._ranks.close()
        self._launched.put(None)
        self._thread.join()
        self._local.close()


class _PipelinePending:
    __slots__ = ("_done", "_error", "_first", "_ranks", "_result", "plan")

    def __init__(self, plan: Plan, first: Pending, ranks: RankLink) -> None:
        self.plan = plan
        self._first, self._ranks = first, ranks
        self._done = threading.Event()
        self._result: Result | None = None
        self._error: Exception | None = None

    def settle(self, result: Result) -> None:
        self._result = result
        self._done.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> Result:
        with rank_errors(self._ranks):
            self._first.wait()  # raises if the first stage has failed: then no result comes
            self._done.wait()
            if self._error is not None:
                raise self._error
        assert self._result is not None, "a pass ended with neither a result nor an error"
        return self._result

    def drafts(self) -> Drafts:
        return ()

    def mask_buffer(self, num_masks: int, num_words: int) -> Bits:
        return np.empty((num_masks, num_words), np.int32)

    def sample(self, masks: Masks) -> None:
        self._ranks.send(SamplePass(masks))
