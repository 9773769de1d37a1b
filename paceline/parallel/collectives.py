"""TorchGroup: collectives between processes by torch.distributed, gloo on a CPU and NCCL on GPUs.

The process group is an object of this module alone: torch's global one is left to the application. Sockets listen on
the loopback interface only.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING

import torch.distributed
from torch import Tensor

from paceline.model.layout import Shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore, Work

dist: ModuleType = torch.distributed  # much of it is untyped
_TIMEOUT = timedelta(minutes=30)  # of a collective: ranks that die are noticed otherwise, and much earlier
_HOST = "127.0.0.1"


def listen() -> tuple[TCPStore, int]:
    """The store by which the ranks of a new group find each other, and the port of it."""
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    # The store takes the descriptor over.
    store: TCPStore = dist.TCPStore(
        _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect(port: int) -> TCPStore:
    """The store of a group, for ranks other than 0."""
    store: TCPStore = dist.TCPStore(_HOST, port, is_master=False, wait_for_workers=False)
    return store


class TorchGroup:
    """One rank of a group of processes. `backend`: gloo or nccl. With gloo, tensors of a GPU are copied to the host and
    back: slow, and no CUDA graph can contain it; for tests with several ranks on one GPU."""

    def __init__(self, shard: Shard, store: TCPStore, backend: str) -> None:
        self.shard = shard
        self.store = store
        self.is_capturable = backend == "nccl"  # into CUDA graphs
        prefix = dist.PrefixStore(backend, store)
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_HOST)]
            options._timeout = _TIMEOUT
            self._group = dist.ProcessGroupGloo(prefix, shard.rank, shard.size, options)
        else:
            # One machine. Registering the buffers of a captured graph would need all ranks at the same time.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._group = dist.ProcessGroupNCCL(prefix, shard.rank, shard.size, options)
            self.all_reduce(torch.zeros(1, device="cuda"))  # it connects now, and has its memory before the KV cache

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, operation: object) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        if self.is_capturable:
            self._group.allreduce([tensor], options).wait()
            return tensor
        host = tensor.cpu()
        if tensor.is_floating_point():
            host = host.float()  # gloo sums 16-bit numbers in 16 bits
        self._group.allreduce([host], options).wait()
        return tensor.copy_(host) if host is not tensor else tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        source = tensor if self.is_capturable else tensor.cpu()
        found = source.new_empty(self.shard.size, *tensor.shape)
        if self.is_capturable:
            self._group._allgather_base(found, source.contiguous()).wait()
            return found
        self._group.allgather([list(found.unbind(0))], [source.contiguous()]).wait()
        return found.to(tensor.device)

    def send(self, tensor: Tensor, rank: int) -> Work:
        """Starts to send a tensor, which must not change until `wait` of what is returned has returned."""
        work: Work = self._group.send([tensor], rank, 0)
        return work

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fills `tensor` with what `rank` sends. Several threads may receive, from different ranks."""
        self._group.recv([tensor], rank, 0).wait()

    def connect_neighbours(self) -> None:
        """Sends a number from each rank to the next one: NCCL connects two ranks when they first send, and has its
        memory before the KV cache."""
        number, rank = torch.zeros(1, device="cuda"), self.shard.rank
        if rank > 0:
            self.receive(number, rank - 1)
        if rank + 1 < self.shard.size:
            self.send(number, rank + 1).wait()
        torch.cuda.synchronize()

    def abort(self) -> None:
        """Ends collectives in progress, where the backend can."""
        if self.is_capturable:
            self._group.abort()
