"""Which GPUs, or which share of the CPU, each of several engines on one machine gets."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from paceline.config import ConfigError
from paceline.engine.kv_sizing import CPU_KV_FRACTION

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Names of the GPUs, as `CUDA_VISIBLE_DEVICES` lists them."""
    given = environment.get(_VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    count = sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))
    return [str(index) for index in range(count)]


def num_ranks(options: Mapping[str, Any]) -> int:
    """Processes of an engine: ranks of tensor parallelism, or stages of a pipeline."""
    return int(options.get("tp", 1) * options.get("pp", 1))


def choose_device(
    options: Mapping[str, Any], replica: int, num_replicas: int, environment: MutableMapping[str, str] = os.environ
) -> dict[str, object]:
    """The options of an engine that is one of several. Sets its GPUs in the environment: torch must not be imported
    yet. On a CPU the threads and the memory for KV are divided."""
    gpus, size = visible_gpus(environment), num_ranks(options)
    device = options.get("device", "auto")
    if num_replicas == 1 or options.get("executor") == "virtual":
        return dict(options)
    if device == "cuda" or (device == "auto" and gpus):
        if len(gpus) < num_replicas * size:
            needed = "one" if size == 1 else f"{'tp' if options.get('tp', 1) > 1 else 'pp'} = {size}"
            raise ConfigError(
                f"replicas is {num_replicas} and there are {len(gpus)} GPUs: each replica needs {needed}; lower it, or "
                "set device to cpu."
            )
        environment[_VISIBLE] = ",".join(gpus[replica * size : (replica + 1) * size])
        return dict(options)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares: dict[str, object] = {"threads": max(1, cores // (num_replicas * size))}
    if not {"kv_memory_fraction", "kv_tokens", "num_pages"} & options.keys():
        shares["kv_memory_fraction"] = CPU_KV_FRACTION / num_replicas
    return {**shares, **options}
