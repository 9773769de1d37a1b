"""Builds the CUDA executor for a loaded decoder: buffers first, then a KV cache in the memory that is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.config import ConfigError, EngineConfig, SchedulerConfig
from paceline.engine.cuda.attention import AttentionChoices, max_units
from paceline.engine.cuda.buffers import SENT_AT_ONCE
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.cuda.graphs import buckets, draft_sizes
from paceline.engine.cuda.inputs import PREFILL_SIZES
from paceline.engine.cuda.lora import LoraSizes
from paceline.engine.cuda.model import CudaModel
from paceline.engine.cuda.parts import ExecutorSizes
from paceline.engine.cuda.sampling import mask_words
from paceline.engine.cuda.sharing import ShareRule
from paceline.engine.cuda.streams import streams_of
from paceline.engine.cuda.swap import buffer_bytes
from paceline.engine.kv_sizing import UnitBytes, num_kv_pages
from paceline.engine.linear.pack import keep_expanded, quantize_decoder
from paceline.engine.precision import FP8_KV, Precision
from paceline.kernels._triton import HAS_TRITON
from paceline.kernels.extend_attention import extend_tuning
from paceline.kernels.groupwise_linear import GroupwiseMatrix
from paceline.kernels.layouts import adjust_words
from paceline.kernels.linear import GemmTuning, decode_tuning
from paceline.model.decoder import Decoder
from paceline.model.layers import Pool
from paceline.model.spec import ModelSpec

_KV_FRACTION = 0.9  # the rest is left to the CUDA context's modules, graphs and cuBLAS
_LINK_RATE = 53e9  # bytes per second from host memory, measured on the host of an H200 (PCIe 5, 16 lanes)
_DRAFT_ROWS = 64  # tokens that can be sampled from in a pass with drafts, even where fewer requests can run
_PREFILL_RATE = 700e12  # FLOP/s of prefill batches: 14B on an H200; 0.6B reaches 770e12


def has_cuda() -> bool:
    return HAS_TRITON and torch.cuda.is_available()


def check_cuda() -> None:
    if not has_cuda():
        missing = "no CUDA device was found" if HAS_TRITON else "triton is not installed"
        raise ConfigError(f"device is 'cuda', but {missing}: choose device cpu, or install what is missing.")


def host_page_cost(spec: ModelSpec, dtype_bytes: int, page_size: int) -> float:
    """Prompt tokens that a GPU computes in the time that copying a page from host memory takes."""
    seconds = spec.unit_bytes(Pool.PAGES, dtype_bytes, page_size) / _LINK_RATE
    return round(seconds * _PREFILL_RATE / (2 * spec.num_active_parameters), 3)


def build_cuda(
    decoder: Decoder,
    config: EngineConfig,
    scheduler: SchedulerConfig,
    given: Mapping[str, Any] | None,
    *,
    tuning: GemmTuning = decode_tuning,
    attention: AttentionChoices = AttentionChoices(),  # noqa: B008  (frozen)
    share_rule: Callable[[int, int], ShareRule] = ShareRule,
    prefill_sizes: Sequence[int] = PREFILL_SIZES,
    draft: Decoder | None = None,
    agree: Callable[[int], int] = lambda num_pages: num_pages,
) -> tuple[CudaExecutor, SchedulerConfig]:
    """The executor, and the scheduler's options with the number of pages, which follows from the free memory and the
    scheduler options in `given`; None: the number in `scheduler` is used. draft: a draft model. The decoders must not
    be used afterwards. agree: as in `build_executor`."""
    streams = streams_of(decoder.device)
    precision = Precision.of(config, str(decoder.dtype).removeprefix("torch."))
    page_size, context = scheduler.page_size, scheduler.context_tokens
    decoders = [one for one in (decoder, draft) if one is not None]
    units = UnitBytes.of(page_size, [(one.spec, precision.kv_bytes(one.dtype)) for one in decoders])
    max_rows = scheduler.max_running
    if scheduler.draft_tokens:
        max_rows = min(max(max_rows, _DRAFT_ROWS), max_rows * (1 + scheduler.draft_tokens))
    for one in decoders:
        if precision.quantization != "none":
            quantize_decoder(one, precision.quantization)
        if isinstance(one.layers[0].qkv.weight, GroupwiseMatrix) and given is not None:
            wanted = (config.num_kv_pages(scheduler, given) or 0) * units.page + scheduler.max_running * units.state
            keep_expanded(one, streams.free_memory() - wanted)
    models = [
        CudaModel(
            one,
            max_tokens=scheduler.max_batch_tokens,
            max_rows=max_rows,
            tuning=tuning,
            lora=LoraSizes(*precision.lora) if one is decoder else LoraSizes(),
        )
        for one in decoders
    ]
    model, draft_model = models[0], models[1] if draft is not None else None
    if given is not None:
        used = (_workspace_bytes(one, precision, config, scheduler, attention) for one in models)
        free = streams.free_memory() - sum(used)
        num_pages = num_kv_pages(
            config,
            units,
            scheduler,
            given,
            free=max(free, 0),
            default_fraction=_KV_FRACTION,
            max_contexts=scheduler.max_running,
        )
        scheduler = replace(scheduler, num_pages=agree(num_pages))
    sizes = ExecutorSizes(
        num_pages=scheduler.num_pages,
        page_size=page_size,
        max_running=scheduler.max_running,
        max_row_tokens=min(context, scheduler.num_pages * page_size),
        num_host_pages=scheduler.num_host_pages,
        max_swap_pages=scheduler.max_swap_pages,
        role=config.role,
        attention=attention,
        share_rule=share_rule,
        prefill_sizes=prefill_sizes,
        max_drafts=scheduler.draft_tokens,
        fp8_kv=precision.kv_dtype == FP8_KV,
    )
    return CudaExecutor(model, streams, sizes, draft_model), scheduler


def _workspace_bytes(
    model: CudaModel,
    precision: Precision,
    config: EngineConfig,
    scheduler: SchedulerConfig,
    attention: AttentionChoices,
) -> int:
    """Device memory besides weights, activations and the KV cache: partial results, token and page tables, queries,
    adjustments, masks, and buffers for swapped pages and for hidden states that are sent."""
    rows, context, spec = scheduler.max_running, scheduler.context_tokens, model.spec
    with_drafts = draft_sizes(buckets(rows), model.max_rows, scheduler.draft_tokens)
    mixer = model.mixer
    partials = max_units(buckets(rows), context + 1, attention.chunks, with_drafts) * (
        mixer.q_size + mixer.num_heads + 32
    )
    max_partials = attention.split_rule(mixer.num_kv_heads, 0).max_partials
    partials += max_partials * extend_tuning(mixer.head_dim).block_m * (mixer.head_dim + 1)
    tables = rows * context * (3 if scheduler.draft_tokens else 2)
    adjustments, masks = rows * adjust_words(context + 1), mask_words(model.max_rows, spec.vocab_size)
    page_bytes = spec.unit_bytes(Pool.PAGES, precision.kv_bytes(model.dtype), scheduler.page_size)
    copies = scheduler.num_host_pages or config.role == "prefill"
    buffers = buffer_bytes(scheduler.max_swap_pages, page_bytes) if copies else 0
    queries = scheduler.max_batch_tokens * mixer.q_size * model.dtype.itemsize
    if not model.shard.is_last:
        buffers += SENT_AT_ONCE * scheduler.max_batch_tokens * spec.hidden_size * model.dtype.itemsize
    return buffers + queries + 4 * (partials + tables + adjustments + masks)
