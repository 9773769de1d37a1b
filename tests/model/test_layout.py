"""Sharded layouts: the ranks together hold the model, and their partial results add up to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from contiguous_cache import ContiguousCache, attention
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.layout import Shard, StoredTensor, stored_parts, target_shapes
from paceline.model.registry import shape
from paceline.model.spec import ModelError, ModelSpec
from paceline.model.weights import fuse_weights

BASE = replace(shape("tiny-llama"), num_heads=8)  # two KV heads, which four ranks replicate
OPTIONS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "QK-norm": {"qk_norm": True},
    "post norms": {"norm_placement": "both"},
    "as many KV heads as heads": {"num_kv_heads": 8},
}
CASES = list(product(OPTIONS, (1, 2, 4)))


def stored_model(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(part.shape, generator=generator) * 0.2 for name, part in stored_parts(spec).items()}


def load(spec: ModelSpec, stored: dict[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    def read(tensor: Tensor) -> StoredTensor:
        return StoredTensor(tuple(tensor.shape), tensor.nbytes, lambda: tensor)

    return fuse_weights(
        spec,
        {name: read(tensor) for name, tensor in stored.items()},
        source="memory",
        dtype="float32",
        device="cpu",
        progress=None,
        shard=shard,
    )


@pytest.mark.parametrize(("options", "size"), CASES)
def test_concatenated_shards_are_the_whole_tensors(options: str, size: int) -> None:
    spec = replace(BASE, **OPTIONS[options])
    stored = stored_model(spec)
    shards = [Shard(rank, size) for rank in range(size)]
    ranks = [load(spec, stored, shard) for shard in shards]
    for shard, weights in zip(shards, ranks, strict=True):
        assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == target_shapes(spec, shard)
    for name, whole in stored.items():
        part = stored_parts(spec)[name]
        pieces = []
        for shard, weights in zip(shards, ranks, strict=True):
            local = stored_parts(spec, shard).get(name)
            if local is not None:
                pieces.append(weights[local.target][local.row : local.row + local.num_rows])
        if name.endswith(("norm.weight", "layernorm.weight")):  # replicated
            assert len(pieces) == size and all((piece == whole).all() for piece in pieces)
        elif name.endswith(("o_proj.bias", "down_proj.bias")):  # once in the sum
            assert len(pieces) == 1 and torch.equal(pieces[0], whole)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat(pieces, dim=1), whole)
        elif ".k_proj." in name or ".v_proj." in name:
            step = max(1, size // spec.num_kv_heads)  # ranks that hold the same KV head
            assert all(torch.equal(piece, pieces[rank // step * step]) for rank, piece in enumerate(pieces))
            assert torch.equal(torch.cat(pieces[::step]), whole)
        else:
            assert torch.equal(torch.cat(pieces), whole)
        assert part.shape == tuple(whole.shape)


@pytest.mark.parametrize(("options", "size"), CASES)
def test_partial_outputs_of_all_ranks_add_up_to_the_layer(options: str, size: int) -> None:
    spec = replace(BASE, num_layers=1, layer_ropes=(), windows=(), **OPTIONS[options])
    stored = stored_model(spec)
    whole = Decoder(spec, load(spec, stored, Shard()))
    x, positions = torch.randn(9, spec.hidden_size), torch.arange(9)
    cos_sin = whole.rope_tables[0][positions].unsqueeze(1)
    expected = whole._attention(0, x, cos_sin, ContiguousCache(whole).attend), whole.layers[0].mlp(x)
    found = torch.zeros_like(x), torch.zeros_like(x)
    for rank in range(size):
        shard = Shard(rank, size)
        local = shard.spec(spec)
        decoder = Decoder(local, load(spec, stored, shard))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, local: ModelSpec = local) -> Tensor:
            return attention(local, layer, q, k, v)

        found[0].add_(decoder._attention(0, x, cos_sin, attend))
        found[1].add_(decoder.layers[0].mlp(x))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({"num_heads": 6}, 4, "num_heads is 6, which 4 ranks cannot split evenly: choose a number of ranks that"),
        ({"ffn_size": 111}, 2, "ffn_size is 111, which 2 ranks cannot split evenly"),
        ({"vocab_size": 513}, 2, "vocab_size is 513, which 2 ranks cannot split evenly"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "num_kv_heads is 6, which 4 ranks can neither split evenly nor"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change: dict[str, Any], size: int, message: str) -> None:
    spec = replace(BASE, **change)
    for function in (target_shapes, stored_parts):
        with pytest.raises(ModelError, match=message):
            function(spec, Shard(0, size))


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ModelError, match="shard rank is 2: give a rank from 0 to 1"):
        Shard(2, 2)
    with pytest.raises(ModelError, match="shard size is 0: give at least 1 rank"):
        Shard(0, 0)
