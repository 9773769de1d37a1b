"""Tiny random checkpoints: every family of the oracle test in every format that weights are stored in.

Weights are those of transformers with a fixed seed, rounded here. A matrix that a format cannot hold stays as it is, as
in published checkpoints; what a reader refuses is part of the record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.text.synthetic import synthetic_tokenizer
from tests.tiny_int4 import AWQ, GPTQ, GPTQ_V2, GROUP, PACKED, PACKED_ZEROS, stored

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))  # as pytest does for the tests there

from test_gguf import write_gguf
from test_oracle import CASES, SIZES, make_pair

VOCAB = 300
# Multiples of 32, which all formats can divide into groups; between two ranks, too.
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
SMALL_EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **CASES,
    "odd sizes": ("Llama", {}),  # of SIZES: no multiples of 32
    "odd sizes, experts": ("Qwen3Moe", CASES["qwen3-moe"][1]),
}
ARCHITECTURES = {  # in GGUF files
    "Llama": "llama", "Mistral": "llama", "Mixtral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3",
    "SmolLM3": "smollm3", "Gemma": "gemma", "Gemma2": "gemma2", "Gemma3": "gemma3", "Phi3": "phi3", "Olmo2": "olmo2",
    "Granite": "granite", "Qwen3Moe": "qwen3moe", "Qwen2Moe": "qwen2moe", "Olmoe": "olmoe", "GptOss": "gpt-oss",
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    },
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def options_of(family: str) -> dict[str, Any]:
    """Of the config: those of the oracle test, with fewer layers and other sizes where nothing depends on them."""
    _, options = FAMILIES[family]
    layers = {} if any("layer" in name for name in options) else {"num_hidden_layers": 2}
    if family.startswith("odd") or "long_factor" in options.get("rope_parameters", ()):
        return {**SIZES, "vocab_size": VOCAB, **layers, **options}
    experts = {name: size for name, size in SMALL_EXPERTS.items() if name in options}
    heads = {"head_dim": 32} if FAMILIES[family][0].startswith("Gemma") else {}  # CUDA needs a multiple of 16
    return {**SIZES, **options, **SMALL, **layers, **experts, **heads}


@cache
def _model(family: str, folder: Path, seed: int = 3) -> Any:
    """A model of transformers, saved to a folder."""
    saving = {"save_original_format": False} if "fused names" in family else {}
    prefix, _ = FAMILIES[family]
    theirs, _ = make_pair(folder, prefix, options_of(family), **saving)
    if seed != 3:
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.copy_(parameter.flip(0))
        theirs.save_pretrained(folder, **saving)
    (folder / "tokenizer.json").write_text(synthetic_tokenizer(VOCAB).to_json())  # that of a draft model is compared
    return theirs


def write_checkpoint(root: Path, family: str, format: str, *, seed: int = 3) -> Path:
    """The folder or file of a family in a format, written at first use."""
    plain = root / f"{_slug(family)}-{seed}"
    model = _model(family, plain, seed)
    if format == "plain":
        return plain
    path = root / f"{_slug(family)}-{seed}-{format}{'.gguf' if format == 'gguf' else ''}"
    if not path.exists():
        if format == "gguf":
            _write_gguf(path, model, ARCHITECTURES[FAMILIES[family][0]])
        else:
            config, quantize = FORMATS[format]
            _write_rounded(plain, path, config, quantize)
    return path


def _slug(family: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in family)


# ---------------------------------------------------------------------- safetensors

Rounded = Callable[[str, Tensor], dict[str, Tensor]]  # the name and the matrix: what is stored instead


def _write_rounded(plain: Path, path: Path, config: dict[str, Any], quantize: Rounded) -> None:
    path.mkdir()
    described = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    weights: dict[str, Tensor] = {}
    torch.manual_seed(7)
    for name, weight in sorted(load_file(plain / "model.safetensors").items()):
        is_linear = (
            name.endswith(".weight")
            and weight.dim() == 2
            and any(part in name for part in ("proj.", ".w1.", ".w2.", ".w3."))
        )
        is_experts = weight.dim() == 3 and name.endswith("proj")
        weights |= quantize(name, weight) if is_linear or is_experts else {name: weight}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path / "model.safetensors")


def _fp8(in_channels: bool = False, in_blocks: bool = False) -> Rounded:
    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        if weight.dim() == 3:
            return {name: weight}
        layer, scale = name.removesuffix(".weight"), weight.abs().max() / 448
        wide = scale = weight.abs().amax(1, keepdim=True) / 448 if in_channels else scale
        if in_blocks:
            blocks = [-(-size // 128) for size in weight.shape]
            scale = scale * (1 + torch.arange(blocks[0] * blocks[1]).view(blocks))
            wide = scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
        values = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {name: values, f"{layer}.weight_scale" + ("_inv" if in_blocks else ""): scale}

    return quantize


def _int4(config: dict[str, Any]) -> Rounded:
    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        if weight.dim() == 3 or weight.shape[1] % GROUP or weight.shape[0] % 8:
            return {name: weight}
        rows, columns = weight.shape
        in_groups = weight.view(rows, -1, GROUP)
        low, high = in_groups.amin(2), in_groups.amax(2)
        if config is PACKED:
            scales, zeros = (in_groups.abs().amax(2) / 7).half(), torch.full((rows, columns // GROUP), 8)
        else:
            scales = ((high - low) / 15).half()
            zeros = (-low / scales).round().clamp(1, 15).long()
        values = (in_groups / scales.float().unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 15)
        tensors = stored(values.view(rows, columns).to(torch.uint8), scales, zeros, config)
        return {name.removesuffix("weight") + suffix: tensor for suffix, tensor in tensors.items()}

    return quantize


def _mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    if weight.dim() == 2 or weight.shape[1] % 32:
        return {name: weight}
    count, columns, rows = weight.shape
    blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(121, 126, (count, rows, columns // 32), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


FORMATS: dict[str, tuple[dict[str, Any], Rounded]] = {
    "fp8": (FP8, _fp8()),
    "fp8-channel": (CHANNEL, _fp8(in_channels=True)),
    "fp8-block": (BLOCKS, _fp8(in_blocks=True)),
    **{
        name: (config, _int4(config))
        for name, config in (
            ("gptq", GPTQ),
            ("gptq-v2", GPTQ_V2),
            ("awq", AWQ),
            ("packed", PACKED),
            ("packed-zeros", PACKED_ZEROS),
        )
    },
    "mxfp4": (MXFP4, _mxfp4),
}


# ---------------------------------------------------------------------- GGUF


def _write_gguf(path: Path, model: Any, architecture: str) -> None:
    with _rounding():
        write_gguf(path, model, architecture, experts=gguf.GGMLQuantizationType.Q8_0)


@contextmanager
def _rounding() -> Iterator[None]:
    """Matrices of several types: those of one layer differ, and so do those of one name."""
    types = gguf.GGMLQuantizationType
    add = gguf.GGUFWriter.add_tensor

    def rounded(self: Any, name: str, value: np.ndarray, *arguments: Any, **options: Any) -> None:
        is_matrix = value.ndim == 2 and name.endswith(".weight") and "ffn_gate_inp" not in name
        if is_matrix and not arguments and "raw_dtype" not in options and value.shape[1] % 32 == 0:
            is_wide = "blk" not in name or "blk.0.ffn_down" in name or "blk.0.attn_v" in name
            kind = types.Q8_0 if is_wide else types.Q4_1 if "attn" in name else types.Q4_0
            options["raw_dtype"] = kind
            value = gguf.quantize(np.ascontiguousarray(value, dtype=np.float32), kind)
        add(self, name, value, *arguments, **options)

    with patch.object(gguf.GGUFWriter, "add_tensor", rounded):
        yield
