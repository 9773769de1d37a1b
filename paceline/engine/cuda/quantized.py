"""Linear layers with quantized weights on a GPU: which kernel computes them, by format and number of rows.

    a layer, few rows:   norm -> qkv -> attention -> out [+ x] -> norm -> gate,up silu -> down [+ x]
    FP8, many rows:      [+ x, norm, round] qkv -> attention -> [round] out -> [+ x, norm, round] gate,up
                         -> [silu, round] down

With few rows a GEMM only reads its weight: it is converted in registers, and activations stay in 16 bits
(kernels/quantized_linear.py, kernels/groupwise_linear.py). With many rows FP8 weights are multiplied with activations
that are rounded to FP8, with a scale per row, by the library's kernel: twice the rate of 16 bits. Its fastest kernels
for up to 1,024 rows know one scale per matrix only: they multiply without scales, and the kernel that reads their
output applies those of rows and columns (`factors`). Weights in groups, of 4 or 8 bits, are expanded (groupwise.py).

Of a mixture of experts, only the experts are quantized (experts.py).

Norms are not folded into quantized weights: they would have to be rounded again. Biases, norms, embedding and head stay
in the dtype of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.engine.cuda.groupwise import ExpandedWeights, groupwise_tuning, max_groupwise_rows
from paceline.engine.cuda.linear_weights import LinearWeights
from paceline.engine.precision import KernelFormat, rounding_group
from paceline.kernels.expert_weights import (
    Fp8Experts,
    Mxfp4Experts,
    pack_mxfp4,
    quantize_fp8_experts,
    quantize_mxfp4,
)
from paceline.kernels.groupwise_linear import (
    GroupwiseMatrix,
    groupwise_linear,
    pack_groupwise,
    pack_with_offsets,
    quantize_int4,
)
from paceline.kernels.linear import LinearTuning, LinearWorkspace
from paceline.kernels.quantize_rows import apply_scales, quantize_rows
from paceline.kernels.quantized_linear import QuantizedMatrix, quantize_fp8, quantized_linear
from paceline.kernels.rms_norm import rms_norm
from paceline.model.decoder import Decoder
from paceline.model.fp8_tensors import block_of_part
from paceline.model.linear import Matrix
from paceline.model.quantized import Fp8Tensor, Int4Tensor, Mxfp4Tensor, PackedTensor, QuantizedTensor, quantize
from paceline.model.rank_group import RankGroup
from paceline.model.spec import ModelSpec
from paceline.model.weights import Keep
from paceline.model.weights_plan import WeightsPlan
from paceline.weight_formats import FP8, GGUF_FORMATS, MXFP4, Q8, WEIGHT_FORMATS, MatrixKind, title_of

_MAX_FP8_ROWS = 16  # rows up to which FP8 weights are converted in registers
_MAX_EXPANDED_SHARE = 0.4  # of the free memory; the KV cache needs the rest
_MAX_UNSCALED_ROWS = 1024  # rows up to which the library's kernel without scales is faster (docs/log/gemms.md)


def max_small_rows(matrices: Sequence[QuantizedMatrix | GroupwiseMatrix]) -> int:
    """Rows up to which the weights of a model are converted in registers."""
    groupwise = [one for one in matrices if isinstance(one, GroupwiseMatrix)]
    return max_groupwise_rows(groupwise) if groupwise else _MAX_FP8_ROWS


def quantized_tuning(weights: LinearWeights, rows: int) -> LinearTuning:
    if isinstance(weights.quantized, GroupwiseMatrix):
        return groupwise_tuning(rows, weights.gated)
    # The fastest of nine tiles for the linear layers of Qwen3-14B at one row on an H200 (docs/log/gemms.md).
    return LinearTuning(16, 64, 128, 4, 4, 1 if weights.gated else 4)


class ManyRows(Protocol):
    """GEMMs of many rows, with weights of one format.

    One that does not apply its scales returns the factors of the columns of its output; otherwise None. Whoever reads
    the output next applies them, and the scales of the rows: the next GEMM, which gets the factors, or `apply_scales`.
    """

    def norm_linear(
        self,
        source: Tensor,
        residual: Tensor | None,
        norm: Tensor,
        eps: float,
        weight: Any,
        out: Tensor,
        *,
        factors: Tensor | None,
    ) -> Tensor | None:
        """out = norm(source) @ weightᵀ; with `residual`, of residual += source. factors: those of `source`."""

    def linear(self, source: Tensor, weight: Any, out: Tensor, *, gated: bool, factors: Tensor | None) -> Tensor | None:
        """out = source @ weightᵀ; gated: of silu(gate) * up. factors: those of `source`."""

    def apply_scales(self, out: Tensor, factors: Tensor) -> None:
        """Of the last GEMM, to its output."""

    def load_kernel(self, weight: Any, rows: int, out: Tensor) -> None:
        """Runs the library's GEMM once, if it is used for so many rows: a kernel is loaded at first use."""


