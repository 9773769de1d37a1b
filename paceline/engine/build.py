"""Putting an engine together: from a model's name and options to something that answers.

Every option is a field of `EngineConfig` or `SchedulerConfig`; what is neither is an error. Where nothing is said,
the pool is sized by the model and the memory that is free, and on a CPU a step is kept short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.config import ConfigError, EngineConfig, SchedulerConfig, split_options
from paceline.engine.cpu.executor import CpuExecutor, CpuModelRunner, DecoderModel
from paceline.engine.cpu.model import CpuModel
from paceline.engine.engine import Engine, EngineHooks, ModelInfo
from paceline.engine.kv_sizing import check_host_fits, check_model_fits, free_memory, num_kv_pages
from paceline.engine.loop import Trace
from paceline.engine.virtual.build import build_virtual
from paceline.model.decoder import Decoder
from paceline.model.fetch import DEFAULT_MODEL, find_model
from paceline.model.registry import shape as named_shape
from paceline.model.spec import ModelSpec
from paceline.model.weights import load_decoder, random_decoder, read_spec
from paceline.scheduler import Scheduler
from paceline.text.load import load_tokenizer
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.engine.cuda.executor import CudaExecutor
    from paceline.engine.recording import Recorder

Progress = Callable[[int, int], None]  # bytes done, bytes in all

# A pass of 8,192 prompt tokens keeps a GPU busy for milliseconds and a CPU for half a minute.
_CPU_DEFAULTS: dict[str, Any] = {
    "max_running": 64, "max_batch_tokens": 1024, "max_prefill_tokens": 1024, "chunk_tokens": 512,
}  # fmt: skip
_GPU_DEFAULTS: dict[str, Any] = {name: getattr(SchedulerConfig(), name) for name in ("max_running", "max_batch_tokens")}
_LOAD = ("weights", "random")


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
    **options: Any,
) -> Engine:
    """The engine for a model: a folder, a .gguf file, a hub id, the default one if None; or, with `load="random"`,
    random weights (of this seed) in a named shape."""
    engine_options, scheduler_options = split_options(options)
    config = EngineConfig(**engine_options)
    if load not in _LOAD:
        raise ConfigError(f"load is {load!r}: choose one of {', '.join(_LOAD)}.")
    if config.executor == "virtual":
        if model is not None or shape is not None or load != "weights":
            raise ConfigError("executor is 'virtual', which runs no model: remove model, load and shape.")
        return build_virtual(config, scheduler_options, trace=trace, hooks=hooks, detokenize=detokenize)
    device = choose_device(config)
    dtype = ("bfloat16" if device == "cuda" else "float32") if config.dtype == "auto" else config.dtype
    path: Path | None = None
    if load == "random":
        if model is not None:
            raise ConfigError(f"model is {str(model)!r} and load is 'random': leave the model out and give a shape.")
        if shape is None:
            raise ConfigError("load is 'random' and no shape is given: name one, such as smollm2-135m.")
        spec = named_shape(shape)
    else:
        if shape is not None:
            raise ConfigError(f"shape is {shape!r}, which belongs to load='random': leave it out.")
        path = find_model(DEFAULT_MODEL if model is None else model, progress=progress)
        spec = read_spec(path)
    # A wrong option shows before the long load.
    context = _scheduler_config(spec, scheduler_options, device).context_tokens
    check_model_fits(spec, _num_bytes(dtype), free=torch.cuda.mem_get_info()[0] if device == "cuda" else None)
    with _one_thread():
        if path is None:
            tokenizer = synthetic_tokenizer(spec.vocab_size)
            decoder = random_decoder(
                spec, seed=seed, dtype=dtype, device=device, max_positions=context, progress=progress
            )
        else:
            tokenizer = load_tokenizer(path)
            tokenizer.check_fits(spec.vocab_size)
            decoder = load_decoder(path, dtype=dtype, device=device, max_positions=context, progress=progress)
        # 16-bit matrices have good kernels as they are stored; for float32 a better arrangement pays.
        fast = CpuModel(decoder) if dtype == "float32" and device == "cpu" else decoder
        del decoder
    return assemble(fast, tokenizer, config, scheduler_options, trace=trace, hooks=hooks, detokenize=detokenize)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For loading: hundreds of small copies, each of which would wait for every thread to come by. On two cores with
    something else to do, SmolLM2 loaded in 5.2 s with two threads and in 2.0 s with one."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def assemble(
    decoder: DecoderModel,
    tokenizer: Tokenizer,
    config: EngineConfig,
    scheduler_options: Mapping[str, Any],
    *,
    trace: Trace | None = None,
    hooks: EngineHooks | None = None,
    detokenize: bool = True,
) -> Engine:
    """An engine around a decoder that is loaded already."""
    on_gpu = isinstance(decoder, Decoder) and decoder.device.type == "cuda"
    spec, dtype = decoder.spec, decoder.dtype
    info = ModelInfo(
        spec.family, spec.num_parameters, str(dtype).removeprefix("torch."),
        torch.cuda.get_device_name() if on_gpu else f"cpu, {_threads(config.threads or torch.get_num_threads())}",
        spec.kv_bytes_per_token(dtype.itemsize),
    )  # fmt: skip
    scheduler_config = _scheduler_config(spec, scheduler_options, "cuda" if on_gpu else "cpu")
    page_size = scheduler_config.page_size
    if "num_pages" in scheduler_options and config.kv_tokens is not None:
        raise ConfigError(
            f"kv_tokens is {config.kv_tokens} and num_pages is {scheduler_config.num_pages}: give one of them."
        )
    if not on_gpu and "num_pages" not in scheduler_options:
        num_pages = num_kv_pages(config, spec, dtype.itemsize, page_size, scheduler_config.context_tokens)
        scheduler_options = {**scheduler_options, "num_pages": num_pages}
    host = _host_options(config, scheduler_options, page_size, spec, dtype.itemsize, on_gpu=on_gpu)
    if host or not on_gpu:
        scheduler_options = {**scheduler_options, **host}
        scheduler_config = _scheduler_config(spec, scheduler_options, "cuda" if on_gpu else "cpu")
    executor: CudaExecutor | CpuExecutor
    if on_gpu:
        from paceline.engine.cuda.build import build_cuda  # only here: the CPU needs no Triton

        assert isinstance(decoder, Decoder), "a GPU takes the plain decoder over"
        executor, scheduler_config = build_cuda(
            decoder,
            config,
            scheduler_config,
            None
            if "num_pages" in scheduler_options
            else lambda count: _scheduler_config(decoder.spec, {**scheduler_options, "num_pages": count}, "cuda"),
        )
        executor.warm_up()
        return _engine(executor, scheduler_config, spec, info, tokenizer, config, trace, hooks, detokenize)
    device = CpuModelRunner(
        decoder,
        num_pages=scheduler_config.num_pages,
        page_size=page_size,
        max_running=scheduler_config.max_running,
        max_row_tokens=min(scheduler_config.context_tokens, scheduler_config.num_pages * page_size),
        num_host_pages=scheduler_config.num_host_pages,
    )
    executor = CpuExecutor(device, num_threads=config.threads)
    return _engine(executor, scheduler_config, spec, info, tokenizer, config, trace, hooks, detokenize)


def _host_options(
    config: EngineConfig, given: Mapping[str, Any], page_size: int, spec: ModelSpec, dtype_bytes: int, *, on_gpu: bool
) -> dict[str, Any]:
    """The scheduler's options of host memory, where some is asked for."""
    count = config.num_host_pages(page_size, given)
    if not count:
        return {}
    page_bytes = page_size * spec.kv_bytes_per_token(dtype_bytes)
    free = free_memory() - (0 if on_gpu else given["num_pages"] * page_bytes)
    check_host_fits(count, page_bytes, page_size, free=max(free, 0))
    found: dict[str, Any] = {"num_host_pages": count}
    if on_gpu and "host_page_cost" not in given:
        from paceline.engine.cuda.build import host_page_cost

        found["host_page_cost"] = host_page_cost(spec, dtype_bytes, page_size)
    return found


