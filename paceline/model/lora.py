"""LoRA adapters: reads a PEFT folder (adapter_config.json, adapter_model.safetensors) for a model that is loaded.

An adapter adds `scale · B(A x)` to the output of linear layers. Each part of a fused matrix (q, k and v of qkv) has its
own A and B, under the names of `layout.py`. What `stored.py` does to the rows of a matrix it does to those of B, and B
includes the scale. With tensor parallelism a rank has the rows of B, or the columns of A, that belong to its part of
the matrix: the sum over ranks that the layer needs anyway is then right for the adapter too.

All of the file is checked before an adapter is used: what is not supported is refused by name. As in PEFT, a file may
have matrices that change nothing, because the config excludes them or the model has no such module, and may lack some
that the config names: `remarks` says which.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.model.layout import WHOLE_MODEL, Shard, StoredPart, StoredTensor, stored_parts
from paceline.model.read_spec import read_json
from paceline.model.registry import FAMILIES
from paceline.model.spec import ModelError, ModelSpec
from paceline.model.stored import adapt
from paceline.request import Unavailable

MAX_RANK = 128
ADAPTED_MATRICES = ("qkv", "out", "gate_up", "down")  # fused matrices of a layer that adapters can change
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
_OF_EXPERTS = re.compile(r"expert|block_sparse_moe|mlp\.(gate|router)$")
_ENDS = ("lm_head", "embed_tokens")  # not linear layers of a layer, also where the file has only one of the two
_RETRAIN = "train the adapter without it"
# Options of PEFT that change what an adapter computes, and the value that leaves it as it is.
_PLAIN_OPTIONS: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, [], ()),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}
_CHANGED_BASE = ("pissa", "olora", "corda")  # initialisations that subtract the first A and B from the base's weights


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What an adapter adds to some rows of a fused matrix: y[first : first + len(b)] += b (a x)."""

    first: int
    a: Tensor  # [rank, columns]
    b: Tensor  # [rows, rank], with the scale

    @property
    def rank(self) -> int:
        return len(self.a)


LayerAdapter = Mapping[str, tuple[LowRank, ...]]  # by fused matrix: its parts that the adapter changes


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """The matrices of one adapter that belong to the layers of one rank."""

    layers: tuple[LayerAdapter, ...]

    @property
    def num_bytes(self) -> int:
        parts = [part for layer in self.layers for matrix in layer.values() for part in matrix]
        return sum(tensor.numel() * tensor.element_size() for part in parts for tensor in (part.a, part.b))


@dataclass(frozen=True, slots=True, eq=False)
class LoraFile:
    """A PEFT folder that was read, before its matrices are arranged for a model."""

    folder: str
    scales: Mapping[str, float]  # by module, in the order of the file
    tensors: Mapping[str, tuple[Tensor, Tensor]]  # A and B by module
    digest: str  # of the contents: adapters with the same one compute the same
    untargeted: tuple[str, ...] = ()  # modules with matrices in the file that the config does not adapt
    missing_targets: tuple[str, ...] = ()  # of target_modules, without matrices in the file

    @property
    def max_rank(self) -> int:
        return max(len(a) for a, _ in self.tensors.values())


class AdapterUnavailable(ModelError, Unavailable):
    """The adapter cannot be read now: the disk with it may be mounted later."""


def read_adapter(folder: str | Path) -> LoraFile:
    """Reads a PEFT folder and checks everything that does not depend on the model. Raises ModelError."""
    folder = Path(folder).expanduser()
    if not folder.is_dir() or not any(folder.iterdir()):
        # Its disk may not be mounted yet.
        kind = AdapterUnavailable if folder.is_absolute() and not folder.is_file() else ModelError
        what = "an empty folder" if folder.is_dir() else "which is no folder"
        raise kind(f"the adapter is {str(folder)!r}, {what}: give a folder with {_CONFIG}, or mount the disk with it.")
    for name in (_CONFIG, _TENSORS):
        if not (folder / name).is_file():
            hint = ": convert adapter_model.bin" if name == _TENSORS and (folder / "adapter_model.bin").exists() else ""
            raise ModelError(f"{folder} has no {name}{hint or ': give the folder of a PEFT adapter'}.")
    config = read_json(folder / _CONFIG)
    _check_config(config, str(folder))
    # Read and not mapped: a file that is overwritten while the engine runs would change or end it.
    data = (folder / _TENSORS).read_bytes()
    digest = hashlib.blake2b(data, digest_size=8)
    digest.update((folder / _CONFIG).read_bytes())
    pairs = _pairs(_parsed(data, str(folder)), str(folder))
    tensors = {module: pair for module, pair in pairs.items() if _is_adapted(config, module)}
    if not tensors:
        raise ModelError(
            f"{folder}/{_CONFIG} adapts none of the modules in {_TENSORS} ({_list(pairs)}): compare target_modules and "
            "exclude_modules."
        )
    scales = {module: _scale(config, module, len(a), str(folder)) for module, (a, _) in tensors.items()}
    targets = config.get("target_modules")
    named = targets if isinstance(targets, list) else []
    missing = tuple(one for one in named if not any(_matches([one], module) for module in pairs))
    untargeted = tuple(module for module in pairs if module not in tensors)
    return LoraFile(str(folder), scales, tensors, digest.hexdigest(), untargeted, missing)


