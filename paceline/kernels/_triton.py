"""Triton if it is installed, else stand-ins that let kernel files be imported for their torch references; and a way to
launch kernels that costs the host little.

The CPU build of torch brings no Triton. `from __future__ import annotations` must not be used to hide `tl.constexpr`:
Triton reads the annotation, so the stand-in has to have it too.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter, or_
from typing import Any

import torch


class _NoTriton:
    """Answers for `triton` and `tl` at import time; a launch fails with the reason."""

    constexpr: Any = Any

    def jit(self, function: Callable[..., Any] | None = None, **_: Any) -> Any:
        return _Unlaunchable() if function is not None else lambda _function: _Unlaunchable()


class _Unlaunchable:
    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError(
            "this operation was asked of a GPU, but triton is not installed: install triton, or use the CPU"
        )


triton: Any
tl: Any
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    HAS_TRITON = True
except ImportError:
    triton = tl = _NoTriton()
    HAS_TRITON = False


Key = tuple[Any, ...]
_ADDRESS, _DTYPE = torch.Tensor.data_ptr, attrgetter("dtype")
_KNOWN_LAUNCHERS = "3.6."  # versions of Triton whose compiled launcher takes what `_Ready` gives it


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """A compiled kernel, and all its launcher wants to know that does not change from launch to launch."""

    launch: Callable[..., None]
    function: int
    fixed: tuple[Any, ...]  # between the function and the arguments
    constants: tuple[None, ...]  # compiled in: the launcher counts them and does not look


@dataclass(slots=True, eq=False)
class _Layout:
    """Launches whose arguments have the same Python types: some tensors, then numbers."""

    num_tensors: int
    ready: dict[Key, _Ready] = field(default_factory=dict)

    def key(self, device: int, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Key, list[int]]:
        """What the binary depends on, and the addresses of the tensors.

        Triton compiles anew for other types of elements, addresses that are no longer multiples of 16 and numbers that
        are 1 or multiples of 16. Two launches it would compile for differ in this key; where it tells more apart than
        Triton does, the same binary is merely found twice.
        """
        tensors = args[: self.num_tensors]
        pointers = list(map(_ADDRESS, tensors))
        rests: Any = reduce(or_, pointers, 0) % 16
        if rests:  # which one is it?
            rests = tuple(pointer % 16 for pointer in pointers)
        numbers, names, values = args[self.num_tensors :], tuple(constants), tuple(constants.values())
        return (device, tuple(map(_DTYPE, tensors)), rests, numbers, names, values), pointers


class Kernel:
    """A Triton kernel, launched as ever: kernel[grid](tensors ..., numbers ..., CONSTANTS=...).

    A pass with prompts launches some two hundred, and of each Triton binds and keys all arguments, which takes the host
    longer than the launch. Here only a first launch of its kind goes through Triton; the next ones call the compiled
    launcher. Whatever is unusual (other arguments, hooks of a profiler, scratch memory) goes through Triton every time.

    All tensors must lie on the current device: only the first launch looks.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._layouts: dict[tuple[type, ...], _Layout | None] = {}
        self._driver = triton.runtime.driver
        self._knobs = triton.knobs.runtime

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self._launch(grid, args, constants)

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        types = tuple(map(type, args))
        if types not in self._layouts:
            self._layouts[types] = layout_of(args)
        layout = self._layouts[types]
        if layout is None or self._knobs.launch_enter_hook.calls or self._knobs.launch_exit_hook.calls:
            self._function[grid](*args, **constants)
            return
        driver = self._driver.active
        device = driver.get_current_device()
        key, pointers = layout.key(device, args, constants)
        ready = layout.ready.get(key)
        if ready is None:
            ready = _ready(self._function[grid](*args, **constants), len(self._function.params) - len(args))
            if ready is None:
                self._layouts[types] = None
            else:
                layout.ready[key] = ready
            return
        x, y, z = (*grid, 1, 1)[:3]
        ready.launch(x, y, z, driver.get_current_stream(device), ready.function, *ready.fixed, *pointers,
                     *args[layout.num_tensors :], *ready.constants)  # fmt: skip


def layout_of(args: tuple[Any, ...]) -> _Layout | None:
    """None if these are not some tensors and then numbers."""
    is_tensor = [isinstance(arg, torch.Tensor) for arg in args]
    count = sum(is_tensor)
    if not all(is_tensor[:count]) or not all(type(arg) in (int, float) for arg in args[count:]):
        return None
    return _Layout(count)


def _ready(compiled: Any, num_constants: int) -> _Ready | None:
    """None if this kernel needs more than a plain launch."""
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    # No scratch, global or for a profiler; behind the kernel's metadata none of the launch, no hook before or after it.
    fixed = (
        launcher.launch_cooperative_grid,
        launcher.launch_pdl,
        None,
        None,
        compiled.packed_metadata,
        None,
        None,
        None,
    )
    return _Ready(launcher.launch, compiled.function, fixed, (None,) * num_constants)


def launched(function: Any) -> Any:
    """For a kernel that the host launches: as a `Kernel`, where there is something to gain."""
    if not HAS_TRITON or not triton.__version__.startswith(_KNOWN_LAUNCHERS):
        return function
    return Kernel(function) if isinstance(function, triton.JITFunction) else function  # else it is interpreted


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
