"""Adapters for tests: PEFT folders with random matrices, and the base model with them merged into its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.model.layout import stored_parts
from paceline.model.spec import ModelSpec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def linear_shapes(model: Any, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Rows and columns of the linear layers of a transformers model, by name, that adapters may change."""
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets and "expert" not in name
    }


def adapted_shapes(spec: ModelSpec, targets: Sequence[str] = ALL) -> dict[str, tuple[int, int]]:
    """The same for a spec."""
    parts = {name.removesuffix(".weight"): part.shape for name, part in stored_parts(spec).items()}
    return {
        name: (shape[0], shape[1])
        for name, shape in parts.items()
        if name.endswith(tuple(targets)) and "expert" not in name
    }


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    seed: int = 0,
    gain: float = 0.5,
    config: Mapping[str, Any] | None = None,
    rank_of: Mapping[str, int] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Writes a PEFT folder with A and B for these matrices, and returns them. gain: of what it adds, relative to its
    input. rank_of: other ranks, by the last part of a name."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (rows, columns) in shapes.items():
        own = (rank_of or {}).get(name.rpartition(".")[2], rank)
        a = torch.randn(own, columns, generator=generator) / math.sqrt(columns)
        b = torch.randn(rows, own, generator=generator) * gain
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        pairs[name] = (a, b)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **(config or {})}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return pairs


def merge(model: Any, pairs: Mapping[str, tuple[Tensor, Tensor]], scales: Mapping[str, float] | float) -> None:
    """W += scale · B A, in a transformers model."""
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            scale = scales if isinstance(scales, float) else scales[name.rpartition(".")[2]]
            model.get_submodule(name).weight += scale * (b @ a)
