"""The weights of 4-bit safetensors: GPTQ, AWQ and compressed-tensors pack-quantized become one stored tensor each.

    of a layer X [N, K] in groups of g columns
    gptq   X.qweight [K/8, N]        low bits first; zeros along N, less 1 in the first format (checkpoint_format gptq)
           X.qzeros [K/g, N/8], X.scales [K/g, N], X.g_idx [K]: the group of a column
    awq    X.qweight [K, N/8]        in the order 0, 2, 4, 6, 1, 3, 5, 7, low bits first; zeros, too
           X.qzeros [K/g, N/8], X.scales [K/g, N]
    c-t    X.weight_packed [N, K/8]  low bits first; zeros along N
           X.weight_scale [N, K/g], X.weight_zero_point [N/8, K/g], X.weight_shape [2]

Integers have 32 bits, and eight weights. A weight is (value - zero) * scale. It can be read dequantized, on any device,
as it is stored (`Int4Tensor`), or as a CPU keeps it (`QuantizedTensor`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.model.layout import PackedForm, StoredTensor
from paceline.model.quantization_config import CheckpointFormat
from paceline.model.quantized import Int4Tensor
from paceline.model.spec import ModelError
from paceline.weight_formats import INT4

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the bits of columns 0 to 7 are
_MARKS = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_packed"}
_PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
}
_OPTIONAL = ("g_idx", "weight_shape")
_SYMMETRIC_ZERO = 8


def int4_tensors(
    stored: Mapping[str, StoredTensor], found: CheckpointFormat, source: str, *, has_data: bool = True
) -> dict[str, StoredTensor]:
    """The tensors of the files, with those of quantized layers replaced by one each. Shapes are checked, and the order
    of columns if there is more than headers."""
    result, mark = dict(stored), _MARKS[found.method]
    layers = [name.removesuffix(f".{mark}") for name in stored if name.endswith(f".{mark}")]
    if not layers:
        raise ModelError(f"{source} has no {mark}, which {found.method} weights are stored as: fetch the model again.")
    for layer in layers:
        parts = {}
        for part in _PARTS[found.method]:
            if part == "weight_zero_point" and found.symmetric:
                continue
            if (tensor := result.pop(f"{layer}.{part}", None)) is not None:
                parts[part] = tensor
            elif part not in _OPTIONAL:
                raise ModelError(f"{source} has {layer}.{mark} and lacks {layer}.{part}: the file is incomplete.")
        if has_data and found.desc_act and "g_idx" in parts:
            _check_order(layer, parts["g_idx"].read(()), parts["g_idx"].shape[0], found.group)
        result[f"{layer}.weight"] = _combined(layer, parts, found)
    return result


def _combined(layer: str, parts: Mapping[str, StoredTensor], found: CheckpointFormat) -> StoredTensor:
    mark, group = _MARKS[found.method], found.group
    packed = parts[mark].shape if len(parts[mark].shape) == 2 else (0, 0)
    rows, columns = {
        "gptq": (packed[1], 8 * packed[0]),
        "awq": (8 * packed[1], packed[0]),
        "compressed-tensors": (packed[0], 8 * packed[1]),
    }[found.method]
    if not rows or columns % group:
        raise ModelError(
            f"{layer} has {columns} columns, in groups of {group} by its quantization_config: only whole groups are "
            "supported; use the unquantized model, or a GGUF file of it."
        )
    by_group, words = (columns // group, rows), -(-rows // 8)
    expected = {"qzeros": (by_group[0], words), "scales": by_group, "g_idx": (columns,)}
    expected |= {"weight_scale": by_group[::-1], "weight_zero_point": (words, by_group[0]), "weight_shape": (2,)}
    for name, tensor in parts.items():
        if name != mark and tensor.shape != expected[name]:
            raise ModelError(
                f"{layer}.{name} has shape {list(tensor.shape)}, where {list(expected[name])} is expected: "
                "quantization_config and weights belong to different models."
            )

    def read_packed(part: tuple[slice, ...], device: str | torch.device) -> Int4Tensor:
        whole = _read(layer, {name: one.read(()).to(device) for name, one in parts.items()}, (rows, columns), found)
        return whole.part(part)

    def read(part: tuple[slice, ...]) -> Tensor:
        whole = read_packed((), "cpu").dequantize()
        return whole[part] if part else whole

    num_bytes = sum(one.num_bytes for one in parts.values())
    return StoredTensor((rows, columns), num_bytes, read, PackedForm(INT4, read_packed, group=group))


def _read(layer: str, parts: Mapping[str, Tensor], shape: tuple[int, int], found: CheckpointFormat) -> Int4Tensor:
    for name, tensor in parts.items():
        if name not in ("scales", "weight_scale") and tensor.dtype not in (torch.int32, torch.int64):
            raise ModelError(f"{layer}.{name} is stored as {tensor.dtype}, where int32 is expected.")
    rows, columns = shape
    if found.method == "compressed-tensors":
        stored_shape = parts["weight_shape"].tolist() if "weight_shape" in parts else [rows, columns]
        if stored_shape != [rows, columns]:
            raise ModelError(f"{layer}.weight_shape is {stored_shape}, and its weights are {[rows, columns]}.")
        values, scales = _unpacked(parts["weight_packed"], 1), parts["weight_scale"]
        zeros = torch.full_like(scales, _SYMMETRIC_ZERO, dtype=torch.uint8)
        if not found.symmetric:
            zeros = _unpacked(parts["weight_zero_point"], 0)[:rows]
        return Int4Tensor(values, scales, zeros, found.group)
    # Transposed while eight weights are one integer: bytes take twice the time.
    packed, packed_zeros = (parts[name].T.contiguous() for name in ("qweight", "qzeros"))
    if found.method == "awq":
        values, zeros = (_unpacked(one, 0, _AWQ_ORDER) for one in (packed, packed_zeros))
    else:
        values, zeros = _unpacked(packed, 1), _unpacked(packed_zeros, 0)[:rows] + found.zero_offset
        _check_order(layer, parts.get("g_idx"), columns, found.group)
    return Int4Tensor(values, parts["scales"].T, zeros, found.group)


def _unpacked(packed: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """The 4-bit numbers of 32-bit integers, in place of each along a dimension, as uint8."""
    numbers = [(packed >> 4 * place & 15).to(torch.uint8) for place in order]
    return torch.stack(numbers, dim=dim + 1).flatten(dim, dim + 1)


def _check_order(layer: str, g_idx: Tensor | None, columns: int, group: int) -> None:
    """Raises unless consecutive columns share a scale. With desc_act they do only if quantization kept their order."""
    if g_idx is not None and not torch.equal(g_idx.cpu().long(), torch.arange(columns) // group):
        raise ModelError(
            f"{layer}.g_idx is not in order (desc_act): groups of columns that are not consecutive are not supported; "
            "use a model with desc_act false, or the unquantized one."
        )
