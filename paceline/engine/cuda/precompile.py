"""Compiles the kernels of a model ahead of time, on any machine, in as many processes as there are cores."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from paceline.kernels.binaries import CannotPrecompile, KernelStore, compile_for, compile_variant
from paceline.kernels.variants import KernelVariant

# Kernels with many registers take longest: they are compiled first, so that the processes end together.
_SLOW = ("_decode_attention_kernel", "_extend_attention_kernel", "_extend_shared_kernel", "_collect_kernel")

Progress = Callable[[int, int], None]  # variants done, variants in total


def precompile(
    variants: Iterable[KernelVariant], folder: Path, arch: int, *, jobs: int, progress: Progress | None = None
) -> int:
    """Compiles what is missing in a folder. Returns how many variants that were."""
    missing = sorted(KernelStore(folder, arch).missing(variants), key=lambda variant: variant.name not in _SLOW)
    if not missing:
        return 0
    context = multiprocessing.get_context("spawn")  # a fork would inherit this process's threads and CUDA context
    with (
        tempfile.TemporaryDirectory(prefix="paceline-triton-") as scratch,
        ProcessPoolExecutor(min(jobs, len(missing)), context, _begin, (arch, scratch)) as pool,
    ):
        tasks = [pool.submit(_compile, variant, folder, arch) for variant in missing]
        for done, task in enumerate(as_completed(tasks), 1):
            task.result()
            if progress is not None:
                progress(done, len(tasks))
    return len(missing)


def _begin(arch: int, scratch: str) -> None:
    """In a process of the pool. Triton's own cache is not used: the folder is ours."""
    os.environ["TRITON_CACHE_DIR"] = scratch
    compile_for(arch)


def _compile(variant: KernelVariant, folder: Path, arch: int) -> None:
    try:
        KernelStore(folder, arch).write(variant, compile_variant(variant))
    except CannotPrecompile:
        return  # Triton compiles it when it is launched
