"""Linear layers with quantised weights on a GPU: which kernel computes them, by format and number of rows.

    a layer, few rows:   norm -> qkv -> attention -> out [+ x] -> norm -> gate,up silu -> down [+ x]
    FP8, many rows:      [+ x, norm, round] qkv -> attention -> [round] out -> [+ x, norm, round] gate,up
                         -> [silu, round] down

With few rows a GEMM only reads its weight: it is converted in registers, and activations stay in 16 bits
(kernels/quantised_linear.py). With many rows FP8 weights are multiplied with activations that are rounded to FP8, with
a scale per row, by the library's kernel: twice the rate of 16 bits.

Norms are not folded into quantised weights: they would have to be rounded again. Biases, norms, embedding and head stay
in the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.config import ConfigError
from paceline.engine.cuda.linear_weights import LinearWeights
from paceline.kernels.linear import LinearTuning, LinearWorkspace
from paceline.kernels.quantise_rows import quantise_rows
from paceline.kernels.quantised_linear import QuantisedMatrix, quantise_fp8, quantised_linear
from paceline.kernels.rms_norm import rms_norm
from paceline.model.decoder import Decoder, Mlp
from paceline.model.quantised import Fp8Tensor
from paceline.model.rank_group import RankGroup
from paceline.model.spec import ModelSpec

MAX_SMALL_ROWS = 16  # rows up to which weights are converted in registers


def quantised_tuning(rows: int, columns: int, gated: bool) -> LinearTuning:
    """The fastest of nine tiles for the linear layers of Qwen3-14B at one row on an H200 (docs/log/gemms.md)."""
    return LinearTuning(16, 64, 128, 4, 4, 1 if gated else 4)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedBuffers:
    """Inputs of linear layers with quantised weights."""

    inputs: Tensor  # [T, H]: normed hidden states, in the type that kernels multiply
    rounded: Tensor  # [T, W] FP8, of the widest input
    row_scales: Tensor  # [T] float32
    partial: Tensor  # [T, H]: outputs that are not yet added to the residual stream

    @classmethod
    def empty(cls, spec: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device) -> QuantisedBuffers:
        widest = max(spec.hidden_size, spec.q_size, spec.ffn_size)
        return cls(
            inputs=torch.zeros(tokens, spec.hidden_size, dtype=operand_dtype(dtype), device=device),
            rounded=torch.zeros(tokens * widest, dtype=torch.float8_e4m3fn, device=device),
            row_scales=torch.ones(tokens, device=device),
            partial=torch.zeros(tokens, spec.hidden_size, dtype=dtype, device=device),
        )

    def rows(self, num_tokens: int, width: int) -> tuple[Tensor, Tensor]:
        return self.rounded[: num_tokens * width].view(num_tokens, width), self.row_scales[:num_tokens]


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of a GEMM's inputs: that to which quantised weights are converted without rounding."""
    return torch.float16 if dtype is torch.bfloat16 else dtype


