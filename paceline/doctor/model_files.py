"""Checks of a model: its files are there, complete and supported, its tokenizer loads, its weights fit into memory."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.finding import Check, Finding, ok, warning


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
    from paceline.engine.kv_sizing import check_models_fit
    from paceline.model.weights import check_files
    from paceline.text.load import load_tokenizer

    spec = check_files(path)
    yield ok("model", f"{path}: {spec.family}, {spec.num_parameters / 1e6:,.1f} M parameters, all files complete")
    tokenizer = load_tokenizer(path)
    tokenizer.check_fits(spec.vocab_size)
    yield ok("tokenizer", f"{tokenizer.vocab_size:,} tokens")
    import torch

    on_gpu = torch.cuda.is_available()
    num_bytes, free = (2, torch.cuda.mem_get_info()[0]) if on_gpu else (4, None)
    check_models_fit([spec], num_bytes, free=free)
    device = "GPU (bfloat16)" if on_gpu else "CPU (float32)"
    yield ok("model memory", f"{spec.num_parameters * num_bytes / 2**30:.2f} GiB fit on the {device}")
