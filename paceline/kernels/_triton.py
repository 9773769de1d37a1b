"""Triton if it is installed, else stand-ins that let kernel files be imported for their torch references.

The CPU build of torch brings no Triton. `from __future__ import annotations` must not be used to hide `tl.constexpr`:
Triton reads the annotation, so the stand-in has to have it too.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


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


@triton.jit
def prefetch(pointer):
    """In a kernel: asks the L2 for the cache lines of a block of addresses, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
