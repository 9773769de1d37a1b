"""Engines on the CUDA executor in Triton's interpreter, small enough for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cuda.attention import AttentionChoices
from paceline.engine.cuda.build import build_cuda
from paceline.engine.engine import Engine, ModelInfo
from paceline.kernels.decode_units import Chunks
from paceline.model.decoder import Decoder
from paceline.scheduler import Scheduler
from paceline.text.tokenizer import Tokenizer

SMALL: dict[str, Any] = {
    "page_size": 4,
    "max_running": 4,
    "context_tokens": 192,
    "max_batch_tokens": 32,
    "max_prefill_tokens": 32,
    "chunk_tokens": 16,
}


def assemble_kernels(
    decoder: Decoder, tokenizer: Tokenizer, config: EngineConfig, options: Mapping[str, Any], num_pages: int = 128
) -> Engine:
    """`assemble` on a GPU, with the limits of a check lowered to what the interpreter can run."""
    scheduler = SchedulerConfig(num_pages=num_pages, **{**options, **SMALL})
    attention = AttentionChoices(chunks=lambda rows: Chunks(16, 64, 4))
    device, scheduler = build_cuda(decoder, config, scheduler, None, tuning=lambda *_: None, attention=attention)
    return Engine(
        Scheduler(scheduler),
        device,
        tokenizer,
        vocab_size=decoder.spec.vocab_size,
        spec=decoder.spec,
        info=ModelInfo(dtype=str(decoder.dtype).removeprefix("torch.")),
        overlap=config.overlap_mode,
    )
