"""The executor for real devices: a worker thread that carries plans out on torch, in launch order.

`launch` hands the plan over and returns. All device state (KV memory, page tables, token rows, sampling columns)
is touched by the worker alone, so order is the only synchronisation there is: pass N+1 reads the tokens that pass
N stored, whether or not the host has seen them. A device is a `Device`: what it takes to run one pass; the CPU's is
below, another one stands beside it and changes nothing here.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.engine.attention import CpuAttention
from paceline.engine.executor import Result
from paceline.engine.inputs import SlotTables
from paceline.engine.kv_cache import KVCache
from paceline.model.decoder import Attend
from paceline.model.spec import ModelSpec
from paceline.sampling.sampler import Sampler
from paceline.scheduler.plan import NO_TOKENS, Plan


class ExecutorFailed(RuntimeError):
    """A pass went wrong: what is in the device's memory can no longer be trusted, so no pass runs after it."""


class Device(Protocol):
    def run(self, plan: Plan) -> np.ndarray:
        """Carries one plan out and returns the sampled tokens (int32), on the host."""


class Model(Protocol):
    """A decoder with its weights: `model.decoder.Decoder`, or its rearranged twin."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def states(self, hidden: Tensor) -> Tensor:
        """Hidden states as the model defines them, out of what `forward` returns."""


class CpuDevice:
    """Torch on the CPU: its memory is the host's, so nothing is uploaded and nothing comes back late."""

    def __init__(
        self, decoder: Model, *, num_pages: int, page_size: int, max_running: int, max_row_tokens: int
    ) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self.cache = KVCache(spec, num_pages, page_size, decoder.dtype)
        self.tables = SlotTables(max_running, max_row_tokens, page_size)
        self.sampler = Sampler(spec.vocab_size, max_running)

    @torch.inference_mode()
    def run(self, plan: Plan) -> np.ndarray:
        for join in plan.joins:
            request = join.request
            self.sampler.join(join.slot, request.params, len(request.prompt), request.stop_ids)
        self.tables.apply(plan)
        inputs = self.tables.inputs(plan)
        attend = CpuAttention(self.cache, self.decoder.spec, inputs)
        hidden = self.decoder.forward(torch.from_numpy(inputs.tokens), torch.from_numpy(inputs.positions), attend)
        self._pool(plan, inputs.offsets, hidden)
        if not len(inputs.sampled):
            return NO_TOKENS
        if len(inputs.sampled) < len(hidden):
            hidden = hidden[torch.from_numpy(inputs.sampled)]
        logits = self.logits(hidden)
        tokens = self.sampler.sample(logits, inputs.sampled_slots, inputs.sampled_positions)
        self.tables.store(inputs, tokens)
        return tokens.astype(np.int32)

    def _pool(self, plan: Plan, offsets: np.ndarray, hidden: Tensor) -> None:
        """Hands the hidden states of prompts over that are to be embedded."""
        for join in plan.joins:
            if join.request.pooled is not None:
                join.request.pooled.begin()
        for row in range(plan.num_decodes, plan.num_rows):
            pooled = plan.requests[row].pooled
            if pooled is not None:
                first = int(offsets[row])
                pooled.take(self.decoder.states(hidden[first : first + int(plan.lengths[row])]).float().numpy())

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


class _Pending:
    __slots__ = ("_done", "_error", "_result", "plan")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._done = threading.Event()
        self._result: Result | None = None
        self._error: ExecutorFailed | None = None

    def settle(self, result: Result | None, error: ExecutorFailed | None) -> None:
        self._result, self._error = result, error
        self._done.set()

    def wait(self) -> Result:
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None, "a pass ended with neither a result nor an error"
        return self._result


class TorchExecutor:
    can_pool = True

    def __init__(self, device: Device, *, num_threads: int | None = None) -> None:
        self.device = device
        self._num_threads = num_threads
        self._queue: SimpleQueue[_Pending | None] = SimpleQueue()
        self._error: ExecutorFailed | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="paceline-device", daemon=True)
        self._thread.start()

    def launch(self, plan: Plan) -> _Pending:
        """Starts a pass and returns at once. After an error every pass ends in that error."""
        assert not self._closed, "a pass was launched on a closed executor"
        pending = _Pending(plan)
        self._queue.put(pending)
        return pending

    def close(self) -> None:
        """Lets the passes that were launched finish, and the thread end."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        while (pending := self._queue.get()) is not None:
            if self._error is not None:
                pending.settle(None, self._error)
                continue
            began = time.perf_counter()
            try:
                tokens = self.device.run(pending.plan)
            except BaseException as error:  # whatever it was, somebody waits for an answer
                self._error = ExecutorFailed(f"pass {pending.plan.step} failed: {type(error).__name__}: {error}")
                self._error.__cause__ = error
                pending.settle(None, self._error)
            else:
                pending.settle(Result(tokens, time.perf_counter() - began), None)
            del pending  # a plan keeps its requests alive; nothing may while the thread is idle
