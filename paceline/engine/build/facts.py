"""What is known of the device and the host before anything is read or allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from paceline.config import EngineConfig
from paceline.engine.kv_sizing import free_memory

CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    kind: str  # CPU or CUDA
    name: str = CPU
    count: int = 1  # GPUs that processes may use
    shares_gpus: bool = False  # ranks may use the same one
    arch: int = 0  # of a GPU: 90 for sm_90
    free_bytes: int | None = None  # memory for weights and KV, of one device; None: unknown
    num_threads: int = 1  # of a CPU
    native_error: str | None = None  # why kernels for 4 and 8 bits could not be compiled for this CPU


def gpu_of_arch(arch: int) -> DeviceFacts:
    """A GPU that is not there: for kernels that are compiled ahead of time, and plans."""
    return DeviceFacts(CUDA, f"sm_{arch}", shares_gpus=True, arch=arch)


def device_facts(config: EngineConfig, *, needs_native: bool) -> DeviceFacts:
    """Of this machine. needs_native: compiles the kernels for 4 and 8 bits on a CPU."""
    if choose_device(config) == CUDA:
        major, minor = torch.cuda.get_device_capability()
        may_overlap = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
        return DeviceFacts(
            CUDA,
            torch.cuda.get_device_name(),
            torch.cuda.device_count(),
            config.collectives == "gloo" or may_overlap,
            10 * major + minor,
            torch.cuda.mem_get_info()[0],
        )
    error = None
    if needs_native:
        from paceline.engine.cpu.native import NativeError, native_library

        try:
            native_library()
        except NativeError as failure:
            error = str(failure)
    return DeviceFacts(CPU, free_bytes=free_memory(), num_threads=torch.get_num_threads(), native_error=error)


def choose_device(config: EngineConfig) -> str:
    """CUDA or CPU."""
    if config.device == CPU or (config.device == "auto" and not torch.cuda.is_available()):
        return CPU
    from paceline.engine.cuda.build import check_cuda, has_cuda

    if config.device == CUDA:
        check_cuda()
    return CUDA if has_cuda() else CPU
