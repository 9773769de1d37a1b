"""The values of the tensors in a GGUF file: dequantized by the `gguf` package, or kept in 4 or 8 bits.

These types are weights with a scale and an offset for every 32 columns, and are kept:

    Q4_0, Q4_1, Q4_K                 4 bits     the scales of Q4_K, products of two numbers, are rounded to float16
    Q8_0, Q5_0, Q5_1, Q5_K           8 bits     the same
    Q6_K and all others              8 bits     rounded again: at most 1/254 of the largest value of a group

torch is imported by the functions that need it: a spec is read before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.model.gguf_file import GGUFFile, TensorInfo, num_stored_bytes
from paceline.model.spec import ModelError
from paceline.weight_formats import Q4, Q8

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paceline.model.layout import PackedForm
    from paceline.model.quantized import PackedTensor, QuantizedTensor

Bytes = npt.NDArray[np.uint8]
GROUP = 32  # columns with one scale


def dequantize(file: GGUFFile, info: TensorInfo) -> Tensor:
    """One tensor in float32, or in its stored 16-bit type."""
    import torch
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(info.type_id)
    raw = _stored_bytes(file, info)
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        values = raw.view(np.float32 if kind == GGMLQuantizationType.F32 else np.float16)
        return torch.from_numpy(values.reshape(info.shape).copy())
    if kind == GGMLQuantizationType.BF16:
        return torch.from_numpy(raw.view(np.int16).reshape(info.shape).copy()).view(torch.bfloat16)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        rows = raw.reshape(*info.shape[:-1], info.shape[-1] // block * block_bytes)
        return torch.from_numpy(dequantize(rows, kind))
    except NotImplementedError:
        raise ModelError(
            f"{info.name} is stored as {kind.name}, which is not supported: use a Q4_K or Q8_0 file."
        ) from None


def read_quantized(file: GGUFFile, info: TensorInfo) -> QuantizedTensor:
    """One matrix, in the bits it is stored in where that is possible."""
    import torch
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    from paceline.model.quantized import QuantizedTensor, quantize, to_half_precision

    kind = GGMLQuantizationType(info.type_id)
    unpack = _UNPACKERS.get(kind.name)
    if unpack is None:
        return quantize(dequantize(file, info), 8)
    raw = _stored_bytes(file, info)
    bits, values, scales, offsets = unpack(raw.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    rows = info.shape[0]
    return QuantizedTensor(
        bits,
        torch.from_numpy(values.astype(np.int8, copy=False).reshape(rows, -1)),
        to_half_precision(torch.from_numpy(np.ascontiguousarray(scales, np.float32).reshape(rows, -1))),
        to_half_precision(torch.from_numpy(np.ascontiguousarray(offsets, np.float32).reshape(rows, -1))),
    )


def _stored_bytes(file: GGUFFile, info: TensorInfo) -> Bytes:
    return np.frombuffer(file.parts[info.part], dtype=np.uint8, count=num_stored_bytes(info), offset=info.offset)


def packed_form(info: TensorInfo, read: Callable[[tuple[slice, ...], str | torch.device], PackedTensor]) -> PackedForm:
    """read: `read_quantized`, and what the family needs."""
    from gguf.constants import GGMLQuantizationType

    from paceline.model.layout import PackedForm

    kind = GGMLQuantizationType(info.type_id).name
    format = Q4 if kind in ("Q4_0", "Q4_1", "Q4_K") else Q8
    return PackedForm(format, read, group=GROUP, is_stored=kind not in ("F32", "F16", "BF16", "F64"))


# ---------------------------------------------------------------------- blocks of GGUF files

# Bits, values, scales and offsets.
_Unpacked = tuple[int, npt.NDArray[np.generic], npt.NDArray[np.floating], npt.NDArray[np.floating]]


def _halves(blocks: Bytes, at: int) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """The low halves of all bytes of a block, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """32 bits as the values 0 and 16."""
    bits: Bytes = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits * np.uint8(16)


def _q4_0(blocks: Bytes) -> _Unpacked:
    scales = _halves(blocks, 0)
    return 4, _nibbles(blocks[:, 2:]), scales, -8 * scales


def _q4_1(blocks: Bytes) -> _Unpacked:
    return 4, _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> _Unpacked:
    scales = _halves(blocks, 0)
    values = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.int8) - np.int8(16)
    return 8, values, scales, np.zeros_like(scales)


def _q5_1(blocks: Bytes) -> _Unpacked:
    return 8, _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> _Unpacked:
    scales = _halves(blocks, 0)
    return 8, np.ascontiguousarray(blocks[:, 2:]).view(np.int8), scales, np.zeros_like(scales)


def _k_scales(blocks: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales and offsets of the eight groups of a block: 6 bits each, in 12 bytes, times those of the block."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    offsets = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1)
    return scales * _halves(blocks, 0), offsets * -_halves(blocks, 2)


def _q4_k(blocks: Bytes) -> _Unpacked:
    return 4, _nibbles(blocks[:, 16:].reshape(-1, 4, GROUP)), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> _Unpacked:
    # Bit g of byte i: the fifth bit of value i of group g.
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1) << 4
    return 8, _nibbles(blocks[:, 48:].reshape(-1, 4, GROUP)).reshape(-1, 8, GROUP) | fifth, *_k_scales(blocks)


_UNPACKERS: dict[str, Callable[[Bytes], _Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
