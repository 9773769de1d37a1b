"""Quantized weights on the host: 4 or 8 bits per value, and a scale and an offset for every group of 32 columns.

    w = scale * q + offset

And those of FP8 and 4-bit checkpoints: as a GPU keeps them, and 4 bits in the form above, as a CPU does.

`dequantize` is the reference. `gguf_tensors.py` reads such weights from files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # columns with one scale and one offset
_CHUNK = 1 << 22  # values that are rounded at once


class PackedTensor(ABC):
    """A weight in the bits of its format, in host or device memory."""

    @property
    @abstractmethod
    def num_rows(self) -> int: ...

    @abstractmethod
    def join(self, others: Sequence[Self]) -> Self:
        """Its rows and those of others of the same format."""

    @abstractmethod
    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Self:
        """With the rows rearranged or selected."""

    @abstractmethod
    def scaled(self, factor: float) -> Self: ...

    def with_offsets(self) -> QuantizedTensor:
        """In the form that a CPU multiplies with, where there is one."""
        raise AssertionError(f"{type(self).__name__} has no form with offsets")


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor(PackedTensor):
    bits: int  # 4 or 8
    values: Tensor  # [rows, columns] int8: 0 to 15 with 4 bits
    scales: Tensor  # [rows, groups] float32, with the precision of float16; so are the offsets
    offsets: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        columns = self.values.shape[1]
        scales, offsets = (one.repeat_interleave(GROUP, dim=1)[:, :columns] for one in (self.scales, self.offsets))
        return torch.addcmul(offsets, self.values.float(), scales).to(dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """The values of some rows."""
        return self.map_rows(lambda rows: rows[ids]).dequantize()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.offsets.nbytes

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def join(self, others: Sequence[QuantizedTensor]) -> QuantizedTensor:
        return concatenate([self, *others])

    def with_offsets(self) -> QuantizedTensor:
        return self

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        return QuantizedTensor(self.bits, function(self.values), function(self.scales), function(self.offsets))

    def scaled(self, factor: float) -> QuantizedTensor:
        scales, offsets = (to_half_precision(one * factor) for one in (self.scales, self.offsets))
        return QuantizedTensor(self.bits, self.values, scales, offsets)

    def part(self, rows_and_columns: tuple[slice, ...]) -> QuantizedTensor:
        """Some rows and whole groups of columns."""
        rows = self.map_rows(lambda values: values[rows_and_columns[0]]) if rows_and_columns else self
        if len(rows_and_columns) < 2:
            return rows
        columns, groups = _whole_groups(rows_and_columns[1], self.values.shape[1], GROUP)
        return QuantizedTensor(self.bits, rows.values[:, columns], rows.scales[:, groups], rows.offsets[:, groups])

    def to(self, device: str | torch.device) -> QuantizedTensor:
        return QuantizedTensor(self.bits, *(one.to(device) for one in (self.values, self.scales, self.offsets)))

    def with_num_rows(self, count: int) -> QuantizedTensor:
        """The first rows; those that it did not have are zeros."""
        return self.map_rows(lambda rows: F.pad(rows, (0, 0, 0, count - len(rows))))


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Tensor(PackedTensor):
    """A weight [N, K]: values float8, times the scale of their row [N] float32, or of their block [N / rows, groups of
    columns]."""

    values: Tensor
    scales: Tensor
    rows: int = 1  # with one scale
    columns: int = 0  # with one scale; 0: all

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def join(self, others: Sequence[Fp8Tensor]) -> Fp8Tensor:
        """All have blocks of the same size."""
        values = torch.cat([one.values.view(torch.uint8) for one in (self, *others)]).view(self.values.dtype)
        return replace(self, values=values, scales=torch.cat([one.scales for one in (self, *others)]))

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Fp8Tensor:
        assert self.rows == 1, "rows of a block stay together"
        values = function(self.values.view(torch.uint8)).view(self.values.dtype)  # few operations know FP8
        return replace(self, values=values, scales=function(self.scales))

    def scaled(self, factor: float) -> Fp8Tensor:
        return replace(self, scales=self.scales * factor)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Tensor(PackedTensor):
    """A weight [N, K] of a 4-bit checkpoint: scale * (value - zero), with a scale for `group` columns of a row."""

    values: Tensor  # [N, K] uint8, 0 to 15
    scales: Tensor  # [N, K / group]
    zeros: Tensor  # [N, K / group], integers from 0 to 16
    group: int

    def dequantize(self) -> Tensor:
        scales, zeros = (one.float()[:, :, None] for one in (self.scales, self.zeros))
        groups = self.values.float().reshape(len(self.values), -1, self.group)
        return ((groups - zeros) * scales).flatten(1)

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def join(self, others: Sequence[Int4Tensor]) -> Int4Tensor:
        values, scales, zeros = (
            torch.cat([getattr(one, name) for one in (self, *others)]) for name in ("values", "scales", "zeros")
        )
        return Int4Tensor(values, scales, zeros, self.group)

    def with_offsets(self) -> QuantizedTensor:
        """In groups of 32 columns, with offsets -scale * zero, which are rounded to float16: of a float16 scale that is
        at most 1/128 of a step between two values, and nothing if the zero is a power of two."""
        scales, zeros = (one.float().repeat_interleave(self.group // GROUP, dim=1) for one in (self.scales, self.zeros))
        scales = to_half_precision(scales)
        return QuantizedTensor(4, self.values.view(torch.int8), scales, to_half_precision(-scales * zeros))

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Int4Tensor:
        return Int4Tensor(function(self.values), function(self.scales), function(self.zeros), self.group)

    def part(self, rows_and_columns: tuple[slice, ...]) -> Int4Tensor:
        """Some rows and whole groups of columns."""
        rows = self.map_rows(lambda values: values[rows_and_columns[0]]) if rows_and_columns else self
        if len(rows_and_columns) < 2:
            return rows
        columns, groups = _whole_groups(rows_and_columns[1], self.values.shape[1], self.group)
        return Int4Tensor(rows.values[:, columns], rows.scales[:, groups], rows.zeros[:, groups], self.group)

    def scaled(self, factor: float) -> Int4Tensor:
        return Int4Tensor(self.values, self.scales.float() * factor, self.zeros, self.group)


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Tensor(PackedTensor):
    """A weight [N, K] of an MXFP4 checkpoint (mxfp4_tensors.py). For all experts of a file, [E, N, K]."""

    values: Tensor  # [..., N, K / 32, 16] uint8
    scales: Tensor  # [..., N, K / 32] uint8

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def join(self, others: Sequence[Mxfp4Tensor]) -> Mxfp4Tensor:
        return self._mapped(lambda first, *rest: torch.cat([first, *rest]), others)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Mxfp4Tensor:
        return self._mapped(function)

    def scaled(self, factor: float) -> Mxfp4Tensor:
        raise AssertionError("scales of MXFP4 are powers of two: no family with them scales its residual stream")

    def _mapped(self, function: Callable[..., Tensor], others: Sequence[Mxfp4Tensor] = ()) -> Mxfp4Tensor:
        return Mxfp4Tensor(
            function(self.values, *(one.values for one in others)),
            function(self.scales, *(one.scales for one in others)),
        )


def _whole_groups(columns: slice, num_columns: int, group: int) -> tuple[slice, slice]:
    start, stop, _ = columns.indices(num_columns)
    assert start % group == 0 and (stop % group == 0 or stop == num_columns), "a plan keeps whole groups only"
    return slice(start, stop), slice(start // group, -(-stop // group))


def concatenate(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """The rows of all of them, with the most bits of any: 4-bit values are 8-bit values too."""
    values, scales, offsets = (
        torch.cat([getattr(one, name) for one in tensors]) for name in ("values", "scales", "offsets")
    )
    return QuantizedTensor(max(one.bits for one in tensors), values, scales, offsets)


def quantize(weight: Tensor, bits: int) -> QuantizedTensor:
    """Rounds to 8 bits by the largest value of a group, or to 4 bits between its smallest and its largest."""
    # By rows, so that a large embedding in 16 bits is never in float32 as a whole.
    chunks = torch.split(weight, max(1, _CHUNK // weight.shape[1]))
    return concatenate([_quantize_rows(chunk.float(), bits) for chunk in chunks])


def _quantize_rows(weight: Tensor, bits: int) -> QuantizedTensor:
    rows, columns = weight.shape
    rest = -columns % GROUP
    groups = F.pad(weight, (0, rest), "replicate" if rest else "constant").view(rows, -1, GROUP)
    if bits == 8:
        scales = to_half_precision(groups.abs().amax(-1) / 127)
        offsets = torch.zeros_like(scales)
        low, high = -127, 127
    else:
        smallest, largest = groups.amin(-1), groups.amax(-1)
        scales, offsets = to_half_precision((largest - smallest) / 15), to_half_precision(smallest)
        low, high = 0, 15
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    values = ((groups - offsets[..., None]) * inverse[..., None]).round_().clamp_(low, high).to(torch.int8)
    return QuantizedTensor(bits, values.view(rows, -1)[:, :columns].contiguous(), scales, offsets)


def to_half_precision(values: Tensor) -> Tensor:
    return values.half().float()
