"""Sharded layouts: the ranks together hold the model, and their partial results add up to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from contiguous_cache import ContiguousCache, attention
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.files import ModelFiles
from paceline.model.layers import Activation, Dense, Experts
from paceline.model.layout import Shard, StoredTensor, stored_parts, target_shapes
from paceline.model.rope import rotation_at
from paceline.model.shapes import shape, vary
from paceline.model.spec import ModelError, ModelSpec
from paceline.model.weights import fuse_weights, random_weights, shard_weights
from paceline.parallel.threads import ThreadGroup

BASE = vary(shape("tiny-llama"), num_heads=8)  # two KV heads, which four ranks replicate
EXPERTS = Experts(count=3, per_token=2, size=40)
OPTIONS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "biases": {"qkv_bias": True, "out_bias": True, "ffn": Dense(size=112, bias=True)},
    "QK-norm": {"qk_norm": "heads"},
    "post norms": {"norms": "both"},
    "as many KV heads as heads": {"num_kv_heads": 8},
    "experts": {"ffns": (EXPERTS, Dense(size=112), EXPERTS, EXPERTS)},
    "gpt-oss": {
        "ffn": replace(EXPERTS, bias=True, activation=Activation(kind="clamped_swiglu")),
        "sinks": True, "qkv_bias": True, "out_bias": True,
    },
}  # fmt: skip
UNEVEN: dict[str, dict[str, Any]] = {
    "SmolLM2": {"num_heads": 9, "num_kv_heads": 3, "ffn": Dense(size=96), "vocab_size": 500},
    "shared expert": {
        "ffn": Experts(count=3, per_token=2, size=37, shared_size=21), "num_heads": 6, "num_kv_heads": 3,
    },
    "odd sizes": {"num_heads": 6, "num_kv_heads": 3, "ffn": Dense(size=37), "vocab_size": 513, "qkv_bias": True},
}  # fmt: skip
FULL_QK_NORM: dict[str, dict[str, Any]] = {"full QK-norm": {"qk_norm": "whole"}}
OPTIONS |= UNEVEN | FULL_QK_NORM
CASES = [*product(OPTIONS, (1, 2, 4)), *product(UNEVEN, (3, 5, 6))]


def stored_model(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(part.shape, generator=generator) * 0.2 for name, part in stored_parts(spec).items()}


def load(spec: ModelSpec, stored: dict[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    def read(tensor: Tensor) -> StoredTensor:
        return StoredTensor(tuple(tensor.shape), tensor.nbytes, lambda part: tensor[part])

    return fuse_weights(
        ModelFiles(Path("memory"), spec, {name: read(tensor) for name, tensor in stored.items()}),
        dtype="float32",
        device="cpu",
        progress=None,
        keep={},
        shard=shard,
    )


@pytest.mark.parametrize(("options", "size"), CASES)
def test_concatenated_shards_are_the_whole_tensors(options: str, size: int) -> None:
    spec = vary(BASE, **OPTIONS[options])
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
        mixer = spec.layers[0].mixer
        if mixer.qk_norm == "whole" and name.endswith(("q_norm.weight", "k_norm.weight")):
            is_key = ".k_norm." in name
            for shard, piece in zip(shards, pieces, strict=True):
                assert torch.equal(piece, whole.view(-1, mixer.head_dim)[shard.heads(mixer)[is_key]])
        elif name.endswith(
            ("norm.weight", "layernorm.weight", "mlp.gate.weight", "mlp.gate.bias", "shared_expert_gate.weight")
        ):  # replicated
            assert len(pieces) == size and all((piece == whole).all() for piece in pieces)
        elif name.endswith(("o_proj.bias", "down_proj.bias")):  # once in the sum
            assert len(pieces) == 1 and torch.equal(pieces[0], whole)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat(pieces, dim=1), whole)
        elif ".k_proj." in name or ".v_proj." in name:
            heads = [shard.heads(mixer)[1] for shard in shards]
            firsts = [rank for rank in range(size) if rank == 0 or heads[rank] != heads[rank - 1]]
            assert all(torch.equal(piece, pieces[heads.index(own)]) for own, piece in zip(heads, pieces, strict=True))
            assert torch.equal(torch.cat([pieces[rank] for rank in firsts]), whole)
        else:
            assert torch.equal(torch.cat(pieces), whole)
        assert part.shape == tuple(whole.shape)


# A norm over the heads of all ranks needs all of them at once: tests/parallel.
@pytest.mark.parametrize(("options", "size"), [case for case in CASES if case[0] not in FULL_QK_NORM])
def test_partial_outputs_of_all_ranks_add_up_to_the_layer(options: str, size: int) -> None:
    spec = vary(BASE, **OPTIONS[options]).with_layers([0])
    stored = stored_model(spec)
    whole = Decoder(spec, load(spec, stored, Shard()))
    x, positions = torch.randn(9, spec.hidden_size), torch.arange(9)
    rotation = rotation_at(whole.rope_tables[0], positions)
    attended = whole._attend(0, x, rotation, ContiguousCache(whole).attend)
    expected = whole.layers[0].out(attended), whole.layers[0].mlp(x)
    found = torch.zeros_like(x), torch.zeros_like(x)
    for group in ThreadGroup.of_size(size):
        decoder = Decoder(spec, load(spec, stored, group.shard), group=group)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, local: ModelSpec = decoder.spec
        ) -> Tensor:
            return attention(local.layers[layer].mixer, q, k, v, sinks)

        found[0].add_(decoder.layers[0].out(decoder._attend(0, x, rotation, attend)))
        found[1].add_(decoder.layers[0].mlp(x))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("options", "size"), CASES)
def test_random_weights_of_all_ranks_are_those_of_one(options: str, size: int) -> None:
    spec = vary(BASE, **OPTIONS[options])
    whole = random_weights(spec, seed=3)
    for rank in range(size):
        shard = Shard(rank, size)
        found, expected = random_weights(spec, seed=3, shard=shard), shard_weights(spec, whole, shard)
        assert {name: tuple(weight.shape) for name, weight in found.items()} == target_shapes(spec, shard)
        assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


@pytest.mark.parametrize(("heads", "size", "expected"), [
    ((9, 3), 3, [(3, 1)] * 3),
    ((9, 3), 2, [(3, 1), (6, 2)]),
    ((6, 2), 4, [(1, 1), (2, 1), (1, 1), (2, 1)]),
    ((16, 8), 2, [(8, 4), (8, 4)]),
    ((16, 2), 8, [(2, 1)] * 8),
])  # fmt: skip
def test_every_rank_has_as_many_query_heads_for_each_of_its_kv_heads(
    heads: tuple[int, int], size: int, expected: list[tuple[int, int]]
) -> None:
    spec = vary(BASE, num_heads=heads[0], num_kv_heads=heads[1])
    local = [Shard(rank, size).spec(spec).layers[0].mixer for rank in range(size)]
    assert [(one.num_heads, one.num_kv_heads) for one in local] == expected


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({"num_heads": 6}, 8, "num_heads is 6, which 8 ranks cannot divide among them: choose tp 6 or less"),
        ({"ffn": Dense(size=3)}, 4, "Dense.size is 3, which 4 ranks cannot divide"),
    ],
)
def test_more_ranks_than_there_are_parts_are_refused(change: dict[str, Any], size: int, message: str) -> None:
    spec = vary(BASE, **change)
    for function in (target_shapes, stored_parts):
        with pytest.raises(ModelError, match=message):
            function(spec, Shard(0, size))


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ModelError, match="shard rank is 2: give a rank from 0 to 1"):
        Shard(2, 2)
    with pytest.raises(ModelError, match="shard size is 0: give at least 1 rank"):
        Shard(0, 0)
