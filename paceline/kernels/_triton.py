"""Triton if it is installed, else stand-ins so that kernel files can be imported for their torch references; and a
kernel launcher with low host overhead.

The CPU build of torch comes without Triton. Kernel files evaluate `tl.constexpr` at import, so the stand-in has it too.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter, or_
from types import FunctionType
from typing import Any, ClassVar, Protocol

import torch


class _NoTriton:
    """Stands in for `triton` and `tl` at import time; a launch fails with the reason."""

    constexpr = int

    def jit(self, function: Callable[..., object] | None = None, **_: object) -> object:
        return _Unlaunchable() if function is not None else lambda _function: _Unlaunchable()


class _Unlaunchable:
    def __getitem__(self, grid: object) -> Callable[..., None]:
        raise RuntimeError(
            "This operation needs a GPU kernel, and triton is not installed: install triton, or choose device cpu."
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


INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # which knows no assembler

KernelArgument = torch.Tensor | float  # of a launch: a tensor or a number
Key = tuple[object, ...]
_ADDRESS: Callable[..., int] = torch.Tensor.data_ptr
_DTYPE = attrgetter("dtype")
LAUNCH_PDL, PDL_ARCH = "launch_pdl", (9, 0)  # Triton's option of a launch with PDL, see `pdl_wait`; GPUs that have it
_SUPPORTED_TRITON = "3.6."  # versions whose compiled launcher has the signature that `_TritonKernel` uses


class Parameter(Protocol):
    """A parameter of a Triton function."""

    do_not_specialize: bool


class TritonFunction(Protocol):
    """What `triton.jit` makes of a function. A launch returns the compiled kernel."""

    fn: FunctionType
    params: Sequence[Parameter]
    warmup: Callable[..., CompiledKernel]  # compiles, and launches nothing

    def __hash__(self) -> int: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CompiledKernel]: ...


class _Launcher(Protocol):
    """Launches one compiled kernel."""

    launch: Callable[..., None]
    launch_cooperative_grid: bool
    launch_pdl: bool
    global_scratch_size: int
    profile_scratch_size: int


class KernelMetadata(Protocol):
    """What Triton says of a compiled kernel."""

    name: str
    shared: int  # bytes
    num_warps: int
    num_ctas: int
    global_scratch_size: int
    profile_scratch_size: int


class CompiledKernel(Protocol):
    """A kernel that Triton has compiled and loaded. `function` is its address."""

    run: _Launcher
    function: int
    metadata: KernelMetadata
    packed_metadata: object
    asm: Mapping[str, bytes]  # by stage of the compiler


class Launchable(Protocol):
    """A compiled kernel on the current device, for numbers that do not change between launches."""

    def launch(self, grid: tuple[int, ...], stream: int, pointers: list[int]) -> None:
        """`pointers`: the addresses of all tensors, in order."""


# A Triton function, its arguments and its constants -> the kernel that was compiled for them before, or None
Loader = Callable[[TritonFunction, tuple[KernelArgument, ...], dict[str, object]], Launchable | None]


@dataclass(frozen=True, slots=True, eq=False)
class _TritonKernel:
    """A kernel that Triton has compiled, and all arguments of its launcher that do not change between launches."""

    launcher: Callable[..., None]
    before: tuple[object, ...]  # from the function to the arguments
    after: tuple[object, ...]  # numbers; and constants, which the launcher counts and does not read

    def launch(self, grid: tuple[int, ...], stream: int, pointers: list[int]) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        self.launcher(x, y, z, stream, *self.before, *pointers, *self.after)


@dataclass(slots=True, eq=False)
class _Signature:
    """Launches whose arguments have the same Python types: some tensors, then numbers."""

    num_tensors: int
    compiled: dict[Key, Launchable] = field(default_factory=dict)

    def key(self, device: int, args: tuple[KernelArgument, ...], constants: dict[str, object]) -> tuple[Key, list[int]]:
        """What the binary depends on, and the addresses of the tensors.

        Triton compiles another binary for other element types, for addresses that are not multiples of 16, and for
        numbers that are 1 or multiples of 16. Launches that need different binaries have different keys. The key is
        finer than Triton's: the same binary may be stored under several keys.
        """
        tensors = args[: self.num_tensors]
        pointers = list(map(_ADDRESS, tensors))
        misaligned: int | tuple[int, ...] = reduce(or_, pointers, 0) % 16
        if misaligned:  # at least one is: the key says which
            misaligned = tuple(pointer % 16 for pointer in pointers)
        numbers, names, values = args[self.num_tensors :], tuple(constants), tuple(constants.values())
        return (device, tuple(map(_DTYPE, tensors)), misaligned, numbers, names, values), pointers


class Kernel:
    """A Triton kernel with the usual launch syntax: kernel[grid](tensors ..., numbers ..., CONSTANTS=...).

    A prefill batch launches some two hundred kernels. For each, Triton binds all arguments and computes a cache key,
    which takes the host longer than the launch. Here only the first launch with a given key goes through Triton, if it
    was not compiled ahead of time (`load`); later ones call the compiled launcher directly. Unusual launches (other
    argument types, profiler hooks, scratch memory) always go through Triton.

    All tensors must be on the current device: only the first launch checks this.
    """

    load: ClassVar[Loader | None] = None  # finds kernels that were compiled ahead of time
    compile_s: ClassVar[float] = 0.0  # host time of first launches that went through Triton

    def __init__(self, function: TritonFunction) -> None:
        self.function = function
        self._signatures: dict[tuple[type, ...], _Signature | None] = {}
        self._knobs = triton.knobs.runtime

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self._launch(grid, args, constants)

    def _launch(self, grid: tuple[int, ...], args: tuple[KernelArgument, ...], constants: dict[str, object]) -> None:
        types = tuple(map(type, args))
        if types not in self._signatures:
            self._signatures[types] = signature_of(args)
        signature = self._signatures[types]
        if signature is None or self._knobs.launch_enter_hook.calls or self._knobs.launch_exit_hook.calls:
            self.function[grid](*args, **_supported(constants))
            return
        device = current_device()
        key, pointers = signature.key(device, args, constants)
        kernel = signature.compiled.get(key)
        if kernel is None and Kernel.load is not None:
            kernel = Kernel.load(self.function, args, constants)
            if kernel is not None:
                signature.compiled[key] = kernel
        if kernel is None:
            began = time.perf_counter()
            compiled = self.function[grid](*args, **_supported(constants))
            Kernel.compile_s += time.perf_counter() - began
            num_constants = len(self.function.params) - len(args)
            kernel = _triton_kernel(compiled, args[signature.num_tensors :], num_constants)
            if kernel is None:
                self._signatures[types] = None
            else:
                signature.compiled[key] = kernel
            return
        kernel.launch(grid, current_stream(device), pointers)


def _supported(constants: dict[str, object]) -> dict[str, object]:
    """Those of a launch through Triton, which this GPU can do."""
    if constants.get(LAUNCH_PDL) and torch.cuda.get_device_capability() < PDL_ARCH:
        return {**constants, LAUNCH_PDL: False}
    return constants


def current_device() -> int:
    return torch.cuda.current_device()


def current_stream(device: int) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def signature_of(args: tuple[KernelArgument, ...]) -> _Signature | None:
    """None unless these are tensors followed by numbers."""
    is_tensor = [isinstance(arg, torch.Tensor) for arg in args]
    count = sum(is_tensor)
    if not all(is_tensor[:count]) or not all(type(arg) in (int, float) for arg in args[count:]):
        return None
    return _Signature(count)


def _triton_kernel(
    compiled: CompiledKernel, numbers: tuple[KernelArgument, ...], num_constants: int
) -> _TritonKernel | None:
    """None if this kernel needs scratch memory, which Triton allocates at launch."""
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    # None: global scratch, profiler scratch; and after the kernel's metadata: launch metadata, enter hook, exit hook.
    before = (
        compiled.function,
        launcher.launch_cooperative_grid,
        launcher.launch_pdl,
        None,
        None,
        compiled.packed_metadata,
        None,
        None,
        None,
    )
    return _TritonKernel(launcher.launch, before, (*numbers, *(None,) * num_constants))


def launched(function: TritonFunction) -> Kernel | TritonFunction:
    """Decorates a kernel that the host launches: makes it a `Kernel` where this version of Triton allows it."""
    if not HAS_TRITON or not triton.__version__.startswith(_SUPPORTED_TRITON):
        return function
    return Kernel(function) if isinstance(function, triton.JITFunction) else function  # else: the interpreter


@triton.jit
def pdl_wait():
    """In a kernel that was launched with programmatic dependent launch (PDL), so that it may start while the previous
    one runs: waits until that has ended. In others it does nothing: one binary serves both."""
    if not INTERPRETED and tl.target_info.cuda_capability_geq(9):
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_launch_dependents():
    """Lets the next kernel start, if that one is launched with PDL."""
    if not INTERPRETED and tl.target_info.cuda_capability_geq(9):
        tl.extra.cuda.gdc_launch_dependents()


# Arguments that follow from the number of layers or pages, or from the context. Kernels gain nothing by knowing that
# one is a multiple of 16, and which variants are needed would be known only when the size of the KV cache is.
UNSPECIALIZED = ["pool_stride", "table_stride", "words_stride", "max_length", "num_pages", "row_size"]
UNSPECIALIZED += ["first_id", "num_ids"]
UNSPECIALIZED += ["num_steps", "has_index"]  # 0 or 1: one binary for both
LOG2_E = 1.4426950408889634  # attention computes its softmax in base 2


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
