from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.engine.build import build_engine
from paceline.engine.engine import Engine


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A tiny random model, ready to answer."""
    made = build_engine(load="random", shape="tiny-llama", threads=1, kv_tokens=4096)
    yield made
    made.close()
