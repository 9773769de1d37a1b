"""StagePipe: what the stages of a pipeline send each other.

    stage 0 ── hidden states, time ──▶ stage 1 ── ... ──▶ last stage
       ▲────────────────────── results ──────────────────────┘

A stage goes on while its hidden states are sent: it waits only for those of the pass before.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.model.layout import Shard


class PointToPoint(Protocol):
    """Sends tensors between ranks, in order. `TorchGroup` and `ThreadGroup` do."""

    @property
    def shard(self) -> Shard: ...

    def send(self, tensor: Tensor, rank: int) -> Any: ...

    def receive(self, tensor: Tensor, rank: int) -> None: ...


class StagePipe:
    """One stage. Results are received by another thread than the one that computes."""

    def __init__(self, ranks: PointToPoint) -> None:
        rank, size = ranks.shard.rank, ranks.shard.size
        self.shard = Shard(stage=rank, num_stages=size)
        self._ranks = ranks
        self._before, self._behind, self._last = rank - 1, rank + 1, size - 1
        self._began = 0.0
        self._sent: list[Any] = []  # of the pass before

    def begin(self) -> None:
        self._began = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        hidden = torch.empty(num_tokens, hidden_size, dtype=dtype)
        self._ranks.receive(hidden, self._before)
        elapsed = torch.empty(1, dtype=torch.float64)
        self._ranks.receive(elapsed, self._before)
        self._began = time.perf_counter() - elapsed.item()
        return hidden

    def send(self, hidden: Tensor) -> None:
        elapsed = torch.tensor([self.elapsed_s], dtype=torch.float64)
        for one in self._sent:
            one.wait()
        # A tensor is kept by its send.
        self._sent = [self._ranks.send(tensor.contiguous(), self._behind) for tensor in (hidden, elapsed)]

    def send_result(self, data: bytes) -> None:
        """From the last stage to the first."""
        size, payload = torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for one in [self._ranks.send(tensor, 0) for tensor in (size, payload)]:
            one.wait()

    def receive_result(self) -> bytes:
        """Blocks until the last stage has sent the next result."""
        size = torch.empty(1, dtype=torch.int64)
        self._ranks.receive(size, self._last)
        data = torch.empty(int(size.item()), dtype=torch.uint8)
        self._ranks.receive(data, self._last)
        return data.numpy().tobytes()