class RoundedRows:
    """FP8: activations are rounded with a scale per row."""

    def __init__(self, spec: ModelSpec, tokens: int, device: torch.device) -> None:
        widest = max(spec.linear_columns)
        self._rounded = torch.zeros(tokens * widest, dtype=torch.float8_e4m3fn, device=device)
        self._scales, self._one = torch.ones(tokens, device=device), torch.ones((), device=device)

    def norm_linear(
        self,
        source: Tensor,
        residual: Tensor | None,
        norm: Tensor,
        eps: float,
        weight: QuantizedMatrix,
        out: Tensor,
        *,
        factors: Tensor | None,
    ) -> Tensor | None:
        rounded, scales = self._rows(*source.shape)
        quantize_rows(source, rounded, scales, norm, eps, residual=residual, factors=factors)
        return self._multiply(rounded, scales, weight, out)

    def linear(
        self, source: Tensor, weight: QuantizedMatrix, out: Tensor, *, gated: bool, factors: Tensor | None
    ) -> Tensor | None:
        rounded, scales = self._rows(len(source), weight.shape[1])
        quantize_rows(source, rounded, scales, gated=gated, factors=factors)
        return self._multiply(rounded, scales, weight, out)

    def apply_scales(self, out: Tensor, factors: Tensor) -> None:
        apply_scales(out, self._scales[: len(out)], factors)

    def load_kernel(self, weight: QuantizedMatrix, rows: int, out: Tensor) -> None:
        self._multiply(*self._rows(rows, weight.shape[1]), weight, out)

    def _multiply(self, x: Tensor, scales: Tensor, weight: QuantizedMatrix, out: Tensor) -> Tensor | None:
        if len(x) > _MAX_UNSCALED_ROWS:
            scaled_mm(x, weight.values, out, scales[:, None], weight.factors[None, :])
            return None
        scaled_mm(x, weight.values, out, self._one, self._one)
        return weight.factors

    def _rows(self, num_tokens: int, width: int) -> tuple[Tensor, Tensor]:
        return self._rounded[: num_tokens * width].view(num_tokens, width), self._scales[:num_tokens]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedBuffers:
    """Inputs of linear layers with quantized weights."""

    inputs: Tensor  # [T, H]: normed hidden states, in the type that kernels multiply
    partial: Tensor  # [T, H]: outputs that are not yet added to the residual stream
    many: ManyRows

    @classmethod
    def empty(
        cls,
        spec: ModelSpec,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        matrices: Sequence[QuantizedMatrix | GroupwiseMatrix],
    ) -> QuantizedBuffers:
        """matrices: all quantized weights of the model."""
        few = min(tokens, max_small_rows(matrices))
        groupwise = [one for one in matrices if isinstance(one, GroupwiseMatrix)]
        return cls(
            inputs=torch.zeros(few, spec.hidden_size, dtype=operand_dtype(dtype), device=device),
            partial=torch.zeros(tokens, spec.hidden_size, dtype=dtype, device=device),
            many=ExpandedWeights(spec, tokens, dtype, device, groupwise)
            if groupwise
            else RoundedRows(spec, tokens, device),
        )


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of a GEMM's inputs: that to which quantized weights are converted without rounding."""
    return torch.float16 if dtype is torch.bfloat16 else dtype


