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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from paceline.engine.cuda.buffers import PassBuffers
from paceline.engine.cuda.graphs import GraphKey, GraphStage, forward_key
from paceline.engine.cuda.inputs import PackedBatch
from paceline.engine.cuda.kv_scales import calibrate, scales_digest
from paceline.engine.cuda.launch_watch import LaunchWatch
from paceline.engine.cuda.model import CudaModel
from paceline.engine.cuda.parts import CudaParts, ExecutorSizes
from paceline.engine.cuda.pending import CopyEnd, CudaPending
from paceline.engine.cuda.stats import ExecutorStats
from paceline.engine.cuda.streams import CudaEvent, Streams
from paceline.engine.executor import Capabilities, Executor
from paceline.engine.weight_source import WeightSource
from paceline.model.decoder import Decoder
from paceline.model.lora import LoraFile, LoraWeights, arrange_adapter
from paceline.model.spec import ModelError
from paceline.sampling.logprobs import LogprobRequest
from paceline.sampling.types import Bits, Masks
from paceline.scheduler.plan import Column, Plan
from paceline.shared_pages import SharedPages


class CudaExecutor(CudaParts, Executor):
    """Executes plans on a GPU. On a CPU device it runs in Triton's interpreter, for tests."""

    capabilities = Capabilities(logits=True, pooling=True, weights=True, kv_transfer=True)

    def __init__(
        self, model: CudaModel, streams: Streams, sizes: ExecutorSizes, draft_model: CudaModel | None = None
    ) -> None:
        super().__init__(model, streams, sizes, draft_model)
        has_lora = model.lora is not None
        self.capabilities = replace(self.capabilities, weights=not model.is_packed, lora=has_lora)
        self.guard: Callable[[], None] | None = None  # raises if a rank is lost, which a pass would wait for forever
        self._num_steps = 0  # the value of the device's step counter once everything launched has run
        prompt_lines = model.max_tokens if model.shard.is_last else 0
        self._ring = [
            PassBuffers(streams, sizes.max_running, model.max_rows, prompt_lines, model.spec.hidden_size, model.device)
            for _ in range(self._depth)
        ]
        self._pending: list[CudaPending | None] = [None] * self._depth  # by index of the ring
        self._count = 0  # of launched passes
        self._prepared: tuple[Plan, PassBuffers, PackedBatch] | None = None  # for the next launch
        self._last_end: CudaEvent | None = None
        self._let_capture = False  # with ranks: in the next launch
        self.watch = LaunchWatch(lambda: self.graphs.capture_s, streams.reserved_memory)
        streams.synchronize()  # buffers were filled on the default stream: finish before the engine stream begins

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
            return self.graphs.capture_next(self.likely_graphs())

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
    def export_pages(self, pages: Column, target: SharedPages, targets: Column) -> CopyEnd:
        assert self.swap is not None, "pages are exported by an engine of role prefill"
        with self.streams.use(self.streams.engine):
            return CopyEnd(self.swap.export(pages, target, targets), self.guard)

    def after_launched(self) -> CopyEnd:
        streams = self.streams
        ends = [streams.event() for _ in range(3)]
        for event, stream in zip(ends, (streams.engine, streams.spill, streams.fetch), strict=True):
            event.record(stream)
        return CopyEnd(ends, self.guard)

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
