"""Names of experts in model files: each becomes one parameter per expert, as Qwen's first files had them.

    mlp.experts.3.gate_proj.weight [F, H]                   Qwen, OLMoE: as it is
    block_sparse_moe.experts.3.w1.weight [F, H]             Mixtral: renamed
    mlp.experts.gate_up_proj [E, 2F, H]                     transformers 5: cut into experts, and into gate and up
    mlp.experts.gate_proj.weight [E, F, H]                  GGUF (ffn_gate_exps): cut into experts
    mlp.experts.gate_up_proj [E, H, 2F], its bias [E, 2F]   gpt-oss: transposed, and every second row is one of gate
    mlp.experts.gate_up_proj.weight [E, 2F, H]              gpt-oss in MXFP4 (mxfp4_tensors.py): not transposed

So the layout has one form of names, and an error names the same parameter whatever the file calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.model.layout import StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paceline.model.quantized import PackedTensor

_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FUSED = re.compile(r"(?P<block>.*\.mlp\.experts\.)(?P<name>gate_up|gate|up|down)_proj(?P<kind>[._](weight|bias))?")


def name_experts(stored: Mapping[str, StoredTensor], *, interleaved: bool = False) -> dict[str, StoredTensor]:
    """The same tensors with one name per expert. interleaved: in the form of gpt-oss."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        name = _renamed(name)
        match = _FUSED.fullmatch(name)
        is_bias = match is not None and match["kind"] in (".bias", "_bias")
        if match is None or len(tensor.shape) != (2 if is_bias else 3):
            found[name] = tensor
            continue
        if interleaved and match["kind"] is None:
            tensor = _transposed(tensor)
        kind = "bias" if is_bias else "weight"
        found.update(_experts(match["block"], match["name"], kind, tensor, interleaved=interleaved))
    return found


def _transposed(tensor: StoredTensor) -> StoredTensor:
    """[E, columns, rows] as [E, rows, columns]."""
    count, num_columns, num_rows = tensor.shape

    def read(part: tuple[slice, ...]) -> Tensor:
        experts, rows, columns = (*part, *(slice(None),) * (3 - len(part)))
        begin, end, step = rows.indices(num_rows)  # files have no steps
        return tensor.read((experts, columns, slice(begin, end)))[..., ::step].transpose(1, 2)

    return replace(tensor, shape=(count, num_rows, num_columns), read=read)


def _renamed(name: str) -> str:
    name = name.replace(".mlp.router.", ".mlp.gate.")
    if ".block_sparse_moe." not in name:
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    *start, kind, suffix = name.split(".")
    return ".".join([*start, _MIXTRAL.get(kind, kind), suffix])


def _experts(
    block: str, name: str, kind: str, tensor: StoredTensor, *, interleaved: bool
) -> Iterator[tuple[str, StoredTensor]]:
    names = ("gate", "up") if name == "gate_up" else (name,)
    size, step = tensor.shape[1] // len(names), len(names) if interleaved else 1
    for expert in range(tensor.shape[0]):
        for index, one in enumerate(names):
            first = index if interleaved else index * size
            yield f"{block}{expert}.{one}_proj.{kind}", _part(tensor, expert, range(first, first + step * size, step))


def _part(tensor: StoredTensor, expert: int, rows: range) -> StoredTensor:
    """Some rows of one expert."""
    num_bytes = tensor.num_bytes * len(rows) // (tensor.shape[0] * tensor.shape[1])
    packed = tensor.packed

    def of_all(part: tuple[slice, ...]) -> tuple[slice, ...]:
        own, *columns = part or (slice(None),)
        some = rows[own]
        return slice(expert, expert + 1), slice(some.start, some.stop, some.step), *columns

    def read(part: tuple[slice, ...]) -> Tensor:
        if len(tensor.shape) == 2:  # a bias; files have no steps
            own, some = of_all(part)
            return tensor.read((own, slice(some.start, some.stop)))[0, :: some.step]
        return tensor.read(of_all(part))[0]

    def read_packed(part: tuple[slice, ...], device: str | torch.device) -> PackedTensor:
        assert packed is not None, "the file is in 16 or 32 bits"
        return packed.read(of_all(part), device).map_rows(lambda values: values[0])

    shape = (len(rows), *tensor.shape[2:])
    return StoredTensor(shape, num_bytes, read, None if packed is None else replace(packed, read=read_packed))