def arrange_adapter(file: LoraFile, spec: ModelSpec, dtype: torch.dtype, shard: Shard = WHOLE_MODEL) -> LoraWeights:
    """The matrices of an adapter for one rank of a model. Raises ModelError if it belongs to another model."""
    whole, parts = stored_parts(spec), stored_parts(spec, shard)
    layers: list[dict[str, list[LowRank]]] = [{} for _ in shard.layers(spec)]
    is_any = False
    for module, a, adapted in _adapted_matrices(file, spec):
        for name, rows in adapted.items():
            is_any = True
            _check_shape(file.folder, module, a, rows.shape, whole[name])
            if name in parts:
                layer, _, matrix = parts[name].target.partition(".")
                found = _part(parts[name], a, rows, file.scales[module], dtype)
                layers[int(layer)].setdefault(matrix, []).append(found)
    if not is_any:
        raise ModelError(
            f"{file.folder} adapts {_list(file.tensors)}, and the served model ({spec.family}, {spec.num_layers} "
            "layers) has no such modules: give an adapter of this model."
        )
    return LoraWeights(tuple({name: tuple(found) for name, found in layer.items()} for layer in layers))


def remarks(file: LoraFile, spec: ModelSpec) -> list[str]:
    """What of the adapter changes nothing, in words."""
    absent = [module for module, _, adapted in _adapted_matrices(file, spec) if not adapted]
    found = {
        f"{_CONFIG} does not adapt": file.untargeted,
        "the model does not have": absent,
        f"{_TENSORS} lacks, and target_modules has": file.missing_targets,
    }
    return [f"{what} {_list(names)}" for what, names in found.items() if names]


def _adapted_matrices(file: LoraFile, spec: ModelSpec) -> Iterator[tuple[str, Tensor, dict[str, StoredTensor]]]:
    """Each module, its A, and B by the names of the stored matrices that it changes: none if the model does not have
    the module."""
    family, whole = next(family for family in FAMILIES if family.name == spec.family), stored_parts(spec)
    for module, (a, b) in file.tensors.items():
        stored = StoredTensor(tuple(b.shape), 0, partial(_rows, b))
        adapted = adapt(spec, family, {f"{module}.weight": stored}, is_gguf=False)
        adapted = {name: rows for name, rows in adapted.items() if name in whole}
        if spec.has_experts and _OF_EXPERTS.search(module):
            raise ModelError(
                f"{file.folder} adapts {module}, a part of a mixture of experts: adapters of experts and routers are "
                "not supported; train one of attention."
            )
        matrices = {whole[name].target.rpartition(".")[2] for name in adapted}
        if module.endswith(_ENDS) or not matrices <= set(ADAPTED_MATRICES):
            raise ModelError(
                f"{file.folder} adapts {module}: only linear layers of attention and MLP can be adapted "
                f"({', '.join(_TARGETS)})."
            )
        unfused = (module.replace("qkv_proj", "q_proj"), module.replace("gate_up_proj", "gate_proj"))
        if not adapted and any(f"{name}.weight" in whole for name in unfused):
            raise ModelError(
                f"{file.folder} has {module} with B of shape {list(b.shape)}, which is not that of the served model "
                f"({spec.family}): give an adapter of this model."
            )
        yield module, a, adapted


def _rows(b: Tensor, part: tuple[slice, ...]) -> Tensor:
    return b[part] if part else b


def _list(names: Iterable[str]) -> str:
    first, *others = sorted(names)  # a file has no order
    return first + (f" and {len(others)} more" if others else "")


def _part(part: StoredPart, a: Tensor, rows: StoredTensor, scale: float, dtype: torch.dtype) -> LowRank:
    """A and B of one stored matrix, as far as the rank has it."""
    has_columns = len(part.source) == 2  # row-parallel: all rows, some columns
    b = rows.read(part.source[:1]).float() * scale
    a = a[:, part.source[1]] if has_columns else a
    return LowRank(part.row, a.to(dtype).contiguous(), b.to(dtype).contiguous())


def _check_shape(folder: str, module: str, a: Tensor, b_shape: tuple[int, ...], part: StoredPart) -> None:
    rows, columns = part.shape
    if a.shape[1] != columns or b_shape[0] != rows:
        raise ModelError(
            f"{folder} has {module} for a matrix of shape {[b_shape[0], a.shape[1]]}, and that of the served model has "
            f"{[rows, columns]}: give an adapter of this model."
        )


def _parsed(data: bytes, folder: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}/{_TENSORS} cannot be read ({error}): it is damaged, fetch it again.") from None


