"""The models that the CUDA executor accepts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.config import ConfigError
from paceline.engine.cuda.model import check_supported
from paceline.model.registry import FAMILIES, SHAPES, shape


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_shape_is_supported(name: str) -> None:
    check_supported(shape(name))


@pytest.mark.parametrize("head_dim", [8, 20, 100])
def test_head_dim_must_be_a_multiple_of_16(head_dim: int) -> None:
    spec = replace(shape("tiny-qwen3"), head_dim=head_dim)
    with pytest.raises(
        ConfigError, match=f"head_dim is {head_dim}: device cuda needs a multiple of 16; choose device cpu"
    ):
        check_supported(spec)


def test_options_without_a_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.cuda.model._UNSUPPORTED_FIELDS", ("score_cap",))
    with pytest.raises(ConfigError, match=r"score_cap is 5\.0, which device cuda does not support: choose device cpu"):
        check_supported(shape("tiny-gemma2"))


def test_the_table_of_families_says_what_runs_on_a_gpu() -> None:
    for family in FAMILIES:
        assert family.gpu == any(spec.family == family.name for spec in SHAPES.values()), family.name
