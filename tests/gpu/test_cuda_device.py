"""The whole engine on a GPU: right tokens and logits, and the same ones however it is overlapped or disturbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.bench import checks
from paceline.bench.checks import Lab

CHECKS: dict[str, Any] = {
    "check": {}, "logits": {}, "alone": {}, "soak": {"seconds": 20.0}, "long": {}, "tiny": {},
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_the_engine_passes(name: str) -> None:
    verdict = getattr(checks, name)(Lab("qwen3-0.6b", torch.device("cuda")), **CHECKS[name])
    assert verdict.passed, verdict.text
