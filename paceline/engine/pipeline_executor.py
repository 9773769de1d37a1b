"""Pipeline parallelism: executes plans on the first stage and sends them to the other stages.

    engine ── plan ─┬─▶ executor of stage 0 ─ hidden states ─▶ stage 1 ... ─▶ last stage
                    └─▶ ring ─▶ executor of stage 1 ...                          │
    engine ◀─ result ─ thread of this file ◀───────── result ────────────────────┘
                         └─ tokens ─▶ executor of stage 0

Every stage executes all passes in launch order. Passes that follow each other have different decode rows, so that all
stages are busy: see `RunningSet.due_slots`. On GPUs all stages report their results, for the time of their part.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from queue import SimpleQueue

import numpy as np

from paceline.codec import TypedDecoder
from paceline.engine.executor import Executor, Pending, Result
from paceline.engine.late_tokens import LateTokens
from paceline.engine.parallel_executor import RankedExecutor, RankLink, rank_errors
from paceline.engine.rank_messages import LaunchPass, RunBackgroundWork, SamplePass
from paceline.model.rank_group import StageLink
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler.plan import Plan


class PipelineExecutor(RankedExecutor):
    def __init__(
        self,
        local: Executor,
        ranks: RankLink,
        pipe: StageLink,
        late_tokens: LateTokens,
        *,
        on_gpus: bool = False,
    ) -> None:
        """local: the executor of the first stage, which waits for `late_tokens`. on_gpus: all other stages send
        results, each with its own time, and have graphs to capture; otherwise the last one does, with the time of
        all."""
        self._local, self._ranks = local, ranks
        self._pipe, self._late_tokens = pipe, late_tokens
        self._on_gpus = on_gpus
        self.capabilities = replace(local.capabilities, kv_transfer=False)
        self._results: TypedDecoder[Result] = TypedDecoder(Result)
        self._launched: SimpleQueue[_PipelinePending | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._receive, name="paceline-results", daemon=True)
        self._thread.start()

    @property
    def local(self) -> Executor:
        return self._local.local

    @property
    def slow_launches(self) -> Mapping[str, int]:
        return self._local.slow_launches

    def run_background_work(self) -> bool:
        if not self._on_gpus:
            return False
        self._ranks.send(RunBackgroundWork())
        return self._local.run_background_work()

    def launch(self, plan: Plan) -> _PipelinePending:
        return self._launch(LaunchPass(plan))

    def launch_delayed(self, plan: Plan) -> _PipelinePending:
        return self._launch(LaunchPass(plan, delayed=True))  # the last stage alone waits for the masks

    def _launch(self, message: LaunchPass) -> _PipelinePending:
        self._ranks.send(message)
        first = self._local.launch(message.plan)
        pending = _PipelinePending(message.plan, first, self._ranks, adds_time=self._on_gpus)
        self._launched.put(pending)
        return pending

    def _receive(self) -> None:
        """Receives the results of all passes, one after the other."""
        error: Exception | None = None
        while (pending := self._launched.get()) is not None:
            if error is None:
                try:
                    result = self._receive_result()
                except Exception as failure:  # of this pass and all behind it
                    error = failure
                    self._late_tokens.fail(failure)
                else:
                    self._late_tokens.put(pending.plan, result.tokens)
                    pending.settle(result)
            if error is not None:
                pending.fail(error)

    def _receive_result(self) -> Result:
        if not self._on_gpus:
            return self._results.decode(self._pipe.receive_result())
        stages = range(1, self._pipe.shard.num_stages)
        *others, last = [self._results.decode(self._pipe.receive_result(stage)) for stage in stages]
        return last._replace(device_s=sum(one.device_s for one in (*others, last)))

    def check(self) -> None:
        self._local.check()

    def close(self) -> None:
        # Stages stop behind the passes that were launched; this one computes the same passes.
        self._ranks.close()
        self._launched.put(None)
        self._thread.join()
        self._local.close()


class _PipelinePending:
    __slots__ = ("_adds_time", "_done", "_error", "_first", "_ranks", "_result", "plan")

    def __init__(self, plan: Plan, first: Pending, ranks: RankLink, *, adds_time: bool) -> None:
        """adds_time: the result has no time of the first stage."""
        self.plan = plan
        self._first, self._ranks, self._adds_time = first, ranks, adds_time
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
            first = self._first.wait()  # raises if the first stage has failed: then no result comes
            self._done.wait()
            if self._error is not None:
                raise self._error
        result = self._result
        assert result is not None, "a pass ended with neither a result nor an error"
        if not self._adds_time:
            return result
        return result._replace(device_s=result.device_s + first.device_s)

    def drafts(self) -> Drafts:
        return ()

    def mask_buffer(self, num_masks: int, num_words: int) -> Bits:
        return np.empty((num_masks, num_words), np.int32)

    def sample(self, masks: Masks) -> None:
        self._ranks.send(SamplePass(masks))
