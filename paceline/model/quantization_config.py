"""The `quantization_config` of a Hugging Face config.json: which format the weights are stored in. Reads no tensors.

Supported are FP8 (`quant_method` fp8; compressed-tensors float-quantized), 4 bits (gptq; awq; compressed-tensors
pack-quantized) and mxfp4, the format of the experts of gpt-oss. Everything else is refused by name, before a weight is
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.model.spec import ModelError
from paceline.weight_formats import FP8, INT4, MXFP4, WeightFormat

_REMEDY = "use the unquantized model, or a GGUF file of it"


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """How the weights of linear layers are stored: as FP8 numbers, with a scale per row or for all, or per block; in 4
    bits, with a scale per group of columns; or those of experts as MXFP4 numbers."""

    method: str  # fp8, gptq, awq, compressed-tensors or mxfp4
    blocks: bool = False
    group: int = 0  # columns of a group of 4-bit weights; 0: another format
    symmetric: bool = False  # 4-bit compressed-tensors: no zeros are stored
    zero_offset: int = 0  # gptq: added to stored zeros
    desc_act: bool = False  # gptq: columns may be in another order than their groups

    @property
    def format(self) -> WeightFormat:
        """The weight format that it is read into."""
        return MXFP4 if self.method == "mxfp4" else INT4 if self.group else FP8


def read_format(config: Mapping[str, object]) -> CheckpointFormat | None:
    """The format that a config.json names; None: weights are not quantized."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise ModelError(f"quantization_config is {given!r}: {_REMEDY}.")
    method = given.get("quant_method", "unknown")
    if method == "fp8":
        _require(given, "fmt", ("e4m3",), "e4m3")
        return CheckpointFormat(method, _has_blocks(given.get("weight_block_size")))
    if method == "mxfp4":
        return CheckpointFormat(method)
    if method == "gptq":
        return _gptq(given)
    if method == "awq":
        _require(given, "bits", (4,))
        _require(given, "version", ("gemm", "GEMM"), "gemm")
        _require(given, "zero_point", (True,), True)
        return CheckpointFormat(method, group=_group(given))
    if method != "compressed-tensors":
        raise ModelError(
            f"quantization_config is {method!r}: supported are fp8, gptq, awq, compressed-tensors and mxfp4; {_REMEDY}."
        )
    return _compressed_tensors(given)


def _gptq(given: Mapping[str, object]) -> CheckpointFormat:
    _require(given, "bits", (4,))
    _require(given, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    offset = 0 if given.get("checkpoint_format") == "gptq_v2" else 1
    return CheckpointFormat("gptq", group=_group(given), zero_offset=offset, desc_act=bool(given.get("desc_act")))


def _compressed_tensors(given: Mapping[str, Any]) -> CheckpointFormat | None:
    """`targets` and `ignore` are not read: which layers are quantized is what their tensors say."""
    _require(given, "format", ("float-quantized", "pack-quantized", "dense"))
    if cache := given.get("kv_cache_scheme"):
        if not isinstance(cache, Mapping):
            raise ModelError(f"quantization_config has kv_cache_scheme {cache!r}: expected an object; {_REMEDY}.")
        for key, values in (("num_bits", (8,)), ("type", ("float",)), ("strategy", ("tensor",)), ("dynamic", (False,))):
            _require(cache, key, values, values[0], name="quantization_config.kv_cache_scheme")
    groups = list((given.get("config_groups") or {}).values())
    if given["format"] == "dense" and not any(group.get("weights") for group in groups):
        return None  # only the KV cache is quantized
    formats = {_group_format(given["format"], group) for group in groups}
    if len(formats) != 1:
        raise ModelError(
            f"quantization_config has {len(groups)} config_groups in {len(formats)} formats: only one format for all "
            f"quantized layers is supported; {_REMEDY}."
        )
    return formats.pop()


def _group_format(kind: str, group: Mapping[str, Any]) -> CheckpointFormat:
    if kind == "dense":
        raise ModelError(f"quantization_config has format 'dense' and quantized weights: {_REMEDY}.")
    weights = group.get("weights") or {}
    if kind == "pack-quantized":
        _require(weights, "num_bits", (4,))
        _require(weights, "type", ("int",), "int")
        _require(weights, "strategy", ("group",))
        _require(weights, "actorder", (None, False, "weight", "static"))  # others: columns out of order
        if group.get("input_activations"):
            raise ModelError(
                f"quantization_config has input_activations: only weights in 4 bits are supported; {_REMEDY}."
            )
        return CheckpointFormat(
            "compressed-tensors", group=_group(weights), symmetric=bool(weights.get("symmetric", True))
        )
    _require(weights, "num_bits", (8,))
    _require(weights, "type", ("float",))
    _require(weights, "strategy", ("channel", "tensor", "block"))
    blocks = weights["strategy"] == "block"
    return CheckpointFormat("compressed-tensors", blocks and _has_blocks(weights.get("block_structure") or ()))


def _group(given: Mapping[str, Any]) -> int:
    _require(given, "group_size", tuple(sorted(INT4.groups)))
    return int(given["group_size"])


def _has_blocks(size: Iterable[int] | None) -> bool:
    if size is None:
        return False
    if list(size) != 2 * [FP8.block]:
        raise ModelError(f"quantization_config has blocks of {list(size)}: only [128, 128] is supported; {_REMEDY}.")
    return True


def _require(
    given: Mapping[str, object],
    key: str,
    values: tuple[object, ...],
    default: object = None,
    name: str = "quantization_config",
) -> None:
    if (value := given.get(key, default)) not in values:
        supported = ", ".join(map(str, values))
        raise ModelError(f"{name} has {key} {value!r}, and supported is {supported}: {_REMEDY}.")
