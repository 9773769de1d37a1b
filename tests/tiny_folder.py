"""A tiny model with random weights, as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.model.config_json import spec_from_config
from paceline.model.layout import stored_parts
from paceline.text.synthetic import synthetic_tokenizer

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 160, "moe_intermediate_size": 192, "num_experts": 3,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 1, "norm_topk_prob": True,
}  # fmt: skip


def save_tiny_model(
    path: Path,
    *,
    vocab_size: int = 300,
    num_tokens: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """num_tokens: of the tokenizer; default: as many as the model has. options: of the config."""
    path.mkdir()
    config = {**_CONFIG, "vocab_size": vocab_size, **(options or {})}
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    parts = stored_parts(spec_from_config(config)).items()
    weights = {name: torch.randn(part.shape, generator=generator) * 0.3 for name, part in parts}
    save_file(weights, path / "model.safetensors")
    (path / "tokenizer.json").write_text(synthetic_tokenizer(num_tokens or vocab_size).to_json())
    return path
