"""Matrices in groups of columns, of 4 or 8 bits: with many rows they are expanded for cuBLAS.

    few rows    norm -> qkv -> attention -> out [+ x] -> norm -> gate,up silu -> down [+ x]
    many rows   [+ x, norm] (expand) qkv -> attention -> (expand) out -> [+ x, norm] (expand) gate,up -> silu
                -> (expand) down

Activations have 16 bits in both. A GPU with enough memory has the weights in 16 bits, too (`keep_expanded` in pack.py):
then batches are as fast as without quantization, and a few rows faster. Otherwise a matrix is expanded into one buffer,
in each pass again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.engine.linear.base import Place, Setting
from paceline.engine.linear.packed import PackedLinear, PackedWork, operand_dtype
from paceline.engine.linear.stream import Projected, ResidualStream
from paceline.kernels.groupwise_linear import GroupwiseMatrix, expand_groupwise, groupwise_linear
from paceline.kernels.linear import LinearTuning, LinearWorkspace

# The largest number of rows for which weights are converted in registers, by bits and whether there are offsets: with
# more, cuBLAS was faster for the layers of Qwen3-14B on an H200 (docs/log/gemms.md). EACH_PASS: a matrix has to be
# expanded first, which reads and writes 2.5 bytes per weight. IN_MEMORY: it is in memory in 16 bits, too.
_MAX_ROWS_EACH_PASS = {(4, False): 224, (4, True): 128, (8, True): 96}
_MAX_ROWS_IN_MEMORY = {(4, False): 64, (4, True): 32, (8, True): 16}
MAX_GROUPWISE_ROWS = 224  # the largest of these
TUNED_ROWS = (1, 9, 17, 33, 65)  # from which on `groupwise_tuning` differs


def groupwise_tuning(rows: int, gated: bool) -> LinearTuning:
    """Tiles as measured on an H200 for Qwen3-14B with 4 bits in groups of 128 (docs/log/gemms.md). A warp has 32 rows
    of a weight: with fewer, more instructions read scales than weights."""
    if rows <= 16:
        return LinearTuning(8 if rows <= 8 else 16, 32 if gated else 64, 256, 2, 3, 1 if gated else 8)
    if gated:
        return LinearTuning(32, 64, 256, 4, 3)
    if rows <= 32:
        return LinearTuning(32, 128, 256, 4, 3, 4)
    return LinearTuning(64, 128, 256, 8, 3, 2 if rows <= 64 else 1)


class GroupwiseWork(PackedWork):
    fuses_prompts = True  # a matrix would have to be expanded

    def __init__(self, setting: Setting, matrices: Sequence[GroupwiseMatrix]) -> None:
        self._matrices = matrices
        self.max_fused_rows = self._limit(in_memory=all(one.expanded is not None for one in matrices))
        tokens, hidden, device = setting.max_tokens, setting.spec.hidden_size, setting.device
        few = min(tokens, self.max_fused_rows)
        self.inputs = torch.zeros(few, hidden, dtype=operand_dtype(setting.dtype), device=device)
        rows = tokens if tokens > self.max_fused_rows else 0
        widest = max(setting.spec.linear_columns)
        self.inputs_many = torch.zeros(rows * widest, dtype=setting.dtype, device=device)
        largest = max((math.prod(one.shape) for one in matrices if one.expanded is None), default=0)
        self._weight = torch.zeros(largest if rows else 0, dtype=setting.dtype, device=device)

    def rows(self, num_rows: int, width: int) -> Tensor:
        """For the inputs of cuBLAS."""
        return self.inputs_many[: num_rows * width].view(num_rows, width)

    def expanded(self, matrix: GroupwiseMatrix) -> Tensor:
        if matrix.expanded is not None:
            return matrix.expanded
        wide = self._weight[: math.prod(matrix.shape)].view(matrix.shape)
        expand_groupwise(matrix, wide)
        return wide

    def row_limits(self) -> Iterator[None]:
        """They depend on the memory of the GPU."""
        before = self.max_fused_rows
        for limit in sorted({before, *(self._limit(in_memory=in_memory) for in_memory in (False, True))}):
            self.max_fused_rows = limit
            yield
        self.max_fused_rows = before

    def _limit(self, *, in_memory: bool) -> int:
        limits = _MAX_ROWS_IN_MEMORY if in_memory else _MAX_ROWS_EACH_PASS
        return min(MAX_GROUPWISE_ROWS, *(limits[one.bits, one.has_offsets] for one in self._matrices))


class GroupwiseLinear(PackedLinear):
    kernel = groupwise_linear

    def __init__(self, matrix: GroupwiseMatrix, place: Place, work: GroupwiseWork, workspace: LinearWorkspace) -> None:
        super().__init__(matrix, place, work, workspace)
        self._matrix, self._work = matrix, work

    def tuning(self, num_rows: int) -> LinearTuning:
        return groupwise_tuning(num_rows, self.gated)

    def multiply(self, source: Tensor, out: Tensor, *, add: bool = False) -> None:
        work = self._work
        if len(source) <= work.max_fused_rows:
            is_operand = source.dtype is work.inputs.dtype
            self.run_few(source if is_operand else work.inputs[: len(source)].copy_(source), out)
        else:
            is_operand = source.dtype is work.inputs_many.dtype
            self._run_many(source if is_operand else work.rows(*source.shape).copy_(source), out)

    def project_many(self, stream: ResidualStream, out: Tensor, activated: Tensor | None) -> Projected:
        inputs = self._work.rows(len(stream), self.shape[1])
        self.read(stream, inputs)
        self._run_many(inputs, out)
        return Projected(out, activated)

    def add_many(self, source: Projected, stream: ResidualStream) -> None:
        inputs, out = self._work.rows(len(source.values), self.shape[1]), stream.partial_buffer
        if source.activated is not None:
            source.activated = inputs
            stream.activated(source)
        else:
            inputs.copy_(source.values)  # float16, as kernels for few rows need it
        self._run_many(inputs, out)
        stream.add(out, self.norm_behind)

    def _run_many(self, x: Tensor, out: Tensor) -> None:
        torch.mm(x, self._work.expanded(self._matrix).T, out=out)
        if self.bias is not None:
            out.add_(self.bias)

    def load_library(self, stream: ResidualStream, source: Tensor, out: Tensor, *, add: bool = False) -> None:
        if not self.runs_fused(len(stream), fused=stream.fused):
            out = stream.partial_buffer if add else out
            torch.mm(self._work.rows(len(stream), self.shape[1]), self._work.expanded(self._matrix).T, out=out)

    @property
    def tuned_rows(self) -> tuple[int, ...]:
        return (*TUNED_ROWS, MAX_GROUPWISE_ROWS + 1)
