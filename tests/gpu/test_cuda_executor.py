"""The whole engine on a GPU: correct tokens and logits, and the same tokens with overlap, aborts and retractions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import checks
from paceline.checks import CheckSetup

OPTIONS: dict[str, dict[str, Any]] = {"soak": {"seconds": 20.0}}


def test_a_soak_with_host_memory_passes() -> None:
    """Pages are spilled and fetched between random joins, aborts and retractions, however short the prefix is."""
    options = {"host_kv_tokens": 100_000, "host_page_cost": 0.0, "max_swap_pages": 64}
    result = checks.check_soak(CheckSetup("qwen3-0.6b", torch.device("cuda"), options=options), 20.0, kv_tokens=12_000)
    assert result.passed, result.text


@pytest.mark.parametrize("name", checks.CHECKS)
def test_the_engine_passes(name: str) -> None:
    result = checks.CHECKS[name](CheckSetup("qwen3-0.6b", torch.device("cuda")), **OPTIONS.get(name, {}))
    assert result.passed, result.text
