"""A matrix of a layer on a GPU.

There is one class per weight format. A forward pass knows two things about a matrix: it projects the norm of the
residual stream (qkv; gate and up), or it adds to the residual stream (out; down). What of the norm, the activation, the
residual sum, the norm behind it and the sum over ranks is fused into its kernels is its business: it says what it
leaves to whoever reads its output (`Projected`) or the residual stream (`ResidualStream`).

A format implements `multiply`. The methods here do the rest with kernels of their own, and are what remains for a pass
with adapters; a format overrides them where it has something faster.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.linear.stream import Projected, ResidualStream
from paceline.kernels.linear import GemmTuning
from paceline.model.linear import Linear
from paceline.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What surrounds a matrix."""

    bias: Tensor | None = None
    gated: bool = False  # the first half of its rows is the gate, the second half is up
    norm: Tensor | None = None  # the RMSNorm before it
    norm_behind: Tensor | None = None  # that of its output


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What all matrices of a model have in common."""

    spec: ModelSpec  # of this rank
    dtype: torch.dtype
    device: torch.device
    max_tokens: int
    has_ranks: bool  # outputs are summed over
    tuning: GemmTuning  # of matrices that are not quantized


class Work:
    """What the matrices of a model in one format share: memory, and which of their kernels is used when."""

    max_fused_rows = 0  # rows up to which a kernel for few rows computes them
    fuses_prompts = False  # in every pass; else in fused ones

    def row_limits(self) -> Iterator[None]:
        """Sets `max_fused_rows` to each value that it can have on a GPU, one after the other."""
        yield


class CudaLinear(ABC):
    """A matrix [N, K] with its bias, in its place."""

    norm: Tensor | None = None  # before it, if its weight is not folded into the matrix
    can_defer = False  # whether the factor of the norm before it may be applied to its output
    can_accumulate = False  # whether `multiply` can add

    def __init__(self, place: Place) -> None:
        self.bias, self.gated, self.norm_behind = place.bias, place.gated, place.norm_behind

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @abstractmethod
    def multiply(self, source: Tensor, out: Tensor, *, add: bool = False) -> None:
        """out = source Wᵀ + b, or out += that if it `can_accumulate`. source: in the dtype of the model."""

    def load(self, other: Linear, norm: Tensor | None = None) -> None:
        """Copies another matrix of the same shape, in place: CUDA graphs hold the address of this one."""
        raise AssertionError("an executor with packed matrices does not replace weights")

    @abstractmethod
    def runs_fused(self, num_rows: int, *, fused: bool) -> bool:
        """Whether a kernel for few rows computes it. fused: as of `ResidualStream`."""

    def reads_squares(self, num_rows: int, *, fused: bool) -> bool:
        """Whether it uses the sums of squares of x."""
        return False

    def project(
        self, stream: ResidualStream, out: Tensor, activated: Tensor | None = None, *, defer: bool = False
    ) -> Projected:
        """norm(x) Wᵀ + b, in `out` or, with the gate's activation, in `activated`. defer: the reader of the output may
        be left to apply the factor of the norm."""
        return self.plainly_project(stream, out, activated, defer=defer)

    def add(self, source: Projected, stream: ResidualStream) -> None:
        """x += source Wᵀ + b, or the norm of that."""
        self.plainly_add(source, stream)

    def plainly_project(
        self, stream: ResidualStream, out: Tensor, activated: Tensor | None = None, *, defer: bool = False
    ) -> Projected:
        """`project` by `multiply`."""
        defer = defer and self.can_defer
        if defer:
            stream.settle()
        source = stream.x if defer else stream.input(self.norm)
        self.multiply(source, out)
        return Projected(out, activated, stream.x if defer else None)

    def plainly_add(self, source: Projected, stream: ResidualStream) -> None:
        """`add` by `multiply`."""
        values = stream.activated(source)
        if self.can_accumulate and stream.adds_directly(self.norm_behind):
            self.multiply(values, stream.x, add=True)
            stream.square_columns = 0
        else:
            out = stream.partial_buffer
            self.multiply(values, out)
            stream.add(out, self.norm_behind)

    @abstractmethod
    def load_library(self, stream: ResidualStream, source: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Runs the library's GEMM that such a pass uses, if any: a kernel is loaded at first use. add: as `add`."""

    def saved_bytes(self, item_bytes: int) -> int:
        """How much smaller it is than with so many bytes per number."""
        return math.prod(self.shape) * item_bytes - self.num_bytes

    @property
    def tuned_rows(self) -> tuple[int, ...]:
        """Numbers of rows from which on a pass that is no decode batch launches other kernels."""
        return ()
