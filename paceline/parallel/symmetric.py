"""SymmetricGroup: collectives of small messages through memory that all GPUs of a group map (symmetric memory).

A rank writes its tensor into its own buffer and reads those of the others over NVLink, in one kernel: for the messages
of a decode batch this has less latency than NCCL's rings. The kernels contain nothing but loads, stores and flags, so
CUDA graphs can capture them. Large messages use the group underneath if CUDA graphs can capture that, else they are
sent in parts: so several ranks can share one GPU, which NCCL refuses. That is for tests
(`TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`): the processes take turns on the GPU, and every collective waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed._symmetric_memory
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group

from paceline.parallel.collectives import TorchGroup, dist

_SMALL_BYTES = 512 << 10  # up to which one GPU reads the messages of all others faster than a ring sends them
_PART_BYTES = 8 << 20  # without a group underneath that graphs can capture
_CHANNEL = 0


class SymmetricGroup:
    is_capturable = True

    def __init__(self, base: TorchGroup, device: torch.device) -> None:
        """base: for large messages, if CUDA graphs can capture it."""
        self.shard, self._base = base.shard, base
        self._size = _SMALL_BYTES if base.is_capturable else _PART_BYTES
        store = dist.PrefixStore("symmetric", base.store)
        self._name = f"paceline-{base.store.port}"  # unique in this process, and the same on all ranks
        # torch finds the ranks by the name of a group; it needs its store only, so the group has no backend.
        self._group = dist.ProcessGroup(store, self.shard.rank, self.shard.size)
        register: Callable[..., None] = _register_process_group
        register(self._name, self._group)
        symmetric_memory: ModuleType = torch.distributed._symmetric_memory
        self._bytes: Tensor = symmetric_memory.empty(self._size, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._bytes, self._name)
        self._operations = torch.ops.symm_mem

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in (torch.float32, torch.bfloat16):  # torch has no kernel
            return self.all_gather(tensor).sum(dim=0, dtype=tensor.dtype)
        if tensor.nbytes <= self._size:
            return self._reduce(tensor, torch.empty_like(tensor))
        if self._base.is_capturable:
            return self._base.all_reduce(tensor)
        flat, step = tensor.view(-1), self._size // tensor.itemsize
        for first in range(0, len(flat), step):
            part = flat[first : first + step]
            part.copy_(self._reduce(part, torch.empty_like(part)))
        return tensor

    def _reduce(self, tensor: Tensor, out: Tensor) -> Tensor:
        flat = tensor.view(-1)
        buffer = self._bytes[: tensor.nbytes].view(tensor.dtype)
        self._operations.one_shot_all_reduce_copy_out(buffer, flat, "sum", self._name, out.view(-1))
        return out

    def all_gather(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes > self._size and self._base.is_capturable:
            return self._base.all_gather(tensor)
        flat, size = tensor.contiguous().view(-1).view(torch.uint8), self.shard.size
        found = torch.empty(size, len(flat), dtype=torch.uint8, device=tensor.device)
        for first in range(0, len(flat), self._size):
            part = flat[first : first + self._size]
            self._bytes[: len(part)].copy_(part)
            self._handle.barrier(_CHANNEL)  # all have written
            for rank in range(size):
                theirs = self._handle.get_buffer(rank, (len(part),), torch.uint8)
                found[rank, first : first + len(part)].copy_(theirs)
            self._handle.barrier(_CHANNEL)  # all have read
        return found.view(tensor.dtype).view(size, *tensor.shape)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return self.all_gather(tensor).amax(dim=0)
