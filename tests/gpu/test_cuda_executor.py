"""The whole engine on a GPU: right tokens and logits, and the same ones however it is overlapped or disturbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import checks
from paceline.checks import Lab

CHECKS: dict[str, Any] = {
    "check": {}, "logits": {}, "alone": {}, "soak": {"seconds": 20.0}, "long": {}, "tiny": {}, "swap": {},
}  # fmt: skip


def test_a_soak_with_host_memory_passes() -> None:
    """Pages leave and come back between random joins, aborts and retractions, however deep they lie."""
    options = {"host_kv_tokens": 100_000, "host_page_cost": 0.0, "max_swap_pages": 64}
    verdict = checks.check_soak(Lab("qwen3-0.6b", torch.device("cuda"), options=options), 20.0, kv_tokens=12_000)
    assert verdict.passed, verdict.text


@pytest.mark.parametrize("name", CHECKS)
def test_the_engine_passes(name: str) -> None:
    verdict = getattr(checks, name)(Lab("qwen3-0.6b", torch.device("cuda")), **CHECKS[name])
    assert verdict.passed, verdict.text
