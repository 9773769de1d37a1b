"""Tiny models in 4-bit checkpoint formats, as Hugging Face folders: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_folder import save_tiny_model

GROUP = 32
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
GPTQ_V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**_WEIGHTS, "symmetric": True}}},
    "ignore": ["lm_head"],
}
PACKED_ZEROS = {
    **PACKED,
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**_WEIGHTS, "symmetric": False}}},
}
FORMATS = {"gptq": GPTQ, "gptq_v2": GPTQ_V2, "awq": AWQ, "packed": PACKED, "packed_zeros": PACKED_ZEROS}


def pack(numbers: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers from 0 to 15 along a dimension, the first in the bits of `order[0]` and so on, in an int32."""
    packed = torch.zeros_like(numbers.unflatten(dim, (-1, 8)).select(dim + 1, 0), dtype=torch.int64)
    for index, place in enumerate(order):
        packed |= numbers.unflatten(dim, (-1, 8)).select(dim + 1, index).long() << 4 * place
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def stored(values: Tensor, scales: Tensor, zeros: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a layer [N, K] in the format of a config, by their suffixes."""
    method = config["quant_method"]
    if method == "gptq":
        less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        return {
            "qweight": pack(values.T, 0),
            "qzeros": pack(zeros.T - less, 1),
            "scales": scales.T,
            "g_idx": (torch.arange(values.shape[1]) // config["group_size"]).int(),
        }
    if method == "awq":
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        return {"qweight": pack(values.T, 1, order), "qzeros": pack(zeros.T, 1, order), "scales": scales.T}
    found = {
        "weight_packed": pack(values, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(values.shape),
    }
    symmetric = config["config_groups"]["group_0"]["weights"]["symmetric"]
    return found if symmetric else {**found, "weight_zero_point": pack(zeros, 0)}


def save_int4(path: Path, config: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """A folder with linear layers in 4 bits; returns their dequantized weights. options: of the model's config."""
    save_tiny_model(path, vocab_size=512, options=options)
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    weights, wanted = load_file(path / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in weights if "proj" in name]:
        rows, columns = weights.pop(name).shape
        groups = (rows, columns // GROUP)
        values = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
        scales = (0.02 + 0.05 * torch.rand(groups, generator=generator)).half()
        zeros = torch.randint(1, 16, groups, generator=generator)
        if config == PACKED:
            zeros = torch.full(groups, 8)
        for suffix, tensor in stored(values, scales, zeros, config).items():
            weights[name.replace("weight", suffix)] = tensor.contiguous()
        wide = (values.float() - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)
        wanted[name] = wide
    save_file(weights, path / "model.safetensors")
    return wanted


def change_weights(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Adds, replaces or removes (None) tensors in the file of a folder."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
