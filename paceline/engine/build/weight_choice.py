"""Decides in which format the matrices of a model are kept, from its headers, options and device. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.config import ConfigError, EngineConfig
from paceline.engine.build.facts import CPU, CUDA, DeviceFacts
from paceline.engine.precision import LARGE_MATRIX, is_kept_on_gpu, rounding_group
from paceline.model.files import ModelFiles, UnloadedModel
from paceline.model.layout import (
    PackedForm,
    Shard,
    is_matrix,
    matrix_kind,
    stored_parts,
    target_shapes,
)
from paceline.model.spec import ModelSpec
from paceline.model.weights_plan import MatrixPlan, Origin, WeightsPlan
from paceline.weight_formats import (
    FP8,
    GGUF,
    GGUF_FORMATS,
    INT4,
    MXFP4,
    Q4,
    Q8,
    WEIGHT_FORMATS,
    MatrixKind,
    WeightFormat,
    title_of,
)

AUTO, NONE = "auto", "none"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ON_CPU = {FP8.name: Q8.name, INT4.name: Q4.name}  # what to choose there instead


@dataclass(frozen=True, slots=True)
class OptionChoice:
    """What an option became, and why."""

    option: str
    value: str
    reason: str
    is_warning: bool = False  # it takes more time or memory than the files suggest


@dataclass(frozen=True, slots=True)
class _Reason:
    text: str
    is_warning: bool = True


def activation_dtype(config: EngineConfig, device: DeviceFacts) -> str:
    if config.dtype != AUTO:
        return config.dtype
    return "bfloat16" if device.kind == CUDA else "float32"


def wants_native(source: UnloadedModel, config: EngineConfig, device_kind: str) -> bool:
    """Whether the kernels for 4 and 8 bits on a CPU decide what is chosen."""
    if device_kind != CPU or config.quantization == NONE:
        return False
    return config.quantization != AUTO or source.quantization in (GGUF, INT4.name)


def choose_weights(
    source: UnloadedModel, config: EngineConfig, device: DeviceFacts, *, tp: int
) -> tuple[WeightsPlan, list[OptionChoice]]:
    """Raises ConfigError for what is asked for and not possible. tp: ranks that divide the matrices."""
    given, stored = config.quantization, source.quantization
    dtype = activation_dtype(config, device)
    if given not in (AUTO, NONE):
        _refuse(given, source, config, device, tp)
        if given == stored and _why_not_kept(source, config, device, tp) is None:
            return _kept(source, device, dtype, given), [OptionChoice("quantization", given, "as given, and as stored")]
        plan = _rounded(source, device, dtype, WEIGHT_FORMATS[given], tp)
        return plan, [OptionChoice("quantization", given, "as given")]
    if given == NONE or stored is None:
        why = "as given" if given == NONE else "the weights are stored in 16 or 32 bits"
        return _expanded(source, dtype), [OptionChoice("quantization", NONE, why)]
    if (reason := _why_not_kept(source, config, device, tp) or _why_slower(source, device)) is None:
        return _kept(source, device, dtype, stored), [OptionChoice("quantization", stored, "the weights are stored so")]
    text = f"weights stored in {title_of(stored)} are expanded to {dtype}: {reason.text}"
    return _expanded(source, dtype), [OptionChoice("quantization", NONE, text, reason.is_warning)]


# ---------------------------------------------------------------------- rules


def _refuse(given: str, source: UnloadedModel, config: EngineConfig, device: DeviceFacts, tp: int) -> None:
    spec, what = source.spec, None
    formats = GGUF_FORMATS if given == GGUF else (WEIGHT_FORMATS[given],)
    if device.kind == CPU:
        if not all(CPU in one.kernels for one in formats):
            nearest = _ON_CPU.get(given)
            what = f"the device is a CPU: {f'set quantization to {nearest}, or ' if nearest else ''}leave it out"
        elif config.num_ranks > 1:
            what = "tp or pp is given: set them to 1, or quantization to none"
        elif spec.has_experts:
            what = "the model has experts, whose weights are not kept in 4 or 8 bits: set it to none"
        elif source.files is None:
            what = "load is 'random': give a model, or set quantization to none"
        elif config.dtype in ("bfloat16", "float16"):
            what = f"dtype is {config.dtype!r}: leave it out"
        elif device.native_error is not None:
            raise ConfigError(
                f"quantization is {given!r}, which needs kernels compiled for this CPU: {device.native_error}; or set "
                "it to none."
            )
    elif config.dtype not in (AUTO, "bfloat16"):
        what = f"dtype is {config.dtype!r}: set it to bfloat16"
    elif given == MXFP4.name and not spec.has_experts:
        what = "the model has no experts: leave it out"
    elif given != GGUF and spec.has_experts and MatrixKind.EXPERTS not in WEIGHT_FORMATS[given].kernels[CUDA]:
        what = "the model has a mixture of experts: set it to none"
    if what is not None:
        raise ConfigError(f"quantization is {given!r} and {what}.")
    if given == GGUF:
        if source.quantization != GGUF:
            raise ConfigError(f"quantization is {GGUF!r}, which needs a quantized GGUF file: leave it out.")
        if (reason := _why_not_kept(source, config, device, tp)) is not None:
            raise ConfigError(f"quantization is {GGUF!r} and {reason.text}: leave it out.")
    elif device.kind == CUDA:
        rounding_group(source.spec, WEIGHT_FORMATS[given], tp)  # raises


def _why_not_kept(source: UnloadedModel, config: EngineConfig, device: DeviceFacts, tp: int) -> _Reason | None:
    """Why weights that are stored in fewer bits cannot stay so."""
    assert source.files is not None and source.quantization is not None, "the file is quantized"
    if config.dtype != AUTO and (device.kind == CPU or config.dtype != "bfloat16"):
        return _Reason(f"dtype is {config.dtype}", is_warning=False)
    return (_why_not_on_cpu if device.kind == CPU else _why_not_on_gpu)(source, config, device, tp)


def _why_not_on_cpu(source: UnloadedModel, config: EngineConfig, device: DeviceFacts, tp: int) -> _Reason | None:
    if source.quantization not in (GGUF, INT4.name):
        return _Reason("a CPU has no kernels for them")
    if config.num_ranks > 1:
        return _Reason("kernels for 4 and 8 bits compute a whole model, and tp or pp is given")
    if source.spec.has_experts:
        return _Reason("there are no kernels for experts in 4 and 8 bits")
    if device.native_error is not None:
        return _Reason(f"kernels for 4 and 8 bits: {device.native_error}")
    return None


def _why_not_on_gpu(source: UnloadedModel, config: EngineConfig, device: DeviceFacts, tp: int) -> _Reason | None:
    files, spec = source.files, source.spec
    assert files is not None, "the file is quantized"
    for name, forms in files.forms().items():
        if not is_kept_on_gpu(name, spec):
            continue
        kind = matrix_kind(name)
        stored = [one for one in forms if one is not None]
        if len(stored) < len(forms):
            return _Reason(f"{name} is stored in 16 bits" if kind is MatrixKind.LINEAR else _NO_EXPERTS)
        if any(kind not in one.format.kernels[CUDA] for one in stored):
            return _Reason(_NO_EXPERTS)
        if any(one.block_rows > 1 and kind not in one.format.block_kinds for one in stored):
            return _Reason("only experts have kernels for scales of blocks")
    if not _can_divide(files, tp):
        return _Reason(f"tp {tp} divides columns that have one scale")
    return None


_NO_EXPERTS = "there are no kernels for experts in this form"


def _why_slower(source: UnloadedModel, device: DeviceFacts) -> _Reason | None:
    if device.kind == CUDA and source.quantization == GGUF and _largest_linear(source.spec) < LARGE_MATRIX:
        return _Reason("that is faster for a model as small as this", is_warning=False)
    return None


def _largest_linear(spec: ModelSpec) -> int:
    """Elements of the largest matrix of a layer."""
    return max(math.prod(shape) for name, shape in target_shapes(spec).items() if "." in name and is_matrix(name))


def _can_divide(files: ModelFiles, tp: int) -> bool:
    """Whether the part of every rank begins at a column where a scale begins, or a block may be divided."""
    spec, first = files.spec, _first_layers(files.spec)
    units = {
        name: _unit(files.stored[name].packed)
        for name, part in stored_parts(spec).items()
        if name.startswith(first) and is_kept_on_gpu(part.target, spec)
    }
    if max(units.values()) == 1:
        return True
    if tp > min(min(layer.mixer.num_heads, layer.ffn.size) for layer in spec.layers):
        return False
    shards = [stored_parts(spec, Shard(rank, tp)) for rank in range(tp)]
    columns = ((units[name], parts[name].source[1:]) for parts in shards for name in units)
    return not any(one.start % unit for unit, source in columns for one in source)


def _unit(packed: PackedForm | None) -> int:
    assert packed is not None, "all matrices that are kept are packed"
    return packed.format.least_columns if packed.block_rows > 1 else packed.group or 1


def _first_layers(spec: ModelSpec) -> tuple[str, ...]:
    """The beginnings of the stored names of the first layer of each kind."""
    return tuple(f"model.layers.{spec.layers.index(layer)}." for layer in dict.fromkeys(spec.layers))


# ---------------------------------------------------------------------- plans


def _expanded(source: UnloadedModel, dtype: str) -> WeightsPlan:
    forms = {} if source.files is None else source.files.forms()

    def plan(name: str, shape: tuple[int, ...]) -> MatrixPlan:
        is_packed = any(one is not None and one.is_stored for one in forms.get(name, ()))
        origin = Origin.EXPANDED if is_packed else Origin.CONVERTED
        return _wide(name, shape, dtype, origin)

    return _plan(source.spec, NONE, dtype, plan)


def _kept(source: UnloadedModel, device: DeviceFacts, dtype: str, quantization: str) -> WeightsPlan:
    """What has kernels stays as it is stored. A CPU multiplies with 4 and 8 bits alone: it rounds all others to 8."""
    assert source.files is not None, "only a file can be quantized"
    spec, forms = source.spec, source.files.forms()

    def plan(name: str, shape: tuple[int, ...]) -> MatrixPlan:
        parts = forms[name]
        stored = [one for one in parts if one is not None]
        if device.kind == CPU:
            wide = len(stored) < len(parts) or any(one.format.bits > Q4.bits for one in stored)
            return _packed(name, shape, Q8 if wide else Q4, _origin(stored))
        if not is_kept_on_gpu(name, spec):
            return _wide(name, shape, dtype, Origin.EXPANDED if _origin(stored) is Origin.STORED else Origin.CONVERTED)
        first = stored[0]
        format = max((one.format for one in stored), key=lambda one: one.bits)  # 4-bit values are 8-bit values, too
        return _packed(name, shape, format, _origin(stored), first.group, first.block_rows)

    return _plan(spec, quantization, dtype, plan, is_stored=True)


def _origin(stored: list[PackedForm]) -> Origin:
    return Origin.STORED if any(one.is_stored for one in stored) else Origin.ROUNDED


def _rounded(source: UnloadedModel, device: DeviceFacts, dtype: str, format: WeightFormat, tp: int) -> WeightsPlan:
    group = rounding_group(source.spec, format, tp)

    def plan(name: str, shape: tuple[int, ...]) -> MatrixPlan:
        if device.kind == CUDA and not is_kept_on_gpu(name, source.spec):
            return _wide(name, shape, dtype, Origin.CONVERTED)
        return _packed(name, shape, format, Origin.ROUNDED, group)

    # On a GPU they are loaded in 16 bits, then rounded layer by layer.
    return _plan(source.spec, format.name, dtype, plan, is_loaded_wide=device.kind == CUDA)


def round_like(source: UnloadedModel, plan: WeightsPlan, config: EngineConfig, device: DeviceFacts) -> WeightsPlan:
    """A draft model on the GPU of a model with this plan: they have the same kernels."""
    if plan.quantization == NONE or (plan.quantization == MXFP4.name and not source.spec.has_experts):
        return _expanded(source, plan.dtype)
    if source.quantization == plan.quantization and _why_not_kept(source, config, device, 1) is None:
        return _kept(source, device, plan.dtype, plan.quantization)
    return _rounded(source, device, plan.dtype, WEIGHT_FORMATS.get(plan.quantization, Q8), 1)


def _wide(name: str, shape: tuple[int, ...], dtype: str, origin: Origin) -> MatrixPlan:
    return MatrixPlan(name, shape, matrix_kind(name), dtype, origin, math.prod(shape) * ITEM_BYTES[dtype])


def _packed(
    name: str,
    shape: tuple[int, ...],
    format: WeightFormat,
    origin: Origin,
    group: int | None = None,
    block_rows: int = 1,
) -> MatrixPlan:
    group = format.groups[0] if group is None else group
    num_bytes = format.num_bytes(shape[0], shape[1], group, block_rows)
    return MatrixPlan(name, shape, matrix_kind(name), format.name, origin, num_bytes, group, block_rows)


def _plan(
    spec: ModelSpec,
    quantization: str,
    dtype: str,
    plan: Callable[[str, tuple[int, ...]], MatrixPlan],
    *,
    is_stored: bool = False,
    is_loaded_wide: bool = False,
) -> WeightsPlan:
    shapes = target_shapes(spec)
    matrices = tuple(plan(name, shape) for name, shape in shapes.items() if is_matrix(name))
    item_bytes = ITEM_BYTES[dtype]
    vectors = sum(math.prod(shape) for name, shape in shapes.items() if not is_matrix(name)) * item_bytes
    loading = vectors + sum(one.num_bytes for one in matrices)
    if is_loaded_wide:
        loading = item_bytes * sum(math.prod(shape) for shape in shapes.values())
    return WeightsPlan(quantization, dtype, matrices, vectors, loading, is_stored)
