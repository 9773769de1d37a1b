"""The executor for real devices: a worker thread that carries plans out on torch, in launch order.

`launch` hands the plan over and returns. All device state (KV memory, page tables, token rows, sampling columns)
is touched by the worker alone, so order is the only synchronisation there is: pass N+1 reads the tokens that pass
N stored, whether or not the host has seen them. A device is a `Device`: what it takes to run one pass; the CPU's is
below, another one stands beside it and changes nothing here.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.engine.attention import AttentionBackend
from paceline.engine.cpu.attention import CpuAttention
from paceline.engine.cpu.inputs import Inputs, SlotTables
from paceline.engine.cpu.kv_cache import KVCache
from paceline.engine.executor import Result
from paceline.model.decoder import Attend
from paceline.model.spec import ModelSpec
from paceline.sampling.logprobs import LogprobRequest, LogprobTable, output_logprobs, prompt_runs
from paceline.sampling.sampler import Sampler
from paceline.sampling.types import Bits, LogprobRun, Masks
from paceline.scheduler.plan import NO_TOKENS, Plan


class ExecutorFailed(RuntimeError):
    """A pass went wrong: what is in the device's memory can no longer be trusted, so no pass runs after it."""


class Device(Protocol):
    def run(self, plan: Plan, masks: Callable[[], Masks] | None) -> Result:
        """Carries one plan out. How long it took need not be said. `masks` waits until the host knows what some rows
        may say."""


class DecoderModel(Protocol):
    """A decoder with its weights: `model.decoder.Decoder`, or its rearranged twin."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def states(self, hidden: Tensor) -> Tensor:
        """Hidden states as the model defines them, out of what `forward` returns."""


class CpuModelRunner:
    """Torch on the CPU: its memory is the host's, so nothing is uploaded and nothing comes back late."""

    def __init__(
        self, decoder: DecoderModel, *, num_pages: int, page_size: int, max_running: int, max_row_tokens: int,
        num_host_pages: int = 0,
    ) -> None:  # fmt: skip
        spec = decoder.spec
        self.decoder = decoder
        self.cache = KVCache(spec, num_pages, page_size, decoder.dtype, num_host_pages)
        self.attention: AttentionBackend[Inputs, Attend] = CpuAttention(self.cache, spec)
        self.tables = SlotTables(max_running, max_row_tokens, page_size)
        self.sampler = Sampler(spec.vocab_size, max_running)
        self._asks = LogprobTable(max_running, spec.vocab_size)

    @torch.inference_mode()
    def run(self, plan: Plan, masks: Callable[[], Masks] | None) -> Result:
        if plan.swap is not None:
            self.cache.swap(plan.swap)
        for join in plan.joins:
            self.sampler.join(join.slot, join.request)
            self._asks.join(join.slot, join.request)
        self.tables.apply(plan)
        inputs = self.tables.inputs(plan)
        attend = self.attention.begin(inputs)
        hidden = self.decoder.forward(torch.from_numpy(inputs.tokens), torch.from_numpy(inputs.positions), attend)
        runs = self._prompt_logprobs(plan, hidden)
        self._pool(plan, inputs.offsets, hidden)
        if not len(inputs.sampled):
            return Result(NO_TOKENS, prompt_logprobs=runs)
        if len(inputs.sampled) < len(hidden):
            hidden = hidden[torch.from_numpy(inputs.sampled)]
        logits = self.logits(hidden)
        width = self._asks.of_output(plan)
        tell = None if width is None else output_logprobs(self._asks, width, inputs.sampled_slots, logits)
        allowed = None if masks is None else _unpacked(masks(), *logits.shape)
        tokens = self.sampler.sample(
            logits, inputs.sampled_slots, inputs.sampled_positions, self.tables.tokens, allowed
        )
        some = np.maximum(tokens, 0)  # a row without a token goes on with one that exists, until the host has seen it
        self.tables.store(inputs, some)
        return Result(tokens.astype(np.int32), logprobs=None if tell is None else tell(some), prompt_logprobs=runs)

    def _prompt_logprobs(self, plan: Plan, hidden: Tensor) -> tuple[LogprobRun, ...]:
        def tokens_of(ask: LogprobRequest) -> Tensor:
            row = self.tables.tokens[plan.slots[ask.row], ask.first : ask.first + ask.count]
            return torch.from_numpy(row.astype(np.int64))

        return prompt_runs(
            self._asks.of_prompts(plan), lambda index, count: self.logits(hidden[index : index + count]), tokens_of
        )

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


