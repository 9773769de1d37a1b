"""Linear layers with weights in groups, of 4 or 8 bits, on a GPU: converted in registers, or, with many rows, expanded
for cuBLAS.

    few rows    norm -> qkv -> attention -> out [+ x] -> norm -> gate,up silu -> down [+ x]
    many rows   [+ x, norm] (expand) qkv -> attention -> (expand) out -> [+ x, norm] (expand) gate,up -> silu
                -> (expand) down

Activations have 16 bits in both. A GPU with enough memory has the weights in 16 bits, too (`keep_expanded` in
quantized.py): then batches are as fast as without quantization, and a few rows faster. Otherwise a layer is expanded
into one buffer, in each pass again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.groupwise_linear import GroupwiseMatrix, expand_groupwise
from paceline.kernels.linear import LinearTuning
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.silu_mul import silu_mul
from paceline.model.spec import ModelSpec

# The largest number of rows for which weights are converted in registers, by bits and whether there are offsets: with
# more, cuBLAS was faster for the layers of Qwen3-14B on an H200 (docs/log/gemms.md). EACH_PASS: a matrix has to be
# expanded first, which reads and writes 2.5 bytes per weight. IN_MEMORY: it is in memory in 16 bits, too.
_MAX_ROWS_EACH_PASS = {(4, False): 224, (4, True): 128, (8, True): 96}
_MAX_ROWS_IN_MEMORY = {(4, False): 64, (4, True): 32, (8, True): 16}
MAX_GROUPWISE_ROWS = 224  # the largest of these
TUNED_ROWS = (1, 9, 17, 33, 65)  # from which on `groupwise_tuning` differs


def max_groupwise_rows(matrices: Sequence[GroupwiseMatrix], *, in_memory: bool | None = None) -> int:
    """The largest number of rows for which the weights of a model are converted in registers. in_memory: whether they
    are in memory in 16 bits, too; None: found out."""
    if in_memory is None:
        in_memory = all(one.expanded is not None for one in matrices)
    limits = _MAX_ROWS_IN_MEMORY if in_memory else _MAX_ROWS_EACH_PASS
    return min(MAX_GROUPWISE_ROWS, *(limits[one.bits, one.has_offsets] for one in matrices))


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


class ExpandedWeights:
    """GEMMs of many rows: cuBLAS with a weight that is in memory in 16 bits, or expanded first."""

    def __init__(
        self,
        spec: ModelSpec,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        matrices: Sequence[GroupwiseMatrix],
    ) -> None:
        self._few_rows = max_groupwise_rows(matrices)
        widest = max(spec.linear_columns)
        rows = tokens if tokens > self._few_rows else 0
        self._inputs = torch.zeros(rows * widest, dtype=dtype, device=device)
        largest = max((math.prod(one.shape) for one in matrices if one.expanded is None), default=0)
        self._weight = torch.zeros(largest if rows else 0, dtype=dtype, device=device)

    def norm_linear(
        self,
        source: Tensor,
        residual: Tensor | None,
        norm: Tensor,
        eps: float,
        weight: GroupwiseMatrix,
        out: Tensor,
        *,
        factors: Tensor | None,
    ) -> None:
        """out = norm(source) @ weightᵀ; with `residual`, of residual += source. There are no factors: scales are those
        of the weight."""
        inputs = self._rows(source)
        rms_norm(source, norm, eps, inputs, residual=residual)
        self._multiply(inputs, weight, out)

    def linear(
        self, source: Tensor, weight: GroupwiseMatrix, out: Tensor, *, gated: bool, factors: Tensor | None
    ) -> None:
        """out = source @ weightᵀ; gated: of silu(gate) * up."""
        inputs = self._rows(source, weight.shape[1])
        if gated:
            silu_mul(source, inputs)
        else:
            inputs.copy_(source)  # float16, as kernels for few rows need it
        self._multiply(inputs, weight, out)

    def apply_scales(self, out: Tensor, factors: Tensor) -> None:
        raise AssertionError("a GEMM of expanded weights has applied them")

    def load_kernel(self, weight: GroupwiseMatrix, rows: int, out: Tensor) -> None:
        """Runs the library's GEMM once: a kernel is loaded at first use."""
        if rows > self._few_rows:
            self._multiply(self._inputs[: rows * weight.shape[1]].view(rows, -1), weight, out)

    def _rows(self, source: Tensor, width: int | None = None) -> Tensor:
        rows, columns = source.shape
        width = columns if width is None else width
        return self._inputs[: rows * width].view(rows, width)

    def _multiply(self, inputs: Tensor, weight: GroupwiseMatrix, out: Tensor) -> None:
        rows, columns = weight.shape
        wide = weight.expanded
        if wide is None:
            wide = self._weight[: rows * columns].view(rows, columns)
            expand_groupwise(weight, wide)
        torch.mm(inputs, wide.T, out=out)