@dataclass(slots=True, eq=False)
class QuantizedPass:
    """The linear layers of one forward pass. `x` is its residual stream; `partial` is not yet added to it. `factors`
    are those of the last GEMM's output, if its scales are not applied yet."""

    x: Tensor
    buffers: QuantizedBuffers
    workspace: LinearWorkspace
    group: RankGroup | None
    eps: float
    pdl: bool
    partial: Tensor | None = None
    factors: Tensor | None = None

    def norm_linear(self, weights: LinearWeights, out: Tensor, *, small: bool) -> None:
        """out = linear(norm(x)), with the gate's activation if `small`. `partial` is added to x first."""
        assert weights.norm is not None, "the norm of a quantized weight is not folded into it"
        source, residual = (self.x, None) if self.partial is None else (self.partial, self.x)
        self.partial = None
        if small:
            inputs = self.buffers.inputs[: len(self.x)]
            rms_norm(source, weights.norm, self.eps, inputs, residual=residual, pdl=self.pdl)
            self._linear(inputs, weights, out)
            return
        options = (source, residual, weights.norm, self.eps, weights.quantized, out)
        self.factors = self.buffers.many.norm_linear(*options, factors=self.factors)
        if weights.bias is not None or not weights.gated:  # attention does not apply them
            self._apply_scales(out)
        if weights.bias is not None:
            out.add_(weights.bias)

    def add_linear(self, weights: LinearWeights, source: Tensor, *, small: bool) -> None:
        """x += linear(source) if `small` and there is one rank; else `partial` = linear(source), which the next norm
        adds to x."""
        if not small:
            self._sum_many(weights, source)
        elif self.group is None:
            self._linear(source, weights, self.x, residual=self.x)
        else:
            out = self.buffers.partial[: len(source)]
            self._linear(source, weights, out)
            self.partial = self.group.all_reduce(out)

    def add_gated_linear(self, weights: LinearWeights, gate_up: Tensor) -> None:
        """As `add_linear` with many rows, of silu(gate) * up."""
        self._sum_many(weights, gate_up, gated=True)

    def _linear(self, source: Tensor, weights: LinearWeights, out: Tensor, residual: Tensor | None = None) -> None:
        tuning, matrix = quantized_tuning(weights, len(source)), weights.quantized
        workspace = self.workspace if tuning.split_k > 1 else None
        options = (out, tuning, weights.bias, weights.gated, residual, workspace, self.pdl)
        if isinstance(matrix, GroupwiseMatrix):
            groupwise_linear(source, matrix, *options)
        elif matrix is not None:
            quantized_linear(source, matrix, *options)

    def _sum_many(self, weights: LinearWeights, source: Tensor, *, gated: bool = False) -> None:
        out = self.buffers.partial[: len(source)]
        many = self.buffers.many
        self.factors = many.linear(source, weights.quantized, out, gated=gated, factors=self.factors)
        if weights.bias is not None or self.group is not None:
            self._apply_scales(out)
        if weights.bias is not None:
            out.add_(weights.bias)
        self.partial = out if self.group is None else self.group.all_reduce(out)

    def take_partial(self) -> Tensor | None:
        """`partial`, which the caller adds to x."""
        partial, self.partial = self.partial, None
        if partial is not None:
            self._apply_scales(partial)
        return partial

    def _apply_scales(self, out: Tensor) -> None:
        if self.factors is not None:
            self.buffers.many.apply_scales(out, self.factors)
            self.factors = None


def load_library_kernels(
    layers: Sequence[tuple[LinearWeights, Tensor]], buffers: QuantizedBuffers, sizes: Iterable[int]
) -> None:
    """Runs the library's GEMMs of some layers, each with a buffer for its output, for so many rows each: a kernel is
    loaded at first use."""
    for rows in sizes:
        for weights, out in layers:
            buffers.many.load_kernel(weights.quantized, rows, out[:rows])


def quantize_decoder(decoder: Decoder, quantization: str, format: KernelFormat | None = None) -> None:
    """Rounds the matrices of all layers, in place, one layer after the other; those that were stored so stay. Of a
    mixture of experts: those of the experts. What has no kernels, a plan has refused. format: of a checkpoint, so that
    a decoder without data has its kernels: where matrices differ in bits, the first half of the layers has the fewest.
    None: as `rounding_group` chooses. A model without experts has nothing in MXFP4."""
    if decoder.spec.has_experts:
        _quantize_experts(decoder, quantization, in_blocks=format is not None and format.group > 0)
        return
    if quantization == MXFP4.name:
        return
    chosen = WEIGHT_FORMATS.get(quantization, Q8)  # of a GGUF file: what has another format is rounded to this
    bits = format.bits if format is not None and format.bits else ((chosen.bits,),) * 4
    group = format.group if format is not None and format.group else None

    def rounded(weight: Tensor, bits: int) -> QuantizedMatrix | GroupwiseMatrix:
        if chosen is FP8:
            return quantize_fp8(weight)
        if chosen in GGUF_FORMATS:
            return keep_quantized(quantize(weight, bits))
        return quantize_int4(weight, group or rounding_group(decoder.whole_spec, chosen, decoder.shard.size))

    for index, layer in enumerate(decoder.layers):
        pick = min if 2 * index < len(decoder.layers) else max
        for linear, each in zip(layer.linears, bits, strict=True):
            if isinstance(linear.weight, Tensor):  # not stored so
                linear.weight = rounded(linear.weight, pick(each))
    decoder.precision = f"{decoder.precision}, weights in {title_of(quantization)}"


