"""CudaModel refuses the model options that its kernels do not compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.engine.cuda.model import CudaModel
from paceline.model.registry import shape
from paceline.model.spec import ModelError
from paceline.model.weights import random_decoder


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "gelu_tanh"},
        {"attention_scale": 0.1},
        {"score_cap": 50.0},
        {"logit_cap": 30.0},
        {"norm_placement": "post"},
        {"norm_placement": "both"},
    ],
    ids=str,
)
def test_unsupported_option_is_refused(options: dict[str, Any]) -> None:
    decoder = random_decoder(replace(shape("tiny-qwen3"), **options), max_positions=16)
    ((name, value),) = options.items()
    with pytest.raises(ModelError) as raised:
        CudaModel(decoder, max_tokens=8, max_rows=4)
    assert str(raised.value) == f"{name} is {value!r}, which the CUDA executor does not support: choose device cpu."
