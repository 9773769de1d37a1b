from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.model.fetch import fetch_default


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file: fetched once per machine, then found in the cache."""
    return fetch_default()
