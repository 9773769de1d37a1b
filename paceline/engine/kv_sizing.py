"""Sizing of the KV cache, and checks that model and cache fit into memory. The same for every device."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.config import ConfigError, EngineConfig, SchedulerConfig
from paceline.model.layers import Pool
from paceline.model.spec import ModelSpec

CPU_KV_FRACTION = 0.3  # of the free memory
_MIN_TOKENS = 64  # a server with less KV cache than this cannot answer a useful request


class UnitBytes(NamedTuple):
    """Bytes of a unit of each pool, in the cache groups of all models that are in memory together."""

    page: int  # 0: no layer keeps KV, so pages only count positions
    state: int  # of one running request

    @classmethod
    def of(cls, page_size: int, models: Sequence[tuple[ModelSpec, int]]) -> UnitBytes:
        """models: with the bytes of a number in their KV."""
        return cls(*(sum(spec.unit_bytes(pool, size, page_size) for spec, size in models) for pool in Pool))


def num_kv_pages(
    config: EngineConfig,
    units: UnitBytes,
    scheduler: SchedulerConfig,
    given: Mapping[str, Any],
    *,
    free: int | None = None,
    default_fraction: float = CPU_KV_FRACTION,
    max_contexts: int = 64,
) -> int:
    """Number of pages of the KV cache: `kv_tokens` or `num_pages` if given, else a fraction of the free memory.

    free = free memory - max_running * states of a request
    pages = floor(min(free * kv_memory_fraction / KV of a token, max_contexts contexts) / page_size)

    The KV of a token has 2 * layers * KV heads * head_dim * bytes, of a draft model too; without any, there are pages
    for all running requests at full length. `given` are the scheduler options of the caller, `scheduler` the same with
    defaults; its number of pages is not used. `free` defaults to the free main memory. The requests that run on a CPU
    never use more than 64 contexts of full length.
    """
    page_size, context_tokens = scheduler.page_size, scheduler.context_tokens
    free = free_memory() if free is None else free
    states, per_token = scheduler.max_running * units.state, units.page // page_size
    if states > free:
        raise ConfigError(
            f"max_running is {scheduler.max_running}: the states of so many requests take {_gib(states)} of memory, "
            f"but only {_gib(free)} are free: lower it to {free // units.state} or less."
        )
    free -= states
    if (chosen := config.num_kv_pages(scheduler, given)) is not None:
        need = chosen * units.page
        if need > free:
            most = free // units.page
            name, value, limit = "num_pages", chosen, most
            if config.kv_tokens is not None:
                name, value, limit = "kv_tokens", config.kv_tokens, most * page_size
            remedy = f"lower it to {limit} or less" if most else "choose a smaller model, or free some memory"
            raise ConfigError(
                f"{name} is {value}, which takes {_gib(need)} of memory, but only {_gib(free)} are free: {remedy}."
            )
        return chosen
    if not per_token:
        return scheduler.max_running * -(-context_tokens // page_size)
    fraction = default_fraction if config.kv_memory_fraction is None else config.kv_memory_fraction
    num_tokens = min(int(free * fraction) // per_token, max_contexts * context_tokens)
    num_pages = num_tokens // page_size
    if num_pages < 1 or num_tokens < min(_MIN_TOKENS, context_tokens):
        raise ConfigError(
            f"the model leaves memory for a KV cache of {num_tokens} tokens ({_gib(free)} free, {per_token} bytes per "
            f"token, pages of {page_size}): choose a smaller model, free some memory, or raise kv_memory_fraction "
            f"(now {fraction})."
        )
    return num_pages


def check_host_fits(num_host_pages: int, page_bytes: int, page_size: int, *, free: int) -> None:
    """Raises if the host tier of the KV cache is larger than the `free` bytes of host memory."""
    if num_host_pages * page_bytes > free:
        most = free // page_bytes
        raise ConfigError(
            f"num_host_pages is {num_host_pages} (host_kv_tokens {num_host_pages * page_size}), which takes "
            f"{_gib(num_host_pages * page_bytes)} of host memory, but only {_gib(free)} are free: lower it to {most} "
            f"({most * page_size}) or less."
        )


def check_models_fit(specs: Sequence[ModelSpec], num_bytes: int, *, free: int | None = None) -> None:
    """Raises if the weights of a model and of its draft model, `num_bytes`, are larger than the `free` bytes (default:
    free main memory). Called before the first byte is read."""
    num_parameters = sum(spec.num_parameters for spec in specs)
    free = free_memory() if free is None else free
    if num_bytes > free:
        raise ConfigError(
            f"the model's {num_parameters:,} parameters take {_gib(num_bytes)}, but only {_gib(free)} of memory are "
            "free: choose a smaller model or a 16-bit dtype."
        )


def free_memory() -> int:
    """Bytes of main memory that this process can still allocate, within its control group."""
    available = math.inf
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
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
            continue  # no such control group
    return max(0, int(available))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
