"""Prints what every kernel variant of a shape uses: `python -m tests.kernels.resources qwen3-0.6b`, on any machine.

Registers, spilled bytes, shared memory, and how many programs fit a multiprocessor of a Hopper GPU. It also shows when
a loop has fewer tiles in flight than num_stages asks for; otherwise only its run time would.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from itertools import groupby
from typing import Any

from triton import knobs

from paceline.config import EngineConfig
from paceline.engine.build import resolve_here
from paceline.engine.build.facts import gpu_of_arch
from paceline.engine.cuda.variants import kernel_variants
from paceline.kernels.binaries import KernelBinary, compile_for, compile_variant
from paceline.kernels.variants import KernelVariant
from paceline.model.files import UnloadedModel
from paceline.model.shapes import shape as named_shape

_SHARED_BYTES, _REGISTERS, _WARPS = 227 * 1024, 65536, 64  # per multiprocessor


def resources(binary: KernelBinary) -> str:
    """The resources of a program, and how many programs fit a multiprocessor."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.cubin)
        file.flush()
        tool = [str(knobs.nvidia.cuobjdump.path), "-res-usage", file.name]
        report = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{what}:(\d+)", report)[-1]) for what in ("REG", "STACK"))
    warps, shared = binary.num_warps, binary.shared_bytes
    fitting = min(_REGISTERS // (registers * 32 * warps), _WARPS // warps, _SHARED_BYTES // (shared + 1024))
    return f"{registers:9} {stack:7} {shared / 1024:9.1f} {warps:5} {fitting:9}"


def variants_of(shape: str, *options: str) -> list[KernelVariant]:
    """Engine options as in kv_dtype=fp8_e4m3."""
    given: dict[str, Any] = dict(option.split("=") for option in options)
    found = resolve_here(EngineConfig(**given), {}, UnloadedModel(named_shape(shape)), device=gpu_of_arch(90))
    return kernel_variants(found.specs, found.precision, found.scheduler)


def main(shape: str, *names: str) -> None:
    """Of all kernels, or of those that are named; with options, those of `variants_of`."""
    variants = variants_of(shape, *(name for name in names if "=" in name))
    names = tuple(name for name in names if "=" not in name)
    compile_for(90)
    print("registers spilled shared KB warps at once")
    for kernel, group in groupby(variants, key=lambda variant: variant.name):
        if names and kernel not in names:
            continue
        print(kernel)
        same = list(group)
        in_all = set.intersection(*(set(variant.constants) for variant in same))
        for variant in same:
            differing = [(name, value) for name, value in variant.constants if (name, value) not in in_all]
            own = ", ".join(f"{name} {value:g}" for name, value in differing)
            print(f"{resources(compile_variant(variant))}   {own}")


if __name__ == "__main__":
    main(*sys.argv[1:])