def _unpacked(masks: Masks, num_rows: int, vocab_size: int) -> Tensor:
    """[rows, vocab]: true where a token may come."""
    allowed = torch.ones(num_rows, vocab_size, dtype=torch.bool)
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    allowed[torch.from_numpy(masks.rows)] = torch.from_numpy(bits.astype(np.bool_))
    return allowed


class _CpuPending:
    __slots__ = ("__weakref__", "_done", "_error", "_masks", "_result", "delayed", "plan")

    def __init__(self, plan: Plan, delayed: bool) -> None:
        self.plan = plan
        self.delayed = delayed
        self._masks: SimpleQueue[Masks | None] = SimpleQueue()
        self._done = threading.Event()
        self._result: Result | None = None
        self._error: ExecutorFailed | None = None

    def settle(self, result: Result | None, error: ExecutorFailed | None) -> None:
        self._result, self._error = result, error
        self._done.set()

    def mask_buffer(self, num_rows: int, num_words: int) -> Bits:
        return np.empty((num_rows, num_words), np.int32)

    def sample(self, masks: Masks) -> None:
        self._masks.put(masks)

    def give_up(self) -> None:
        """Nobody will say any more what its rows may say."""
        self._masks.put(None)

    def wait_masks(self) -> Masks:
        masks = self._masks.get()
        if masks is None:
            raise ExecutorFailed("the executor was closed while a pass waited for its masks")
        return masks

    def wait(self) -> Result:
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None, "a pass ended with neither a result nor an error"
        return self._result


class CpuExecutor:
    can_pool = True

    def __init__(self, device: Device, *, num_threads: int | None = None) -> None:
        self.device = device
        self._num_threads = num_threads
        self._queue: SimpleQueue[_CpuPending | None] = SimpleQueue()
        self._error: ExecutorFailed | None = None
        self._closed = False
        self._delayed: weakref.ref[_CpuPending] | None = None
        self._thread = threading.Thread(target=self._work, name="paceline-device", daemon=True)
        self._thread.start()

    def launch(self, plan: Plan) -> _CpuPending:
        """Starts a pass and returns at once. After an error every pass ends in that error."""
        return self._start(_CpuPending(plan, delayed=False))

    def prepare(self, plan: Plan) -> None:
        """Nothing: launching is handing over, and the worker does the rest."""

    def launch_delayed(self, plan: Plan) -> _CpuPending:
        """As `launch`; the worker waits for the masks before it chooses tokens."""
        pending = _CpuPending(plan, delayed=True)
        self._delayed = weakref.ref(pending)
        return self._start(pending)

    def _start(self, pending: _CpuPending) -> _CpuPending:
        assert not self._closed, "a pass was launched on a closed executor"
        self._queue.put(pending)
        return pending

    def close(self) -> None:
        """Lets the passes that were launched finish, and the thread end."""
        if not self._closed:
            self._closed = True
            pending = self._delayed() if self._delayed is not None else None
            if pending is not None:
                pending.give_up()  # a loop that broke between launching and sampling leaves it waiting
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        ended: float | None = None
        while (pending := self._queue.get()) is not None:
            if self._error is not None:
                pending.settle(None, self._error)
                continue
            began = time.perf_counter()
            try:
                result = self.device.run(pending.plan, pending.wait_masks if pending.delayed else None)
            except BaseException as error:  # whatever it was, somebody waits for an answer
                self._error = ExecutorFailed(f"pass {pending.plan.step} failed: {type(error).__name__}: {error}")
                self._error.__cause__ = error
                pending.settle(None, self._error)
            else:
                idle_s = None if ended is None else began - ended
                ended = time.perf_counter()
                pending.settle(result._replace(device_s=ended - began, idle_s=idle_s), None)
            del pending  # a plan keeps its requests alive; nothing may while the thread is idle