def keep_expanded(decoder: Decoder, free: int) -> None:
    """Keeps weights in groups also in the dtype of activations, if that takes little enough of the `free` bytes of
    memory: batches of many rows need not expand them."""
    linears = [linear for _, _, linear in decoder.linears()]
    if decoder.dtype.itemsize * sum(math.prod(one.weight.shape) for one in linears) > _MAX_EXPANDED_SHARE * free:
        return
    for one in linears:
        assert isinstance(one.weight, GroupwiseMatrix), "all matrices are in groups"
        one.weight = one.weight.with_expanded(decoder.dtype)
    decoder.precision = f"{decoder.precision}, for large batches also in {str(decoder.dtype).removeprefix('torch.')}"


def _quantize_experts(decoder: Decoder, quantization: str, *, in_blocks: bool) -> None:
    """in_blocks: FP8 as this rank has it of a checkpoint with a scale per block."""
    spec = decoder.spec
    gate_up, down = None, None
    if in_blocks and quantization == FP8.name:
        part = decoder.shard.aligned_part(decoder.whole_spec.expert_layers[0].size)
        gate_up = block_of_part(part.start, spec.expert_layers[0].size), block_of_part(0)
        down = block_of_part(0, spec.hidden_size), block_of_part(part.start)

    def rounded(weight: Matrix, block: tuple[int, int] | None) -> Matrix:
        if not isinstance(weight, Tensor):
            return weight  # stored so
        return quantize_mxfp4(weight) if quantization == MXFP4.name else quantize_fp8_experts(weight, block)

    for mlp in decoder.mixtures:
        mlp.expert_gate_up, mlp.expert_down = rounded(mlp.expert_gate_up, gate_up), rounded(mlp.expert_down, down)
    decoder.precision = f"{decoder.precision}, experts in {title_of(quantization)}"


def keepers(plan: WeightsPlan, spec: ModelSpec) -> dict[str, Keep]:
    """Of each matrix that stays as it is stored, how it is kept."""
    experts = partial(keep_experts, num_experts=spec.expert_layers[0].count) if spec.has_experts else keep
    return {
        one.name: experts if one.kind is MatrixKind.EXPERTS else keep for one in plan.matrices if one.packed is not None
    }


def keep(tensor: PackedTensor) -> QuantizedMatrix | GroupwiseMatrix:
    """A matrix of a checkpoint, on the device of the tensor."""
    match tensor:
        case Fp8Tensor():
            return QuantizedMatrix(tensor.values, tensor.scales.contiguous())
        case Int4Tensor():
            return pack_groupwise(tensor.values, tensor.scales, tensor.zeros, tensor.group)
        case QuantizedTensor():
            return keep_quantized(tensor)
    raise AssertionError(f"a plan keeps no {type(tensor).__name__}")


def keep_quantized(tensor: QuantizedTensor) -> GroupwiseMatrix:
    return pack_with_offsets(tensor.values, tensor.scales, tensor.offsets, bits=tensor.bits)


def keep_experts(tensor: PackedTensor, num_experts: int) -> Fp8Experts | Mxfp4Experts:
    """All experts of a layer behind each other, on the device of the tensor."""
    match tensor:
        case Fp8Tensor():
            return keep_fp8_experts(tensor, num_experts)
        case Mxfp4Tensor():
            return keep_mxfp4_experts(tensor, num_experts)
    raise AssertionError(f"a plan keeps no experts in {type(tensor).__name__}")


def keep_fp8_experts(tensor: Fp8Tensor, num_experts: int) -> Fp8Experts:
    num_rows, num_columns = tensor.values.shape
    scales = tensor.scales.view(num_experts, num_rows // num_experts // tensor.rows, -1).transpose(1, 2).contiguous()
    values = tensor.values.view(num_experts, -1, num_columns)
    return Fp8Experts(values, scales, tensor.rows, tensor.columns or num_columns)


def keep_mxfp4_experts(tensor: Mxfp4Tensor, num_experts: int) -> Mxfp4Experts:
    blocks, scales = (one.view(num_experts, -1, *one.shape[1:]) for one in (tensor.values, tensor.scales))
    return pack_mxfp4(blocks, scales)


def scaled_mm(x: Tensor, weight: Tensor, out: Tensor, scales: Tensor, factors: Tensor) -> None:
    """out [M, N] = x @ weightᵀ * scales * factors, of FP8 numbers. scales are [M, 1] and factors [1, N], or both are
    scalars."""
    if x.device.type == "cuda":
        torch._scaled_mm(
            x,
            weight.T,
            scale_a=scales,
            scale_b=factors,
            out_dtype=out.dtype,
            use_fast_accum=True,  # all sums in the tensor core, which keeps fewer bits of them (docs/log/gemms.md)
            out=out,
        )
    elif x.device.type == "cpu":
        out.copy_(x.float() @ weight.float().T * scales * factors)
