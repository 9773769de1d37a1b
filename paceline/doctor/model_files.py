"""Checks of a model: its files are there, complete and supported, its tokenizer loads, its weights fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.doctor.finding import Check, Finding, ok, warning

if TYPE_CHECKING:
    from paceline.model.files import ModelFiles


def model_checks(model: str) -> list[tuple[str, Check]]:
    return [("model", lambda: check_model(model))]


def check_model(model: str) -> Iterator[Finding]:
    """Reads headers and the tokenizer, but no weights, and downloads nothing."""
    from paceline.model.fetch import NotDownloaded, find_model

    try:
        path = find_model(model, download=False)
    except NotDownloaded:
        yield warning("model", f"{model} is not on this machine", f"paceline pull {model}")
        return
    from paceline.model.files import open_files
    from paceline.text.load import load_tokenizer

    files = open_files(path)
    spec = files.spec
    yield ok("model", f"{path}: {spec.family}, {spec.num_parameters / 1e6:,.1f} M parameters, all files complete")
    tokenizer = load_tokenizer(path)
    tokenizer.check_fits(spec.vocab_size)
    yield ok("tokenizer", f"{tokenizer.vocab_size:,} tokens")
    yield from check_model_memory(files)


def check_model_memory(files: ModelFiles) -> Iterator[Finding]:
    """With the default options of the engine."""
    from paceline.config import EngineConfig
    from paceline.engine.build import resolve_here
    from paceline.model.files import UnloadedModel

    found = resolve_here(EngineConfig(), {}, UnloadedModel(files.spec, files))
    size, device = found.weights.num_bytes / 2**30, found.device.kind.replace("cuda", "GPU").replace("cpu", "CPU")
    yield ok("model memory", f"{size:.2f} GiB fit on the {device} ({found.weights.title})")
    for choice in found.choices:
        if choice.is_warning:
            text = f"{choice.option} is {choice.value}: {choice.reason}"
            yield warning("model memory", text, "paceline models --plan MODEL")
