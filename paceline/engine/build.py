"""Builds an engine from a model's name and options.

Every option is a field of `EngineConfig` or `SchedulerConfig`; any other is an error. By default the KV cache is sized
from the model and the free memory, and steps are short on a CPU.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.config import MAX_PAGES, ConfigError, EngineConfig, SchedulerConfig, split_options
from paceline.engine.adapter_loading import load_adapter
from paceline.engine.cpu.build import build_cpu
from paceline.engine.cpu.executor import CpuExecutor
from paceline.engine.cpu.model import CpuModel, DecoderModel
from paceline.engine.cpu.native import NativeError, native_library, one_thread, return_free_memory
from paceline.engine.cpu.quantised_model import QuantisedModel
from paceline.engine.draft_model import DraftSource, check_tokenizer, find_draft_model, with_vocabulary
from paceline.engine.engine import Engine, EngineHooks, ModelInfo
from paceline.engine.kv_sizing import check_host_fits, check_models_fit, free_memory, num_kv_pages
from paceline.engine.loaded_text import LoadedText, set_up_grammars
from paceline.engine.loop import Trace
from paceline.engine.precision import (
    FP8_KV,
    GPU_FORMATS,
    LARGE_MATRIX,
    MXFP4_BITS,
    OFFSET_FORMATS,
    Precision,
    WeightFormat,
    check_arch,
    check_kv_dtype,
    rounding_group,
)
from paceline.engine.recent_outputs import RecentOutputs
from paceline.engine.virtual.build import build_virtual
from paceline.model.decoder import Decoder
from paceline.model.fetch import DEFAULT_MODEL, find_model
from paceline.model.gguf_file import is_gguf, open_gguf
from paceline.model.gguf_tensors import is_quantised
from paceline.model.layout import WHOLE_MODEL, Shard
from paceline.model.lora import arrange_adapter, read_adapter
from paceline.model.quantised import QuantisedTensor
from paceline.model.quantization_config import BLOCK as FP8_BLOCK
from paceline.model.rank_group import RankGroup, StageLink, shard_of
from paceline.model.read_spec import read_spec
from paceline.model.shapes import shape as named_shape
from paceline.model.spec import ModelSpec
from paceline.model.weights import (
    QuantisedWeights,
    bits_of_layers,
    has_blocks,
    has_int4,
    load_decoder,
    quantised_bytes,
    random_decoder,
    stored_group,
    stored_quantization,
)
from paceline.parallel.collectives import TorchGroup, connect, listen
from paceline.parallel.stages import StagePipe
from paceline.request import short
from paceline.sampling.grammar import Grammars
from paceline.scheduler import Scheduler
from paceline.scheduler.plan import DRAFT_DEPTHS
from paceline.text.load import load_tokenizer
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.template_trial import TemplateTrial
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.engine.cuda.compile_workers import CompileWorkers
    from paceline.engine.cuda.executor import CudaExecutor
    from paceline.engine.cuda.precompile import KernelPreparation
    from paceline.engine.executor import Executor
    from paceline.engine.parallel_executor import RankLink
    from paceline.engine.rank_messages import RankSetup
    from paceline.engine.rank_processes import RankProcesses
    from paceline.engine.recording import Recorder

Progress = Callable[[int, int], None]  # bytes loaded, bytes in total

# A prefill batch of 8,192 tokens takes milliseconds on a GPU and half a minute on a CPU.
_CPU_DEFAULTS: dict[str, Any] = {
    "max_running": 64,
    "max_batch_tokens": 1024,
    "max_prefill_tokens": 1024,
    "chunk_tokens": 512,
    "itl_target": math.inf,
}
_GPU_DEFAULTS: dict[str, Any] = {"max_running": 512, "max_batch_tokens": 8192}
_LOAD = ("weights", "random")
_DECODE_HOST_BYTES = 4 << 30  # of host memory for received KV, where no size is given
log = logging.getLogger("paceline.engine")


def build_engine(
    model: str | Path | None = None,
    *,
    load: str = "weights",
    shape: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    trace: Trace | None = None,
    hooks: EngineHooks | None = None,
    detokenize: bool = True,
    role: str = "both",
    text: LoadedText | None = None,
    workers: CompileWorkers | None = None,
    **options: Any,
) -> Engine:
    """Builds the engine for a model: a folder, a .gguf file, a hub id, or the default model if None. With
    `load="random"`, weights are random (from `seed`) in a named shape. role: of prefill/decode disaggregation. text,
    workers: if they are loaded and started already (`start.py`)."""
    engine_options, scheduler_options = split_options(options, ("model", "load", "shape", "seed"))
    config = EngineConfig(**engine_options, role=role)
    if model is not None and (not isinstance(model, str | Path) or model == ""):
        raise ConfigError(f"model is {short(model)}: give a folder, a .gguf file or a Hugging Face id.")
    if not isinstance(seed, int):
        raise ConfigError(f"seed is {short(seed)}: expected an integer.")
    if load not in _LOAD:
        raise ConfigError(f"load is {load!r}: choose one of {', '.join(_LOAD)}.")
    device = "virtual" if config.executor == "virtual" else choose_device(config)
    if config.pp > 1:
        scheduler_options["num_stages"] = config.pp
    scheduler_options.setdefault("adapter_slots", config.max_loras)
    if device == "virtual":
        scheduler_options = _with_drafts(config, scheduler_options, device)
        if model is not None or shape is not None or load != "weights":
            raise ConfigError("executor is 'virtual', which runs no model: remove model, load and shape.")
        return build_virtual(config, scheduler_options, trace=trace, hooks=hooks, detokenize=detokenize)
    path: Path | None = None
    if load == "random":
        if model is not None:
            raise ConfigError(f"model is {str(model)!r} and load is 'random': give a shape instead of a model.")
        if shape is None:
            raise ConfigError("load is 'random' and no shape is given: name one, such as smollm2-135m.")
        spec = named_shape(shape)
    else:
        if shape is not None:
            raise ConfigError(f"shape is {shape!r}, which requires load='random': leave it out.")
        path = find_model(DEFAULT_MODEL if model is None else model, progress=progress)
        spec = read_spec(path)
    config = _with_adapters(config, spec, device)
    given_config = _with_threads(config, device)
    config = choose_precision(given_config, device, path)
    check_kv_dtype(config, device, config.dtype)
    scheduler_options = _with_drafts(config, scheduler_options, device)
    if device == "cuda" and config.max_lora_rank and config.quantization != "none" and not spec.has_experts:
        raise ConfigError(
            f"max_lora_rank is {config.max_lora_rank} and quantization is {config.quantization!r}: LoRA adapters need "
            "weights in 16 bits on a GPU; set quantization to none."
        )
    if config.quantization == "mxfp4" and not spec.has_experts:
        raise ConfigError("quantization is 'mxfp4', and the model has no experts: leave it out.")
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        check_arch(config, 10 * major + minor)
    # Invalid options are reported before the weights are loaded.
    if config.role != "both" and not scheduler_options.get("prefix_cache", True):
        raise ConfigError(f"role is {config.role!r} and prefix_cache is off: KV is sent and received by prefix.")
    scheduler_config = _scheduler_config(spec, scheduler_options, device)
    config.num_kv_pages(scheduler_config, scheduler_options)
    context = scheduler_config.context_tokens
    draft, draft_config = None, config
    specs, num_bytes = [spec], weight_bytes(config, spec, path, device)
    if config.draft_model is not None:
        draft = find_draft_model(config.draft_model, spec, random=load == "random", progress=progress)
        draft_config = choose_precision(given_config, device, draft.path)
        if device == "cuda":  # both have the same kernels
            draft_config = replace(draft_config, quantization=config.quantization)
        specs.append(draft.spec)
        num_bytes += config.tp * weight_bytes(draft_config, draft.spec, draft.path, device)  # every rank has all of it
    _check_ranks(config, spec, device)
    free = torch.cuda.mem_get_info()[0] * config.num_ranks if device == "cuda" else None
    check_models_fit(specs, num_bytes, free=free)
    with ExitStack() as stack:
        ranks, group, stages = None, None, None
        if config.num_ranks > 1:
            from paceline.engine.rank_processes import RankProcesses  # needs msgspec, which a minimal GPU host may lack

            ranks = RankProcesses(config.num_ranks)
            stack.callback(ranks.close)
            stack.enter_context(ranks.explained())
            store = _connected(ranks, path, load, shape, seed, device, config, draft, scheduler_options)
            group, stages = _links(config, _backend(config, device), 0, store, device)
        kernels = None
        if device == "cuda":
            formats = weight_formats(config, zip(specs, (path, None if draft is None else draft.path), strict=False))
            shard = shard_of(group or stages)
            kernels = _prepare_kernels(specs, config.dtype, scheduler_config, config, shard, formats, workers)
        with one_thread():
            if text is not None:
                tokenizer = text.tokenizer
            else:
                tokenizer = synthetic_tokenizer(spec.vocab_size) if path is None else load_tokenizer(path)
            tokenizer.check_fits(spec.vocab_size)
            # It runs while the weights are loaded.
            trial = stack.enter_context(closing(TemplateTrial([] if path is None else tokenizer.templates)))
            fast = load_model(path, spec, seed, config, device, context, progress, group, stages)
            fast_drafter = None
            if draft is not None:
                check_tokenizer(draft, tokenizer)
                fast_drafter = load_model(draft.path, draft.spec, seed, draft_config, device, context)
            trial.check()
        engine = assemble(
            fast,
            tokenizer,
            config,
            scheduler_options,
            trace=trace,
            hooks=hooks,
            detokenize=detokenize,
            kernels=kernels,
            draft=fast_drafter,
            grammars=None if text is None else text.grammars,
            ranks=ranks,
        )
        stack.pop_all()  # the ranks are the engine's now
    with ExitStack() as stack:
        stack.callback(engine.close)
        for name, folder in config.lora.items():
            load_adapter(engine, name, folder)
        stack.pop_all()
    return engine


def _with_adapters(config: EngineConfig, spec: ModelSpec, device: str) -> EngineConfig:
    """The options with the highest rank of all adapters. Raises for those that cannot be loaded, before a model is."""
    ranks = [0]
    for folder in dict.fromkeys(config.lora.values()):
        file = read_adapter(folder)
        arrange_adapter(file, spec, torch.float32)
        ranks.append(file.max_rank)
    if 0 < config.max_lora_rank < max(ranks):
        raise ConfigError(
            f"max_lora_rank is {config.max_lora_rank} and an adapter of lora has rank {max(ranks)}: raise it."
        )
    return config if config.max_lora_rank or device == "cpu" else replace(config, max_lora_rank=max(ranks))


def build_rank(setup: RankSetup, rank: int, size: int, agree: Callable[[int], int]) -> Executor:
    """The executor of a rank other than 0. agree: returns the number of pages that all ranks use."""
    config = EngineConfig(**setup.engine_options)
    if setup.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    assert size == config.num_ranks, f"{size} processes for {config.num_ranks} ranks"
    group, stages = _links(config, setup.backend, rank, connect(setup.port), setup.device)
    path = None if setup.model is None else Path(setup.model)
    spec = named_shape(setup.shape) if path is None and setup.shape is not None else read_spec(str(path))
    scheduler = _scheduler_config(spec, setup.scheduler_options, setup.device)
    draft = None
    if config.draft_model is not None:
        draft = find_draft_model(config.draft_model, spec, random=path is None)
    kernels, context = None, scheduler.context_tokens
    if setup.device == "cuda":
        specs = [spec] if draft is None else [spec, draft.spec]
        formats = weight_formats(config, zip(specs, (path, None if draft is None else draft.path), strict=False))
        kernels = _prepare_kernels(specs, config.dtype, scheduler, config, shard_of(group or stages), formats)
    with one_thread():
        fast = load_model(path, spec, setup.seed, config, setup.device, context, None, group, stages)
        drafter = None
        if draft is not None:  # in the precision of the model, as on rank 0: none is kept in 4 bits with ranks
            drafter = load_model(draft.path, draft.spec, setup.seed, config, setup.device, context)
    options = setup.scheduler_options
    executor = build_executor(fast, config, options, kernels=kernels, draft=drafter, agree=agree).executor
    if isinstance(executor, CpuExecutor) or stages is None:
        return executor
    from paceline.engine.cuda.stages import LaterCudaStage  # not at the top: the CPU needs no Triton

    return LaterCudaStage(executor, stages)


def load_model(
    path: Path | None,
    spec: ModelSpec,
    seed: int,
    config: EngineConfig,
    device: str,
    max_positions: int,
    progress: Progress | None = None,
    group: RankGroup | None = None,
    stages: StageLink | None = None,
) -> DecoderModel:
    """A decoder with its weights, in the precision of `choose_precision`. spec: that of the model at `path`; its
    vocabulary may have another size, which a draft model gets."""
    if device == "cpu" and config.quantization != "none":
        assert path is not None, "only weights of a file are quantised"
        weights = QuantisedWeights(path, quantization=config.quantization, progress=progress)

        def matrix(name: str) -> QuantisedTensor:
            weight = weights.matrix(name)
            return weight.with_num_rows(spec.vocab_size) if name in ("embedding", "head") else weight

        model = QuantisedModel(native_library(), spec, weights.vectors, matrix, max_positions=max_positions)
        return_free_memory()
        if is_gguf(path):
            open_gguf(path).release_memory()
        return model
    options: dict[str, Any] = {"dtype": config.dtype, "device": device, "max_positions": max_positions}
    options |= {"progress": progress, "group": group, "stages": stages}
    if path is None:
        return _arranged(random_decoder(spec, seed=seed, **options))
    if config.quantization in GPU_FORMATS and stored_quantization(path, shard_of(group).size) == config.quantization:
        from paceline.engine.cuda.quantised import stored_weights  # not at the top: the CPU needs no Triton

        options["keep"] = stored_weights(config.quantization, spec)
    return _arranged(with_vocabulary(load_decoder(path, **options), spec.vocab_size))


def group_of_one() -> RankGroup:
    """A group with one rank, over NCCL: the code and the CUDA graphs of tensor parallelism on one GPU, for checks."""
    return TorchGroup(Shard(0, 1), listen()[0], "nccl")


# ---------------------------------------------------------------------- ranks


def choose_precision(config: EngineConfig, device: str, path: Path | None) -> EngineConfig:
    """With a dtype, and with quantization as it will be: none, or how the weights in `path` are quantised."""
    given = config.quantization
    if given in GPU_FORMATS and (device == "cuda" or given not in ("q4", "q8")):
        on_cpu = {"fp8": "set quantization to q8, or ", "int4": "set quantization to q4, or "}.get(given, "")
        for refused, what in (
            (device == "cpu", f"the device is a CPU: {on_cpu}leave it out"),
            (config.dtype not in ("auto", "bfloat16"), f"dtype is {config.dtype!r}: set it to bfloat16"),
        ):
            if refused:
                raise ConfigError(f"quantization is {given!r} and {what}.")
        if given == "gguf" and (path is None or stored_quantization(path, config.tp) != given):
            raise ConfigError(
                "quantization is 'gguf', which needs a quantised GGUF file, without experts, of a model with norms "
                "before blocks and silu, and whole groups of 32 columns for every rank: leave it out."
            )
    elif given in ("q4", "q8"):
        for refused, what in (
            (config.num_ranks > 1, "tp or pp is given: set them to 1, or quantization to none"),
            (_has_experts(path), "the model has experts, whose weights are not kept in 4 or 8 bits: set it to none"),
            (path is None, "load is 'random': give a model, or set quantization to none"),
            (config.dtype in ("bfloat16", "float16"), f"dtype is {config.dtype!r}: leave it out"),
        ):
            if refused:
                raise ConfigError(f"quantization is {given!r} and {what}.")
        try:
            native_library()
        except NativeError as error:
            raise ConfigError(
                f"quantization is {given!r}, which needs kernels compiled for this CPU: {error}; or set it to none."
            ) from None
    elif given == "auto":
        is_kept = device == "cpu" and config.dtype == "auto" and config.num_ranks == 1 and _is_quantised(path)
        if is_kept and _has_experts(path):
            log.warning("weights are expanded to float32: there are no kernels for experts in 4 and 8 bits")
            is_kept = False
        if is_kept:
            try:
                native_library()
            except NativeError as error:
                log.warning("weights are expanded to float32, which is slower: kernels for 4 and 8 bits: %s", error)
                is_kept = False
        stored = "none"
        if device == "cuda" and path is not None and config.dtype in ("auto", "bfloat16"):
            stored = stored_quantization(path, config.tp)
            if stored == "none" and config.tp > 1 and stored_quantization(path) != "none":
                log.warning(
                    "quantised weights are expanded to bfloat16: tp %d divides columns that have one scale", config.tp
                )
        if stored == "gguf" and config.max_lora_rank:
            log.warning("weights in 4 and 8 bits are expanded to bfloat16: LoRA adapters need 16 bits on a GPU")
            stored = "none"
        if stored == "gguf" and path is not None and _largest_matrix(read_spec(path)) < LARGE_MATRIX:
            log.info("weights in 4 and 8 bits are expanded to bfloat16: that is faster for a model as small as this")
            stored = "none"
        config = replace(config, quantization="auto" if is_kept else stored)
    if config.dtype != "auto":
        return config
    return replace(config, dtype="bfloat16" if device == "cuda" else "float32")


def _largest_matrix(spec: ModelSpec) -> int:
    """Elements of the largest matrix of a layer."""
    return spec.hidden_size * max(max(layer.mixer.qkv_size, 2 * layer.ffn.size) for layer in spec.layers)


def weight_bytes(config: EngineConfig, spec: ModelSpec, path: Path | None, device: str) -> int:
    """The memory of the weights, with a config of `choose_precision`."""
    if device == "cpu" and config.quantization != "none":
        assert path is not None, "only weights of a file are quantised"
        return quantised_bytes(path, config.quantization)
    is_kept = path is not None and config.quantization == stored_quantization(path, config.tp)
    if is_kept and config.quantization in ("fp8", "mxfp4") and spec.has_experts:
        bits = 8 if config.quantization == "fp8" else MXFP4_BITS
        return 2 * spec.num_parameters - int(spec.num_expert_parameters * (16 - bits) / 8)
    if config.quantization in ("fp8", "int4") and path is not None and is_kept:
        tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
        bits = 8.0 if config.quantization == "fp8" else 4 + 32 / stored_group(path)
        return int((spec.num_parameters - tables) * bits / 8) + 2 * tables
    if is_kept and config.quantization == "gguf" and path is not None:
        return quantised_bytes(path, "gguf", on_gpu=True)
    # Others are loaded in 16 bits, then rounded layer by layer.
    return spec.num_parameters * (4 if config.dtype == "float32" else 2)


def weight_formats(config: EngineConfig, models: Iterable[tuple[ModelSpec, Path | None]]) -> tuple[WeightFormat, ...]:
    """Of each of these models, if its weights are quantised on a GPU: as stored, or as they are rounded."""

    def format_of(index: int, spec: ModelSpec, path: Path | None) -> WeightFormat:
        is_stored = path is not None and stored_quantization(path, config.tp) == config.quantization
        if config.quantization == "int4":
            tp = config.tp if index == 0 else 1  # every rank has all of a draft model
            return WeightFormat(stored_group(path) if path is not None and is_stored else rounding_group(spec, tp))
        if config.quantization == "gguf" and path is not None and is_stored:
            return WeightFormat(bits=bits_of_layers(path))
        has_scales = path is not None and is_stored and spec.has_experts and has_blocks(path)
        return WeightFormat(FP8_BLOCK if has_scales else 0)

    if config.quantization not in ("fp8", "int4", *OFFSET_FORMATS):
        return ()
    return tuple(format_of(index, spec, path) for index, (spec, path) in enumerate(models))


def _is_quantised(path: Path | None) -> bool:
    """Whether a CPU can keep the weights of a file in 4 or 8 bits."""
    return path is not None and (is_quantised(open_gguf(path)) if is_gguf(path) else has_int4(path))


def _has_experts(path: Path | None) -> bool:
    return path is not None and read_spec(path).has_experts


def _with_threads(config: EngineConfig, device: str) -> EngineConfig:
    """On a CPU the ranks share the threads."""
    if config.num_ranks == 1 or config.threads is not None or device != "cpu":
        return config
    return replace(config, threads=max(1, torch.get_num_threads() // config.num_ranks))


def _check_ranks(config: EngineConfig, spec: ModelSpec, device: str) -> None:
    """Raises if the model cannot be divided, or the GPUs do not suffice."""
    Shard(0, config.tp, 0, config.pp).spec(spec)
    shares_gpu = config.collectives == "gloo" or os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    if device == "cuda" and not shares_gpu and torch.cuda.device_count() < config.num_ranks:
        name, each = ("tp", "rank") if config.pp == 1 else ("pp", "stage")
        raise ConfigError(
            f"{name} is {config.num_ranks} and there are {torch.cuda.device_count()} GPUs: each {each} needs one; "
            f"lower {name}."
        )
    if config.collectives in ("nccl", "symmetric") and device == "cpu":
        raise ConfigError(f"collectives is {config.collectives!r}, which needs GPUs: set it to auto or gloo.")


def _backend(config: EngineConfig, device: str) -> str:
    if device == "cpu":
        return "gloo"
    return "nccl" if config.collectives == "auto" else config.collectives


def _connected(
    ranks: RankProcesses,
    path: Path | None,
    load: str,
    shape: str | None,
    seed: int,
    device: str,
    config: EngineConfig,
    draft: DraftSource | None,
    scheduler_options: Mapping[str, Any],
) -> Any:
    """The store by which all ranks find each other, once they have the same setup."""
    from paceline.engine.rank_messages import RankSetup

    store, port = listen()
    backend = _backend(config, device)
    model = None if path is None else str(path.resolve())
    engine_options = {**asdict(config), "record": None}
    if draft is not None and draft.path is not None:
        engine_options["draft_model"] = str(draft.path.resolve())
    ranks.connect(RankSetup(port, backend, model, load, shape, seed, device, engine_options, dict(scheduler_options)))
    return store


def _links(
    config: EngineConfig, backend: str, rank: int, store: Any, device: str
) -> tuple[RankGroup | None, StagePipe | None]:
    """What this process has to do with the others: its place among the ranks, or among the stages."""
    if config.pp > 1:
        shard = Shard(rank, config.pp)
        device_ranks = None
        if backend == "nccl":
            device_ranks = TorchGroup(shard, store, "nccl")
            device_ranks.connect_neighbours()
        return None, StagePipe(TorchGroup(shard, store, "gloo"), device_ranks)
    return _group(backend, Shard(rank, config.tp), store, device), None


def _group(backend: str, shard: Shard, store: Any, device: str) -> RankGroup:
    if backend != "symmetric":
        return TorchGroup(shard, store, backend)
    from paceline.parallel.symmetric import SymmetricGroup  # not at the top: needs CUDA

    base = "nccl" if torch.cuda.device_count() >= shard.size else "gloo"  # ranks that share a GPU
    return SymmetricGroup(TorchGroup(shard, store, base), torch.device(device, torch.cuda.current_device()))


def _arranged(decoder: Decoder) -> DecoderModel:
    """torch has good 16-bit GEMMs for weights as stored; on a CPU, float32 weights are rearranged."""
    return CpuModel(decoder) if decoder.dtype is torch.float32 and decoder.device.type == "cpu" else decoder


def _prepare_kernels(
    specs: Sequence[ModelSpec],
    dtype: str,
    scheduler: SchedulerConfig,
    config: EngineConfig,
    shard: Shard = WHOLE_MODEL,
    formats: tuple[WeightFormat, ...] = (),
    workers: CompileWorkers | None = None,
) -> KernelPreparation:
    from paceline.engine.cuda.precompile import KernelPreparation  # not at the top: the CPU needs no Triton

    precision = Precision.of(config, dtype, formats)
    return KernelPreparation(specs, precision, scheduler, config.kernel_folder, shard, workers)


class BuiltExecutor(NamedTuple):
    executor: CpuExecutor | CudaExecutor
    scheduler: SchedulerConfig  # with the number of pages
    device_name: str
    buckets: list[int]  # of decode batches, where there are CUDA graphs


def _alone(num_pages: int) -> int:
    return num_pages


def build_executor(
    decoder: DecoderModel,
    config: EngineConfig,
    scheduler_options: Mapping[str, Any],
    *,
    kernels: KernelPreparation | None = None,
    draft: DecoderModel | None = None,
    agree: Callable[[int], int] = _alone,
) -> BuiltExecutor:
    """The executor of a loaded decoder, which it takes over, or of one rank's part. agree: gets the number of pages
    that fit here and returns how many all ranks use."""
    device = _device_of(decoder)
    dtype, size = decoder.dtype, decoder.shard.num_ranks
    given = scheduler_options
    scheduler_config = _scheduler_config(decoder.whole_spec, given, device)
    page_size = scheduler_config.page_size
    if device == "cpu":
        models = [one for one in (decoder, draft) if one is not None]
        per_token = sum(one.spec.kv_bytes_per_token(one.kv_dtype.itemsize) for one in models)
        num_pages = num_kv_pages(config, per_token, scheduler_config, given, free=free_memory() // size)
        scheduler_options = {**given, "num_pages": agree(num_pages)}
    host = _host_options(config, scheduler_options, page_size, decoder, device, agree)
    scheduler_options = {**scheduler_options, **host}
    scheduler_config = _scheduler_config(decoder.whole_spec, scheduler_options, device)
    if device == "cpu":
        return BuiltExecutor(build_cpu(decoder, config, scheduler_config, draft), scheduler_config, "cpu", [])
    from paceline.engine.cuda.build import build_cuda  # not at the top: the CPU needs no Triton

    assert isinstance(decoder, Decoder), "CUDA takes over a Decoder"
    assert draft is None or isinstance(draft, Decoder), "CUDA takes over a Decoder"
    specs = [decoder.whole_spec] if draft is None else [decoder.whole_spec, draft.spec]
    shard = decoder.shard
    kernels = kernels or _prepare_kernels(specs, str(dtype).removeprefix("torch."), scheduler_config, config, shard)
    executor, scheduler_config = build_cuda(decoder, config, scheduler_config, given, draft=draft, agree=agree)
    executor.load_libraries()
    kernels.finish()
    executor.warm_up()
    return BuiltExecutor(executor, scheduler_config, torch.cuda.get_device_name(), list(executor.graphs.sizes))


def _device_of(decoder: DecoderModel) -> str:
    return "cuda" if isinstance(decoder, Decoder) and decoder.device.type == "cuda" else "cpu"


def assemble(
    decoder: DecoderModel,
    tokenizer: Tokenizer,
    config: EngineConfig,
    scheduler_options: Mapping[str, Any],
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
    if _device_of(decoder) == "cuda":
        setting_up = Thread(target=set_up_grammars, args=(grammars,), name="paceline-grammar")
        setting_up.start()  # beside the libraries, which take as long to load
    agree = _alone if ranks is None else ranks.agree
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
    if device_name == "cpu":
        threads = config.threads or torch.get_num_threads()
        device_text = f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    else:
        device_text = device_name
    kv_dtype = decoder.kv_dtype if on_gpu is None else on_gpu.kv.dtype
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


def _host_options(
    config: EngineConfig,
    given: Mapping[str, Any],
    page_size: int,
    decoder: DecoderModel,
    device: str,
    agree: Callable[[int], int],
) -> dict[str, Any]:
    """The scheduler's options for the host memory tier, if it is enabled. agree: as in `build_executor`."""
    count = config.num_host_pages(page_size, given)
    dtype_bytes = 1 if config.kv_dtype == FP8_KV else decoder.kv_dtype.itemsize
    page_bytes = page_size * decoder.spec.kv_bytes_per_token(dtype_bytes)
    size = decoder.shard.num_ranks
    free = free_memory() // size - (0 if device == "cuda" else given["num_pages"] * page_bytes)
    if not count and config.role == "decode":
        count = agree(max(1, min(_DECODE_HOST_BYTES // size, free // 8) // page_bytes))
        log.info("role is decode: %d tokens of host memory receive KV (host_kv_tokens)", count * page_size)
    if not count:
        return {}
    check_host_fits(count, page_bytes, page_size, free=max(free, 0))
    found: dict[str, Any] = {"num_host_pages": count}
    if device == "cuda" and "host_page_cost" not in given:
        from paceline.engine.cuda.build import host_page_cost

        # Of ranks, each has its part of the bytes and of the computation.
        found["host_page_cost"] = host_page_cost(decoder.whole_spec, dtype_bytes, page_size)
    return found


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


def choose_device(config: EngineConfig) -> str:
    """cuda or cpu."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    from paceline.engine.cuda.build import check_cuda, has_cuda

    if config.device == "cuda":
        check_cuda()
    return "cuda" if has_cuda() else "cpu"


def _scheduler_config(spec: ModelSpec, given: Mapping[str, Any], device: str) -> SchedulerConfig:
    """The given options on top of the defaults for this device and model."""
    defaults = _CPU_DEFAULTS if device == "cpu" else _GPU_DEFAULTS
    model = {"context_tokens": spec.context_tokens, "chunk_context": spec.double_cost_context}
    options = {"num_pages": MAX_PAGES, **defaults, **model, **given}  # not given: known once the model is loaded
    # A decode batch of all running requests must fit into a step: the option that was not given is adjusted.
    row_tokens = 1 + options.get("draft_tokens", 0)
    if "max_batch_tokens" not in given and isinstance(options["max_running"], int):
        options["max_batch_tokens"] = max(options["max_batch_tokens"], row_tokens * options["max_running"])
    elif "max_running" not in given and isinstance(options["max_batch_tokens"], int):
        options["max_running"] = max(1, min(options["max_running"], options["max_batch_tokens"] // row_tokens))
    config = SchedulerConfig(**options)
    if config.context_tokens > spec.context_tokens:
        raise ConfigError(
            f"context_tokens is {config.context_tokens}, more than the model's {spec.context_tokens}: lower it or "
            "leave it out."
        )
    return config


def kernel_options(
    model: str | Path | None, shape: str | None, config: EngineConfig, scheduler_options: Mapping[str, Any]
) -> tuple[list[ModelSpec], Precision, SchedulerConfig]:
    """What the kernels of a model, or of a named shape, depend on: see `kernel_variants`. Needs no GPU."""
    path = None if shape is not None else find_model(model or DEFAULT_MODEL)
    spec = named_shape(shape) if path is None and shape is not None else read_spec(str(path))
    config = choose_precision(_with_adapters(config, spec, "cuda"), "cuda", path)
    specs, paths = [spec], [path]
    if config.draft_model is not None:
        draft = find_draft_model(config.draft_model, spec, random=shape is not None)
        specs, paths = [*specs, draft.spec], [*paths, draft.path]
    scheduler = _scheduler_config(spec, _with_drafts(config, scheduler_options, "cuda"), "cuda")
    formats = weight_formats(config, zip(specs, paths, strict=True))
    return specs, Precision.of(config, config.dtype, formats), scheduler


def _with_drafts(config: EngineConfig, scheduler_options: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The scheduler's options, with those that follow from `speculate`."""
    speculate = config.speculate or default_speculation(config, scheduler_options, device)
    if speculate == "off":
        return dict(scheduler_options)
    return {
        "draft_tokens": max(DRAFT_DEPTHS),
        "adaptive_drafts": speculate in ("auto", "draft"),
        "model_drafts": speculate == "draft",
        **scheduler_options,
    }


def default_speculation(config: EngineConfig, given: Mapping[str, Any], device: str) -> str:
    """auto, unless other options leave no room for drafts; not yet with several GPUs."""
    if device == "virtual" or config.pp > 1 or config.role != "both":
        return "off"
    if device == "cuda" and config.tp > 1:
        return "off"
    defaults = _CPU_DEFAULTS if device == "cpu" else _GPU_DEFAULTS
    rows, tokens = given.get("max_running", defaults["max_running"]), given.get("max_batch_tokens", math.inf)
    has_room = isinstance(rows, int) and isinstance(tokens, int | float) and tokens >= rows * (1 + max(DRAFT_DEPTHS))
    return "auto" if has_room else "off"
