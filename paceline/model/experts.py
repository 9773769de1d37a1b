"""Names of experts in model files: each becomes one parameter per expert, as Qwen's first files had them.

    mlp.experts.3.gate_proj.weight [F, H]                   Qwen, OLMoE: as it is
    block_sparse_moe.experts.3.w1.weight [F, H]             Mixtral: renamed
    mlp.experts.gate_up_proj [E, 2F, H]                     transformers 5: cut into experts, and into gate and up
    mlp.experts.gate_proj.weight [E, F, H]                  GGUF (ffn_gate_exps): cut into experts

So the layout has one form of names, and an error names the same parameter whatever the file calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.model.layout import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FUSED = re.compile(r"(?P<block>.*\.mlp\.experts\.)(?P<name>gate_up|gate|up|down)_proj(\.weight)?")


def name_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The same tensors with one name per expert."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        name = _renamed(name)
        match = _FUSED.fullmatch(name)
        if match is None or len(tensor.shape) != 3:
            found[name] = tensor
        else:
            found.update(_experts(match["block"], match["name"], tensor))
    return found


def _renamed(name: str) -> str:
    if ".block_sparse_moe." not in name:
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    *start, kind, suffix = name.split(".")
    return ".".join([*start, _MIXTRAL.get(kind, kind), suffix])


def _experts(block: str, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    count, rows, columns = tensor.shape
    names = ("gate", "up") if name == "gate_up" else (name,)
    size = rows // len(names)
    for expert in range(count):
        for index, one in enumerate(names):
            part = _part(tensor, expert, slice(index * size, (index + 1) * size))
            yield f"{block}{expert}.{one}_proj.weight", replace(part, shape=(size, columns))


def _part(tensor: StoredTensor, expert: int, rows: slice) -> StoredTensor:
    """Some rows of one expert."""
    num_bytes = tensor.num_bytes * (rows.stop - rows.start) // (tensor.shape[0] * tensor.shape[1])

    def read(part: tuple[slice, ...]) -> Tensor:
        own, *columns = part or (slice(None),)
        start, stop, _ = own.indices(rows.stop - rows.start)
        selected = (slice(expert, expert + 1), slice(rows.start + start, rows.start + stop), *columns)
        return tensor.read(selected)[0]

    return StoredTensor(tensor.shape[1:], num_bytes, read)
