"""Loads and launches compiled kernels through the CUDA driver API, with ctypes: nothing is built on the GPU host."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from functools import cache

from paceline.kernels._triton import LAUNCH_PDL, PDL_ARCH, Kernel, KernelArgument, Launchable, TritonFunction
from paceline.kernels.binaries import KernelBinary, KernelStore
from paceline.kernels.variants import KernelVariant, variant_of

_SHARED_WITHOUT_CONSENT = 48 << 10  # bytes of shared memory that a kernel may use unless it asks for more
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_NUM_SCRATCH = 2  # Triton's kernels end with pointers to global and profiler scratch memory, here null


class DriverError(RuntimeError):
    pass


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


def use_binaries(store: KernelStore, variants: Iterable[KernelVariant]) -> None:
    """Loads these kernels from `store`. From now on launches find them there, and others that it has; those that it
    lacks are compiled by Triton when they are launched."""
    functions = {variant: DriverFunction(binary) for variant in variants if (binary := store.read(variant)) is not None}

    has_pdl = divmod(store.arch, 10) >= PDL_ARCH

    def load(
        function: TritonFunction, args: tuple[KernelArgument, ...], constants: dict[str, object]
    ) -> Launchable | None:
        variant = variant_of(function, args, constants)
        if variant not in functions:
            binary = store.read(variant)
            if binary is None:
                return None
            functions[variant] = DriverFunction(binary)
        numbers = tuple(arg for arg in args if isinstance(arg, int | float))
        return DriverKernel(
            functions[variant], variant, numbers, pdl=has_pdl and bool(constants.get(LAUNCH_PDL, False))
        )

    Kernel.load = load


@cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class DriverFunction:
    """A compiled kernel, loaded into the current context."""

    def __init__(self, binary: KernelBinary, library: ctypes.CDLL | None = None) -> None:
        self.binary = binary
        self._library = _libcuda() if library is None else library
        self._module, self.handle = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(self._module), binary.cubin)
        self._call("cuModuleGetFunction", ctypes.byref(self.handle), self._module, binary.symbol.encode())
        if binary.shared_bytes > _SHARED_WITHOUT_CONSENT:
            self._call("cuFuncSetAttribute", self.handle, _MAX_DYNAMIC_SHARED, binary.shared_bytes)
            # As much as possible, so that more programs fit a multiprocessor. cuFuncSetCacheConfig asks for the same,
            # but then decoding one request takes 3% longer.
            self._call("cuFuncSetAttribute", self.handle, _SHARED_CARVEOUT, 100)
        self.launch = self._library.cuLaunchKernelEx

    def fail(self, name: str, status: int) -> None:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{name} of {self.binary.symbol} failed: {(text.value or b'unknown error').decode()}")

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            self.fail(name, status)


class DriverKernel:
    """A function and its numbers, which are fixed; each launch gives the addresses of its tensors."""

    def __init__(
        self, function: DriverFunction, variant: KernelVariant, numbers: tuple[float, ...], *, pdl: bool
    ) -> None:
        binary = function.binary
        self._function, self._handle, self._launch = function, function.handle, function.launch
        # Every argument has a cell of eight bytes; little endian, so that a narrower one is at its beginning.
        kept = [_bits(value) for value, kind in zip(numbers, _numbers(variant), strict=True) if kind != 1]
        num_tensors = len(variant.args) - len(numbers)
        self._num_tensors = num_tensors
        self._cells = (ctypes.c_uint64 * (num_tensors + len(kept) + _NUM_SCRATCH))(*[0] * num_tensors, *kept)
        first = ctypes.addressof(self._cells)
        self._params = (ctypes.c_void_p * len(self._cells))(*range(first, first + 8 * len(self._cells), 8))
        self._attribute = _Attribute(_PDL)
        self._attribute.value[0] = 1
        self._config = _Config(block_x=32 * binary.num_warps, block_y=1, block_z=1, shared_bytes=binary.shared_bytes)
        if pdl:
            self._config.attributes, self._config.num_attributes = ctypes.pointer(self._attribute), 1
        self._config_address = ctypes.byref(self._config)

    def launch(self, grid: tuple[int, ...], stream: int, pointers: list[int]) -> None:
        """`pointers`: the addresses of all tensors, in order."""
        config = self._config
        config.grid_x, config.grid_y, config.grid_z = (*grid, 1, 1)[:3]
        if not config.grid_x * config.grid_y * config.grid_z:
            return
        config.stream = stream
        self._cells[: self._num_tensors] = pointers  # type: ignore[assignment]
        status = self._launch(self._config_address, self._handle, self._params, None)
        if status:
            self._function.fail("cuLaunchKernelEx", status)


def _numbers(variant: KernelVariant) -> list[float]:
    return [arg for arg in variant.args if not isinstance(arg, str)]


def _bits(value: float) -> int:
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<f", value), "little")
    return value & 0xFFFF_FFFF_FFFF_FFFF
