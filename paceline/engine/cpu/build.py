"""Builds the CPU executor for a loaded decoder."""

from __future__ import annotations

from dataclasses import replace

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cpu.executor import CpuExecutor, CpuModelRunner
from paceline.engine.cpu.quantized_model import DecoderModel, QuantizedModel


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
    num_threads, max_lora_rank = config.threads, config.max_lora_rank
    stages = decoder.stages
    if stages is not None and not stages.shard.is_last:
        from paceline.engine.cpu.stages import StageRunner

        first = StageRunner(decoder, stages, **sizes)
        return CpuExecutor(first, num_threads=num_threads, max_lora_rank=max_lora_rank)
    runner = CpuModelRunner(
        decoder,
        **sizes,
        share_host=config.role == "decode",
        adapt_drafts=not scheduler.adaptive_drafts,
        draft=draft,
    )
    if stages is None:
        executor = CpuExecutor(runner, num_threads=num_threads, max_lora_rank=max_lora_rank)
        if isinstance(decoder, QuantizedModel):
            executor.capabilities = replace(executor.capabilities, weights=False)
        return executor
    from paceline.engine.cpu.stages import LastStageRunner  # with msgspec, which one process does not need

    return CpuExecutor(LastStageRunner(runner, stages), num_threads=num_threads, max_lora_rank=max_lora_rank)
