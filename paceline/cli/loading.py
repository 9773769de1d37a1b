"""Finds or downloads a model and builds an engine. Progress bars go to stderr, so that stdout has output only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from paceline.config import ConfigError

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

log = logging.getLogger("paceline.server")
errors = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, with the name and context length of its model."""

    engine: Engine
    name: str
    context_tokens: int


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in bytes, shown from the first update on and removed at the end."""
    from paceline.logs import logs_json

    shown = errors.is_terminal and not logs_json()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not shown) as progress:
        task: TaskID | None = None

        def advance(done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = progress.add_task(title, total=total)
            progress.update(task, completed=done, total=total)

        yield advance


def report(message: str) -> None:
    """A line on standard error, or in the log of a server whose log is JSON."""
    from paceline.logs import logs_json

    if logs_json():
        log.info(message)
    else:
        errors.print(message, markup=False)


def fetch(model: str | None) -> Path:
    """The path of the model, which is downloaded if it is not on this machine."""
    from paceline.model.fetch import DEFAULT_MODEL, find_model

    name = model or DEFAULT_MODEL
    fetched = False

    with bar(f"downloading {name}") as advance:

        def note(done: int, total: int) -> None:
            nonlocal fetched
            fetched = True
            advance(done, total)

        path = find_model(name, progress=note)
    if fetched:
        checked = " (checksum verified)" if model in (None, DEFAULT_MODEL) else ""
        report(f"Downloaded {name} to {path}{checked}.")
    return path


def name_of(model: str | None, path: Path | None, shape: str | None) -> str:
    """The name of a model: its id, or the name of its file or folder."""
    from paceline.text.load import model_name

    return shape or "random" if path is None else model_name(model)


def load_engine(model: str | None, load: str, shape: str | None, options: dict[str, Any]) -> LoadedEngine:
    if load == "random" and model is not None:
        raise ConfigError(f"model is {model!r} and load is 'random': remove the model and give a shape.")
    path = None if load == "random" or options.get("executor") == "virtual" else fetch(model)
    name = name_of(model, path, shape)
    with errors.status("importing torch"):  # takes a second or two
        from paceline.engine.build import build_engine
    with bar(f"loading {name}") as advance:
        engine = build_engine(path, load=load, shape=shape, progress=advance, **options)
    return LoadedEngine(engine, name, engine.scheduler.config.context_tokens)


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def count(number: int) -> str:
    """A number of parameters, such as 134.5 M."""
    if number < 1_000_000:
        return f"{number:,}"
    return f"{number / 1e6:.1f} M" if number < 1_000_000_000 else f"{number / 1e9:.1f} G"