@dataclass(slots=True, eq=False)
class QuantisedPass:
    """The linear layers of one forward pass. `x` is its residual stream; `partial` is not yet added to it."""

    x: Tensor
    buffers: QuantisedBuffers
    workspace: LinearWorkspace
    group: RankGroup | None
    eps: float
    pdl: bool
    partial: Tensor | None = None

    def norm_linear(self, weights: LinearWeights, out: Tensor, *, small: bool) -> None:
        """out = linear(norm(x)), with the gate's activation if `small`. `partial` is added to x first."""
        assert weights.norm is not None, "the norm of a quantised weight is not folded into it"
        source, residual = (self.x, None) if self.partial is None else (self.partial, self.x)
        self.partial = None
        if small:
            inputs = self.buffers.inputs[: len(self.x)]
            rms_norm(source, weights.norm, self.eps, inputs, residual=residual, pdl=self.pdl)
            self._linear(inputs, weights, out)
            return
        rounded, scales = self.buffers.rows(len(self.x), self.x.shape[1])
        quantise_rows(source, rounded, scales, weights.norm, self.eps, residual=residual)
        scaled_mm(rounded, scales, _matrix(weights), out)
        if weights.bias is not None:
            out.add_(weights.bias)

    def add_linear(self, weights: LinearWeights, source: Tensor, *, small: bool) -> None:
        """x += linear(source) if `small`; else `partial` = linear(source), which the next norm adds to x."""
        if small:
            self._linear(source, weights, self.x, residual=self.x)
        else:
            self._sum_rounded(weights, source)

    def add_gated_linear(self, weights: LinearWeights, gate_up: Tensor) -> None:
        """As `add_linear` with many rows, of silu(gate) * up."""
        self._sum_rounded(weights, gate_up, gated=True)

    def _linear(self, source: Tensor, weights: LinearWeights, out: Tensor, residual: Tensor | None = None) -> None:
        tuning = quantised_tuning(len(source), weights.columns, weights.gated)
        workspace = self.workspace if tuning.split_k > 1 else None
        quantised_linear(
            source, _matrix(weights), out, tuning, weights.bias, weights.gated, residual, workspace, pdl=self.pdl
        )

    def _sum_rounded(self, weights: LinearWeights, source: Tensor, *, gated: bool = False) -> None:
        weight = _matrix(weights)
        rounded, scales = self.buffers.rows(len(source), weight.shape[1])
        quantise_rows(source, rounded, scales, gated=gated)
        out = self.buffers.partial[: len(source)]
        scaled_mm(rounded, scales, weight, out)
        if weights.bias is not None:
            out.add_(weights.bias)
        self.partial = out if self.group is None else self.group.all_reduce(out)


def load_library_kernels(
    layers: Sequence[tuple[LinearWeights, Tensor]], buffers: QuantisedBuffers, sizes: Iterable[int]
) -> None:
    """Runs the library's GEMMs of some layers, each with a buffer for its output, for so many rows each: a kernel is
    loaded at first use."""
    for rows in sizes:
        for weights, out in layers:
            weight = _matrix(weights)
            scaled_mm(*buffers.rows(rows, weight.shape[1]), weight, out[:rows])


def quantise_decoder(decoder: Decoder) -> None:
    """Rounds the matrices of all layers to FP8, in place, one layer after the other."""
    layers: list[Any] = decoder.layers
    spec = decoder.spec
    if spec.norm_placement != "pre" or spec.activation != "silu":
        raise ConfigError(
            f"quantization is 'fp8', norm_placement {spec.norm_placement!r} and activation {spec.activation!r}: FP8 "
            "weights need norms before blocks and silu; set quantization to none."
        )
    for index, layer in enumerate(layers):
        if type(layer.mlp) is not Mlp:
            raise ConfigError("quantization is 'fp8' and the model has a mixture of experts: set it to none.")
        if isinstance(layer.qkv, QuantisedMatrix):
            continue  # stored in FP8
        gate_up: Any = quantise_fp8(layer.mlp.gate_up)
        down: Any = quantise_fp8(layer.mlp.down)
        mlp = replace(layer.mlp, gate_up=gate_up, down=down)
        layers[index] = replace(layer, qkv=quantise_fp8(layer.qkv), out=quantise_fp8(layer.out), mlp=mlp)
    decoder.precision = f"{decoder.precision}, weights in FP8"


def keep_fp8(tensor: Fp8Tensor, *, device: str | torch.device) -> QuantisedMatrix:
    """A matrix of an FP8 checkpoint on a device."""
    return QuantisedMatrix(tensor.values.to(device), tensor.scales.to(device).contiguous())


def scaled_mm(x: Tensor, scales: Tensor, weight: QuantisedMatrix, out: Tensor) -> None:
    """out [M, N] = (x * scales) @ weightᵀ, of FP8 numbers."""
    if x.device.type == "cuda":
        torch._scaled_mm(
            x,
            weight.values.T,
            scale_a=scales[:, None],
            scale_b=weight.factors[None, :],
            out_dtype=out.dtype,
            use_fast_accum=False,  # sums of 128 numbers in the tensor core, then in float32
            out=out,
        )
    elif x.device.type == "cpu":
        out.copy_(x.float() @ weight.values.float().T * scales[:, None] * weight.factors)


def _matrix(weights: LinearWeights) -> QuantisedMatrix:
    assert weights.quantised is not None, "these weights are not quantised"
    return weights.quantised
