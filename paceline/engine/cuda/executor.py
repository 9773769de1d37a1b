"""The CUDA executor: launches forward passes and never waits for one.

    host    pack N+1 ─▶ pinned buffer            wait for the event of N ─▶ tokens of N
    copy            └─▶ staging N+1 (event) ┐
    engine  ── pass N ──────────────────────┴─ pass N+1 ───┬─ …
    results ── pinned results of N - 1 (event) ────────────┴─▶ pinned results of N + 1 (event)

The engine stream runs the passes and applies every change of device state. The copy stream copies the packed upload of
each pass to a staging buffer, the results stream copies its results to the host. On one stream the upload of N+1 would
wait for the results of N, and so for N itself, and N+1 would begin a copy late. A pass uses one of a few `PassBuffers`,
which are not reused before its results have been read. KV pages are copied to and from host memory on two more streams
(swap.py). Tokens stay on the device: sampling writes them into `token_pool`, where the next pass reads them. What a
pass computes follows from its plan alone.

A decode batch is one small kernel that applies the upload, and one CUDA graph (decode.py). A prefill batch with many
tokens is launched kernel by kernel (prefill.py), which takes the host a few milliseconds, hidden behind the previous
pass. With few tokens they would not be hidden: such a batch runs as a graph too, up to the logits. Its inputs are
copied from the upload to where the graph reads them. Where a graph does not exist yet, the same kernels are launched
one by one: no pass waits for a capture (graphs.py).

Noise is keyed by seed, position and token, as on the CPU, but with another hash (kernels/noise.py): a seed gives the
same tokens in every run on the same kind of device, but not across kinds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paceline.engine.cuda.attention import AttentionChoices, CudaAttention, max_units
from paceline.engine.cuda.buffers import PassBuffers
from paceline.engine.cuda.decode import DecodeRunner
from paceline.engine.cuda.draft_model import DraftModel
from paceline.engine.cuda.graphs import CudaGraphs, GraphKey, GraphStage, draft_sizes, forward_key, forward_keys
from paceline.engine.cuda.inputs import PREFILL_SIZES, PackedBatch, PlanPacker, output_sizes, token_sizes
from paceline.engine.cuda.kv_scales import calibrate, scales_digest
from paceline.engine.cuda.launch_watch import LaunchWatch
from paceline.engine.cuda.model import CudaModel
from paceline.engine.cuda.prefill import PrefillRunner
from paceline.engine.cuda.prompt_logprobs import PromptLogprobs, logprob_columns, prompt_runs
from paceline.engine.cuda.sampling import CudaSampling
from paceline.engine.cuda.sharing import BLOCK_SIZES, ShareRule
from paceline.engine.cuda.stats import ExecutorStats
from paceline.engine.cuda.streams import CudaEvent, Streams
from paceline.engine.cuda.swap import CudaSwap
from paceline.engine.executor import Capabilities, Executor, Result
from paceline.engine.garbage import no_garbage_collection
from paceline.engine.pooling import PooledStates
from paceline.engine.weight_source import WeightSource
from paceline.kernels.adjust import write_runs
from paceline.kernels.drafts import DraftBuffers
from paceline.kernels.layouts import DraftWord
from paceline.kernels.pool_states import pool_states
from paceline.kernels.slot_state import SlotState, apply_diff
from paceline.model.decoder import Decoder
from paceline.model.lora import LoraFile, LoraWeights, arrange_adapter
from paceline.model.spec import ModelError
from paceline.sampling.logprobs import LogprobRequest
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler.plan import NO_TOKENS, Column, Plan, Swap
from paceline.shared_pages import SharedPages

_DEPTH = 4  # passes that have buffers; at most two are in flight, of a pipeline one more than it has stages
_RANK_CAPTURES = 16  # as many on every rank of tensor parallelism
_COPY_POLL_S = 0.0005
_CAPTURE_SECONDS = 0.15  # for capturing graphs at start, 5 to 10 ms each; the others are captured in idle time


class CudaPending:
    """A launched forward pass."""

    __slots__ = (
        "_buffers",
        "_executor",
        "_packed",
        "_previous_end",
        "_result",
        "bucket",
        "delayed",
        "has_counts",
        "num_drafts",
        "prompt_logprobs",
        "slow_launch",
    )

    def __init__(
        self,
        executor: CudaExecutor,
        buffers: PassBuffers,
        previous_end: CudaEvent | None,
        packed: PackedBatch,
        bucket: int,
        prompt_logprobs: Sequence[LogprobRequest],
    ) -> None:
        self._executor, self._buffers, self._previous_end = executor, buffers, previous_end
        self._packed, self.bucket = packed, bucket
        self._result: Result | None = None
        self.prompt_logprobs = prompt_logprobs
        self.delayed: Callable[[Masks], None] | None = None
        self.slow_launch: str | None = None
        self.num_drafts = 0  # of each row, at most
        self.has_counts = False  # the scheduler expects how many tokens each row got

    def drafts(self) -> Drafts:
        if not self.num_drafts:
            return ()
        self._executor.wait_event(self._buffers.drafts_copied)
        rows = self._buffers.drafts[: self._packed.num_sampled].tolist()
        return [row[DraftWord.TOKENS : DraftWord.TOKENS + row[DraftWord.NUM_FED] - 1] for row in rows]

    def mask_buffer(self, num_masks: int, num_words: int) -> Bits:
        return self._executor.mask_buffer(self, num_masks, num_words)

    def sample(self, masks: Masks) -> None:
        assert self.delayed is not None, "this pass was not delayed, or has its masks already"
        finish, self.delayed = self.delayed, None
        finish(masks)

    @property
    def is_over(self) -> bool:
        return self._result is not None

    def wait(self) -> Result:
        assert self.delayed is None, "a delayed pass was waited for before its masks were given"
        if self._result is None:
            began = time.perf_counter()
            buffers, stats = self._buffers, self._executor.stats
            self._executor.wait_event(buffers.copied)
            device_s = buffers.began.elapsed_time(buffers.ended) / 1e3
            stats.wait_s += time.perf_counter() - began
            stats.add_pass(self.bucket, device_s)
            idle_s = self._previous_end.elapsed_time(buffers.began) / 1e3 if self._previous_end is not None else 0.0
            stats.idle_s += idle_s
            has_fetched = self._packed.fetch_pages.count
            fetch_s = buffers.fetch_began.elapsed_time(buffers.fetched) / 1e3 if has_fetched else None
            stats.fetch_s += fetch_s or 0.0
            # Copies: a later pass will reuse the buffers.
            count, width, counts, num_drafts = self._packed.num_sampled, self._packed.logprobs, None, None
            if self.num_drafts:
                rows = buffers.drafts[:count].numpy()
                counts, num_fed = rows[:, DraftWord.COUNT].copy(), rows[:, DraftWord.NUM_FED]
                num_drafts = num_fed - 1
                is_kept = np.arange(1 + self.num_drafts) < counts[:, None]
                tokens = rows[:, DraftWord.TOKENS : DraftWord.TOKENS + 1 + self.num_drafts][is_kept]
                # Logprobs are those of all fed tokens, one row after the other.
                kept = ((np.cumsum(num_fed) - num_fed)[:, None] + np.arange(1 + self.num_drafts))[is_kept]
            else:
                tokens = buffers.results[:count].numpy().copy() if count else NO_TOKENS
                kept = np.arange(count)
                if self.has_counts:
                    counts, num_drafts = np.ones(count, np.int32), np.zeros(count, np.int32)
            logprobs = None if width is None else logprob_columns(buffers.logprobs.numpy()[kept], width)
            self._result = Result(
                tokens,
                device_s,
                counts,
                num_drafts,
                idle_s=idle_s,
                logprobs=logprobs,
                prompt_logprobs=prompt_runs(buffers.host_prompt_lines.numpy(), self.prompt_logprobs),
                fetch_s=fetch_s,
                slow_launch=self.slow_launch,
                pooled=self._pooled_states(),
            )
        return self._result

    def _pooled_states(self) -> tuple[PooledStates, ...]:
        rows, starts = self._packed.pooled_rows, self._packed.pooled_starts
        if not len(rows):
            return ()
        states = self._buffers.host_pooled.numpy()[: len(rows)].astype(np.float64)  # copied, as above
        return tuple(map(PooledStates, rows.tolist(), starts.tolist(), states))


@dataclass(frozen=True, slots=True)
class _CopyEnd:
    events: Sequence[CudaEvent]
    guard: Callable[[], None] | None

    def wait(self) -> None:
        for event in self.events:
            if self.guard is None:
                event.synchronize()
                continue
            while not event.query():  # it never occurs if a rank is lost in a pass before
                self.guard()
                time.sleep(_COPY_POLL_S)


class CudaExecutor(Executor):
    """Executes plans on a GPU. On a CPU device it runs in Triton's interpreter, for tests."""

    capabilities = Capabilities(logits=True, pooling=True, weights=True, kv_transfer=True)

    def __init__(
        self,
        model: CudaModel,
        streams: Streams,
        *,
        num_pages: int,
        page_size: int,
        max_running: int,
        max_row_tokens: int,
        num_host_pages: int = 0,
        max_swap_pages: int = 0,
        role: str = "both",
        attention: AttentionChoices = AttentionChoices(),  # noqa: B008  (frozen)
        share_rule: Callable[[int, int], ShareRule] = ShareRule,
        prefill_sizes: Sequence[int] = PREFILL_SIZES,
        max_drafts: int = 0,
        draft_model: CudaModel | None = None,
        fp8_kv: bool = False,
    ) -> None:
        spec, device = model.spec, model.device
        self.model = model
        if model.is_packed:
            self.capabilities = replace(self.capabilities, weights=False)
        if model.lora is not None:
            self.capabilities = replace(self.capabilities, lora=True)
        self.stats = ExecutorStats()
        self.streams = streams
        self._depth = depth = max(_DEPTH, model.shard.num_stages + 2)
        # In the interpreter, which runs one program after the other, idle programs cost as much as others.
        self._diff_programs, self._run_programs = (2, 2) if device.type == "cpu" else (64, 128)
        # One more than a row can have, since the last sampled token is stored and never fed.
        max_length = max_row_tokens + 1
        self.state = SlotState.empty(max_running, max_length, page_size, max_running, device)
        is_capturable = model.group is None or model.group.is_capturable
        self.graphs = CudaGraphs(streams, max_running, self.run_pass, is_enabled=is_capturable)
        self.guard: Callable[[], None] | None = None  # raises if a rank is lost, which a pass would wait for forever
        self.draft_sizes = draft_sizes(self.graphs.sizes, model.max_rows, max_drafts)
        capacity = max_units(self.graphs.sizes, max_length, attention.chunks, self.draft_sizes)
        self.attention = CudaAttention(
            model,
            streams,
            self.state,
            num_pages=num_pages,
            page_size=page_size,
            capacity=capacity,
            choices=attention,
            max_drafts=max_drafts,
            fp8_kv=fp8_kv,
        )
        self.kv = self.attention.cache.paged
        self.swap = None
        if num_host_pages or role == "prefill":
            self.swap = CudaSwap(streams, self.kv, num_host_pages, max_swap_pages, share_host=role == "decode")
        self.sampling = CudaSampling(streams, self.state, model, depth, has_drafts=max_drafts > 0)
        self.prompt_logprobs = PromptLogprobs(model, self.state.token_pool)
        self.drafts = None
        if max_drafts:
            self.drafts = DraftBuffers.empty(max_running, model.max_rows, depth, max_length, max_running, device)
        self._slots, self._positions = (
            torch.zeros(model.max_tokens, dtype=torch.int32, device=device) for _ in range(2)
        )
        if model.lora is not None:
            model.lora.bind(self._slots, self.state.sampling)
        self.draft_model = None
        if draft_model is not None:
            self.draft_model = DraftModel(
                draft_model,
                streams,
                self.state,
                self.attention,
                self.sampling,
                num_pages=num_pages,
                page_size=page_size,
                sizes=self.graphs.sizes,
                draft_rows=sorted({rows for rows, _ in self.draft_sizes}),
                choices=attention,
                fp8_kv=fp8_kv,
                group=model.group,
            )
        self.decode = DecodeRunner(
            model,
            self.attention,
            self.sampling,
            self.state,
            self._slots,
            self._positions,
            self.drafts,
            None if self.draft_model is None else self.draft_model.propose,
        )
        sizes = [size for size in prefill_sizes if size <= model.max_tokens]
        self.prefill = PrefillRunner(
            model,
            self.attention,
            self.state,
            self._slots,
            self._positions,
            max_running,
            sizes,
            None if self.draft_model is None else self.draft_model.compute_kv,
        )
        rule = None
        if self.attention.shared_units is not None:
            rule = share_rule(model.mixer.num_heads // model.mixer.num_kv_heads, capacity)
            models = [self.attention, *([] if self.draft_model is None else [self.draft_model.attention])]
            rule = replace(rule, share_prefill=all(one.can_share_prefill for one in models))
        self._packer = PlanPacker(
            max_running,
            spec.vocab_size,
            self.attention.tokens_per_tile,
            rule,
            max_length,
            self.attention.split_rule,
            sizes,
            max_tokens=model.max_tokens,
            has_drafts=max_drafts > 0,
            samples=model.shard.is_last,
        )
        self._num_steps = 0  # the value of the device's step counter once everything launched has run

        prompt_lines = model.max_tokens if model.shard.is_last else 0
        self._ring = [
            PassBuffers(streams, max_running, model.max_rows, prompt_lines, spec.hidden_size, device)
            for _ in range(depth)
        ]
        self._pending: list[CudaPending | None] = [None] * depth  # by index of the ring
        self._count = 0  # of launched passes
        self._prepared: tuple[Plan, PassBuffers, PackedBatch] | None = None  # for the next launch
        self._last_end: CudaEvent | None = None
        self._let_capture = False  # with ranks: in the next launch
        self.watch = LaunchWatch(lambda: self.graphs.capture_s, streams.reserved_memory)
        streams.synchronize()  # buffers were filled on the default stream: finish before the engine stream begins

    @property
    def token_buffers(self) -> tuple[Tensor, Tensor]:
        """Slots and positions of the tokens of a pass."""
        return self._slots, self._positions

    @property
    def num_buffer_tokens(self) -> int:
        return len(self._slots)

    @torch.inference_mode()
    def load_libraries(self) -> None:
        """Loads the kernels of libraries, which they do at first use and which may take a second on a new machine.
        Needs no kernel of ours, so those may be compiled meanwhile."""
        with self.streams.use(self.streams.engine):
            prefill_sizes = [*(one.tokens for one in self.prefill.buckets), *token_sizes(self.model.max_tokens)]
            self.model.load_gemm_kernels(self.graphs.sizes, prefill_sizes, output_sizes(self.model.max_rows))
            if self.draft_model is not None:
                self.draft_model.load_libraries(self.graphs.sizes, prefill_sizes)
            if self.model.shard.is_last:
                self.sampling.load_kernels(self.model)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Finds the scales of an FP8 cache, and captures the graphs that are most likely to be used, as many as the
        time allows."""
        with self.streams.use(self.streams.engine):
            for model, attention in self._models():
                if attention.scales is not None:
                    attention.scales.copy_(calibrate(model))
        deadline = time.perf_counter() + _CAPTURE_SECONDS
        with self.streams.use(self.streams.engine), no_garbage_collection():
            if self.swap is not None:
                self.swap.warm_up()
            for count, graph in enumerate(self._likely_graphs(), 1):
                self.graphs.capture(*graph)
                # All ranks must have the same graphs, however fast they are.
                if time.perf_counter() > deadline if self.model.group is None else count == _RANK_CAPTURES:
                    break

    def _likely_graphs(self) -> Iterator[tuple[int, GraphKey]]:
        """Graphs that are captured before they are needed, the most likely first; of decode batches the largest first,
        so that smaller ones reuse its memory. One of a prefill batch comes first: the first launch of a kernel takes
        longer, and most kernels of larger batches are the same."""
        sizes = self.graphs.sizes[::-1]
        for bucket in self.prefill.buckets[-1:]:
            yield sizes[0], GraphKey(prefill=bucket)
        plain = [(size, key) for size in sizes for key in forward_keys(size)]
        yield from plain
        if self.model.lora is not None:
            yield from ((size, key._replace(lora=True)) for size, key in plain)
        for bucket in self.prefill.buckets[:-1]:
            yield sizes[0], GraphKey(prefill=bucket)
        if self.attention.shared_units is not None:
            for key in (GraphKey(shared_block_m=block) for block in BLOCK_SIZES):
                yield from dict.fromkeys((self.graphs.bucket(size, key), key) for size in sizes)
        if not self.model.shard.is_last:
            return  # the keys that follow differ in how they sample
        yield from ((size, GraphKey(drafts=drafts)) for size, drafts in self.draft_sizes)
        yield from ((size, key._replace(filters=True)) for size, key in plain)
        yield from ((size, key._replace(logprobs=True)) for size, key in plain)
        yield from ((size, key._replace(adjusts=True)) for size, key in plain)
        yield from ((size, key._replace(stage=GraphStage.LOGITS)) for size, key in plain)
        yield from ((size, GraphKey(stage=GraphStage.TOKENS)) for size in sizes)

    def _models(self) -> Iterator[tuple[CudaModel, CudaAttention]]:
        yield self.model, self.attention
        if self.draft_model is not None:
            yield self.draft_model.model, self.draft_model.attention

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.attention.cache.dtype

    @property
    def kv_scales(self) -> str:
        """A digest of the scales of an FP8 cache; empty for other caches."""
        return "" if self.attention.scales is None else scales_digest(self.attention.scales)

    def read_weights(self, source: WeightSource) -> Decoder:
        return source.read(self.model.group, self.model.stages)

    @torch.inference_mode()
    def load_weights(self, decoder: Decoder) -> None:
        self.streams.synchronize()
        self.model.load(decoder)
        if self.attention.scales is not None:  # all KV is dropped with the old weights
            with self.streams.use(self.streams.engine):
                self.attention.scales.copy_(calibrate(self.model))
        self.streams.synchronize()

    def arrange_adapter(self, file: LoraFile) -> LoraWeights:
        model = self.model
        assert model.lora is not None, "the model has memory for adapters"
        if file.max_rank > model.lora.sizes.rank:
            raise ModelError(
                f"{file.folder} has rank {file.max_rank}, and memory was allocated for ranks up to "
                f"{model.lora.sizes.rank}: raise max_lora_rank."
            )
        return model.lora.pack(arrange_adapter(file, model.whole_spec, model.dtype, model.shard))

    def add_adapter(self, adapter: str, file: LoraFile, weights: LoraWeights) -> None:
        assert self.model.lora is not None, "the model has memory for adapters"
        self.model.lora.add(adapter, weights)

    def remove_adapter(self, adapter: str) -> None:
        assert self.model.lora is not None, "the model has memory for adapters"
        self.model.lora.remove(adapter)  # launched passes have copied it

    def accept_by_coin(self, probability: float) -> None:
        """Benchmarks: from now on a draft is accepted with this probability, whatever it is. No pass is in flight."""
        self.decode.coin = round(256 * probability)
        self.graphs.drop_drafts()

    @torch.inference_mode()
    def run_background_work(self) -> bool:
        """Captures one CUDA graph that is likely to be used; returns whether one was missing."""
        with self.streams.use(self.streams.engine):
            return self.graphs.capture_next(self._likely_graphs())

    def reset_stats(self) -> None:
        self.stats = ExecutorStats()
        self._last_end = None

    def store_tokens(self, slots: Column, positions: Column, tokens: Column) -> None:
        """Tokens that another stage of a pipeline has sampled. The next pass that is launched, and those behind it,
        find them."""
        self._packer.add_tokens(slots, positions, tokens)

    @property
    def may_capture(self) -> bool:
        return self._last_end is None or self._last_end.query()

    def let_capture(self, may_capture: bool) -> None:
        self._let_capture = may_capture

    def launch(self, plan: Plan) -> CudaPending:
        """Starts a pass and returns at once. Passes run in launch order."""
        return self._start(plan, delayed=False)

    @torch.inference_mode()
    def prepare(self, plan: Plan) -> None:
        """Packs the plan and sends its upload; the next launch must be of this plan."""
        assert self._prepared is None, "a plan was prepared and not launched"
        began = time.perf_counter()
        self._prepared = plan, *self._send(plan)
        self.stats.launch_s += time.perf_counter() - began

    def launch_delayed(self, plan: Plan) -> CudaPending:
        """As `launch`, up to the logits; `CudaPending.sample` continues."""
        return self._start(plan, delayed=True)

    def _send(self, plan: Plan) -> tuple[PassBuffers, PackedBatch]:
        """Packs a plan and uploads it into the buffers of the next launch. Earlier passes may still be running, or wait
        for their masks: they have other buffers."""
        index = self._count % self._depth
        pending, buffers = self._pending[index], self._ring[index]
        if pending is not None:
            pending.wait()  # has ended long ago; unread only if the caller launches without waiting
        packed = self._packer.pack(plan)
        if packed.num_words:
            buffers.send(packed)
        return buffers, packed

    @torch.inference_mode()
    def _start(self, plan: Plan, *, delayed: bool) -> CudaPending:
        spent, previous = self.watch.begin(), self._last_end
        streams, stats = self.streams, self.stats
        prepared, buffers, packed = self._prepared or (plan, *self._send(plan))
        assert prepared.step == plan.step, "another plan was prepared than is launched"
        self._prepared = None
        ring_index = self._count % self._depth
        self._count += 1
        logits = index = after = None
        num_drafts = 0
        prompt_logprobs: Sequence[LogprobRequest] = ()
        may_capture = self.may_capture if self.model.group is None else self._let_capture
        with streams.use(streams.engine):
            if packed.num_words:
                buffers.uploaded.wait(streams.engine)
            if plan.swap is not None:
                self._swap_pages(plan.swap, buffers, packed)  # before `began`: it may wait for the host link
            buffers.began.record(streams.engine)
            self.attention.cache.begin(plan.joins)
            for load in plan.adapter_loads:
                assert self.model.lora is not None, "a plan loads an adapter, and the model has no memory for any"
                self.model.lora.load(load.slot, load.adapter)
            if packed.is_decode:
                self._apply(buffers, packed)
                lora = packed.has_adapters
                key = forward_key(packed.num_rows, plan.num_context_tokens, packed.shared_block_m, lora=lora)
                num_drafts = self._num_drafts(plan)
                if num_drafts:
                    key = GraphKey(drafts=num_drafts, lora=lora)
                bucket = self.graphs.bucket(packed.num_rows, key)
                filters, adjusts, logprobs = packed.has_filters, packed.adjusts, packed.logprobs is not None
                if delayed:
                    after = GraphKey(
                        filters, adjusts=adjusts, logprobs=logprobs, stage=GraphStage.TOKENS, drafts=num_drafts
                    )
                    if num_drafts:
                        # Only a draft model samples in this stage.
                        sampled = filters and self.draft_model is not None
                        stage = key._replace(stage=GraphStage.DRAFTS, filters=sampled, lora=False)
                        self._replay(bucket, stage, may_capture=may_capture)
                        buffers.proposed.record(streams.engine)
                    key = key._replace(stage=GraphStage.LOGITS)
                elif self.model.shard.is_last:  # otherwise it ends with the hidden states
                    key = key._replace(filters=filters, adjusts=adjusts, logprobs=logprobs)
                by_graph = self._replay(bucket, key, may_capture=may_capture)
            else:
                bucket = 0
                index = buffers.span(packed.sampled)
                by_graph, logits, prompt_logprobs = self._run_prefill(
                    plan, buffers, packed, index, may_capture=may_capture
                )
                index = index[: packed.num_sampled]
                if packed.num_sampled:
                    self.sampling.step.add_(1)
        pending = CudaPending(self, buffers, self._last_end, packed, bucket, prompt_logprobs)
        pending.num_drafts, pending.has_counts = num_drafts, plan.drafts is not None
        self._pending[ring_index], self._last_end = pending, buffers.ended
        finish = partial(self._finish, pending, buffers, packed, logits, index, after)
        if delayed:
            pending.delayed = finish
            if num_drafts:
                self._copy_drafts(buffers, packed.num_sampled)
        else:
            finish(None)
        stats.passes += 1
        stats.graphs += by_graph
        if packed.is_decode:
            stats.decode_context_tokens += plan.num_context_tokens
            stats.saved_tokens += packed.num_saved_tokens
        stats.launch_s += time.perf_counter() - spent.now
        what = f"a pass of {packed.num_rows} rows and {packed.num_tokens} tokens"
        pending.slow_launch = self.watch.end(spent, what, is_device_busy=previous is not None and not previous.query())
        return pending

    def _copy_drafts(self, buffers: PassBuffers, count: int) -> None:
        """Copies the drafts of a pass to the host while its logits are computed."""
        assert self.drafts is not None, "a pass has drafts"
        with self.streams.use(self.streams.results):
            buffers.proposed.wait(self.streams.results)
            buffers.drafts[:count].copy_(self.drafts.proposed[:count], non_blocking=True)
            buffers.drafts_copied.record(self.streams.results)

    def _num_drafts(self, plan: Plan) -> int:
        """How many drafts the rows of a decode batch may have. None if it has other rows, or too many."""
        if plan.drafts is None or plan.num_decodes < plan.num_rows:
            return 0
        bucket, most = self.graphs.bucket(plan.num_rows, GraphKey()), plan.drafts.max()
        return max((depth for rows, depth in self.draft_sizes if rows == bucket and depth <= most), default=0)

    def _replay(self, rows: int, key: GraphKey, *, may_capture: bool) -> bool:
        """Runs a pass, or a stage of it, as a graph if there is one, else kernel by kernel; returns which."""
        graph = self.graphs.find(rows, key, may_capture=may_capture)
        if graph is None:
            self.run_pass(rows, key)
        else:
            graph.replay()
        return graph is not None

    def _run_prefill(
        self, plan: Plan, buffers: PassBuffers, packed: PackedBatch, index: Tensor, *, may_capture: bool
    ) -> tuple[bool, Tensor | None, Sequence[LogprobRequest]]:
        """Runs a prefill or mixed batch. Returns whether it ran as a graph, the logits of the sampling rows, and which
        logprobs of prompts are in `buffers.prompt_lines`; hidden states of prompts that are embedded are summed into
        `buffers.pooled`. Stages of a
        pipeline before the last have none of it. index: the tokens of the sampling rows, padded."""
        model, num_pooled = self.model, len(packed.pooled_rows)
        requests = self._packer.logprobs.of_prompts(plan) if model.shard.is_last else []
        all_states = bool(requests) or num_pooled > 0
        is_needed = packed.num_sampled or all_states or not model.shard.is_last  # more than the KV
        by_graph = False
        self._apply(buffers, packed)
        if packed.bucket is not None and is_needed:
            self.prefill.load_inputs(packed, buffers.span)
            key = GraphKey(
                shared_block_m=packed.shared_block_m,
                prefill=packed.bucket,
                all_states=all_states,
                lora=packed.has_adapters,
            )
            by_graph = self._replay(self.graphs.sizes[-1], key, may_capture=may_capture)
            if not all_states:
                return by_graph, model.last_logits(packed.num_sampled) if model.shard.is_last else None, []
            hidden = model.last_states(packed.num_tokens)
        else:
            rows = 0
            if packed.num_decodes:
                rows = self.graphs.bucket(packed.num_decodes, GraphKey(shared_block_m=packed.shared_block_m))
            hidden = self.prefill.run(packed, buffers.span, rows, None if all_states else index)
        if num_pooled:
            pool_states(hidden, buffers.span(packed.pool_ranges), buffers.pooled[:num_pooled])
        self.prompt_logprobs.compute(requests, plan.slots, hidden, buffers.prompt_lines)
        if not packed.num_sampled:
            return by_graph, None, requests
        logits = model.logits(model.select(hidden, index) if all_states else hidden)
        return by_graph, logits[: packed.num_sampled], requests

    @torch.inference_mode()
    def _finish(
        self,
        pending: CudaPending,
        buffers: PassBuffers,
        packed: PackedBatch,
        logits: Tensor | None,
        index: Tensor | None,
        after: GraphKey | None,
        masks: Masks | None,
    ) -> None:
        """Ends a pass: samples, unless its graph has done so, and copies the results to the host. after: the stage of a
        decode batch that follows its logits."""
        streams, sampling = self.streams, self.sampling
        if masks is not None:
            sampling.masks.send(masks)
        self._num_steps += bool(packed.num_sampled)
        at, count = self._num_steps % self._depth, packed.num_sampled
        with streams.use(streams.engine):
            if after is not None:
                sampling.masks.arrived.wait(streams.engine)
                self._replay(pending.bucket, after, may_capture=False)  # never behind this pass's own logits
            elif logits is not None:
                if masks is not None:
                    sampling.masks.arrived.wait(streams.engine)
                sampling.sample(
                    logits,
                    self._slots,
                    self._positions,
                    index,
                    adjusts=packed.adjusts,
                    filters=packed.has_filters,
                    logprobs=packed.logprobs is not None,
                    masked=masks is not None,
                )
            buffers.ended.record(streams.engine)
        with streams.use(streams.results):
            buffers.ended.wait(streams.results)
            if pending.num_drafts:
                assert self.drafts is not None, "a pass had drafts"
                buffers.drafts[:count].copy_(self.drafts.results[at, :count], non_blocking=True)
                count *= 1 + pending.num_drafts
            elif count:
                buffers.results[:count].copy_(sampling.results[at, :count], non_blocking=True)
            if packed.logprobs is not None:
                buffers.logprobs[:count].copy_(sampling.logprobs[at, :count], non_blocking=True)
            if num_pooled := len(packed.pooled_rows):
                buffers.host_pooled[:num_pooled].copy_(buffers.pooled[:num_pooled], non_blocking=True)
            if num_lines := sum(request.count for request in pending.prompt_logprobs):
                buffers.host_prompt_lines[:num_lines].copy_(buffers.prompt_lines[:num_lines], non_blocking=True)
            buffers.copied.record(streams.results)

    def mask_buffer(self, pending: CudaPending, num_masks: int, num_words: int) -> Bits:
        previous, last = (self._pending[(self._count - back) % self._depth] for back in (2, 1))
        assert pending is last, "masks can only be given to the pass that was launched last"
        assert previous is None or previous.is_over, "the previous pass may still read its masks"
        return self.sampling.masks.host_bits(num_masks, num_words)

    def wait_event(self, event: CudaEvent) -> None:
        """Blocks until the event has occurred. With ranks, raises if one is lost meanwhile."""
        if self.guard is None:
            event.synchronize()
            return
        while not event.query():
            self.guard()
            time.sleep(0)  # other threads may need the GIL

    def check(self) -> None:
        last = self._last_end
        if last is not None:
            with self.streams.use(self.streams.engine):  # on another thread, another GPU may be the current one
                last.query()  # raises if the device has failed

    @property
    @torch.inference_mode()
    def expert_rows(self) -> Sequence[Sequence[int]]:
        if self.model.experts is None:
            return ()
        with self.streams.use(self.streams.copy):  # the one that waits for no pass
            found: list[list[int]] = self.model.experts.loads.tolist()
            return found

    @property
    def slow_launches(self) -> Mapping[str, int]:
        return self.watch.slow

    @property
    def host_pages(self) -> SharedPages | None:
        return None if self.swap is None else self.swap.host

    def map_pages(self, target: SharedPages) -> None:
        assert self.swap is not None, "pages are exported by an engine of role prefill"
        self.swap.map_pages(target)

    def unmap_pages(self, target: SharedPages) -> None:
        assert self.swap is not None, "pages are exported by an engine of role prefill"
        self.swap.unmap_pages(target)

    @torch.inference_mode()
    def export_pages(self, pages: Column, target: SharedPages, targets: Column) -> _CopyEnd:
        assert self.swap is not None, "pages are exported by an engine of role prefill"
        with self.streams.use(self.streams.engine):
            return _CopyEnd(self.swap.export(pages, target, targets), self.guard)

    def after_launched(self) -> _CopyEnd:
        streams = self.streams
        ends = [streams.event() for _ in range(3)]
        for event, stream in zip(ends, (streams.engine, streams.spill, streams.fetch), strict=True):
            event.record(stream)
        return _CopyEnd(ends, self.guard)

    def close(self) -> None:
        """Waits for launched passes and frees the KV cache, most of the device's memory: somebody may keep the closed
        engine, and make another."""
        self.watch.close()
        if self._last_end is not None:
            self.wait_event(self._last_end)
        self.streams.synchronize()
        for attention in [self.attention, *([] if self.draft_model is None else [self.draft_model.attention])]:
            attention.cache.free()
        self.streams.free_memory()

    def _swap_pages(self, swap: Swap, buffers: PassBuffers, packed: PackedBatch) -> None:
        assert self.swap is not None, "a plan moves pages to host memory, and the executor has none"
        if packed.spill_pages.count:
            self.swap.spill(buffers.span(packed.spill_pages), swap.spill_hosts)
        if packed.fetch_pages.count:
            pages = buffers.span(packed.fetch_pages)
            self.swap.fetch(pages, swap.fetch_hosts, buffers.fetch_began, buffers.fetched)
            self.stats.fetched_pages += packed.fetch_pages.count

    def _apply(self, buffers: PassBuffers, packed: PackedBatch) -> None:
        if not packed.num_words:
            return
        apply_diff(buffers.diff, self.state, self.attention.shared_units, num_programs=self._diff_programs)
        if packed.adjust_runs.count:
            write_runs(buffers.span(packed.adjust_runs), self.sampling.adjust.words, self._run_programs)
        if packed.source_runs.count:
            assert self.drafts is not None, "only a packer for drafts packs their sources"
            write_runs(buffers.span(packed.source_runs), self.drafts.sources, self._run_programs)

    # ------------------------------------------------------------------ what a graph contains

    def run_pass(self, rows: int, key: GraphKey) -> None:
        """Launches the kernels of a pass of so many rows, or of the stage of it that the key names."""
        if key.prefill is not None:
            hidden = self.prefill.run_bucket(
                rows, key.shared_block_m, key.prefill, all_states=key.all_states, lora=key.lora
            )
            if not key.all_states and self.model.shard.is_last:
                self.model.logits(hidden)
        else:
            self.decode.run(rows, key)
