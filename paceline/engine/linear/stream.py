"""The residual stream of a forward pass on a GPU, and what one matrix leaves to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.quantize_rows import apply_scales
from paceline.kernels.rms_norm import post_norm, rms_norm
from paceline.kernels.silu_mul import silu_mul
from paceline.model.rank_group import RankGroup


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """Scales of the rows and columns of an output, which are not applied to it yet."""

    rows: Tensor
    columns: Tensor

    def apply_to(self, out: Tensor) -> None:
        apply_scales(out, self.rows[: len(out)], self.columns)


@dataclass(slots=True, eq=False)
class Projected:
    """An input of a matrix, and what its reader has to apply first: the factor of a norm or scales, then the gate's
    activation."""

    values: Tensor
    activated: Tensor | None = None  # gets the activation of `values`, which are gate and up; None: they need none
    normed_by: Tensor | None = None  # the rows get the RMSNorm factors of these
    scales: Scales | None = None

    def apply_scales(self) -> None:
        if self.scales is not None:
            self.scales.apply_to(self.values)
            self.scales = None


@dataclass(frozen=True, slots=True, eq=False)
class StreamBuffers:
    """What the passes of a model share."""

    x: Tensor  # [T, H]
    normed: Tensor  # [T, H]
    partial: Tensor  # [T, H], or empty if every matrix adds to x itself
    squares: Tensor  # [R, columns] float32
    ones: Tensor  # [H]: the weight of a norm that is folded into the matrix behind it
    norms: str  # of a block: pre, post or both
    eps: float
    gelu: bool  # the gate's activation; else SiLU
    can_defer: bool  # whether whoever reads the output of a matrix may apply the factor of the norm before it
    group: RankGroup | None


class ResidualStream:
    """x [T, H], and what is pending: `partial`, which is not added to it yet, with the `scales` of that.

    square_columns: how many columns of the squares buffer hold the sums of squares of the rows of x; 0: none.
    is_normed: `normed` is the norm of x without a weight.
    """

    __slots__ = (
        "_buffers", "adapts", "can_defer", "eps", "fused", "gelu", "group", "is_normed", "normed", "norms", "partial",
        "pdl", "scales", "square_columns", "x",
    )  # fmt: skip

    def __init__(
        self, buffers: StreamBuffers, num_tokens: int, *, fused: bool, pdl: bool, adapts: bool, square_columns: int
    ) -> None:
        """fused: kernels for few rows may be used, as in decode batches without adapters. pdl: see kernels/linear.py.
        adapts: some rows have adapters."""
        self._buffers, self.norms, self.eps, self.gelu = buffers, buffers.norms, buffers.eps, buffers.gelu
        self.can_defer, self.group = buffers.can_defer, buffers.group
        self.x, self.normed = buffers.x[:num_tokens], buffers.normed[:num_tokens]
        self.fused, self.pdl, self.adapts = fused, pdl, adapts
        self.square_columns, self.is_normed = square_columns, False
        self.partial: Tensor | None = None
        self.scales: Scales | None = None

    def __len__(self) -> int:
        return len(self.x)

    @property
    def squares(self) -> Tensor:
        return self._buffers.squares[: len(self.x), : self.square_columns]

    @property
    def partial_buffer(self) -> Tensor:
        """For an output that is not added to x at once."""
        return self._buffers.partial[: len(self.x)]

    def adds_directly(self, norm_behind: Tensor | None) -> bool:
        """Whether an output is added to x as it is: neither normed nor summed over ranks."""
        return self.group is None and norm_behind is None

    def add(self, out: Tensor, norm_behind: Tensor | None = None, scales: Scales | None = None) -> None:
        """x += out, summed over ranks, or the norm of that; by the next norm if there is no norm behind `out`."""
        if scales is not None and not self.adds_directly(norm_behind):
            scales.apply_to(out)
            scales = None
        if self.group is not None:
            out = self.group.all_reduce(out)
        self.is_normed = norm_behind is not None and self.norms == "both"
        if norm_behind is None:
            self.partial, self.scales = out, scales
        else:
            post_norm(out, norm_behind, self.eps, self.x, self.normed if self.is_normed else None, pdl=self.pdl)
        self.square_columns = 0

    def take(self) -> tuple[Tensor, Tensor | None, Scales | None]:
        """What is to be normed next: x; or what is pending, to which x is added first, and its scales."""
        found = (self.x, None, None) if self.partial is None else (self.partial, self.x, self.scales)
        self.partial = self.scales = None
        return found

    def settle(self) -> None:
        """Adds to x what is pending."""
        source, residual, scales = self.take()
        if scales is not None:
            scales.apply_to(source)
        if residual is not None:
            residual.add_(source)

    def norm(self, weight: Tensor | None, out: Tensor) -> None:
        """out = norm(x), after adding to x what is pending. weight: None if it is folded into what follows."""
        source, residual, scales = self.take()
        if scales is not None:
            scales.apply_to(source)
        weight = self._buffers.ones if weight is None else weight
        rms_norm(source, weight, self.eps, out, residual=residual, pdl=self.pdl)

    def input(self, weight: Tensor | None) -> Tensor:
        """norm(x) in the dtype of x, or x where the model norms only the outputs of blocks."""
        if self.norms == "post":
            return self.x
        if weight is not None or not self.is_normed:
            self.norm(weight, self.normed)
        return self.normed

    def activated(self, source: Projected) -> Tensor:
        """Its values, with all that was left to apply."""
        source.apply_scales()
        if source.activated is None:
            return source.values
        silu_mul(source.values, source.activated, source.normed_by, self.eps, pdl=self.pdl, gelu=self.gelu)
        return source.activated

    def select(self, rows: Tensor, selected: Tensor) -> None:
        """Goes on with some rows."""
        assert not self.fused, "the sums of squares are not selected"
        self.x = torch.index_select(self.x, 0, rows, out=selected[: len(rows)])
        self.normed = self._buffers.normed[: len(rows)]
