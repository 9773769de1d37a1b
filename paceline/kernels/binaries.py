"""Compiled kernels in a folder: compiled on any machine, found by what they were compiled from.

A binary is named by a hash of its variant, the source of the kernel and of everything that it calls, the architecture
and the version of Triton. A folder may hold binaries of many models; a changed kernel is never found by mistake.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.kernels._triton import triton
from paceline.kernels.variants import KernelVariant


@dataclass(frozen=True, slots=True)
class KernelBinary:
    cubin: bytes
    symbol: str
    shared_bytes: int
    num_warps: int
    launch_pdl: bool  # programmatic dependent launch


class CannotPrecompile(Exception):
    """This kernel needs something that only Triton's own launcher provides."""


class _CompileOnlyDriver:
    """Tells Triton what to compile for, where there is no such device."""

    def __init__(self, arch: int) -> None:
        self._target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compile_for(arch: int) -> None:
    """From now on this process compiles for an architecture such as 90, and can launch nothing."""
    triton.runtime.driver.set_active(_CompileOnlyDriver(arch))


def compile_variant(variant: KernelVariant) -> KernelBinary:
    """Compiles a variant for the architecture of `compile_for`."""
    args = [_Pointer(arg) if isinstance(arg, str) else arg for arg in variant.args]
    compiled = function_of(variant).warmup(*args, grid=(1,), **dict(variant.constants))
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise CannotPrecompile(f"{variant.name} needs scratch memory or a cluster")
    return KernelBinary(
        compiled.asm["cubin"], metadata.name, metadata.shared, metadata.num_warps, bool(metadata.launch_pdl)
    )


class _Pointer:
    """An address of a tensor, for the compiler."""

    def __init__(self, name: str) -> None:
        self.dtype = getattr(torch, name.rstrip("?"))
        self._address = 8 if name.endswith("?") else 0

    def data_ptr(self) -> int:
        return self._address


def function_of(variant: KernelVariant) -> Any:
    """The Triton function of a variant."""
    return getattr(importlib.import_module(variant.module), variant.name).function


class KernelStore:
    """Binaries in a folder, and in others that are only read. Several processes may use them at once."""

    def __init__(self, folder: Path, arch: int, also: Sequence[Path] = ()) -> None:
        self._folder, self._also, self._arch = folder, also, arch
        self._sources: dict[tuple[str, str], str] = {}

    def missing(self, variants: Iterable[KernelVariant]) -> list[KernelVariant]:
        return [variant for variant in variants if self._find(variant) is None]

    def read(self, variant: KernelVariant) -> KernelBinary | None:
        """None if there is no binary of this variant."""
        path = self._find(variant)
        if path is None:
            return None
        return KernelBinary(path.read_bytes(), **json.loads(path.with_suffix(".json").read_bytes()))

    def _find(self, variant: KernelVariant) -> Path | None:
        name = f"{self._digest(variant)}.cubin"
        return next((path for folder in (*self._also, self._folder) if (path := folder / name).exists()), None)

    def write(self, variant: KernelVariant, binary: KernelBinary) -> None:
        fields = asdict(binary)
        path, cubin = self._folder / f"{self._digest(variant)}.cubin", fields.pop("cubin")
        self._folder.mkdir(parents=True, exist_ok=True)
        # The cubin last: once it is there, so is the rest.
        for target, data in ((path.with_suffix(".json"), json.dumps(fields).encode()), (path, cubin)):
            descriptor, temporary = tempfile.mkstemp(dir=self._folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)  # other users may read a shared folder
            os.replace(temporary, target)

    def _digest(self, variant: KernelVariant) -> str:
        kernel = variant.module, variant.name
        if kernel not in self._sources:
            self._sources[kernel] = function_of(variant).cache_key
        parts = repr(variant), self._sources[kernel], triton.__version__, str(self._arch)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
