from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.engine.build import build_engine
from paceline.engine.cuda import inputs as cuda_inputs
from paceline.engine.cuda.graphs import CudaGraphs, GraphKey
from paceline.engine.cuda.streams import Graph
from paceline.engine.engine import Engine
from tests.kernels.bounds import checked_bounds


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine with a tiny random model."""
    made = build_engine(load="random", shape="tiny-llama", threads=1, kv_tokens=4096)
    yield made
    made.close()


@pytest.fixture
def in_bounds() -> Iterator[None]:
    with checked_bounds():
        yield


@pytest.fixture
def graphs_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass that can run as a CUDA graph does so, from the first one on."""
    find = CudaGraphs.find

    def capturing(self: CudaGraphs, size: int, key: GraphKey, *, may_capture: bool) -> Graph | None:
        if (size, key) not in self._graphs:
            self.capture(size, key)
        return find(self, size, key, may_capture=may_capture)

    monkeypatch.setattr(CudaGraphs, "find", capturing)


@pytest.fixture
def prefill_graphs(monkeypatch: pytest.MonkeyPatch, graphs_at_first_use: None) -> dict[str, Any]:
    """Options for prefill batches that are captured at first use, with little padding: each unit costs a program."""
    monkeypatch.setattr(cuda_inputs, "_EXTRA_TILES", 3)
    monkeypatch.setattr(cuda_inputs, "_SPLIT_CAPACITIES", ((0, 0), (9, 4)))
    return {"prefill_sizes": (8, 16, 32)}
