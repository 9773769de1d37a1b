"""Catches kernels that read or write outside of the tensors they were given, in Triton's interpreter.

Most such accesses hit other allocated memory and go unnoticed, there as on a GPU: a mask that is wrong for one shape
would be found by the user of that shape. Each view counts with its own extent, not that of its storage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch


class OutOfBounds(AssertionError):
    pass


@contextmanager
def checked_bounds() -> Iterator[None]:
    """Within this context, every launch raises at its first access outside of its tensors."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    call = executor.__call__
    begins = ends = np.empty(0, np.uint64)
    first_bytes: list[int] = []
    last_bytes: list[int] = []
    kernel = ""

    def in_one_tensor(addresses: Any, size: int) -> bool:
        """The usual case. For few addresses Python's integers are faster than numpy's functions."""
        if addresses.size == 1:
            lowest = highest = addresses.item()
        else:
            lowest, highest = int(np.minimum.reduce(addresses, None)), int(np.maximum.reduce(addresses, None))
        at = bisect_right(first_bytes, lowest) - 1
        return at >= 0 and highest + size <= last_bytes[at]

    def check(kind: str, pointers: Any, mask: Any) -> None:
        addresses = pointers.data
        size = pointers.get_element_ty().primitive_bitwidth // 8
        if in_one_tensor(addresses, size):
            return
        if not mask.data.all():
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)]
            if not addresses.size or in_one_tensor(addresses, size):
                return
        # Extents may overlap: of all that begin at or before an address, the furthest end counts.
        addresses = addresses.reshape(-1)
        at = np.searchsorted(begins, addresses, side="right") - 1
        outside = (at < 0) | (addresses + np.uint64(size) > ends[at])
        if outside.any():
            raise OutOfBounds(f"{kernel}: {int(outside.sum())} of {len(addresses)} addresses of a {kind} are outside")

    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal begins, ends, first_bytes, last_bytes, kernel
        extents = sorted(_extent(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor))
        begins = np.array([begin for begin, _ in extents], np.uint64)
        ends = np.maximum.accumulate(np.array([end for _, end in extents], np.uint64))
        first_bytes, last_bytes = begins.tolist(), ends.tolist()
        kernel = self.fn.__name__
        return call(self, *args, **kwargs)

    def loading(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check("load", pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def storing(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def adding(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("atomic", pointers, mask)
        return atomic(self, operation, pointers, value, mask, *rest)

    with (
        patch.object(executor, "__call__", calling),
        patch.object(builder, "create_masked_load", loading),
        patch.object(builder, "create_masked_store", storing),
        patch.object(builder, "create_atomic_rmw", adding),
    ):
        yield


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
