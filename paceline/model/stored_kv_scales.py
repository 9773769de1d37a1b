"""Scales of an FP8 KV cache in a checkpoint (`kv_cache_scheme`): one for keys and one for values of each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.model.layout import Shard, StoredTensor
from paceline.model.spec import ModelError, ModelSpec

KV_SCALES = re.compile(r"\.self_attn\.([kv])_scale$")
# Of the outputs of k_proj and v_proj, of those of fused projections, and of a module of its own.
_OTHER_NAMES = re.compile(r"(?<=\.self_attn)\.(?:([kv])_proj\.(?:output|\1)|(?:qkv_proj|attn)\.([kv]))_scale$")
_OF_BOTH = re.compile(r"(?<=\.self_attn\.)kv_scale$")


def with_kv_scale_names(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by name, with one form of the names of scales."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if _OF_BOTH.search(name):
            found |= {_OF_BOTH.sub(f"{part}_scale", name): tensor for part in "kv"}
        else:
            found[_OTHER_NAMES.sub(lambda match: f".{match[1] or match[2]}_scale", name)] = tensor
    return found


def read_kv_scales(spec: ModelSpec, stored: Mapping[str, StoredTensor], shard: Shard, source: str) -> Tensor | None:
    """[layers, 2, 1] float32 of the layers of a stage; None if the model has no scales."""
    if not any(KV_SCALES.search(name) for name in stored):
        return None
    scales = torch.empty(spec.num_layers, 2, 1)
    for layer in range(spec.num_layers):
        for index, part in enumerate("kv"):
            name = f"model.layers.{layer}.self_attn.{part}_scale"
            if name not in stored:
                raise ModelError(f"{source} has scales of an FP8 KV cache and lacks {name}: the file is incomplete.")
            value = stored[name].read(()).float()
            if value.numel() != 1 or not (torch.isfinite(value) & (value > 0)).all():
                raise ModelError(f"{source} has {name} of shape {list(value.shape)}: expected one number above 0.")
            scales[layer, index] = value.reshape(())
    own = shard.layers(spec)
    return scales[own.start : own.stop]
