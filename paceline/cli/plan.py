"""`paceline models --plan MODEL`: what the options would become, and whether the model fits, without loading it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.cli.loading import count, size
from paceline.config import ConfigError, EngineConfig, split_options

if TYPE_CHECKING:
    from paceline.engine.build.facts import DeviceFacts
    from paceline.engine.build.resolution import Resolution
    from paceline.model.files import UnloadedModel
    from paceline.model.weights_plan import MatrixPlan, WeightsPlan

_KV_SHARE = 0.9  # of the memory that weights leave, as a default of a GPU; kv_memory_fraction on a CPU


def print_plan(model: str, options: dict[str, object], arch: str | None, memory: float | None) -> None:
    from paceline.engine.build import find_draft, resolve_here

    engine_options, scheduler_options = split_options(options, ("plan", "arch", "memory"))
    config, device = EngineConfig(**engine_options), _device(arch, memory)
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder:
        source = _source(model, Path(folder))
        found = resolve_here(config, scheduler_options, source, find_draft(config, source), device=device)
    console = Console(soft_wrap=True, highlight=False)
    spec = found.spec
    console.print(f"{model}: {spec.family} family, {count(spec.num_parameters)} parameters\n", markup=False)
    table = Table(box=None, padding=(0, 2))
    for title in ("option", "value", "why"):
        table.add_column(title, no_wrap=title != "why")
    for choice in found.choices:
        table.add_row(choice.option, choice.value, choice.reason)
    console.print(table)
    for plan, name in zip(found.plans, ("", " of draft_model"), strict=False):
        console.print()
        console.print(_matrices(plan, name))
    console.print()
    for line in _memory(found):
        console.print(line, markup=False)


def _device(arch: str | None, memory: float | None) -> DeviceFacts | None:
    if arch is None:
        if memory is not None:
            raise ConfigError(
                f"memory is {memory} and arch is not given: name the architecture of the GPU, such as sm_90."
            )
        return None
    from paceline.engine.build.facts import gpu_of_arch

    match = re.fullmatch(r"sm_(\d{2,3})a?", arch)
    if match is None:
        raise ConfigError(f"arch is {arch!r}: give an architecture such as sm_90.")
    found = gpu_of_arch(int(match[1]))
    return found if memory is None else replace(found, free_bytes=int(memory * 1e9))


def _source(model: str, folder: Path) -> UnloadedModel:
    """A model on this machine, the headers of one on the hub, or a shape."""
    from paceline.engine.build import find_source
    from paceline.model.fetch import NotDownloaded, find_model
    from paceline.model.files import UnloadedModel, open_files
    from paceline.model.remote_headers import fetch_headers
    from paceline.model.shapes import SHAPES

    if model in SHAPES and not Path(model).exists():
        return find_source(None, load="random", shape=model)
    try:
        files = open_files(find_model(model, download=False))
    except NotDownloaded:
        files = open_files(fetch_headers(model, folder), has_data=False)
    return UnloadedModel(files.spec, files)


def _matrices(plan: WeightsPlan, name: str) -> Table:
    table = Table(box=None, padding=(0, 2))
    for title in (f"weights{name}", "format", "group", "how", "size"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("group", "size") else "left")

    def key(one: MatrixPlan) -> tuple[str, str, int, str]:
        return one.name.rpartition(".")[2], one.format, one.group, one.origin

    for (matrix, format, group, origin), group_of in groupby(sorted(plan.matrices, key=key), key):
        rows = list(group_of)
        layers = sorted(int(one.name.partition(".")[0]) for one in rows if "." in one.name)
        where = f"{matrix} of layers {_ranges(layers)}" if layers else matrix
        num_bytes = sum(one.num_bytes for one in rows)
        table.add_row(where, format, str(group) if group else "", origin, size(num_bytes))
    table.add_row("norms and biases", plan.dtype, "", "", size(plan.vector_bytes))
    return table


def _ranges(numbers: list[int]) -> str:
    """Such as 0-3, 5."""
    found = []
    for _, pairs in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        found.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(found)


def _memory(found: Resolution) -> Iterator[str]:
    total = sum(plan.num_bytes for plan in found.plans)
    loading = sum(plan.loading_bytes for plan in found.plans)
    yield f"weights: {size(total)}" + (f", {size(loading)} while they are loaded" if loading > total else "")
    yield f"KV cache: {found.kv_bytes_per_token:,} bytes per token in {found.kv_dtype}"
    states = found.scheduler.max_running * found.unit_bytes.state
    if states:
        yield f"states: {size(found.unit_bytes.state)} per running request"
    free = found.device.free_bytes
    if free is None:
        yield f"memory of {found.device.name} is not known: give --memory"
        return
    ranks = found.config.num_ranks if found.device.kind != "cpu" else 1
    from paceline.engine.kv_sizing import CPU_KV_FRACTION

    share = found.config.kv_memory_fraction or (CPU_KV_FRACTION if found.device.kind == "cpu" else _KV_SHARE)
    most = found.scheduler.max_running * found.scheduler.context_tokens
    room, per_token = int((free * ranks - total - states) * share), found.kv_bytes_per_token
    tokens = room // per_token if per_token else most
    yield (
        f"fits: {size(free * ranks)} are free, which leaves room for about {min(tokens, most):,} tokens of KV "
        f"(context of {found.scheduler.context_tokens:,}, {found.scheduler.max_running} running requests)"
    )
