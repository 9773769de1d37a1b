"""What options become, without loading a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.build import find_draft, resolve_here
from paceline.engine.build.facts import CPU, CUDA, DeviceFacts, gpu_of_arch
from paceline.engine.build.resolution import Resolution
from paceline.engine.build.weight_choice import choose_weights
from paceline.engine.precision import KernelFormat
from paceline.model.files import UnloadedModel, open_files
from paceline.model.shapes import shape
from paceline.model.spec import ModelSpec
from paceline.model.weights import Keep
from paceline.model.weights_plan import WeightsPlan

GPU = gpu_of_arch(90)
Model = Path | ModelSpec | None  # None: random weights


def source_of(model: Model) -> UnloadedModel:
    if isinstance(model, Path):
        files = open_files(model)
        return UnloadedModel(files.spec, files)
    return UnloadedModel(shape("tiny-qwen3") if model is None else model)


def resolved(model: Model, device: str = CPU, **options: Any) -> Resolution:
    """device: this CPU, or a GPU with sm_90."""
    config, source = EngineConfig(**({"device": CPU} if device == CPU else {}) | options), source_of(model)
    return resolve_here(config, {}, source, find_draft(config, source), device=GPU if device == CUDA else None)


def plan_of(model: Model, device: str = CPU, *, native_error: str | None = None, **options: Any) -> WeightsPlan:
    return _choose(model, device, native_error, options)[0]


def why(model: Model, device: str = CPU, *, native_error: str | None = None, **options: Any) -> str:
    """What is said of the weights, beginning with a level."""
    choices = _choose(model, device, native_error, options)[1]
    return "; ".join(f"{'warning' if one.is_warning else 'info'}: {one.reason}" for one in choices)


def _choose(model: Model, device: str, native_error: str | None, options: dict[str, Any]) -> Any:
    config = EngineConfig(**options)
    facts = GPU if device == CUDA else DeviceFacts(CPU, native_error=native_error)
    return choose_weights(source_of(model), config, facts, tp=config.tp)


def quantization(model: Model, device: str = CPU, **options: Any) -> str:
    return plan_of(model, device, **options).quantization


def kernel_formats(model: Model, **options: Any) -> tuple[KernelFormat, ...]:
    """On a GPU."""
    return resolved(model, CUDA, **options).precision.formats


def keep_stored(path: Path, quantization: str) -> dict[str, Keep]:
    """How a GPU keeps the matrices of a file, with one rank."""
    from paceline.engine.linear.pack import keepers  # with Triton, which most tests do not need

    plan = plan_of(path, CUDA, quantization=quantization)
    assert plan.is_stored, f"weights are not kept in {quantization}"
    return keepers(plan, source_of(path).spec)
