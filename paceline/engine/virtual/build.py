"""Builds an engine on the virtual GPU in real time: no model, no torch, a synthetic tokenizer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import MAX_PAGES, EngineConfig, SchedulerConfig
from paceline.engine.engine import Engine, EngineHooks, ModelInfo
from paceline.engine.loop import Trace
from paceline.engine.virtual.drafts import DraftVerifier, RandomDrafts
from paceline.engine.virtual.executor import (
    SMALL_MODEL_H200,
    ClockTokens,
    HostLink,
    PassTime,
    VirtualExecutor,
    VirtualTokens,
    WallClock,
    slowed,
)
from paceline.engine.virtual.tensor_parallel import PREDICTED, RankWork, ShardedStepTime
from paceline.model.shapes import shape
from paceline.scheduler import Scheduler
from paceline.text.synthetic import MIN_VOCAB_SIZE, synthetic_tokenizer

NAME = "virtual"
VOCAB_SIZE = 32_768
KV_BYTES_PER_TOKEN = 114_688  # of the model whose times are charged
_KV_TOKENS = 524_288
_LINK_RATE = 53e9  # bytes a second to host memory, each way


def build_virtual(
    config: EngineConfig,
    scheduler_options: Mapping[str, Any],
    *,
    trace: Trace | None = None,
    hooks: EngineHooks | None = None,
    detokenize: bool = True,
) -> Engine:
    options = dict(scheduler_options)
    checked = SchedulerConfig(**{"num_pages": MAX_PAGES, **options})
    page_size = checked.page_size
    kv_tokens, device = _KV_TOKENS, NAME
    page_s = page_size * KV_BYTES_PER_TOKEN / _LINK_RATE
    step_time: PassTime = slowed(SMALL_MODEL_H200, config.virtual_slowdown)
    if config.tp > 1:
        work = RankWork(shape("qwen3-0.6b"), config.tp, KV_BYTES_PER_TOKEN / SMALL_MODEL_H200.per_context_token)
        step_time = ShardedStepTime(SMALL_MODEL_H200, work, config.virtual_slowdown)
        kv_tokens, page_s = work.kv_tokens(_KV_TOKENS), page_s * work.kv  # each GPU has a link
        device = f"{config.tp} x {NAME}, {PREDICTED}"
    options["num_pages"] = config.num_kv_pages(checked, options) or max(1, kv_tokens // page_size)
    if count := config.num_host_pages(page_size, options):
        options["num_host_pages"] = count
        options.setdefault("host_page_cost", page_s / SMALL_MODEL_H200.per_prefill_token)
    scheduler_config = SchedulerConfig(**options)
    tokenizer = synthetic_tokenizer(VOCAB_SIZE)
    tokens: VirtualTokens | ClockTokens
    if config.virtual_tokens == "clock":
        tokens = ClockTokens(MIN_VOCAB_SIZE, VOCAB_SIZE, lambda: executor.span[1])
    else:
        tokens = virtual_tokens(scheduler_config.max_running)
    drafts = None
    if scheduler_config.draft_tokens:
        size = scheduler_config.max_running
        drafts = DraftVerifier(size, RandomDrafts(size, config.virtual_acceptance))
    executor = VirtualExecutor(
        WallClock(), step_time, tokens, link=HostLink(page_s * config.virtual_slowdown), drafts=drafts
    )
    scheduler = Scheduler(scheduler_config)
    recorder = None
    if config.record is not None:
        from paceline.engine.recording import Recorder

        recorder = Recorder(Path(config.record), scheduler, time.monotonic, device=device, model=NAME,
                            overlap=config.overlap_mode, buckets=[])  # fmt: skip
    return Engine(
        scheduler,
        executor,
        tokenizer,
        vocab_size=VOCAB_SIZE,
        info=ModelInfo("virtual", 600_000_000, "bfloat16", device, KV_BYTES_PER_TOKEN),
        overlap=config.overlap_mode,
        clock=time.monotonic,
        detokenize=detokenize,
        trace=trace,
        hooks=hooks,
        recorder=recorder,
    )


def virtual_tokens(max_running: int = 1) -> VirtualTokens:
    """The virtual model's tokens, for tests and benchmarks that compute the expected output."""
    return VirtualTokens(max_running, MIN_VOCAB_SIZE, VOCAB_SIZE, end=2)
