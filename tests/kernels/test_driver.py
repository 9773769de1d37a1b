"""Launches through the driver API, with a driver that writes down what it is told."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from paceline.kernels.binaries import KernelBinary
from paceline.kernels.driver import DriverError, DriverFunction, DriverKernel, _Attribute, _Config
from paceline.kernels.variants import KernelVariant

MODULE, FUNCTION = 0x7000_0000_1000, 0x7000_0000_2000


class FakeLibrary:
    """libcuda. Its launch reads the memory that it is given, as the driver would."""

    def __init__(self, num_args: int, status: int = 0) -> None:
        self.loaded: list[bytes] = []
        self.attributes: list[tuple[int, int]] = []
        self.launches: list[dict[str, Any]] = []
        self._num_args, self._status = num_args, status
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self.cuLaunchKernelEx = kind(self._launch)

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        self.loaded.append(cubin)
        module._obj.value = MODULE
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        assert module.value == MODULE and name == b"kernel"
        function._obj.value = FUNCTION
        return 0

    def cuFuncSetAttribute(self, function: Any, name: int, value: int) -> int:
        self.attributes.append((name, value))
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = f"error {status}".encode()
        return 0

    def _launch(self, config: int, function: int, params: int, extra: int | None) -> int:
        assert extra is None
        given = _Config.from_address(config)
        cells = (ctypes.c_void_p * self._num_args).from_address(params)
        self.launches.append(
            {
                "grid": (given.grid_x, given.grid_y, given.grid_z),
                "block": (given.block_x, given.block_y, given.block_z),
                "shared": given.shared_bytes,
                "stream": given.stream,
                "attributes": [
                    (given.attributes[at].id, given.attributes[at].value[0]) for at in range(given.num_attributes)
                ],
                "function": function,
                "args": [ctypes.string_at(cell, 8) for cell in cells],
            }
        )
        return self._status


VARIANT = KernelVariant("module", "kernel", ("bfloat16", "int32", 17, 1, 0.5, (1 << 32) + 16), ())
NUMBERS = (100, 1, 0.25, 1 << 40)


def kernel(library: FakeLibrary, shared: int = 1024, pdl: bool = False) -> DriverKernel:
    binary = KernelBinary(b"cubin", "kernel", shared, 4)
    return DriverKernel(DriverFunction(binary, library), VARIANT, NUMBERS, pdl=pdl)


def test_a_launch_gets_addresses_and_numbers_without_those_that_are_compiled_in() -> None:
    library = FakeLibrary(num_args=7)
    launched = kernel(library)
    for pointers in ([0x1000, 0x2000], [0x7FFF_0000_0010, 0x20]):
        launched.launch((3, 2), 77, pointers)
        (one,) = library.launches
        library.launches.clear()
        first, second, integer, number, large, *scratch = one["args"]
        assert [int.from_bytes(cell, "little") for cell in (first, second)] == pointers
        assert struct.unpack("<i", integer[:4]) == (100,) and struct.unpack("<f", number[:4]) == (0.25,)
        assert struct.unpack("<q", large) == (1 << 40,)
        assert scratch == [bytes(8)] * 2, "Triton's scratch memory, which these kernels do not use"
        assert one["grid"] == (3, 2, 1) and one["block"] == (128, 1, 1)
        assert one["stream"] == 77 and one["function"] == FUNCTION and one["shared"] == 1024
        assert one["attributes"] == []
    assert library.loaded == [b"cubin"] and library.attributes == []


def test_programmatic_dependent_launch_and_large_shared_memory_are_asked_for() -> None:
    library = FakeLibrary(num_args=7)
    kernel(library, shared=100_000, pdl=True).launch((1,), 0, [16, 32])
    assert library.launches[0]["attributes"] == [(6, 1)]
    assert library.attributes == [(8, 100_000), (9, 100)]


def test_an_empty_grid_is_not_launched() -> None:
    library = FakeLibrary(num_args=7)
    kernel(library).launch((0, 5), 0, [16, 32])
    assert not library.launches


def test_an_error_names_the_kernel() -> None:
    with pytest.raises(DriverError, match="cuLaunchKernelEx of kernel failed: error 700"):
        kernel(FakeLibrary(num_args=7, status=700)).launch((1,), 0, [16, 32])


def test_structures_are_laid_out_as_in_the_drivers_header() -> None:
    assert ctypes.sizeof(_Attribute) == 72 and _Attribute.value.offset == 8
    assert ctypes.sizeof(_Config) == 56 and _Config.stream.offset == 32 and _Config.attributes.offset == 40
