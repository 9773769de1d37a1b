"""The models that the CUDA executor accepts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.config import ConfigError
from paceline.engine.cuda.model import check_supported
from paceline.model.layers import Dense
from paceline.model.registry import FAMILIES
from paceline.model.shapes import SHAPES, shape, vary
from paceline.model.spec import ModelError


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_shape_is_supported(name: str) -> None:
    check_supported(shape(name))


@pytest.mark.parametrize("head_dim", [8, 20, 100])
def test_head_dim_must_be_a_multiple_of_16(head_dim: int) -> None:
    spec = vary(shape("tiny-qwen3"), head_dim=head_dim)
    with pytest.raises(
        ConfigError, match=f"head_dim is {head_dim}: device cuda needs a multiple of 16; choose device cpu"
    ):
        check_supported(spec)


def test_layers_may_differ_in_attention_and_in_nothing_that_sizes_a_buffer() -> None:
    spec = shape("tiny-llama")
    first, other = spec.layers[0], replace(spec.layers[0].mixer, window=9, rope=None, score_cap=3.0, scale=0.2)
    check_supported(replace(spec, layers=(first, replace(first, mixer=other))))
    for layer, name in (
        (replace(first, mixer=replace(other, num_heads=4)), "Attention.num_heads is 6 in some layers and 4 in others"),
        (replace(first, ffn=Dense(size=96)), "Dense.size is 112 in some layers and 96 in others"),
        (replace(first, norms="both"), "LayerSpec.norms is 'pre' in some layers and 'both' in others"),
    ):
        with pytest.raises(ModelError, match=f"{name}, which device cuda does not support: choose device cpu"):
            check_supported(replace(spec, layers=(first, layer)))


def test_the_table_of_families_says_what_runs_on_a_gpu() -> None:
    for family in FAMILIES:
        assert family.gpu == any(spec.family == family.name for spec in SHAPES.values()), family.name
