"""Reads the spec of a model from its files, without its weights and without importing torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.model.config_json import spec_from_config
from paceline.model.gguf import gguf_spec
from paceline.model.gguf_file import is_gguf, open_gguf
from paceline.model.spec import ModelError, ModelSpec


def read_spec(path: str | Path) -> ModelSpec:
    """Reads the spec of the model at `path`, but not its weights."""
    path = Path(path)
    if is_gguf(path):
        return gguf_spec(open_gguf(path))
    if not path.is_dir():
        raise ModelError(
            f"model is {str(path)!r}, which is neither a folder nor a .gguf file: give the path of one, or a hub id."
        )
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: give the folder of a model, or a .gguf file.")
    return spec_from_config(read_json(path / "config.json"), read_json(path / "generation_config.json", {}))


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not path.is_file():
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): fetch it again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} contains a {type(value).__name__} instead of an object: fetch it again.")
    return value
