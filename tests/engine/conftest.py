from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.engine.build import build_engine
from paceline.engine.engine import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A tiny random model, ready to answer."""
    made = build_engine(load="random", shape="tiny-llama", threads=1, kv_tokens=4096)
    yield made
    made.close()
