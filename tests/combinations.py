"""What becomes of stored weights with other features: the table in docs/models.md, as `resolve` decides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from paceline.engine.build.facts import DeviceFacts
from paceline.model.files import UnloadedModel
from paceline.model.shapes import shape
from paceline.model.spec import ModelSpec
from paceline.weight_formats import FP8, INT4, MXFP4, Q4
from tests.engine.test_resolution import GPU, HOST, resolved, stored_in

_DENSE, _GEMMA, _EXPERTS, _GPT_OSS = (
    shape(name) for name in ("qwen3-14b", "gemma3-4b", "qwen3-30b-a3b", "gpt-oss-20b")
)
_STORED: dict[str, Callable[[ModelSpec], UnloadedModel]] = {
    "FP8, a scale per row": lambda spec: stored_in(spec, FP8, group=0),
    "FP8 in blocks": lambda spec: stored_in(spec, FP8, group=128, block_rows=128),
    "GPTQ, AWQ": lambda spec: stored_in(spec, INT4, group=32),
    "GGUF": lambda spec: stored_in(spec, Q4),
    "MXFP4": lambda spec: stored_in(spec, MXFP4),
}
_COLUMNS: dict[str, tuple[ModelSpec, DeviceFacts, Mapping[str, Any]]] = {
    "GPU": (_DENSE, GPU, {}),
    "GPU, Gemma 3": (_GEMMA, GPU, {}),
    "GPU, LoRA": (_DENSE, GPU, {"max_lora_rank": 16}),
    "GPU, `--tp 2`": (_DENSE, GPU, {"tp": 2}),
    "GPU, experts": (_EXPERTS, GPU, {}),
    "CPU": (_DENSE, HOST, {}),
    "CPU, LoRA": (_DENSE, HOST, {"max_lora_rank": 16}),
    "CPU, `--tp 2`": (_DENSE, HOST, {"tp": 2}),
    "CPU, `--pp 2`": (_DENSE, HOST, {"pp": 2}),
    "CPU, experts": (shape("tiny-qwen3-moe"), HOST, {}),
}
HEAD = ("stored", *_COLUMNS)


def combination_rows() -> list[tuple[str, ...]]:
    with patch("paceline.model.files.is_gguf", lambda path: Path(path).suffix == ".gguf"):
        return [
            (name, *(_cell(make(_model(name, spec)), device, options) for spec, device, options in _COLUMNS.values()))
            for name, make in _STORED.items()
        ]


def _model(name: str, spec: ModelSpec) -> ModelSpec:
    return _GPT_OSS if name == "MXFP4" and spec.has_experts else spec


def _cell(source: UnloadedModel, device: DeviceFacts, options: Mapping[str, Any]) -> str:
    if source.quantization == MXFP4.name and not source.spec.has_experts:
        return ""  # experts alone are stored so
    found = resolved(source, replace(device, count=2), **options)
    return "kept" if found.weights.is_stored else "expanded"
