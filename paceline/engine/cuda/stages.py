"""Pipeline parallelism on GPUs: the stages, each a CUDA executor with its layers.

    stage 0   late tokens ─▶ pass k+2 ─┐            pass k+3 ─┐
    stage 1            receive ─ pass k+1 ─┐  receive ─ pass k+2 ─┐
    stage 2                      receive ─ pass k ─ sample ─▶ result of k to the first stage

All stages launch the same plans in the same order, each on its engine stream, behind the hidden states that it
receives. These go from GPU to GPU in the order of streams (NCCL): no host waits for them. Without such a connection,
for tests of several stages on one GPU, they go through host memory, and a launch blocks until they are there. CUDA
graphs contain neither.

Tokens reach the first stage through the host: they are part of the result of a pass, and the next upload writes them
into the token pool. A pass that feeds tokens which have not arrived yet is launched when they have, by a thread of the
first stage. A stage waits only for earlier passes, so there is no deadlock: pass k of the first stage needs the results
of passes before it, pass k of another stage needs pass k of the stage before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch

from paceline.codec import encode
from paceline.engine.cuda.buffers import SENT_AT_ONCE
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.cuda.pending import CudaPending
from paceline.engine.executor import Executor, Result
from paceline.engine.late_tokens import LateTokens
from paceline.engine.weight_source import WeightSource
from paceline.model.decoder import Decoder
from paceline.model.lora import LoraFile, LoraWeights
from paceline.parallel.stages import StagePipe
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler.plan import Plan

_T = TypeVar("_T")


class HiddenStates:
    """Receives the hidden states of a pass, and sends them on."""

    def __init__(self, executor: CudaExecutor, pipe: StagePipe) -> None:
        model = executor.model
        self._executor, self._streams, self._model, self._pipe = executor, executor.streams, model, pipe
        self._count = 0  # of sends
        count = SENT_AT_ONCE if pipe.device_ranks is not None and not pipe.shard.is_last else 0
        size = (model.max_tokens, model.spec.hidden_size)
        self._buffers = [torch.empty(size, dtype=model.dtype, device=model.device) for _ in range(count)]
        self._copied, self._sent = ([self._streams.event() for _ in range(count)] for _ in range(2))

    @torch.inference_mode()
    def receive(self, num_tokens: int) -> None:
        """Of the next pass, into the buffer from which it begins."""
        model, pipe, target = self._model, self._pipe, self._model.received[:num_tokens]
        with self._streams.use(self._streams.engine):
            if pipe.device_ranks is not None:
                pipe.device_ranks.receive(target, pipe.before)
            else:
                target.copy_(pipe.receive(num_tokens, model.spec.hidden_size, model.dtype))

    @torch.inference_mode()
    def send(self, num_tokens: int) -> None:
        """Of the pass that was launched last. They are copied first, so that the next pass need not wait until another
        GPU has received them."""
        streams, pipe, hidden = self._streams, self._pipe, self._model.input(num_tokens)
        if pipe.device_ranks is None:
            with streams.use(streams.engine):
                pipe.send(hidden.cpu())  # waits for the pass
            return
        at = self._count % SENT_AT_ONCE
        self._count += 1
        buffer = self._buffers[at][:num_tokens]
        with streams.use(streams.engine):
            self._sent[at].wait(streams.engine)
            buffer.copy_(hidden)
            self._copied[at].record(streams.engine)
        with streams.use(streams.send):
            self._copied[at].wait(streams.send)
            pipe.device_ranks.send(buffer, pipe.behind).wait()
            self._sent[at].record(streams.send)

    def wait_sent(self) -> None:
        """Blocks until everything is sent. Raises if a stage is lost, as `CudaExecutor.wait_event`."""
        for event in self._sent:
            self._executor.wait_event(event)


class CudaStage(Executor):
    """A stage. The thread runs what must not block its caller."""

    def __init__(self, executor: CudaExecutor, pipe: StagePipe, thread_name: str) -> None:
        self._executor, self._pipe = executor, pipe
        self._hidden = HiddenStates(executor, pipe)
        self._failure: BaseException | None = None  # after one, no pass runs
        self.capabilities = replace(executor.capabilities, kv_transfer=False)
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # A daemon: it may wait for another stage, and the process must be able to exit.
        self._thread = threading.Thread(target=self._work, name=thread_name, daemon=True)
        self._thread.start()

    def _submit(self, task: Callable[[], _T]) -> Future[_T]:
        """Calls a function on the thread, behind what was submitted before, unless that has failed."""
        future: Future[_T] = Future()
        self._tasks.put((future, task))
        return future

    def _work(self) -> None:
        if self._executor.model.device.type == "cuda":
            torch.cuda.set_device(self._executor.model.device)  # of this thread
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                if self._failure is not None:
                    raise self._failure
                future.set_result(task())
            except BaseException as error:  # a caller waits for it, whatever failed
                self._failure = error
                future.set_exception(error)
            del item, future, task  # releases the plan and the result while the thread is idle

    def _run(self, plan: Plan, *, delayed: bool = False) -> CudaPending:
        """Launches the pass of this stage."""
        shard = self._pipe.shard
        if not shard.is_first:
            self._hidden.receive(plan.num_tokens)
        pending = self._executor.launch_delayed(plan) if delayed else self._executor.launch(plan)
        if not shard.is_last:
            self._hidden.send(plan.num_tokens)
        return pending

    @property
    def local(self) -> Executor:
        return self._executor

    @property
    def slow_launches(self) -> Mapping[str, int]:
        return self._executor.slow_launches

    def read_weights(self, source: WeightSource) -> Decoder:
        return self._executor.read_weights(source)

    def load_weights(self, decoder: Decoder) -> None:
        self._executor.load_weights(decoder)

    def arrange_adapter(self, file: LoraFile) -> LoraWeights:
        return self._executor.arrange_adapter(file)

    def add_adapter(self, adapter: str, file: LoraFile, weights: LoraWeights) -> None:
        self._executor.add_adapter(adapter, file, weights)

    def remove_adapter(self, adapter: str) -> None:
        self._executor.remove_adapter(adapter)

    def run_background_work(self) -> bool:
        return self._executor.run_background_work()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._executor.check()

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()
        self._hidden.wait_sent()
        self._executor.close()


class FirstCudaStage(CudaStage):
    """The first stage: launches passes on its thread, each when its tokens have arrived."""

    def __init__(self, executor: CudaExecutor, pipe: StagePipe, max_running: int) -> None:
        super().__init__(executor, pipe, "paceline-launch")
        self.late_tokens = LateTokens(max_running, executor.store_tokens)

    def launch(self, plan: Plan) -> _FirstPending:
        return _FirstPending(self._submit(partial(self._launch, plan)))

    def _launch(self, plan: Plan) -> CudaPending:
        self.late_tokens.begin(plan)
        return self._run(plan)

    # What follows happens on the thread: passes that wait for their tokens may need what was there before.

    def load_weights(self, decoder: Decoder) -> None:
        self._submit(partial(self._executor.load_weights, decoder)).result()

    def add_adapter(self, adapter: str, file: LoraFile, weights: LoraWeights) -> None:
        self._submit(partial(self._executor.add_adapter, adapter, file, weights))

    def remove_adapter(self, adapter: str) -> None:
        self._submit(partial(self._executor.remove_adapter, adapter))

    def run_background_work(self) -> bool:
        return self._submit(self._executor.run_background_work).result()


class _FirstPending:
    __slots__ = ("_launched",)

    def __init__(self, launched: Future[CudaPending]) -> None:
        self._launched = launched

    def wait(self) -> Result:
        return self._launched.result().wait()


class LaterCudaStage(CudaStage):
    """Any other stage: its thread waits for its passes and sends their results to the first stage. Those of the last
    one have the tokens, those of the others only the time."""

    def __init__(self, executor: CudaExecutor, pipe: StagePipe) -> None:
        super().__init__(executor, pipe, "paceline-results")

    def launch(self, plan: Plan) -> _LaterPending:
        pending = _LaterPending(self, self._run(plan))
        pending.report()
        return pending

    def launch_delayed(self, plan: Plan) -> _LaterPending:
        if not self._pipe.shard.is_last:
            return self.launch(plan)
        return _LaterPending(self, self._run(plan, delayed=True))

    def report(self, pending: CudaPending) -> Future[Result]:
        return self._submit(partial(self._report, pending))

    def _report(self, pending: CudaPending) -> Result:
        result = pending.wait()
        self._pipe.send_result(encode(result))
        return result


class _LaterPending:
    """The thread of the stage alone waits for the pass on the device."""

    __slots__ = ("_pending", "_reported", "_stage")

    def __init__(self, stage: LaterCudaStage, pending: CudaPending) -> None:
        self._stage, self._pending = stage, pending
        self._reported: Future[Result] | None = None

    def report(self) -> None:
        self._reported = self._stage.report(self._pending)

    def drafts(self) -> Drafts:
        return ()

    def mask_buffer(self, num_masks: int, num_words: int) -> Bits:
        if self._reported is not None:  # a stage before the last, which samples nothing
            return np.empty((num_masks, num_words), np.int32)
        return self._pending.mask_buffer(num_masks, num_words)

    def sample(self, masks: Masks) -> None:
        if self._reported is None:
            self._pending.sample(masks)
            self.report()

    def wait(self) -> Result:
        assert self._reported is not None, "a delayed pass was waited for before its masks were given"
        return self._reported.result()
