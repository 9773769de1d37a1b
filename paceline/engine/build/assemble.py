"""Puts an engine together around a loaded model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import torch

from paceline.config import EngineConfig
from paceline.engine.build.executor import alone, build_executor, device_of
from paceline.engine.build.facts import CPU, CUDA
from paceline.engine.cpu.executor import CpuExecutor
from paceline.engine.cpu.quantized_model import DecoderModel
from paceline.engine.engine import Engine, EngineHooks, ModelInfo
from paceline.engine.loaded_text import set_up_grammars
from paceline.engine.loop import Trace
from paceline.engine.recent_outputs import RecentOutputs
from paceline.model.layout import Shard
from paceline.model.rank_group import StageLink
from paceline.model.spec import ModelSpec
from paceline.parallel.stages import StagePipe
from paceline.sampling.grammar import Grammars
from paceline.scheduler import Scheduler
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.engine.cuda.executor import CudaExecutor
    from paceline.engine.cuda.precompile import KernelPreparation
    from paceline.engine.executor import Executor
    from paceline.engine.parallel_executor import RankLink
    from paceline.engine.recording import Recorder


def assemble(
    decoder: DecoderModel,
    tokenizer: Tokenizer,
    config: EngineConfig,
    scheduler_options: Mapping[str, object],
    *,
    trace: Trace | None = None,
    hooks: EngineHooks | None = None,
    detokenize: bool = True,
    kernels: KernelPreparation | None = None,
    draft: DecoderModel | None = None,
    grammars: Grammars | None = None,
    ranks: RankLink | None = None,
) -> Engine:
    """Builds an engine around a loaded decoder, which it takes over. kernels: if they are being compiled already.
    draft: a draft model, of the same device and dtype. grammars: if they are set up already. ranks: the other ranks, if
    the decoder is rank 0's part."""
    spec = decoder.whole_spec
    grammars = grammars or Grammars(tokenizer, spec.vocab_size)
    setting_up = None
    if device_of(decoder) == CUDA:
        setting_up = Thread(target=set_up_grammars, args=(grammars,), name="paceline-grammar")
        setting_up.start()  # beside the libraries, which take as long to load
    agree = alone if ranks is None else ranks.agree
    built = build_executor(decoder, config, scheduler_options, kernels=kernels, draft=draft, agree=agree)
    if setting_up is not None:
        setting_up.join()
    executor: Executor = built.executor
    if config.role != "both":  # KV of adapters is not sent between engines
        executor.capabilities = replace(executor.capabilities, lora=False)
    if ranks is not None:
        from paceline.engine.parallel_executor import ParallelExecutor

        ranks.wait_ready()
        if not isinstance(built.executor, CpuExecutor):  # there collectives raise when a rank is killed
            built.executor.guard = ranks.check
        if decoder.stages is None:
            executor = ParallelExecutor(built.executor, ranks)
        else:
            executor = _pipeline(built.executor, ranks, decoder.stages, built.scheduler.max_running)
    scheduler_config, device_name = built.scheduler, built.device_name
    on_gpu = None if isinstance(built.executor, CpuExecutor) else built.executor
    scheduler = Scheduler(scheduler_config)
    if device_name == CPU:
        threads = config.threads or torch.get_num_threads()
        device_text = f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    else:
        device_text = device_name
    kv_dtype = decoder.kv_dtype if on_gpu is None else on_gpu.kv_dtype
    kv_bytes, size = kv_dtype.itemsize, decoder.shard.size
    info = ModelInfo(
        spec.family,
        spec.num_parameters,
        decoder.precision,
        device_text if ranks is None else f"{decoder.shard.num_ranks} x {device_text}",
        spec.kv_bytes_per_token(kv_bytes),
        str(kv_dtype).removeprefix("torch."),
        "" if on_gpu is None else on_gpu.kv_scales,
        tuple(Shard(rank, size).spec(spec).kv_bytes_per_token(kv_bytes) for rank in range(size)),
    )
    engine = Engine(
        scheduler,
        executor,
        tokenizer,
        vocab_size=spec.vocab_size,
        spec=spec,
        info=info,
        overlap=config.overlap_mode,
        detokenize=detokenize,
        trace=trace,
        hooks=hooks,
        grammars=grammars,
        recent_outputs=RecentOutputs(config.recent_output_tokens if scheduler_config.draft_tokens else 0),
        recorder=None if config.record is None else _recorder(config, scheduler, device_name, built.buckets, spec),
    )
    if ranks is not None:
        ranks.watch(engine.fail)
    return engine


def _pipeline(executor: CpuExecutor | CudaExecutor, ranks: RankLink, pipe: StageLink, max_running: int) -> Executor:
    """executor: that of the first stage."""
    from paceline.engine.pipeline_executor import PipelineExecutor

    if isinstance(executor, CpuExecutor):
        late_tokens = getattr(executor.runner, "late_tokens", None)
        assert late_tokens is not None, "the first stage plans"
        return PipelineExecutor(executor, ranks, pipe, late_tokens)
    from paceline.engine.cuda.stages import FirstCudaStage  # not at the top: the CPU needs no Triton

    assert isinstance(pipe, StagePipe), "stages of GPUs have a pipe"
    first = FirstCudaStage(executor, pipe, max_running)
    return PipelineExecutor(first, ranks, pipe, first.late_tokens, on_gpus=True)


def _recorder(config: EngineConfig, scheduler: Scheduler, device: str, buckets: list[int], spec: ModelSpec) -> Recorder:
    from paceline.engine.recording import Recorder  # needs msgspec, which a minimal GPU host may lack

    return Recorder(
        Path(str(config.record)),
        scheduler,
        time.monotonic,
        device=device,
        model=spec.size_name,
        overlap=config.overlap_mode,
        buckets=buckets,
    )
