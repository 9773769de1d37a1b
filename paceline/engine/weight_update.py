"""New weights for a running engine, from a folder or file of the same shape.

    load into host memory ─▶ pause ─▶ copy in place, drop all KV ─▶ resume
    while the engine serves           milliseconds to a second

The weights are loaded and checked before the engine pauses, so an invalid folder harms nothing. They are copied into
the existing tensors, because CUDA graphs hold their addresses. Of several ranks each loads its own part; the engine
pauses when all of them have, and they replace their weights behind the same pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import ConfigError
from paceline.engine.kv_sizing import check_models_fit, free_memory
from paceline.engine.output import Conflict, EngineFailed, WeightUpdate
from paceline.engine.pausing import PauseMode
from paceline.engine.weight_source import WeightSource
from paceline.model.spec import ModelError, ModelSpec
from paceline.request import InvalidRequest, short

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.model.decoder import Decoder

_UPDATE = "weight update"  # who pauses
# Differences between checkpoints of one architecture: what the files say of tokens, precision and length.
_IGNORED_FIELDS = ("dtype", "context_tokens", "bos_id", "eos_ids")


def update_weights(
    engine: Engine, path: str | Path, *, mode: str = PauseMode.WAIT, version: str | None = None
) -> WeightUpdate:
    """Blocks until the engine uses the weights at `path`. Any thread may call it. Raises, and changes nothing, if they
    do not fit. `mode`: what becomes of running requests; `version` defaults to the number of the update."""
    if mode not in list(PauseMode):
        raise InvalidRequest(f"mode is {mode!r}: choose one of {', '.join(PauseMode)}.")
    if not isinstance(path, str | Path) or path == "":
        raise InvalidRequest(f"path is {short(path)}: give a folder or a .gguf file.")
    if engine.spec is None or not engine.executor.capabilities.weights:
        raise InvalidRequest(
            "this engine cannot replace weights: weight updates need a model with unquantized weights (executor torch, "
            "quantization none)."
        )
    if not engine.weights.updating.acquire(blocking=False):
        raise Conflict("another weight update is in progress: wait until it has ended.")
    with contextlib.ExitStack() as stack:
        stack.callback(engine.weights.updating.release)
        began = time.perf_counter()
        announced = stack.enter_context(contextlib.ExitStack())  # what the other ranks load
        decoder = _load(engine, Path(path).expanduser(), engine.spec, announced)
        loaded = time.perf_counter()
        stack.callback(engine.resume, who=_UPDATE)
        engine.pause(PauseMode(mode), who=_UPDATE).result()
        paused = time.perf_counter()
        version = version or str(engine.weights.num_updates + 1)
        announced.pop_all()
        # An adapter that was arranged for the old weights must be known by now: the executor arranges it again.
        stack.enter_context(engine.adapters.loading)
        pages = engine.replace_weights(decoder, version).result()
        ended = time.perf_counter()
    tokens = pages * engine.scheduler.config.page_size
    return WeightUpdate(version, loaded - began, paused - loaded, ended - paused, tokens)


def _load(engine: Engine, path: Path, spec: ModelSpec, announced: contextlib.ExitStack) -> Decoder:
    """The weights at `path` in host memory, if their shape is `spec`; with ranks, those of rank 0, when the others have
    theirs. announced: is closed if they are not used."""
    from paceline.model.files import open_files
    from paceline.model.read_spec import read_spec

    executor, dtype = engine.executor, engine.info.dtype
    try:
        source = WeightSource.of(path, dtype, engine.scheduler.config.context_tokens)
        _check_shape(read_spec(path), spec)
        open_files(path)  # checks names and shapes
        check_models_fit([spec], spec.num_parameters * (4 if dtype == "float32" else 2), free=free_memory())
        announced.callback(_drop, engine)
        engine.call(lambda _: executor.announce_weights(source)).result()
        decoder = executor.read_weights(source)
        executor.wait_weights()
    except (ModelError, ConfigError, OSError) as error:  # to an engine that runs, a mistake of this request
        raise InvalidRequest(str(error)) from None
    return decoder


def _drop(engine: Engine) -> None:
    with contextlib.suppress(EngineFailed):  # then its ranks have ended, too
        engine.call(lambda _: engine.executor.drop_weights())


def _check_shape(found: ModelSpec, spec: ModelSpec) -> None:
    for name, theirs, ours in _differences(found, spec):
        if name not in _IGNORED_FIELDS:
            raise InvalidRequest(
                f"path has a model with {name} {theirs!r}, the served one has {ours!r}: give weights of the same shape."
            )


def _differences(one: object, other: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    """The innermost fields in which two values differ, such as layers[3].mixer.window."""
    if one == other:
        return
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _differences(*pair, f"{name}[{index}]")
    elif isinstance(one, tuple) and isinstance(other, tuple):
        yield f"num_{name}", len(one), len(other)
    elif dataclasses.is_dataclass(one) and type(one) is type(other):
        for field in dataclasses.fields(one):
            path = f"{name}.{field.name}" if name else field.name
            yield from _differences(getattr(one, field.name), getattr(other, field.name), path)
    else:
        yield name, one, other
