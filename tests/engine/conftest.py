from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.engine.build import build_engine
from paceline.engine.cuda import graphs as cuda_graphs
from paceline.engine.cuda import inputs as cuda_inputs
from paceline.engine.engine import Engine
from tests.kernels.bounds import checked_bounds


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A tiny random model, ready to answer."""
    made = build_engine(load="random", shape="tiny-llama", threads=1, kv_tokens=4096)
    yield made
    made.close()


@pytest.fixture
def in_bounds() -> Iterator[None]:
    with checked_bounds():
        yield


@pytest.fixture
def prompts_by_graph(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options for passes with prompts that are captured when first seen, with little padding: each costs a program."""
    monkeypatch.setattr(cuda_graphs, "FREQUENT", 1)
    monkeypatch.setattr(cuda_inputs, "_MORE_TILES", 3)
    monkeypatch.setattr(cuda_inputs, "_SPLITS", ((0, 0), (9, 4)))
    return {"prompt_sizes": (8, 16, 32)}
