"""The `quantization_config` of a Hugging Face config.json: which format the weights are stored in. Reads no tensors.

FP8 is supported: `quant_method` fp8, and compressed-tensors float-quantized; and mxfp4, the format of the experts of
gpt-oss. Everything else is refused by name, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.model.spec import ModelError

BLOCK = 128  # rows and columns of a block of FP8 weights
_REMEDY = "use the unquantised model, or a GGUF file of it"


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """How the weights of linear layers are stored: as FP8 numbers, with a scale per row or for all, or per block; or
    those of experts as MXFP4 numbers."""

    method: str  # fp8, compressed-tensors or mxfp4
    blocks: bool


def read_format(config: Mapping[str, Any]) -> CheckpointFormat | None:
    """The format that a config.json names; None: weights are not quantised."""
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
        return CheckpointFormat(method, True)
    if method != "compressed-tensors":
        raise ModelError(
            f"quantization_config is {method!r}: supported are fp8, compressed-tensors and mxfp4; {_REMEDY}."
        )
    _require(given, "format", ("float-quantized",))
    groups = list((given.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise ModelError(
            f"quantization_config has {len(groups)} config_groups: only one, for all Linear, is supported; {_REMEDY}."
        )
    weights = groups[0].get("weights") or {}
    _require(weights, "num_bits", (8,))
    _require(weights, "type", ("float",))
    _require(weights, "strategy", ("channel", "tensor", "block"))
    blocks = weights["strategy"] == "block"
    return CheckpointFormat(method, blocks and _has_blocks(weights.get("block_structure") or ()))


def _has_blocks(size: Any) -> bool:
    if size is None:
        return False
    if list(size) != [BLOCK, BLOCK]:
        raise ModelError(f"quantization_config has blocks of {list(size)}: only [128, 128] is supported; {_REMEDY}.")
    return True


def _require(given: Mapping[str, Any], key: str, values: tuple[Any, ...], default: Any = None) -> None:
    if (value := given.get(key, default)) not in values:
        supported = ", ".join(map(str, values))
        raise ModelError(f"quantization_config has {key} {value!r}, and supported is {supported}: {_REMEDY}.")
