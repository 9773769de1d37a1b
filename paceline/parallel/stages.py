"""StagePipe: what the stages of a pipeline send each other.

    stage 0 ── hidden states, time ──▶ stage 1 ── ... ──▶ last stage
       ▲────────────────────── results ──────────────────────┘

A stage goes on while its hidden states are sent: it waits only for those of the pass before. Between GPUs hidden states
take another way where there is one (`device_ranks`); everything else is host memory.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from paceline.model.layout import Shard


class Sending(Protocol):
    def wait(self) -> object: ...


class PointToPoint(Protocol):
    """Sends tensors between ranks, in order. `TorchGroup` and `ThreadGroup` do."""

    @property
    def shard(self) -> Shard: ...

    def send(self, tensor: Tensor, rank: int) -> Sending: ...

    def receive(self, tensor: Tensor, rank: int) -> None: ...


class StagePipe:
    """One stage. Results are received by another thread than the one that computes."""

    def __init__(self, ranks: PointToPoint, device_ranks: PointToPoint | None = None) -> None:
        """device_ranks: sends tensors of GPUs, in the order of streams."""
        self.device_ranks = device_ranks
        rank, size = ranks.shard.rank, ranks.shard.size
        self.shard = Shard(stage=rank, num_stages=size)
        self._ranks = ranks
        self.before, self.behind, self._last = rank - 1, rank + 1, size - 1
        self._began = 0.0
        self._sent: list[Sending] = []  # of the pass before

    def begin(self) -> None:
        self._began = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        hidden = torch.empty(num_tokens, hidden_size, dtype=dtype)
        self._ranks.receive(hidden, self.before)
        elapsed = torch.empty(1, dtype=torch.float64)
        self._ranks.receive(elapsed, self.before)
        self._began = time.perf_counter() - elapsed.item()
        return hidden

    def send(self, hidden: Tensor) -> None:
        elapsed = torch.tensor([self.elapsed_s], dtype=torch.float64)
        for one in self._sent:
            one.wait()
        # A tensor is kept by its send.
        self._sent = [self._ranks.send(tensor.contiguous(), self.behind) for tensor in (hidden, elapsed)]

    def send_result(self, data: bytes) -> None:
        """To the first stage."""
        size, payload = torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for one in [self._ranks.send(tensor, 0) for tensor in (size, payload)]:
            one.wait()

    def receive_result(self, stage: int | None = None) -> bytes:
        """Blocks until a stage, by default the last one, has sent its next result."""
        rank = self._last if stage is None else stage
        size = torch.empty(1, dtype=torch.int64)
        self._ranks.receive(size, rank)
        data = torch.empty(int(size.item()), dtype=torch.uint8)
        self._ranks.receive(data, rank)
        return data.numpy().tobytes()
