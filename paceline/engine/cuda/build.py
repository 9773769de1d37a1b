"""A CUDA executor for a decoder that is loaded: buffers first, then as much KV memory as is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.config import ConfigError, EngineConfig, SchedulerConfig
from paceline.engine.cuda.executor import AttentionTuning, ChunkChoice, CudaExecutor, SplitChoice, max_units
from paceline.engine.cuda.graphs import buckets
from paceline.engine.cuda.inputs import PROMPT_SIZES, ShareRule
from paceline.engine.cuda.model import CudaModel, Tuning
from paceline.engine.cuda.sampling import mask_words
from paceline.engine.cuda.streams import streams_of
from paceline.engine.cuda.swap import buffer_bytes
from paceline.engine.kv_sizing import num_kv_pages
from paceline.kernels._triton import HAS_TRITON
from paceline.kernels.adjust import adjust_bytes
from paceline.kernels.decode_attention import decode_attention_tuning
from paceline.kernels.decode_units import decode_chunks
from paceline.kernels.extend_attention import ExtendTuning
from paceline.kernels.extend_tiles import SplitRule
from paceline.kernels.linear import decode_tuning
from paceline.model.decoder import Decoder
from paceline.model.spec import ModelSpec

_KV_FRACTION = 0.9  # the rest is left to the CUDA context's modules, graphs and cuBLAS
_LINK_RATE = 53e9  # bytes a second from host memory, as measured on the host of an H200 (PCIe 5, 16 lanes)
_PROMPT_RATE = 700e12  # operations a second of a pass with prompts: 14B on an H200; 0.6B has 770e12


def has_cuda() -> bool:
    return HAS_TRITON and torch.cuda.is_available()


def check_cuda() -> None:
    if not has_cuda():
        missing = "there is no CUDA device" if HAS_TRITON else "triton is not installed"
        raise ConfigError(f"device is 'cuda' and {missing}: choose device cpu, or install what is missing.")


def host_page_cost(spec: ModelSpec, dtype_bytes: int, page_size: int) -> float:
    """Prompt tokens that a GPU computes while a page comes from host memory."""
    seconds = page_size * spec.kv_bytes_per_token(dtype_bytes) / _LINK_RATE
    return round(seconds * _PROMPT_RATE / (2 * spec.num_parameters), 3)


def build_cuda(
    decoder: Decoder,
    config: EngineConfig,
    scheduler: SchedulerConfig,
    with_pages: Callable[[int], SchedulerConfig] | None,
    *,
    tuning: Tuning = decode_tuning,
    chunks: ChunkChoice = decode_chunks,
    attention_tuning: AttentionTuning = decode_attention_tuning,
    share_rule: Callable[[int, int], ShareRule] = ShareRule,
    split_rule: SplitChoice = SplitRule,
    prompt_sizes: Sequence[int] = PROMPT_SIZES,
) -> tuple[CudaExecutor, SchedulerConfig]:
    """The executor, and the scheduler's options with the pool's size in them: `with_pages` makes them, unless the
    pool's size was asked for. The decoder is taken over."""
    streams = streams_of(decoder.device)
    model = CudaModel(decoder, max_tokens=scheduler.max_batch_tokens, max_rows=scheduler.max_running, tuning=tuning)
    page_size, context = scheduler.page_size, scheduler.context_tokens
    if with_pages is not None:
        free = streams.free_memory() - _workspace_bytes(model, scheduler, chunks, split_rule)
        num_pages = num_kv_pages(
            config, model.spec, model.dtype.itemsize, page_size, context, free=max(free, 0),
            default_fraction=_KV_FRACTION, max_contexts=scheduler.max_running,
        )  # fmt: skip
        scheduler = with_pages(num_pages)
    device = CudaExecutor(
        model,
        streams,
        num_pages=scheduler.num_pages,
        page_size=page_size,
        max_running=scheduler.max_running,
        max_row_tokens=min(context, scheduler.num_pages * page_size),
        num_host_pages=scheduler.num_host_pages,
        max_swap_pages=scheduler.max_swap_pages,
        chunks=chunks,
        attention_tuning=attention_tuning,
        share_rule=share_rule,
        split_rule=split_rule,
        prompt_sizes=prompt_sizes,
    )
    return device, scheduler


def _workspace_bytes(model: CudaModel, scheduler: SchedulerConfig, chunks: ChunkChoice, split_rule: SplitChoice) -> int:
    """What the device allocates beside weights, activations and KV: partial results, token and page tables."""
    rows, context, spec = scheduler.max_running, scheduler.context_tokens, model.spec
    partials = max_units(buckets(rows), context + 1, chunks) * (spec.q_size + spec.num_heads + 32)
    partials += split_rule(spec.num_kv_heads, 0).room * ExtendTuning().block_m * (spec.head_dim + 1)
    tables = rows * context * 2
    adjustments, masks = adjust_bytes(rows, context + 1), mask_words(rows, spec.vocab_size)
    page_bytes = scheduler.page_size * spec.kv_bytes_per_token(model.dtype.itemsize)
    buffers = buffer_bytes(scheduler.max_swap_pages, page_bytes) if scheduler.num_host_pages else 0
    queries = scheduler.max_batch_tokens * spec.q_size * model.dtype.itemsize
    return buffers + adjustments + 4 * (partials + tables + masks) + queries
