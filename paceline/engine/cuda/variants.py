"""Every kernel variant that an executor can ever launch, found without a GPU.

A decoder on the meta device has shapes and no data. An executor built for it runs everything that requests can ask for,
with kernels that are recorded instead of launched: torch computes shapes only, so all of it takes a second or two. What
a variant depends on follows from model, data type, scheduler options and code; a test compares the list with what
random requests launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cuda.build import build_cuda
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.cuda.graphs import SHORT_CONTEXT_ROWS, GraphKey, GraphStage
from paceline.engine.cuda.inputs import prefill_buckets
from paceline.engine.cuda.model import CudaModel, ForwardPass
from paceline.engine.cuda.sharing import BLOCK_SIZES
from paceline.engine.cuda.streams import HostStreams
from paceline.engine.cuda.swap import CudaSwap
from paceline.engine.linear.experts import ExpertBuffers, tuned_sizes
from paceline.engine.linear.pack import quantize_decoder
from paceline.engine.precision import Precision
from paceline.kernels.adjust import write_runs
from paceline.kernels.layouts import SHARED_TILE_WORDS
from paceline.kernels.lora import lora_row_counts
from paceline.kernels.pool_states import pool_states
from paceline.kernels.route_experts import LiveRows
from paceline.kernels.slot_state import apply_diff
from paceline.kernels.variants import KernelVariant, recorded_launches
from paceline.model.decoder import Decoder
from paceline.model.layout import WHOLE_MODEL, Shard, target_shapes
from paceline.model.spec import ModelSpec

# The scheduler options that the list depends on. It depends on no others, such as the size of the KV cache.
VARIANT_OPTIONS = ("max_running", "max_batch_tokens", "page_size", "draft_tokens")


def kernel_variants(
    specs: Sequence[ModelSpec], precision: Precision, scheduler: SchedulerConfig, shard: Shard = WHOLE_MODEL
) -> list[KernelVariant]:
    """What a model with these options, and its draft model if `specs` has a second, can launch on one GPU, in order.
    shard: on the GPU of this rank or stage."""
    reduced = [_two_of_each_layer(spec) for spec in (specs[0].with_layers(shard.layers(specs[0])), *specs[1:])]
    with recorded_launches() as found, torch.inference_mode(), _without_gemms():
        launch_all(_dry_executor(reduced, precision, scheduler, shard))
    return sorted(found, key=repr)


class DryGroup:
    """Collectives of tensors that have no data."""

    is_capturable = True

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty(self.shard.size, *tensor.shape)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return tensor


@contextmanager
def _without_gemms() -> Iterator[None]:
    """Leaves out GEMMs. On the meta device torch would import its compiler for `addmm`, which takes seconds."""
    before = {"mm": torch.mm, "addmm": torch.addmm}
    vars(torch).update(dict.fromkeys(before, lambda *_, out, **__: out))
    try:
        yield
    finally:
        vars(torch).update(before)


def _two_of_each_layer(spec: ModelSpec) -> ModelSpec:
    """The same model with fewer layers. Layers of a kind launch the same kernels, except that the first one reads the
    embeddings."""
    return replace(spec, layers=2 * tuple(dict.fromkeys(spec.layers)))


def _dry_executor(
    specs: Sequence[ModelSpec], precision: Precision, scheduler: SchedulerConfig, shard: Shard
) -> CudaExecutor:
    group = DryGroup(shard) if shard.size > 1 else None
    stage, shard = shard, replace(shard, stage=0, num_stages=1)  # the specs have only its layers

    def decoder(spec: ModelSpec, shard: Shard, group: DryGroup | None) -> Decoder:
        shapes = target_shapes(spec, shard).items()
        dtype = getattr(torch, precision.dtype)
        weights = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes}
        return Decoder(spec, weights, max_positions=scheduler.context_tokens, group=group)

    num_adapters, rank = precision.lora
    config = EngineConfig(
        kv_dtype=precision.kv_dtype,
        quantization=precision.quantization,
        max_loras=max(num_adapters, 1),
        max_lora_rank=rank,
    )
    decoders = [decoder(specs[0], shard, group), *(decoder(spec, WHOLE_MODEL, None) for spec in specs[1:])]
    for one, format in zip(decoders, precision.formats, strict=False):  # none are given: as if rounded at load
        quantize_decoder(one, precision.quantization, format)
    model, draft = decoders[0], decoders[1] if len(specs) > 1 else None
    model.shard = stage
    return build_cuda(model, config, scheduler, None, draft=draft)[0]


def launch_all(executor: CudaExecutor) -> None:
    """Launches every kernel in every variant. For an executor on the meta device."""
    blocks = (0, *BLOCK_SIZES) if executor.attention.shared_units is not None else (0,)
    for _ in executor.model.row_limits():
        _decodes(executor, blocks)
        for rows, drafts in executor.draft_sizes:
            key = GraphKey(drafts=drafts, adjusts=True, filters=True, logprobs=True)
            for stage in (GraphStage.ALL, GraphStage.TOKENS):  # the others are parts of the first
                executor.run_pass(rows, key._replace(stage=stage))
    if executor.model.lora is not None:
        _adapters(executor, blocks)
    if executor.model.shard.is_last:
        for rows in range(1, executor.model.max_rows + 1):
            _sample(executor, rows)
        executor.prompt_logprobs.launch_all()
    _prefill(executor, blocks)
    for model in (executor.model, None if executor.draft_model is None else executor.draft_model.model):
        if model is not None and model.experts is not None:
            _experts(model, model.experts)
        if model is not None:
            _linears(model)
    _apply(executor)
    CudaSwap(HostStreams(), executor.kv, num_host_pages=1, max_pages=1).warm_up()


def _decodes(executor: CudaExecutor, blocks: Sequence[int], *, lora: bool = False) -> None:
    for rows in executor.graphs.sizes:
        for short in (False, True) if rows > SHORT_CONTEXT_ROWS else (False,):
            for block in blocks:
                executor.run_pass(rows, GraphKey(short_contexts=short, shared_block_m=block, lora=lora))


def _adapters(executor: CudaExecutor, blocks: Sequence[int]) -> None:
    """Batches with LoRA adapters. What differs by the number of rows are the parts of A x and the norms."""
    _decodes(executor, blocks, lora=True)
    for rows, drafts in executor.draft_sizes:
        executor.run_pass(rows, GraphKey(drafts=drafts, lora=True))
    prefill = executor.prefill
    for bucket in prefill.buckets:
        for block in blocks:
            prefill.run_bucket(executor.graphs.sizes[-1], block, bucket, all_states=False, lora=True)
    model = executor.model
    for rows in sorted({*lora_row_counts(model.max_tokens), *model.tuned_rows}):
        for live in (LiveRows(torch.zeros(rows, dtype=torch.int32, device=model.device), by_row=True), None):
            ForwardPass(model, rows, fused=False, live=live, lora=True).run(lambda *_: None)


def _sample(executor: CudaExecutor, rows: int) -> None:
    """Sampling of so many rows with all its options: of a decode batch, and of some tokens of a prefill batch."""
    keys = GraphKey(stage=GraphStage.TOKENS), GraphKey(stage=GraphStage.TOKENS, filters=True, adjusts=True)
    for key in (*keys, keys[-1]._replace(logprobs=True)):
        executor.decode.run(rows, key)
        index = torch.zeros(rows, dtype=torch.int32, device=executor.model.device)
        executor.sampling.sample(
            executor.model.last_logits(rows),
            *executor.token_buffers,
            index,
            adjusts=key.adjusts,
            filters=key.filters,
            logprobs=key.logprobs,
            masked=True,
        )


def _prefill(executor: CudaExecutor, blocks: tuple[int, ...]) -> None:
    """Prefill and mixed batches: as graphs and kernel by kernel, with and without split keys and shared tiles."""
    attention, prefill, sizes = executor.attention, executor.prefill, executor.graphs.sizes
    tokens = max(bucket.tokens for bucket in prefill.buckets)
    device = executor.model.device
    shared = None
    if attention.can_share_prefill:
        tiles = torch.zeros(4, SHARED_TILE_WORDS, dtype=torch.int32, device=device)
        shared = (tiles, tiles.flatten(), torch.zeros(4 * attention.tokens_per_tile, dtype=torch.int32, device=device))
    for bucket in prefill_buckets(tokens, attention.tokens_per_tile):
        num_splits = attention.max_splits if bucket.merges else 0
        inputs = prefill.bucket_inputs(bucket)
        for block in blocks:
            prefill.run_bucket(sizes[-1], block, bucket, all_states=False)
            for rows in (0, *sizes):
                prefill.run_inputs(tokens, rows, block, inputs, num_splits, shared, single_launch=True)
    hidden = executor.model.last_states(tokens)
    pool_states(hidden, torch.zeros(2, 2, dtype=torch.int32, device=device), torch.zeros_like(hidden[:2]).float())


def _experts(model: CudaModel, buffers: ExpertBuffers) -> None:
    """Experts with any number of rows: of prefill batches, and of the tokens of them that are sampled from."""
    rows_of_padding = torch.zeros(model.max_tokens, dtype=torch.int32, device=model.device)
    for rows in tuned_sizes(buffers, model.max_tokens):
        for live in (LiveRows(rows_of_padding, by_row=True), LiveRows(rows_of_padding[:1], by_row=False)):
            forward = ForwardPass(model, rows, fused=False, live=live)
            for layer in model.layers:
                layer.block.run(forward.stream, forward.block_buffers)


def _linears(model: CudaModel) -> None:
    """Matrices whose kernels depend on the number of rows in any pass: prefill batches launch them one by one."""
    for rows in model.tuned_rows:
        ForwardPass(model, rows, fused=False).run(lambda *_: None)


def _apply(executor: CudaExecutor) -> None:
    words = torch.zeros(64, dtype=torch.int32, device=executor.model.device)
    apply_diff(words, executor.state, executor.attention.shared_units)
    write_runs(words, executor.sampling.adjust.words)
