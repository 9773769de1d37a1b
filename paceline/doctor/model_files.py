"""Checks of a model: its files are there, complete and supported, its tokenizer loads, its weights fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.doctor.finding import Check, Finding, ok, warning

if TYPE_CHECKING:
    from paceline.model.spec import ModelSpec


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
    from paceline.model.weights import check_files
    from paceline.text.load import load_tokenizer

    spec = check_files(path)
    yield ok("model", f"{path}: {spec.family}, {spec.num_parameters / 1e6:,.1f} M parameters, all files complete")
    tokenizer = load_tokenizer(path)
    tokenizer.check_fits(spec.vocab_size)
    yield ok("tokenizer", f"{tokenizer.vocab_size:,} tokens")
    yield from check_model_memory(path, spec)


def check_model_memory(path: Path, spec: ModelSpec) -> Iterator[Finding]:
    """With the default options of the engine."""
    import torch

    from paceline.config import EngineConfig
    from paceline.engine.build import choose_precision, weight_bytes
    from paceline.engine.kv_sizing import check_models_fit

    device, free = ("cuda", torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else ("cpu", None)
    config = choose_precision(EngineConfig(), device, path)
    num_bytes = weight_bytes(config, spec, path, device)
    check_models_fit([spec], num_bytes, free=free)
    precision = config.dtype if config.quantization == "none" else "quantised, as in the file"
    yield ok(
        "model memory", f"{num_bytes / 2**30:.2f} GiB fit on the {'GPU' if device == 'cuda' else 'CPU'} ({precision})"
    )
