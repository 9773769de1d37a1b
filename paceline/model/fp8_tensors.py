"""The weights of FP8 safetensors: X.weight, and X.weight_scale or X.weight_scale_inv, become one stored tensor.

It can be read dequantized, on any device, or as it is stored: with a scale per row, or, of experts, with a scale per
block. Scales of activations (X.input_scale) are not used: activations are rounded with scales of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from paceline.model.layout import PackedForm, StoredTensor
from paceline.model.quantization_config import CheckpointFormat
from paceline.model.quantized import Fp8Tensor
from paceline.model.spec import ModelError
from paceline.weight_formats import FP8

BLOCK = FP8.block  # rows and columns of a block
_SCALES = ("weight_scale", "weight_scale_inv")


def fp8_tensors(stored: Mapping[str, StoredTensor], found: CheckpointFormat, source: str) -> dict[str, StoredTensor]:
    """The tensors of the files, with those of quantized layers replaced by one each. Shapes are checked."""
    result = dict(stored)
    is_any = False
    for name in stored:
        layer, _, suffix = name.rpartition(".")
        if suffix not in _SCALES:
            continue
        weight = stored.get(f"{layer}.weight")
        if weight is None:
            raise ModelError(f"{source} has {name} and lacks {layer}.weight: the file is incomplete.")
        is_any = True
        for used in (name, f"{layer}.input_scale"):
            result.pop(used, None)
        result[f"{layer}.weight"] = _combined(layer, weight, stored[name], found)
    if not is_any:
        raise ModelError(f"{source} has no scales of FP8 weights, which its config names: fetch the model again.")
    for name, tensor in result.items():
        if tensor is stored[name] and tensor.num_bytes == math.prod(tensor.shape):  # would be read without a scale
            raise ModelError(f"{source} stores {name} in 8 bits and lacks its weight_scale: the file is incomplete.")
    return result


def _combined(layer: str, weight: StoredTensor, scale: StoredTensor, found: CheckpointFormat) -> StoredTensor:
    rows, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
    expected = {(), (1,), (rows,), (rows, 1)}
    if found.blocks:
        expected = {(-(-rows // BLOCK), -(-columns // BLOCK))}
    if scale.shape not in expected:
        shapes = " or ".join(str(list(shape)) for shape in sorted(expected))
        raise ModelError(f"{layer} has FP8 scales of shape {list(scale.shape)}, where {shapes} is expected.")

    def read_values(source: tuple[slice, ...]) -> Tensor:
        values = weight.read(source)
        if values.dtype != torch.float8_e4m3fn:
            raise ModelError(f"{layer}.weight is stored as {values.dtype}, where float8_e4m3fn is expected.")
        return values

    def read(source: tuple[slice, ...]) -> Tensor:
        scales = scale.read(()).float()
        if found.blocks:
            scales = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        else:
            scales = scales.reshape(-1, 1).expand(rows, columns)
        return read_values(source).float() * (scales[source] if source else scales)

    def read_packed(source: tuple[slice, ...], device: str | torch.device) -> Fp8Tensor:
        values, scales = read_values(source).to(device), scale.read(()).float()
        if not found.blocks:
            scales = scales.reshape(-1).expand(rows)
            return Fp8Tensor(values, (scales[source[:1]] if source else scales).to(device))
        own_rows, own_columns = (*source, *(slice(None),) * (2 - len(source)))
        (first, end, _), (first_column, end_column, _) = own_rows.indices(rows), own_columns.indices(columns)
        height, width = block_of_part(first, end - first), block_of_part(first_column)
        scales = scales.repeat_interleave(BLOCK // height, 0)[first // height : end // height]
        scales = scales.repeat_interleave(BLOCK // width, 1)[:, first_column // width : -(-end_column // width)]
        return Fp8Tensor(values, scales.to(device), height, width)

    size = BLOCK if found.blocks else 0
    packed = PackedForm(FP8, read_packed, group=size, block_rows=size or 1)
    return replace(weight, num_bytes=weight.num_bytes + scale.num_bytes, read=read, packed=packed)


def block_of_part(*sizes: int) -> int:
    """Rows or columns with one scale, of a part of a matrix with blocks: `sizes` are its offset and, of rows, their
    number. Blocks that are cut are divided, so that a part has whole ones, except for the last columns."""
    return math.gcd(BLOCK, *sizes)
