"""What a CUDA executor consists of: the state of slots, attention, sampling, the runners of passes and their graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.engine.cuda.attention import AttentionChoices, CudaAttention, max_units
from paceline.engine.cuda.buffers import PassBuffers
from paceline.engine.cuda.decode import DecodeRunner
from paceline.engine.cuda.draft_model import DraftModel
from paceline.engine.cuda.graphs import CudaGraphs, GraphKey, GraphStage, draft_sizes, forward_keys
from paceline.engine.cuda.inputs import PREFILL_SIZES, PackedBatch, PlanPacker, output_sizes, token_sizes
from paceline.engine.cuda.kv_scales import calibrate
from paceline.engine.cuda.model import CudaModel
from paceline.engine.cuda.prefill import PrefillRunner
from paceline.engine.cuda.prompt_logprobs import PromptLogprobs
from paceline.engine.cuda.sampling import CudaSampling
from paceline.engine.cuda.sharing import BLOCK_SIZES, ShareRule
from paceline.engine.cuda.stats import ExecutorStats
from paceline.engine.cuda.streams import Streams
from paceline.engine.cuda.swap import CudaSwap
from paceline.engine.garbage import no_garbage_collection
from paceline.kernels.adjust import write_runs
from paceline.kernels.drafts import DraftBuffers
from paceline.kernels.pool_states import pool_states
from paceline.kernels.slot_state import SlotState, apply_diff
from paceline.sampling.logprobs import LogprobRequest
from paceline.scheduler.plan import Plan, Swap

_DEPTH = 4  # passes that have buffers; at most two are in flight, of a pipeline one more than it has stages
_RANK_CAPTURES = 16  # as many on every rank of tensor parallelism
_CAPTURE_SECONDS = 0.15  # for capturing graphs at start, 5 to 10 ms each; the others are captured in idle time


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSizes:
    """What an executor allocates memory for, and the choices of its kernels."""

    num_pages: int
    page_size: int
    max_running: int
    max_row_tokens: int
    num_host_pages: int = 0
    max_swap_pages: int = 0
    role: str = "both"
    attention: AttentionChoices = field(default_factory=AttentionChoices)
    share_rule: Callable[[int, int], ShareRule] = ShareRule
    prefill_sizes: Sequence[int] = PREFILL_SIZES
    max_drafts: int = 0
    fp8_kv: bool = False

    @property
    def max_length(self) -> int:
        """One more than a row can have, since the last sampled token is stored and never fed."""
        return self.max_row_tokens + 1


class CudaParts:
    """Launches the kernels of a pass, or a graph of them, on the engine stream."""

    def __init__(
        self, model: CudaModel, streams: Streams, sizes: ExecutorSizes, draft_model: CudaModel | None = None
    ) -> None:
        device = model.device
        self.model, self.streams, self._sizes = model, streams, sizes
        self.stats = ExecutorStats()
        self._depth = max(_DEPTH, model.shard.num_stages + 2)
        # In the interpreter, which runs one program after the other, idle programs cost as much as others.
        self._diff_programs, self._run_programs = (2, 2) if device.type == "cpu" else (64, 128)
        max_running = sizes.max_running
        self.state = SlotState.empty(max_running, sizes.max_length, sizes.page_size, max_running, device)
        is_capturable = model.group is None or model.group.is_capturable
        self.graphs = CudaGraphs(streams, max_running, self.run_pass, is_enabled=is_capturable)
        self.draft_sizes = draft_sizes(self.graphs.sizes, model.max_rows, sizes.max_drafts)
        capacity = max_units(self.graphs.sizes, sizes.max_length, sizes.attention.chunks, self.draft_sizes)
        self.attention = CudaAttention(
            model,
            streams,
            self.state,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            capacity=capacity,
            choices=sizes.attention,
            max_drafts=sizes.max_drafts,
            fp8_kv=sizes.fp8_kv,
        )
        self.kv = self.attention.cache.paged
        self.swap = None
        if sizes.num_host_pages or sizes.role == "prefill":
            self.swap = CudaSwap(
                streams, self.kv, sizes.num_host_pages, sizes.max_swap_pages, share_host=sizes.role == "decode"
            )
        self.sampling = CudaSampling(streams, self.state, model, self._depth, has_drafts=sizes.max_drafts > 0)
        self.prompt_logprobs = PromptLogprobs(model, self.state.token_pool)
        self._slots, self._positions = (
            torch.zeros(model.max_tokens, dtype=torch.int32, device=device) for _ in range(2)
        )
        if model.lora is not None:
            model.lora.bind(self._slots, self.state.sampling)
        self.drafts, self.draft_model = None, None
        if sizes.max_drafts:
            rows = max_running, model.max_rows, self._depth, sizes.max_length, max_running
            self.drafts = DraftBuffers.empty(*rows, device)
        if draft_model is not None:
            self.draft_model = self._draft_model(draft_model)
        self.decode, self.prefill = self._decode_runner(), self._prefill_runner()
        self._packer = self._plan_packer(capacity)

    def _draft_model(self, model: CudaModel) -> DraftModel:
        sizes = self._sizes
        return DraftModel(
            model,
            self.streams,
            self.state,
            self.attention,
            self.sampling,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            sizes=self.graphs.sizes,
            draft_rows=sorted({rows for rows, _ in self.draft_sizes}),
            choices=sizes.attention,
            fp8_kv=sizes.fp8_kv,
            group=self.model.group,
        )

    def _decode_runner(self) -> DecodeRunner:
        return DecodeRunner(
            self.model,
            self.attention,
            self.sampling,
            self.state,
            self._slots,
            self._positions,
            self.drafts,
            None if self.draft_model is None else self.draft_model.propose,
        )

    @property
    def _prefill_sizes(self) -> list[int]:
        return [size for size in self._sizes.prefill_sizes if size <= self.model.max_tokens]

    def _prefill_runner(self) -> PrefillRunner:
        return PrefillRunner(
            self.model,
            self.attention,
            self.state,
            self._slots,
            self._positions,
            self._sizes.max_running,
            self._prefill_sizes,
            None if self.draft_model is None else self.draft_model.compute_kv,
        )

    def _plan_packer(self, capacity: int) -> PlanPacker:
        model, attention, sizes, rule = self.model, self.attention, self._sizes, None
        if attention.shared_units is not None:
            rule = sizes.share_rule(model.mixer.num_heads // model.mixer.num_kv_heads, capacity)
            models = [attention, *([] if self.draft_model is None else [self.draft_model.attention])]
            rule = replace(rule, share_prefill=all(one.can_share_prefill for one in models))
        return PlanPacker(
            sizes.max_running,
            model.spec.vocab_size,
            attention.tokens_per_tile,
            rule,
            sizes.max_length,
            attention.split_rule,
            self._prefill_sizes,
            max_tokens=model.max_tokens,
            has_drafts=sizes.max_drafts > 0,
            samples=model.shard.is_last,
        )

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
            for count, graph in enumerate(self.likely_graphs(), 1):
                self.graphs.capture(*graph)
                # All ranks must have the same graphs, however fast they are.
                if time.perf_counter() > deadline if self.model.group is None else count == _RANK_CAPTURES:
                    break

    def likely_graphs(self) -> Iterator[tuple[int, GraphKey]]:
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
