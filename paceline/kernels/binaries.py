"""Compiled kernels in a folder: compiled on any machine, found by what they were compiled from.

A file is a line of JSON and the cubin. It is named by a hash of its variant, the source of all kernels, the
architecture and the version of Triton: a folder may hold binaries of many models and versions, and a changed kernel is
never found by mistake.
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
from functools import cache
from pathlib import Path
from zlib import crc32

import torch

from paceline.kernels._triton import Kernel, TritonFunction, triton
from paceline.kernels.variants import KernelVariant


@dataclass(frozen=True, slots=True)
class KernelBinary:
    cubin: bytes
    symbol: str
    shared_bytes: int
    num_warps: int


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

    def get_current_target(self) -> object:
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
    return KernelBinary(compiled.asm["cubin"], metadata.name, metadata.shared, metadata.num_warps)


class _Pointer:
    """An address of a tensor, for the compiler."""

    def __init__(self, name: str) -> None:
        self.dtype = getattr(torch, name.rstrip("?"))
        self._address = 8 if name.endswith("?") else 0

    def data_ptr(self) -> int:
        return self._address


def function_of(variant: KernelVariant) -> TritonFunction:
    """The Triton function of a variant."""
    kernel: Kernel = getattr(importlib.import_module(variant.module), variant.name)
    return kernel.function


class KernelStore:
    """Binaries in a folder, and in others that are only read. Several processes may use them at once."""

    def __init__(self, folder: Path, arch: int, also: Sequence[Path] = ()) -> None:
        self.arch, self._folder, self._also = arch, folder, also
        self._target = f"{source_digest()} {triton.__version__} {arch}"

    def missing(self, variants: Iterable[KernelVariant]) -> list[KernelVariant]:
        return [variant for variant in variants if self.read(variant) is None]

    def read(self, variant: KernelVariant) -> KernelBinary | None:
        """None if no folder has a binary of this variant that is whole."""
        name = self._name(variant)
        return next(filter(None, (_read(folder / name) for folder in (*self._also, self._folder))), None)

    def write(self, variant: KernelVariant, binary: KernelBinary) -> None:
        fields = asdict(binary)
        cubin = fields.pop("cubin")
        header = json.dumps({**fields, "crc": crc32(cubin)}).encode()
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(header + b"\n" + cubin)
        os.chmod(temporary, 0o644)  # other users may read a shared folder
        os.replace(temporary, self._folder / self._name(variant))

    def _name(self, variant: KernelVariant) -> str:
        return hashlib.sha256(f"{variant!r} {self._target}".encode()).hexdigest()[:32] + ".kernel"


def _read(path: Path) -> KernelBinary | None:
    """None if the file does not exist or is damaged."""
    try:
        header, _, cubin = path.read_bytes().partition(b"\n")
        fields = json.loads(header)
        return KernelBinary(cubin, **fields) if fields.pop("crc") == crc32(cubin) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


@cache
def source_digest() -> str:
    """Changes with the source of any kernel. Triton's own digest of one depends on which others were hashed before."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
