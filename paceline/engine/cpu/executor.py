"""The CPU executor: a worker thread that executes plans with torch, in launch order.

`launch` queues the plan and returns. All device state (KV cache, page tables, token rows, sampling columns) is used by
the worker only, so launch order is the only synchronisation: pass N+1 reads the tokens that pass N stored, whether or
not the host has seen them. `CpuModelRunner` runs one pass; `CpuExecutor` runs them one after the other.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.engine.cpu.draft_model import ModelDrafts
from paceline.engine.cpu.drafts import DraftProposer, NgramDrafts, Verification, verification
from paceline.engine.cpu.inputs import Index, Inputs, SlotTables
from paceline.engine.cpu.kv_cache import KVCache
from paceline.engine.cpu.linear import arrange
from paceline.engine.cpu.lora import PreparedAdapter, ResidentAdapters
from paceline.engine.cpu.quantized_model import DecoderModel, QuantizedModel, attention_for
from paceline.engine.executor import Capabilities, Executor, Result
from paceline.engine.pooling import PooledStates, pool_chunk
from paceline.engine.weight_source import WeightSource
from paceline.model.decoder import Decoder
from paceline.model.lora import LoraFile, LoraWeights, arrange_adapter
from paceline.model.rank_group import gather_logits
from paceline.model.spec import ModelError
from paceline.sampling.logprobs import LogprobRequest, LogprobTable, output_logprobs, prompt_runs
from paceline.sampling.sampler import Sampler
from paceline.sampling.sharded import ShardedSampler
from paceline.sampling.types import Bits, Drafts, LogprobRun, Masks
from paceline.scheduler.plan import NO_TOKENS, Column, Plan
from paceline.shared_pages import SharedPages

_NOT_MEASURED = 0.0  # device time, as runners report it: the executor measures it around them


class ExecutorFailed(RuntimeError):
    """A pass failed. The device's memory can no longer be trusted, so no later pass runs."""


class MaskSource(Protocol):
    """The host, for a delayed pass."""

    def set_drafts(self, drafts: Drafts) -> None:
        """Called first."""

    def wait_masks(self) -> Masks:
        """Blocks until the host has computed the masks."""


class ModelRunner(Protocol):
    cache: KVCache
    adapters: ResidentAdapters

    @property
    def decoder(self) -> DecoderModel: ...

    def run(self, plan: Plan, host: MaskSource | None) -> Result:
        """Executes one plan. With `host`, masks are applied."""

    def load_weights(self, decoder: Decoder) -> None:
        """Replaces the weights by those of a decoder of the same spec, which is taken over."""


