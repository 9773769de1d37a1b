"""ThreadGroup: ranks as threads of one process, the reference implementation of the collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.model.layout import Shard

_TIMEOUT_S = 30.0  # a rank that has failed never comes


@dataclass(slots=True, eq=False)
class _Meeting:
    """Where the ranks exchange tensors."""

    barrier: threading.Barrier
    tensors: list[Tensor] = field(default_factory=list)


class ThreadGroup:
    """One rank of a group."""

    is_capturable = True  # by the graphs of Triton's interpreter

    def __init__(self, shard: Shard, meeting: _Meeting) -> None:
        self.shard = shard
        self._meeting = meeting

    @classmethod
    def of_size(cls, size: int) -> list[ThreadGroup]:
        """All ranks of a group."""
        meeting = _Meeting(threading.Barrier(size, timeout=_TIMEOUT_S), [torch.empty(0)] * size)
        return [cls(Shard(rank, size), meeting) for rank in range(size)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._together(tensor, lambda tensors: torch.stack(tensors).sum(dim=0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._together(tensor, torch.stack)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return self._together(tensor, lambda tensors: torch.stack(tensors).amax(dim=0))

    def _together(self, tensor: Tensor, function: Callable[[list[Tensor]], Tensor]) -> Tensor:
        meeting = self._meeting
        meeting.tensors[self.shard.rank] = tensor
        meeting.barrier.wait()
        result = function(list(meeting.tensors))
        meeting.barrier.wait()  # nobody reads the tensors any more
        return result
