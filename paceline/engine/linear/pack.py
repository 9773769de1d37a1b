"""Packs the matrices of a model as its kernels read them: those stored in few bits, and those that are rounded.

Biases, norms, embedding and head stay in the dtype of the model. Of a mixture of experts, only the experts are
quantized.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from paceline.engine.precision import KernelFormat, rounding_group
from paceline.kernels.expert_weights import (
    Fp8Experts,
    Mxfp4Experts,
    pack_mxfp4,
    quantize_fp8_experts,
    quantize_mxfp4,
)
from paceline.kernels.groupwise_linear import GroupwiseMatrix, pack_groupwise, pack_with_offsets, quantize_int4
from paceline.kernels.quantized_linear import QuantizedMatrix, quantize_fp8
from paceline.model.decoder import Decoder
from paceline.model.fp8_tensors import block_of_part
from paceline.model.linear import Matrix
from paceline.model.quantized import Fp8Tensor, Int4Tensor, Mxfp4Tensor, PackedTensor, QuantizedTensor, quantize
from paceline.model.spec import ModelSpec
from paceline.model.weights import Keep
from paceline.model.weights_plan import WeightsPlan
from paceline.weight_formats import FP8, GGUF_FORMATS, MXFP4, Q8, WEIGHT_FORMATS, MatrixKind, title_of

_MAX_EXPANDED_SHARE = 0.4  # of the free memory; the KV cache needs the rest


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
        for linear, each in zip(layer.linears, bits, strict=True):
            if isinstance(linear.weight, Tensor):  # not stored so
                fewest = 2 * index < len(decoder.layers)
                linear.weight = rounded(linear.weight, min(each) if fewest else max(each))
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
