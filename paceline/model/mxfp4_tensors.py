"""The experts of MXFP4 safetensors (gpt-oss): X_blocks and X_scales become one stored tensor X.weight.

    X_blocks [E, rows, columns / 32, 16] uint8      two numbers (e2m1) in a byte, the first in its low half
    X_scales [E, rows, columns / 32] uint8          s of 2^(s - 127), the factor of 32 numbers

It can be read dequantized, on any device, or as it is stored. Every number is exact in bfloat16 and float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.model.layout import PackedForm, StoredTensor
from paceline.model.quantized import Mxfp4Tensor
from paceline.model.spec import ModelError
from paceline.weight_formats import MXFP4

BLOCK = 32  # numbers with one scale
_MAX_SCALE = 240  # of those that kernels multiply with; no model has weights of 2^113
_BIAS = 127
# e2m1: a sign, two bits of exponent, one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., 32 n] float32 of blocks [..., n, 16] and scales [..., n]."""
    values = torch.tensor(_VALUES)
    numbers = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1).flatten(-2)
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - _BIAS).flatten(-2)


def mxfp4_tensors(stored: Mapping[str, StoredTensor], source: str) -> dict[str, StoredTensor]:
    """The tensors of the files, with blocks and scales replaced by one each. Shapes are checked."""
    found: dict[str, StoredTensor] = {}
    is_any = False
    for name, tensor in stored.items():
        if name.endswith("_scales"):
            if f"{name.removesuffix('_scales')}_blocks" not in stored:
                raise ModelError(f"{source} has {name} and lacks its blocks: the file is incomplete.")
            continue
        if not name.endswith("_blocks"):
            found[name] = tensor
            continue
        matrix, is_any = name.removesuffix("_blocks"), True
        scales = stored.get(f"{matrix}_scales")
        if scales is None:
            raise ModelError(f"{source} has {name} and lacks {matrix}_scales: the file is incomplete.")
        found[f"{matrix}.weight"] = _combined(matrix, tensor, scales)
    if not is_any:
        raise ModelError(f"{source} has no MXFP4 blocks, which its config names: fetch the model again.")
    return found


def _combined(name: str, blocks: StoredTensor, scales: StoredTensor) -> StoredTensor:
    if len(blocks.shape) != 4 or blocks.shape[-1] != BLOCK // 2:
        raise ModelError(f"{name} has MXFP4 blocks of shape {list(blocks.shape)}, where [E, rows, n, 16] is expected.")
    if scales.shape != blocks.shape[:-1]:
        raise ModelError(
            f"{name} has MXFP4 scales of shape {list(scales.shape)}, where {list(blocks.shape[:-1])} is expected."
        )
    shape = (*blocks.shape[:2], blocks.shape[2] * BLOCK)

    def read_blocks(part: tuple[slice, ...]) -> tuple[Tensor, Tensor, slice]:
        """Whole blocks, with their scales, and where the columns are in them. Whole rows are read, since files have no
        steps: gate and up are every second row."""
        experts, rows, columns = (*part, *(slice(None),) * (3 - len(part)))
        first, stop, _ = columns.indices(shape[2])
        begin, end, step = rows.indices(shape[1])
        source = (experts, slice(begin, end), slice(first // BLOCK, -(-stop // BLOCK)))
        inside = slice(first % BLOCK, first % BLOCK + stop - first)
        return blocks.read(source)[:, ::step], scales.read(source)[:, ::step], inside

    def read(part: tuple[slice, ...]) -> Tensor:
        found, own_scales, inside = read_blocks(part)
        return dequantize_mxfp4(found, own_scales)[..., inside]

    def read_packed(part: tuple[slice, ...], device: str | torch.device) -> Mxfp4Tensor:
        found, own_scales, inside = read_blocks(part)
        assert inside.start == inside.stop % BLOCK == 0, "a plan keeps whole blocks only"
        if int(own_scales.max()) > _MAX_SCALE:
            raise ModelError(f"{name} has a scale of 2^{int(own_scales.max()) - _BIAS}: set quantization to none.")
        return Mxfp4Tensor(found.to(device), own_scales.to(device))

    num_bytes = blocks.num_bytes + scales.num_bytes
    return StoredTensor(shape, num_bytes, read, PackedForm(MXFP4, read_packed, group=BLOCK))
