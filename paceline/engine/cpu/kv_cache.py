"""The KV memory of the CPU: where the keys and values of every page lie, and how much room there is.

Positions are flat: position `offset` of page `page` lies at `page * page_size + offset`. Keys and values are
apart, so that a row whose pages follow each other is read in place, without a copy. Padding reads positions behind a
row's end, in its own last page: whoever begins a page clears what is left of it, since a weight of zero times an
earlier owner's NaN would still be a NaN.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paceline.config import ConfigError, EngineConfig
from paceline.model.spec import ModelSpec
from paceline.scheduler.plan import Swap

_LEAST_TOKENS = 64  # below this a server could not answer anything worth asking


class KVCache:
    def __init__(
        self, spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype, num_host_pages: int = 0
    ) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        shape = (2, num_pages * page_size, spec.num_kv_heads, spec.head_dim)
        layers = [_zeros(shape, dtype) for _ in range(spec.num_layers)]
        self.keys = [layer[0] for layer in layers]
        self.values = [layer[1] for layer in layers]
        # One row a page; rows from num_pages on are the values, so that one gather brings both.
        self._pages = [layer.view(2 * num_pages, -1) for layer in layers]
        self._row = (page_size, spec.num_kv_heads, spec.head_dim)
        self._scratch = torch.empty(0, dtype=dtype)
        # A host tier beside memory that is the host's itself gains nothing but room; it is the GPU's plain twin.
        self._hosts = [_zeros((2, num_host_pages, pages.shape[1]), dtype) for pages in self._pages]

    def swap(self, swap: Swap) -> None:
        """Copies pages out, then others in."""
        spill_pages, spill_hosts, fetch_pages, fetch_hosts = (
            torch.from_numpy(ids).long()
            for ids in (swap.spill_pages, swap.spill_hosts, swap.fetch_pages, swap.fetch_hosts)
        )
        for layer, host in zip(self._pages, self._hosts, strict=True):
            pages = layer.view(2, self.num_pages, -1)
            host[:, spill_hosts] = pages[:, spill_pages]
            pages[:, fetch_pages] = host[:, fetch_hosts]

    def gather(self, layer: int, both: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, positions, KV heads, D] of the pages in `both`: those of the keys, then of the
        values. The result is overwritten by the next gather."""
        pages = self._pages[layer]
        # Fresh memory for every layer would cost more in page faults than the copy itself.
        size = both.numel() * pages.shape[1]
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size * 5 // 4, dtype=pages.dtype)
        found = self._scratch[:size].view(-1, pages.shape[1])
        torch.index_select(pages, 0, both, out=found)
        keys, values = found.view(2, num_rows, -1, *self._row[1:]).unbind(0)
        return keys, values


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # numpy's zeros are the system's untouched pages, which cost nothing until they are written; torch's are filled,
    # which for gigabytes takes seconds and all of the memory at once.
    whole = {2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, whole)).view(dtype)


def num_kv_pages(
    config: EngineConfig,
    spec: ModelSpec,
    dtype_bytes: int,
    page_size: int,
    context_tokens: int,
    *,
    free: int | None = None,
    default_fraction: float = 0.3,
    max_contexts: int = 64,
) -> int:
    """How many pages of KV memory the engine takes: `kv_tokens` if given, else a share of the memory that is free.

    pages = floor(min(free memory * kv_memory_fraction / (2 * layers * KV heads * head_dim * bytes),
                      max_contexts contexts) / page_size)

    Free is main memory unless given. More than 64 contexts at full length are never used by the requests that run on
    a CPU.
    """
    per_token = spec.kv_bytes_per_token(dtype_bytes)
    free = free_memory() if free is None else free
    fraction = default_fraction if config.kv_memory_fraction is None else config.kv_memory_fraction
    if config.kv_tokens is not None:
        num_tokens = config.kv_tokens
        if num_tokens * per_token > free:
            raise ConfigError(
                f"kv_tokens is {num_tokens}, which takes {_gib(num_tokens * per_token)} of memory, and {_gib(free)} "
                f"are free: lower it to {free // per_token} or less."
            )
    else:
        num_tokens = min(int(free * fraction) // per_token, max_contexts * context_tokens)
    num_pages = num_tokens // page_size
    if num_pages < 1 or (num_tokens < min(_LEAST_TOKENS, context_tokens) and config.kv_tokens is None):
        raise ConfigError(
            f"the model leaves room for {num_tokens} tokens of KV memory ({_gib(free)} free, {per_token} bytes a "
            f"token, pages of {page_size}): choose a smaller model, free some memory, or raise kv_memory_fraction "
            f"(now {fraction})."
        )
    return num_pages


def check_host_fits(num_host_pages: int, page_bytes: int, page_size: int, *, free: int) -> None:
    """Raises if the host memory for what leaves the device is more than the `free` bytes of it."""
    if num_host_pages * page_bytes > free:
        most = free // page_bytes
        raise ConfigError(
            f"num_host_pages is {num_host_pages} (host_kv_tokens {num_host_pages * page_size}), which takes "
            f"{_gib(num_host_pages * page_bytes)} of host memory, and {_gib(free)} are free: lower it to {most} "
            f"({most * page_size}) or less."
        )


def check_model_fits(spec: ModelSpec, dtype_bytes: int, *, free: int | None = None) -> None:
    """Raises before the first byte is read if the weights alone are more than the memory that is free: main memory,
    unless given."""
    need, free = spec.num_parameters * dtype_bytes, free_memory() if free is None else free
    if need > free:
        raise ConfigError(
            f"the model's {spec.num_parameters:,} parameters take {_gib(need)} and {_gib(free)} of memory are free: "
            "choose a smaller model or a 16-bit dtype."
        )


def free_memory() -> int:
    """Bytes of main memory that this process can still have."""
    available = math.inf
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        import os

        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit, encoding="ascii") as file, open(used, encoding="ascii") as current:
                text = file.read().strip()
                if text != "max":
                    available = min(available, int(text) - int(current.read()))
        except OSError:
            continue  # no such control group here
    return max(0, int(available))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
