"""`paceline compile`: compiles a model's GPU kernels ahead of time, without a GPU."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Model, takes
from paceline.config import ConfigError, EngineConfig, SchedulerConfig, split_options

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the compiled kernels.", show_default=False)]
ShapeName = Annotated[
    str | None, typer.Option("--shape", help="Name of a model architecture instead of a model; see `paceline models`.")
]
Arch = Annotated[str, typer.Option(help="GPU architecture: sm_90 is Hopper (H100, H200).")]
_LEAST_ARCH = 80  # the first one with bfloat16
Jobs = Annotated[int, typer.Option(help="Compilations at the same time (default: one per core).", min=0)]


@takes(EngineConfig, SchedulerConfig)
def compile(
    options: dict[str, object],
    output: Output,
    model: Model = None,
    shape: ShapeName = None,
    arch: Arch = "sm_90",
    jobs: Jobs = 0,
) -> None:
    """Compile the GPU kernels of a model ahead of time, on a machine with or without a GPU."""
    found = re.fullmatch(r"sm_(\d{2,3})a?", arch)
    if found is None or int(found[1]) < _LEAST_ARCH:
        raise ConfigError(f"arch is {arch!r}: give an architecture such as sm_90, sm_{_LEAST_ARCH} or newer.")
    if shape is not None and model is not None:
        raise ConfigError(f"model is {model!r} and shape is {shape!r}: give one of them.")
    if find_spec("triton") is None:  # before torch is imported, which takes seconds
        raise ConfigError("triton is not installed, which compiles kernels: pip install triton.")
    os.environ.pop("TRITON_INTERPRET", None)  # the interpreter compiles nothing; before Triton is imported
    from paceline.engine.build import find_draft, find_source, resolve_here
    from paceline.engine.build.facts import gpu_of_arch
    from paceline.engine.cuda.precompile import precompile
    from paceline.model.layout import Shard, different_shards

    engine_options, scheduler_options = split_options(options, ("model", "shape", "output", "arch", "jobs"))
    config = EngineConfig(**engine_options)
    source = find_source(model, load="weights" if shape is None else "random", shape=shape)
    draft = find_draft(config, source)
    resolved = resolve_here(config, scheduler_options, source, draft, device=gpu_of_arch(int(found[1])))
    resolved.log_choices()
    try:
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()
    except OSError as error:
        raise ConfigError(f"output is {str(output)!r}, which cannot be written: {error.strerror}.") from None

    def show(done: int, missing: int) -> None:
        typer.echo(f"\rCompiled {done} of {missing} kernels", nl=done == missing, err=True)

    progress = show if sys.stderr.isatty() else None
    variants: set[object] = set()
    count = 0
    spec = source.spec
    shards = different_shards(spec, config.tp)
    if config.pp > 1:
        shards = [Shard(stage=stage, num_stages=config.pp) for stage in range(config.pp)]
        shards[0].spec(spec)  # raises if there are too many
    for shard in shards:
        what = (resolved.specs, resolved.precision, resolved.scheduler, output, resolved.device.arch)
        listed, compiled = precompile(*what, jobs=jobs or None, progress=progress, shard=shard)
        variants.update(listed)
        count += compiled
    total = len(variants)
    size = sum(path.stat().st_size for path in output.iterdir()) / 1e6
    typer.echo(f"{output}: {total} kernels for {arch}, {total - count} of them there before; {size:.1f} MB")