def _pairs(tensors: Mapping[str, Tensor], folder: str) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by module."""
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(rf"(?:{re.escape(_PREFIX)})?(.+)\.lora_([AB])\.weight", name)
        if match is None:
            raise ModelError(
                f"{folder} has the tensor {name}: only lora_A.weight and lora_B.weight of linear layers are supported; "
                f"{_RETRAIN}."
            )
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ModelError(f"{folder} stores {name} as {tensor.dtype}: store it in float32, float16 or bfloat16.")
        if tensor.ndim != 2 or not tensor.numel():
            raise ModelError(f"{folder} has {name} of shape {list(tensor.shape)}: expected a matrix.")
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{folder} has {name} with NaN or infinite values: train the adapter again.")
        sides.setdefault(match[1], {})[match[2]] = tensor
    if not sides:
        raise ModelError(f"{folder}/{_TENSORS} has no tensors: give the folder of a trained adapter.")
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for module, found in sides.items():
        if len(found) < 2:
            missing = "B" if "A" in found else "A"
            raise ModelError(f"{folder} lacks lora_{missing} of {module}: the file is incomplete, fetch it again.")
        a, b = found["A"], found["B"]
        if len(a) != b.shape[1]:
            raise ModelError(
                f"{folder} has {module} with A of shape {list(a.shape)} and B of shape {list(b.shape)}: the rows of A "
                "and the columns of B are the rank and must be equal."
            )
        pairs[module] = (a, b)
    return pairs


def _check_config(config: Mapping[str, Any], folder: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{folder}/{_CONFIG} has peft_type {kind!r}: only LORA is supported.")
    for name, plain in _PLAIN_OPTIONS.items():
        value = config.get(name)
        if value not in plain:
            raise ModelError(f"{folder}/{_CONFIG} has {name} {value!r}, which is not supported: {_RETRAIN}.")
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.startswith(_CHANGED_BASE):
        raise ModelError(
            f"{folder}/{_CONFIG} has init_lora_weights {initial!r}, which changes the base model: save the adapter "
            "with path_initial_model_for_weight_conversion."
        )
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"{folder}/{_CONFIG} has {name} {value!r}: expected a number above 0.")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        values = patterns.values() if isinstance(patterns, dict) else (None,)
        if not all(isinstance(one, int | float) and math.isfinite(one) and one > 0 for one in values):
            raise ModelError(f"{folder}/{_CONFIG} has {name} {patterns!r}: expected numbers above 0 by module.")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ModelError(
                    f"{folder}/{_CONFIG} has {name} with {pattern!r}, which is no regular expression ({error})."
                ) from None
    for name in ("target_modules", "exclude_modules"):
        _check_modules(name, config.get(name), folder)


def _check_modules(name: str, value: object, folder: str) -> None:
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ModelError(
                f"{folder}/{_CONFIG} has {name} {value!r}, which is no regular expression ({error})."
            ) from None
    elif value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise ModelError(
            f"{folder}/{_CONFIG} has {name} {value!r}: expected names of modules, or a regular expression."
        )


def _is_adapted(config: Mapping[str, Any], module: str) -> bool:
    """Whether the config adapts a module of this name, as PEFT decides it."""
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    is_target = targets is None or targets == "all-linear" or _matches(targets, module)
    return is_target and not (excluded and _matches(excluded, module))


def _matches(names: str | list[str], module: str) -> bool:
    """names: a regular expression of the whole name, or last parts of names."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _scale(config: Mapping[str, Any], module: str, rank: int, folder: str) -> float:
    """Of a module whose A has `rank` rows."""
    if rank > MAX_RANK:
        raise ModelError(f"{folder} has {module} of rank {rank}: ranks up to {MAX_RANK} are supported.")
    expected = _by_pattern(config.get("rank_pattern") or {}, module, config["r"])
    if rank != expected:
        raise ModelError(
            f"{folder} has {module} of rank {rank} where {_CONFIG} says {expected}: they belong to different adapters."
        )
    alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that matches the end of the module's name, as PEFT defines it."""
    matches = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matches, default)


# adapt(matrix, x, y): y += what the adapters of its rows add to a fused matrix of one layer with the input x.
AddAdapters = Callable[[str, Tensor, Tensor], None]


class LoraRows:
    """Which rows of a batch use which adapter. The reference implementation of a batch with several adapters."""

    def __init__(self, groups: Sequence[tuple[Tensor, LoraWeights]]) -> None:
        """groups: the rows of each adapter, ascending."""
        self.groups = groups

    def add(self, layer: int, matrix: str, x: Tensor, y: Tensor) -> None:
        """y += B(A x), in place, for the rows that have an adapter."""
        for rows, weights in self.groups:
            parts = weights.layers[layer].get(matrix, ())
            own = x if len(rows) == len(x) or not parts else x[rows]
            for part in parts:
                added = (own @ part.a.T) @ part.b.T
                y[:, part.first : part.first + len(part.b)].index_add_(0, rows, added)
