"""Loads, replaces and unloads LoRA adapters while requests run.

read and check the folder ─▶ arrange for this rank ─▶ install          requests with its name use it
the caller's thread                                   engine's thread, between two steps
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.engine.kv_sizing import free_memory
from paceline.engine.output import LoadedAdapter
from paceline.request import InvalidRequest, PacelineError, short

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

log = logging.getLogger("paceline.engine")
_MAX_NAME = 200  # characters
_MEMORY_FRACTION = 0.5  # of the free memory that an adapter may take


def load_adapter(engine: Engine, name: str, path: str | Path, *, replace: bool = False) -> LoadedAdapter:
    """Blocks until requests can use the PEFT folder at `path` by `name`. Any thread may call it. Raises, and changes
    nothing, if it does not fit the model. replace: a loaded adapter of this name is replaced for new requests."""
    from paceline.model.lora import read_adapter, remarks  # not at the top: needs torch, which a virtual GPU does not

    _check_name(name)
    if not isinstance(path, str | Path) or path == "":
        raise InvalidRequest(f"lora_path is {short(path)}: give a folder.")
    if engine.spec is None or not engine.executor.capabilities.lora:
        raise InvalidRequest(
            "this engine has no memory for LoRA adapters: start it with max_lora_rank or lora, with executor torch and "
            "role both."
        )
    with engine.adapters.loading:
        if engine.adapters.get(name) is not None and not replace:
            raise InvalidRequest(
                f"lora_name is {name!r}, which is loaded already: unload it first, or set load_inplace to replace it."
            )
        folder = Path(path).expanduser().resolve()
        try:
            check_fits(folder)
            file = read_adapter(folder)
            weights = engine.executor.arrange_adapter(file)
            for remark in remarks(file, engine.spec):
                log.warning("LoRA adapter %s: %s.", name, remark)
        except (PacelineError, OSError) as error:  # to an engine that runs, a mistake of this request
            raise InvalidRequest(str(error)) from None
        loaded = LoadedAdapter(name, str(folder), f"{name}@{file.digest}", file.max_rank, weights.num_bytes)
        engine.call(
            lambda scheduler: engine.adapters.install(loaded, file, weights, engine.executor, scheduler)
        ).result()
    return loaded


def unload_adapter(engine: Engine, name: str) -> None:
    """Blocks until the adapter is gone. Raises Conflict while requests use it."""
    with engine.adapters.loading:
        engine.call(
            lambda scheduler: engine.adapters.remove(
                name, engine.num_preparing(engine.adapters.resolve(name)), engine.executor, scheduler
            )
        ).result()


def check_fits(folder: Path) -> None:
    """Raises if the file is larger than memory allows, before it is read."""
    file = folder / "adapter_model.safetensors"
    size = file.stat().st_size if file.is_file() else 0
    most = int(free_memory() * _MEMORY_FRACTION)
    if size > most:
        raise InvalidRequest(
            f"lora_path is {str(folder)!r} with {size / 2**30:.1f} GiB, and {most / 2**30:.1f} GiB of memory may be "
            "used for it: unload other adapters."
        )


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise InvalidRequest(f"lora_name is {short(name)}: give 1 to {_MAX_NAME} printable characters.")