def _engine(
    executor: CudaExecutor | CpuExecutor,
    scheduler_config: SchedulerConfig,
    spec: ModelSpec,
    info: ModelInfo,
    tokenizer: Tokenizer,
    config: EngineConfig,
    trace: Trace | None,
    hooks: EngineHooks | None,
    detokenize: bool,
) -> Engine:
    scheduler = Scheduler(scheduler_config)
    return Engine(
        scheduler,
        executor,
        tokenizer,
        vocab_size=spec.vocab_size,
        info=info,
        overlap=config.overlap_mode,
        detokenize=detokenize,
        trace=trace,
        hooks=hooks,
        recorder=None if config.record is None else _recorder(config, scheduler, executor, spec),
    )


def _recorder(
    config: EngineConfig, scheduler: Scheduler, executor: CudaExecutor | CpuExecutor, spec: ModelSpec
) -> Recorder:
    from paceline.engine.recording import Recorder  # its lines need msgspec, which a bare GPU host may lack

    return Recorder(
        Path(str(config.record)),
        scheduler,
        time.monotonic,
        device="cpu" if isinstance(executor, CpuExecutor) else torch.cuda.get_device_name(),
        model=f"{spec.family}-{spec.num_parameters / 1e9:.2f}b",
        overlap=config.overlap_mode,
        buckets=[] if isinstance(executor, CpuExecutor) else list(executor.graphs.sizes),
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
    """What was asked for, on top of what suits the device and this model."""
    defaults = _CPU_DEFAULTS if device == "cpu" else _GPU_DEFAULTS
    options = {
        **defaults, "context_tokens": spec.context_tokens, "chunk_context": spec.double_cost_context, **given,
    }  # fmt: skip
    # The decode of every running request must fit a step: whichever of the two was not asked for gives way.
    if "max_batch_tokens" not in given and isinstance(options["max_running"], int):
        options["max_batch_tokens"] = max(options["max_batch_tokens"], options["max_running"])
    elif "max_running" not in given and isinstance(options["max_batch_tokens"], int):
        options["max_running"] = max(1, min(options["max_running"], options["max_batch_tokens"]))
    config = SchedulerConfig(**options)
    if config.context_tokens > spec.context_tokens:
        raise ConfigError(
            f"context_tokens is {config.context_tokens}, more than the model's {spec.context_tokens}: lower it or "
            "leave it out."
        )
    return config


def _num_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"
