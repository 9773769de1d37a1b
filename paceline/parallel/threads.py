"""ThreadGroup: ranks as threads of one process, the reference implementation of the collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from paceline.model.layout import Shard

_TIMEOUT_S = 30.0  # a rank that has failed never comes


@dataclass(slots=True, eq=False)
class _Meeting:
    """Where the ranks exchange tensors."""

    barrier: threading.Barrier
    tensors: list[Tensor] = field(default_factory=list)
    sent: dict[tuple[int, int], SimpleQueue[Tensor]] = field(default_factory=dict)  # by ranks: from, to


class _Sent:
    def wait(self) -> None: ...


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
        meeting.sent.update({(one, other): SimpleQueue() for one in range(size) for other in range(size)})
        return [cls(Shard(rank, size), meeting) for rank in range(size)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._together(tensor, lambda tensors: torch.stack(tensors).sum(dim=0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._together(tensor, torch.stack)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return self._together(tensor, lambda tensors: torch.stack(tensors).amax(dim=0))

    def send(self, tensor: Tensor, rank: int) -> _Sent:
        self._meeting.sent[self.shard.rank, rank].put(tensor.clone())
        return _Sent()

    def receive(self, tensor: Tensor, rank: int) -> None:
        tensor.copy_(self._meeting.sent[rank, self.shard.rank].get(timeout=_TIMEOUT_S))

    def _together(self, tensor: Tensor, function: Callable[[list[Tensor]], Tensor]) -> Tensor:
        meeting = self._meeting
        meeting.tensors[self.shard.rank] = tensor
        meeting.barrier.wait()
        result = function(list(meeting.tensors))
        meeting.barrier.wait()  # nobody reads the tensors any more
        return result
