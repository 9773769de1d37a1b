"""LoRA: a matrix of any format, to whose output the adapters of the rows are added."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.engine.linear.base import CudaLinear
from paceline.engine.linear.stream import Projected, ResidualStream
from paceline.model.linear import Linear

AddAdapters = Callable[[Tensor, Tensor], None]  # source, out: out += what the adapters of its rows add


class Adapted(CudaLinear):
    """In a pass with adapters it asks the matrix for all of its output, before the activation. Where the factor of the
    norm is deferred, neither that output nor what the adapters add has it yet."""

    def __init__(self, inner: CudaLinear, add_adapters: AddAdapters) -> None:
        self._inner, self._add_adapters = inner, add_adapters
        self.bias, self.gated, self.norm, self.norm_behind = inner.bias, inner.gated, inner.norm, inner.norm_behind
        self.can_defer, self.can_accumulate = inner.can_defer, inner.can_accumulate

    @property
    def shape(self) -> tuple[int, ...]:
        return self._inner.shape

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes

    @property
    def tuned_rows(self) -> tuple[int, ...]:
        return self._inner.tuned_rows

    def multiply(self, source: Tensor, out: Tensor, *, add: bool = False) -> None:
        self._inner.multiply(source, out, add=add)
        self._add_adapters(source, out)

    def load(self, other: Linear, norm: Tensor | None = None) -> None:
        self._inner.load(other, norm)

    def runs_fused(self, num_rows: int, *, fused: bool) -> bool:
        return self._inner.runs_fused(num_rows, fused=fused)

    def reads_squares(self, num_rows: int, *, fused: bool) -> bool:
        return self._inner.reads_squares(num_rows, fused=fused)

    def project(
        self, stream: ResidualStream, out: Tensor, activated: Tensor | None = None, *, defer: bool = False
    ) -> Projected:
        project = self.plainly_project if stream.adapts else self._inner.project
        return project(stream, out, activated, defer=defer)

    def add(self, source: Projected, stream: ResidualStream) -> None:
        (self.plainly_add if stream.adapts else self._inner.add)(source, stream)

    def load_library(self, stream: ResidualStream, source: Tensor, out: Tensor, *, add: bool = False) -> None:
        self._inner.load_library(stream, source, out, add=add)
