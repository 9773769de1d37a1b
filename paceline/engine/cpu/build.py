"""Builds the CPU executor for a loaded decoder."""

from __future__ import annotations

from dataclasses import replace

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cpu.executor import CpuExecutor, CpuModelRunner, ModelRunner
from paceline.engine.cpu.quantized_model import DecoderModel


def build_cpu(
    decoder: DecoderModel, config: EngineConfig, scheduler: SchedulerConfig, draft: DecoderModel | None = None
) -> CpuExecutor:
    """draft: a draft model."""
    sizes: dict[str, int] = {
        "num_pages": scheduler.num_pages,
        "page_size": scheduler.page_size,
        "max_running": scheduler.max_running,
        "max_row_tokens": min(scheduler.context_tokens, scheduler.num_pages * scheduler.page_size),
        "num_host_pages": scheduler.num_host_pages,
    }
    stages = decoder.stages
    runner: ModelRunner
    if stages is not None and not stages.shard.is_last:
        from paceline.engine.cpu.stages import StageRunner

        runner = StageRunner(decoder, stages, **sizes)
    else:
        runner = whole = CpuModelRunner(
            decoder,
            **sizes,
            share_host=config.role == "decode",
            adapt_drafts=not scheduler.adaptive_drafts,
            draft=draft,
        )
        if stages is not None:
            from paceline.engine.cpu.stages import LastStageRunner  # with msgspec, which one process does not need

            runner = LastStageRunner(whole, stages)
    executor = CpuExecutor(runner, num_threads=config.threads, max_lora_rank=config.max_lora_rank)
    if decoder.is_packed:
        executor.capabilities = replace(executor.capabilities, weights=False)
    return executor