class CpuModelRunner:
    """Runs passes with torch on the CPU. Device memory is host memory, so nothing is copied."""

    def __init__(
        self,
        decoder: DecoderModel,
        *,
        num_pages: int,
        page_size: int,
        max_running: int,
        max_row_tokens: int,
        num_host_pages: int = 0,
        share_host: bool = False,
        adapt_drafts: bool = True,
        draft: DecoderModel | None = None,
    ) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self.cache = KVCache(
            spec, num_pages, page_size, decoder.kv_dtype, num_host_pages, num_slots=max_running, share_host=share_host
        )
        self.attention = attention_for(decoder, self.cache)
        self.tables = SlotTables(max_running, max_row_tokens, page_size)
        self.adapters = ResidentAdapters(max_running)
        self.sampler = Sampler(spec.vocab_size, max_running)
        self._sharded = None
        if decoder.group is not None:
            self._sharded = ShardedSampler(self.sampler, decoder.group, spec)
        self._logprobs = LogprobTable(max_running, spec.vocab_size)
        self._pooling: dict[int, str] = {}  # slot -> kind, for prompts that are embedded
        self._draft_model = None
        if draft is not None:
            self._draft_model = ModelDrafts(
                draft,
                self.sampler,
                num_pages=num_pages,
                page_size=page_size,
                max_running=max_running,
                group=decoder.group,
            )
        self._drafts: DraftProposer = self._draft_model or NgramDrafts(max_running, adapts=adapt_drafts)

    def load_weights(self, decoder: Decoder) -> None:
        assert not isinstance(self.decoder, QuantizedModel), "weights of a quantized model cannot be replaced"
        self.decoder = arrange(decoder)
        self.adapters.replace_decoder(self.decoder)

    @torch.inference_mode()
    def run(self, plan: Plan, host: MaskSource | None) -> Result:
        self.cache.apply(plan)
        for join in plan.joins:
            self.sampler.join(join)
            self._logprobs.join(join)
            self._drafts.join(join)
            self._pooling.pop(join.slot, None)
            if join.pooling is not None:
                self._pooling[join.slot] = join.pooling
        self.tables.apply(plan)
        self.adapters.apply(plan, self.decoder)
        checked = None
        if plan.drafts is not None:
            checked = verification(plan, self.tables, self._drafts)
            plan = checked.plan
        if host is not None:
            host.set_drafts(() if checked is None else checked.drafts)
        if checked is not None and not plan.num_rows:  # drafts have completed the output of all of them
            zeros = np.zeros(checked.num_rows, np.int32)
            return Result(NO_TOKENS, _NOT_MEASURED, counts=zeros, num_drafts=zeros)
        inputs = self.tables.inputs(plan, 0 if checked is None else plan.num_decodes)
        attend = self.attention.begin(inputs)
        tokens_in, rotated_by = torch.from_numpy(inputs.tokens), torch.from_numpy(inputs.rope_positions)
        hidden = self.decoder.forward(tokens_in, rotated_by, attend, self.adapters.rows(plan))
        if self._draft_model is not None and plan.num_decodes < plan.num_rows:
            self._draft_model.compute_kv(inputs)
        runs = self._prompt_logprobs(plan, hidden)
        pooled = tuple(self._pool(plan, inputs.offsets, hidden)) if self._pooling else ()
        if checked is not None and checked.num_dropped:
            runs = tuple(run._replace(row=run.row + checked.num_dropped) for run in runs)
            pooled = tuple(states._replace(row=states.row + checked.num_dropped) for states in pooled)
        self.tables.positions[plan.slots] = inputs.starts + inputs.lengths
        if not len(inputs.sampled):
            none = None if checked is None else np.zeros(checked.num_rows, np.int32)
            return Result(NO_TOKENS, _NOT_MEASURED, counts=none, num_drafts=none, prompt_logprobs=runs, pooled=pooled)
        if len(inputs.sampled) < len(hidden):
            hidden = hidden[torch.from_numpy(inputs.sampled)]
        width = self._logprobs.of_output(plan)
        local = None  # one rank's logits
        if self._sharded is None or width is not None or host is not None:
            logits = self.logits(hidden)
        else:
            local = self.decoder.logits(hidden)
        logprobs_of = None if width is None else output_logprobs(self._logprobs, width, inputs.sampled_slots, logits)
        allowed = None
        if host is not None:
            masks = host.wait_masks()
            allowed = _unpacked(masks if checked is None else checked.masks(masks), *logits.shape)
        slots, positions = inputs.sampled_slots, inputs.sampled_positions
        if local is not None and self._sharded is not None:
            tokens = self._sharded.sample(local, slots, positions, self.tables.tokens)
        else:
            tokens = self.sampler.sample(logits, slots, positions, self.tables.tokens, allowed)
        valid = np.maximum(tokens, 0)  # a row with NO_TOKEN continues with a valid id until the host has seen it
        self.tables.store(inputs, valid)
        logprobs, counts = None if logprobs_of is None else logprobs_of(valid), None
        if checked is not None:
            kept, counts = self._accept(checked, inputs, tokens)
            tokens, logprobs = tokens[kept], None if logprobs is None else logprobs.of_rows(kept.tolist())
        return Result(
            tokens.astype(np.int32),
            _NOT_MEASURED,
            counts=counts,
            num_drafts=None if checked is None else checked.drafts_by_sampling_row(),
            logprobs=logprobs,
            prompt_logprobs=runs,
            pooled=pooled,
        )

    def _accept(self, checked: Verification, inputs: Inputs, tokens: Index) -> tuple[Index, Column]:
        """The indices of the tokens that count, and how many each sampling row has. Rows continue after them."""
        plan, nums = checked.plan, checked.num_drafts
        is_draft = np.ones(int(plan.lengths[: plan.num_decodes].sum()), np.bool_)
        is_draft[inputs.offsets[: plan.num_decodes]] = False
        kept, counts = checked.accept(tokens, inputs.tokens[: len(is_draft)][is_draft])
        for row, num in enumerate(nums.tolist()):
            slot, count = int(plan.slots[row]), int(counts[checked.sampling_rows[row]])
            position = int(inputs.starts[row]) + count
            self.tables.positions[slot] = position
            self._drafts.settle(slot, position, num, count - 1)
        return kept, counts

    def _prompt_logprobs(self, plan: Plan, hidden: Tensor) -> tuple[LogprobRun, ...]:
        def tokens_of(ask: LogprobRequest) -> Tensor:
            row = self.tables.tokens[plan.slots[ask.row], ask.first : ask.first + ask.count]
            return torch.from_numpy(row.astype(np.int64))

        return prompt_runs(
            self._logprobs.of_prompts(plan), lambda index, count: self.logits(hidden[index : index + count]), tokens_of
        )

    def _pool(self, plan: Plan, offsets: Index, hidden: Tensor) -> Iterator[PooledStates]:
        """Pooled hidden states of the chunks of prompts that are embedded."""
        for row in range(plan.num_decodes, plan.num_rows):
            pooling = self._pooling.get(int(plan.slots[row]))
            if pooling is not None:
                first = int(offsets[row])
                states = self.decoder.states(hidden[first : first + int(plan.lengths[row])]).float().numpy()
                yield PooledStates(row, int(plan.starts[row]), pool_chunk(pooling, states))

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the whole vocabulary."""
        return gather_logits(self.decoder.group, self.decoder.spec, self.decoder.logits(hidden))


def _unpacked(masks: Masks, num_rows: int, vocab_size: int) -> Tensor:
    """[rows, vocab]: true where a token is allowed."""
    allowed = torch.ones(num_rows, vocab_size, dtype=torch.bool)
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    allowed[torch.from_numpy(masks.rows)] = torch.from_numpy(bits.astype(np.bool_))
    return allowed


class _CpuPending:
    __slots__ = ("__weakref__", "_done", "_drafts", "_error", "_has_drafts", "_masks", "_result", "delayed", "plan")

    def __init__(self, plan: Plan, delayed: bool) -> None:
        self.plan = plan
        self.delayed = delayed
        self._drafts: Drafts = ()
        self._has_drafts = threading.Event()  # they are known, or the pass has failed
        self._masks: SimpleQueue[Masks | None] = SimpleQueue()
        self._done = threading.Event()
        self._result: Result | None = None
        self._error: ExecutorFailed | None = None

    def settle(self, result: Result | None, error: ExecutorFailed | None) -> None:
        self._result, self._error = result, error
        self._has_drafts.set()
        self._done.set()

    def set_drafts(self, drafts: Drafts) -> None:
        self._drafts = drafts
        self._has_drafts.set()

    def drafts(self) -> Drafts:
        self._has_drafts.wait()
        if self._error is not None:
            raise self._error
        return self._drafts

    def mask_buffer(self, num_masks: int, num_words: int) -> Bits:
        return np.empty((num_masks, num_words), np.int32)

    def sample(self, masks: Masks) -> None:
        self._masks.put(masks)

    def give_up(self) -> None:
        """Fails the pass: no masks will be provided."""
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


class _CpuTask:
    """Something that the worker does between two passes."""

    __slots__ = ("_done", "_error", "_function")

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._done = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._function()
        except Exception as error:  # of who waits for it; passes are not affected
            self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class CpuExecutor(Executor):
    capabilities = Capabilities(logits=True, pooling=True, weights=True, kv_transfer=True, lora=True)

    def __init__(self, runner: ModelRunner, *, num_threads: int | None = None, max_lora_rank: int = 0) -> None:
        """max_lora_rank: adapters of a higher rank are refused; 0: none is."""
        self.runner, self._max_lora_rank = runner, max_lora_rank
        self._num_threads = num_threads
        self._queue: SimpleQueue[_CpuPending | _CpuTask | None] = SimpleQueue()
        self._error: ExecutorFailed | None = None
        self._closed = False
        self._delayed: weakref.ref[_CpuPending] | None = None
        self._clock: int | None = None  # of the worker's CPU time
        self._thread = threading.Thread(target=self._work, name="paceline-device", daemon=True)
        self._thread.start()

    @property
    def activity(self) -> float:
        """CPU seconds of the worker: `native.c` computes all layers in one call, which nobody can look into. A thread
        that waits uses none."""
        if self._clock is None:
            return 0.0
        try:
            return round(time.clock_gettime(self._clock), 1)  # what it takes to wake up is no progress
        except OSError:  # the thread has ended
            return 0.0

    @property
    def expert_rows(self) -> Sequence[Sequence[int]]:
        decoder = getattr(self.runner, "decoder", None)
        return decoder.expert_rows if isinstance(decoder, Decoder) else ()

    def read_weights(self, source: WeightSource) -> Decoder:
        return source.read(self.runner.decoder.group, self.runner.decoder.stages)

    def load_weights(self, decoder: Decoder) -> None:
        self.runner.load_weights(decoder)  # the worker is idle, and sees it with the next pass

    def arrange_adapter(self, file: LoraFile) -> LoraWeights:
        decoder = self.runner.decoder
        if 0 < self._max_lora_rank < file.max_rank:
            raise ModelError(
                f"{file.folder} has rank {file.max_rank}, and max_lora_rank is {self._max_lora_rank}: raise it."
            )
        weights = arrange_adapter(file, decoder.whole_spec, decoder.dtype, decoder.shard)
        return PreparedAdapter.of(weights, decoder)

    def add_adapter(self, adapter: str, file: LoraFile, weights: LoraWeights) -> None:
        self._do(lambda: self.runner.adapters.add(adapter, weights))

    def remove_adapter(self, adapter: str) -> None:
        self._do(lambda: self.runner.adapters.remove(adapter))

    def launch(self, plan: Plan) -> _CpuPending:
        """Starts a pass and returns at once. After an error every pass ends in that error."""
        return self._start(_CpuPending(plan, delayed=False))

    def launch_delayed(self, plan: Plan) -> _CpuPending:
        """As `launch`; the worker waits for the masks before it samples."""
        pending = _CpuPending(plan, delayed=True)
        self._delayed = weakref.ref(pending)
        return self._start(pending)

    def _start(self, pending: _CpuPending) -> _CpuPending:
        assert not self._closed, "a pass was launched on a closed executor"
        self._queue.put(pending)
        return pending

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    @property
    def host_pages(self) -> SharedPages | None:
        return self.runner.cache.host

    def export_pages(self, pages: Column, target: SharedPages, targets: Column) -> _CpuTask:
        pages, targets = pages.copy(), targets.copy()
        return self._do(lambda: self.runner.cache.export(pages, target, targets))

    def after_launched(self) -> _CpuTask:
        return self._do(lambda: None)

    def _do(self, function: Callable[[], None]) -> _CpuTask:
        assert not self._closed, "a task is given to a closed executor"
        task = _CpuTask(function)
        self._queue.put(task)
        return task

    def close(self) -> None:
        """Waits for launched passes and ends the thread."""
        if not self._closed:
            self._closed = True
            pending = self._delayed() if self._delayed is not None else None
            if pending is not None:
                pending.give_up()  # a loop that failed between launching and sampling leaves it waiting
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):  # not on every system
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        ended: float | None = None
        while (pending := self._queue.get()) is not None:
            if isinstance(pending, _CpuTask):
                pending.run()
                continue
            if self._error is not None:
                pending.settle(None, self._error)
                continue
            began = time.perf_counter()
            try:
                result = self.runner.run(pending.plan, pending if pending.delayed else None)
            except BaseException as error:  # a caller waits for this pass, whatever failed
                self._error = ExecutorFailed(f"pass {pending.plan.step} failed: {type(error).__name__}: {error}")
                self._error.__cause__ = error
                pending.settle(None, self._error)
            else:
                idle_s = None if ended is None else began - ended
                ended = time.perf_counter()
                pending.settle(result._replace(device_s=ended - began, idle_s=idle_s), None)
            del pending  # releases the plan and the result while the thread is idle
