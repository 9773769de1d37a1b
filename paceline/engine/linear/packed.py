"""Matrices with fewer bits: with few rows a GEMM only reads them, and converts them in registers.

Activations stay in 16 bits then. Norms are not folded into quantized weights, which would have to be rounded again: a
launch of its own norms the input, in the type to which weights are converted without rounding. With many rows each
format has its own way (fp8.py, groupwise.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from paceline.engine.linear.base import CudaLinear, Place, Work
from paceline.engine.linear.stream import Projected, ResidualStream
from paceline.kernels.linear import LinearTuning, LinearWorkspace
from paceline.model.linear import PackedWeight


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of a GEMM's inputs: that to which quantized weights are converted without rounding."""
    return torch.float16 if dtype is torch.bfloat16 else dtype


class PackedWork(Work):
    inputs: Tensor  # [rows, H]: normed hidden states of few rows, in the type that kernels multiply


class PackedLinear(CudaLinear):
    kernel: ClassVar[Callable[..., None]]  # for few rows: x, matrix, out, tuning and what else `quantized_linear` takes

    def __init__(self, matrix: PackedWeight, place: Place, work: PackedWork, workspace: LinearWorkspace) -> None:
        super().__init__(place)
        self.norm, self._packed, self._packed_work, self._workspace = place.norm, matrix, work, workspace

    @property
    def shape(self) -> tuple[int, ...]:
        return self._packed.shape

    @property
    def num_bytes(self) -> int:
        return self._packed.num_bytes

    def runs_fused(self, num_rows: int, *, fused: bool) -> bool:
        work = self._packed_work
        return (fused or work.fuses_prompts) and num_rows <= work.max_fused_rows

    def project(
        self, stream: ResidualStream, out: Tensor, activated: Tensor | None = None, *, defer: bool = False
    ) -> Projected:
        if not self.runs_fused(len(stream), fused=stream.fused):
            return self.project_many(stream, out, activated)
        inputs = self._packed_work.inputs[: len(stream)]
        self.read(stream, inputs)
        if activated is None or stream.gelu:  # kernels have SiLU only
            self.run_few(inputs, out, pdl=stream.pdl)
            return Projected(out, activated)
        self.run_few(inputs, activated, gated=True, pdl=stream.pdl)
        return Projected(activated)

    def add(self, source: Projected, stream: ResidualStream) -> None:
        if not self.runs_fused(len(stream), fused=stream.fused):
            self.add_many(source, stream)
            return
        values = stream.activated(source)
        if stream.adds_directly(self.norm_behind):
            self.run_few(values, stream.x, residual=stream.x, pdl=stream.pdl)
            stream.square_columns = 0
        else:
            out = stream.partial_buffer
            self.run_few(values, out, pdl=stream.pdl)
            stream.add(out, self.norm_behind)

    def read(self, stream: ResidualStream, inputs: Tensor) -> None:
        """inputs = norm(x), or x where the model norms only the outputs of blocks."""
        if stream.norms == "post":
            inputs.copy_(stream.x)
        else:
            stream.norm(self.norm, inputs)

    def run_few(
        self, x: Tensor, out: Tensor, *, gated: bool = False, residual: Tensor | None = None, pdl: bool = False
    ) -> None:
        """out = x Wᵀ + b + residual, or the activation of that, by the kernel for few rows. x: in `operand_dtype`."""
        tuning = self.tuning(len(x))
        workspace = self._workspace if tuning.split_k > 1 else None
        options = (self.bias, gated, residual, workspace, pdl)
        type(self).kernel(x, self._packed, out, tuning, *options)

    @abstractmethod
    def tuning(self, num_rows: int) -> LinearTuning:
        """Of the kernel for few rows. The two halves of gate and up are not split along K."""

    @abstractmethod
    def project_many(self, stream: ResidualStream, out: Tensor, activated: Tensor | None) -> Projected:
        """`project` with many rows."""

    @abstractmethod
    def add_many(self, source: Projected, stream: ResidualStream) -> None:
        """`add` with many rows."""
