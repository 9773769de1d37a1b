"""The models that the CUDA executor accepts."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import ConfigError
from paceline.engine.cuda.model import check_supported
from paceline.model.registry import SHAPES, shape
from paceline.model.spec import ModelSpec

OTHERS: dict[str, Any] = {
    "activation": "gelu_tanh",
    "norm_placement": "post",
    "attention_scale": 0.5,
    "score_cap": 50.0,
    "logit_cap": 30.0,
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_shape_is_supported(name: str) -> None:
    check_supported(shape(name))


@pytest.mark.parametrize("head_dim", [8, 48, 96])
def test_head_dim_must_be_a_power_of_two(head_dim: int) -> None:
    spec = replace(shape("tiny-qwen3"), head_dim=head_dim)
    with pytest.raises(
        ConfigError, match=f"head_dim is {head_dim}: device cuda needs a power of two .* choose device cpu"
    ):
        check_supported(spec)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelSpec) if field.name in OTHERS])
def test_options_without_a_kernel_are_refused(field: str) -> None:
    spec = replace(shape("tiny-qwen3"), **{field: OTHERS[field]})
    with pytest.raises(ConfigError, match=f"{field} is .*, which device cuda does not support: choose device cpu"):
        check_supported(spec)
