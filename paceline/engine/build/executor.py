"""Builds the executor of a loaded model: the number of pages, the kernels, the buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.build.facts import CPU, CUDA
from paceline.engine.build.resolution import scheduler_config as scheduler_config_of
from paceline.engine.cpu.build import build_cpu
from paceline.engine.cpu.executor import CpuExecutor
from paceline.engine.cpu.quantized_model import DecoderModel
from paceline.engine.kv_sizing import UnitBytes, check_host_fits, free_memory, num_kv_pages
from paceline.engine.precision import FP8_KV, Precision
from paceline.model.decoder import Decoder
from paceline.model.layers import Pool
from paceline.model.layout import WHOLE_MODEL, Shard
from paceline.model.spec import ModelSpec

if TYPE_CHECKING:
    from paceline.engine.cuda.compile_workers import CompileWorkers
    from paceline.engine.cuda.executor import CudaExecutor
    from paceline.engine.cuda.precompile import KernelPreparation

_DECODE_HOST_BYTES = 4 << 30  # of host memory for received KV, where no size is given
log = logging.getLogger("paceline.engine")


class BuiltExecutor(NamedTuple):
    executor: CpuExecutor | CudaExecutor
    scheduler: SchedulerConfig  # with the number of pages
    device_name: str
    buckets: list[int]  # of decode batches, where there are CUDA graphs


def alone(num_pages: int) -> int:
    return num_pages


def prepare_kernels(
    specs: Sequence[ModelSpec],
    precision: Precision,
    scheduler: SchedulerConfig,
    config: EngineConfig,
    shard: Shard = WHOLE_MODEL,
    workers: CompileWorkers | None = None,
) -> KernelPreparation:
    """Compiles what is missing, in other processes. workers: if they are started already."""
    from paceline.engine.cuda.precompile import KernelPreparation  # not at the top: the CPU needs no Triton

    return KernelPreparation(specs, precision, scheduler, config.kernel_folder, shard, workers)


def build_executor(
    decoder: DecoderModel,
    config: EngineConfig,
    scheduler_options: Mapping[str, object],
    *,
    kernels: KernelPreparation | None = None,
    draft: DecoderModel | None = None,
    agree: Callable[[int], int] = alone,
) -> BuiltExecutor:
    """The executor of a loaded decoder, which it takes over, or of one rank's part. agree: gets the number of pages
    that fit here and returns how many all ranks use."""
    device = device_of(decoder)
    dtype, size = decoder.dtype, decoder.shard.num_ranks
    given = scheduler_options
    scheduler_config = scheduler_config_of(decoder.whole_spec, given, device)
    page_size = scheduler_config.page_size
    if device == CPU:
        models = [one for one in (decoder, draft) if one is not None]
        units = UnitBytes.of(page_size, [(one.spec, one.kv_dtype.itemsize) for one in models])
        num_pages = num_kv_pages(config, units, scheduler_config, given, free=free_memory() // size)
        scheduler_options = {**given, "num_pages": agree(num_pages)}
    host = _host_options(config, scheduler_options, page_size, decoder, device, agree)
    scheduler_options = {**scheduler_options, **host}
    scheduler_config = scheduler_config_of(decoder.whole_spec, scheduler_options, device)
    if device == CPU:
        return BuiltExecutor(build_cpu(decoder, config, scheduler_config, draft), scheduler_config, CPU, [])
    from paceline.engine.cuda.build import build_cuda  # not at the top: the CPU needs no Triton

    assert isinstance(decoder, Decoder), "CUDA takes over a Decoder"
    assert draft is None or isinstance(draft, Decoder), "CUDA takes over a Decoder"
    specs = [decoder.whole_spec] if draft is None else [decoder.whole_spec, draft.spec]
    shard = decoder.shard
    if kernels is None:
        precision = Precision.of(config, str(dtype).removeprefix("torch."))
        kernels = prepare_kernels(specs, precision, scheduler_config, config, shard)
    executor, scheduler_config = build_cuda(decoder, config, scheduler_config, given, draft=draft, agree=agree)
    executor.load_libraries()
    kernels.finish()
    executor.warm_up()
    return BuiltExecutor(executor, scheduler_config, torch.cuda.get_device_name(), list(executor.graphs.sizes))


def device_of(decoder: DecoderModel) -> str:
    return CUDA if isinstance(decoder, Decoder) and decoder.device.type == CUDA else CPU


def _host_options(
    config: EngineConfig,
    given: Mapping[str, Any],
    page_size: int,
    decoder: DecoderModel,
    device: str,
    agree: Callable[[int], int],
) -> dict[str, float]:
    """The scheduler's options for the host memory tier, if it is enabled. agree: as in `build_executor`."""
    count = config.num_host_pages(page_size, given)
    dtype_bytes = 1 if config.kv_dtype == FP8_KV else decoder.kv_dtype.itemsize
    page_bytes = decoder.spec.unit_bytes(Pool.PAGES, dtype_bytes, page_size)
    size = decoder.shard.num_ranks
    free = free_memory() // size - (0 if device == CUDA else given["num_pages"] * page_bytes)
    if not count and config.role == "decode":
        count = agree(max(1, min(_DECODE_HOST_BYTES // size, free // 8) // page_bytes))
        log.info("role is decode: %d tokens of host memory receive KV (host_kv_tokens)", count * page_size)
    if not count:
        return {}
    check_host_fits(count, page_bytes, page_size, free=max(free, 0))
    found: dict[str, float] = {"num_host_pages": count}
    if device == CUDA and "host_page_cost" not in given:
        from paceline.engine.cuda.build import host_page_cost

        # Of ranks, each has its part of the bytes and of the computation.
        found["host_page_cost"] = host_page_cost(decoder.whole_spec, dtype_bytes, page_size)
    return found
