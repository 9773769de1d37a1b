"""Kernel variants: everything that a compiled kernel depends on, so that it can be compiled before it is launched.

Triton compiles another binary for other constants, element types, misaligned addresses, and for numbers that are 1 or
multiples of 16. `KernelVariant` states these and nothing else: two launches need the same binary if their variants are
equal. It is plain data, so that another process, on a machine without a GPU, can compile it.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from paceline.kernels._triton import LAUNCH_PDL, Kernel, KernelArgument, TritonFunction

_LARGE = 1 << 32  # does not fit 32 bits
_MISALIGNED = "?"

Argument = str | int | float  # the element type of a tensor, or a number


@dataclass(frozen=True, slots=True, order=True)
class KernelVariant:
    module: str
    name: str
    args: tuple[Argument, ...]
    constants: tuple[tuple[str, object], ...]  # by name, with options of the compiler such as num_warps

    @property
    def misaligned(self) -> list[int]:
        """Tensors, by position, whose address is not a multiple of 16."""
        return [at for at, arg in enumerate(self.args) if isinstance(arg, str) and arg.endswith(_MISALIGNED)]


def variant_of(
    function: TritonFunction, args: tuple[KernelArgument, ...], constants: dict[str, object]
) -> KernelVariant:
    """The variant that a launch of a Triton function needs."""
    names = tuple(
        [
            _tensor(arg) if isinstance(arg, torch.Tensor) else _number(arg, is_specialized)
            for arg, is_specialized in zip(args, _specialized(function), strict=False)
        ]
    )
    compiled_in = tuple(sorted((name, value) for name, value in constants.items() if name != LAUNCH_PDL))
    return KernelVariant(function.fn.__module__, function.fn.__name__, names, compiled_in)


@cache
def _specialized(function: TritonFunction) -> list[bool]:
    """Whether each parameter is, if it is a number."""
    return [not param.do_not_specialize for param in function.params]


@cache
def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(value: torch.Tensor) -> str:
    name = _type_name(value.dtype)
    return name if value.data_ptr() % 16 == 0 else name + _MISALIGNED


def _number(value: float, specialized: bool) -> float:
    """A number that stands for all those that need the same binary."""
    if isinstance(value, float):
        return 0.5
    if value == 1 and specialized:
        return 1
    base = 0 if -(1 << 31) <= value < 1 << 31 else _LARGE
    return base + (16 if specialized and value % 16 == 0 else 17)


@contextmanager
def recorded_launches() -> Iterator[set[KernelVariant]]:
    """Meanwhile kernels are not launched: their variants are collected. Other threads must not launch any."""
    found: set[KernelVariant] = set()

    def record(
        self: Kernel, grid: tuple[int, ...], args: tuple[KernelArgument, ...], constants: dict[str, object]
    ) -> None:
        found.add(variant_of(self.function, args, constants))

    launch = Kernel._launch
    Kernel._launch = record  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Kernel._launch = launch  # type: ignore[method-assign]
