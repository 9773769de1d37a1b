"""Compiles the kernels of a model ahead of time, on any machine, in as many processes as there are cores.

    this process        loads weights and libraries ─────────────┐
    first process       lists the variants ─▶ compiles ─▶ …      ├─▶ launches
    other processes                         ─▶ compile ─▶ …  ────┘

Binaries, and the list of what a model needs, are kept in a folder. If all are there, no process is started.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, nullcontext
from dataclasses import astuple
from pathlib import Path

import torch

from paceline.config import SchedulerConfig
from paceline.engine.cuda.compile_workers import CompileWorkers
from paceline.engine.cuda.variants import VARIANT_OPTIONS, kernel_variants
from paceline.engine.precision import Precision
from paceline.kernels.binaries import CannotPrecompile, KernelStore, compile_for, compile_variant, source_digest
from paceline.kernels.driver import use_binaries
from paceline.kernels.variants import KernelVariant
from paceline.model.fetch import kernel_cache
from paceline.model.layout import WHOLE_MODEL, Shard
from paceline.model.spec import ModelSpec

log = logging.getLogger("paceline.engine")

# Kernels with many registers take longest: they are compiled first, so that the processes end together.
_SLOW = ("_decode_attention_kernel", "_extend_attention_kernel", "_extend_shared_kernel", "_collect_kernel")

Progress = Callable[[int, int], None]  # variants done, variants in total


def precompile(
    specs: Sequence[ModelSpec],
    precision: Precision,
    scheduler: SchedulerConfig,
    folder: Path,
    arch: int,
    *,
    also: Sequence[Path] = (),
    jobs: int | None = None,
    workers: CompileWorkers | None = None,
    progress: Progress | None = None,
    shard: Shard = WHOLE_MODEL,
) -> tuple[list[KernelVariant], int]:
    """Compiles into a folder what it and those of `also` lack for a model, and its draft model if `specs` has a second,
    in `jobs` processes (default: one per core), or by `workers`, which the caller closes. Returns all variants of the
    model, and how many were compiled. shard: for this rank's part of the model."""
    store, name = KernelStore(folder, arch, also), f"{_list_name(specs, precision, scheduler, shard)}.list"
    variants = next(filter(None, (_read_list(one / name) for one in (*also, folder))), None)
    if variants is not None and not store.missing(variants):
        return variants, 0
    with closing(CompileWorkers(jobs)) if workers is None else nullcontext(workers) as workers:
        if variants is None:
            variants = workers.submit(kernel_variants, specs, precision, scheduler, shard).result()
            log.debug("listed %d kernels", len(variants))
        missing = sorted(store.missing(variants), key=lambda variant: variant.name not in _SLOW)
        tasks = [workers.submit(_compile, variant, folder, arch) for variant in missing]
        for done, task in enumerate(as_completed(tasks), 1):
            task.result()
            if progress is not None:
                progress(done, len(tasks))
    _write_list(folder / name, variants)
    return variants, len(missing)


class KernelPreparation:
    """Compiles what is missing while weights and libraries are loaded."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        precision: Precision,
        scheduler: SchedulerConfig,
        prepared: str | None,
        shard: Shard = WHOLE_MODEL,
        workers: CompileWorkers | None = None,
    ) -> None:
        """specs: of the model, and of its draft model if it has one. `prepared`: a folder written by `paceline
        compile`. shard: this rank's part of the model. workers: see `precompile`."""
        major, minor = torch.cuda.get_device_capability()
        self._arch, self._prepared = 10 * major + minor, [] if prepared is None else [Path(prepared)]
        self._folder = _writable(kernel_cache())
        self._began = time.perf_counter()
        pool = ThreadPoolExecutor(1, "paceline-compile")
        self._task = pool.submit(
            precompile,
            specs,
            precision,
            scheduler,
            self._folder,
            self._arch,
            also=self._prepared,
            workers=workers,
            shard=shard,
        )
        pool.shutdown(wait=False)

    def finish(self) -> None:
        """Waits, and loads the binaries into the GPU. If compiling failed, kernels are compiled as they are used."""
        variants: list[KernelVariant] = []
        try:
            variants, num_compiled = self._task.result()
        except (OSError, RuntimeError) as error:
            log.warning("kernels could not be compiled ahead, the first requests wait for them: %s", error)
        else:
            if num_compiled:
                seconds = time.perf_counter() - self._began
                log.info("compiled %d of %d kernels in %.1f s", num_compiled, len(variants), seconds)
            if self._prepared and num_compiled == len(variants):
                log.warning(
                    "kernel_folder %s has no kernel of this model for sm_%d and this version: see `paceline compile`",
                    self._prepared[0],
                    self._arch,
                )
        use_binaries(KernelStore(self._folder, self._arch, self._prepared), variants)


def _writable(folder: Path) -> Path:
    """The folder, or a new one for this process alone if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        log.warning("%s cannot be written (%s): kernels are not kept; set PACELINE_HOME", folder, error.strerror)
        own = tempfile.mkdtemp(prefix="paceline-kernels-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return Path(own)
    return folder


def _compile(variant: KernelVariant, folder: Path, arch: int) -> None:
    compile_for(arch)
    try:
        KernelStore(folder, arch).write(variant, compile_variant(variant))
    except CannotPrecompile:
        return  # Triton compiles it when it is launched


# ---------------------------------------------------------------------- the list of variants


def _list_name(specs: Sequence[ModelSpec], precision: Precision, scheduler: SchedulerConfig, shard: Shard) -> str:
    """Changes with everything that the list depends on: model, options and the code that launches kernels."""
    options = [getattr(scheduler, name) for name in VARIANT_OPTIONS]
    digest = hashlib.sha256(repr((list(specs), precision, options, shard, source_digest())).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _write_list(path: Path, variants: Iterable[KernelVariant]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps([astuple(variant) for variant in variants]))
    temporary.replace(path)


def _read_list(path: Path) -> list[KernelVariant] | None:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # ValueError: a damaged file is written again
        return None
    return [
        KernelVariant(module, name, tuple(args), tuple((key, value) for key, value in constants))
        for module, name, args, constants in found
    ]
