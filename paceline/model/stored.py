"""Adapts the parameters in a file to those that the decoder expects, by name, before any of them is read.

    fused in the file           q, k, v or gate and up in one matrix (Phi-3): divided into the names of `layout.py`
    norms less 1                Gemma's safetensors files: 1 is added
    partial rotary              rows of q and k heads are rearranged (`rotary_order`)
    residual multiplier         multiplied into the matrices that add to the residual stream (Granite)
    text of a multimodal model  the prefix of its names is removed, and other parts are left out

So decoders and kernels know none of this. With 16 bits a multiplied weight is rounded once more, like every weight that
a norm is folded into.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.model.layers import LayerSpec
from paceline.model.layout import StoredTensor
from paceline.model.registry import ModelFamily
from paceline.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paceline.model.quantized import PackedTensor

_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_FUSED = re.compile(r"\.(qkv|gate_up)_proj\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HEADS = ("q_proj", "k_proj", "q_norm", "k_norm")  # their rows are those of heads
_NOT_TEXT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
Rows = Callable[["Tensor"], "Tensor"]  # of a tensor with whole heads in its rows, to one of the same shape


def adapt(
    spec: ModelSpec, family: ModelFamily, stored: Mapping[str, StoredTensor], *, is_gguf: bool
) -> dict[str, StoredTensor]:
    """The parameters under the names of `layout.stored_parts`, with the values that the decoder computes with."""
    found: dict[str, StoredTensor] = {}
    for stored_name, tensor in stored.items():
        name = stored_name if family.multimodal is None else _text_name(stored_name)
        if name is not None:
            found.update(_divided(_layer_of(spec, name), name, tensor))
    for name, tensor in found.items():
        layer, part = _layer_of(spec, name), name.split(".")[-2] if "." in name else ""
        if family.norms_plus_one and not is_gguf and part.endswith("norm"):
            tensor = _mapped(tensor, lambda values: values.float() + 1)
        if layer is not None and layer.mixer.rotary_dim is not None and part in _HEADS:
            tensor = _rearranged(tensor, _head_rows(rotary_order(layer.mixer.head_dim, layer.mixer.rotary_dim)))
        if layer is not None and layer.residual_scale != 1.0 and part in ("o_proj", "down_proj"):
            tensor = _scaled(tensor, layer.residual_scale)
        found[name] = tensor
    return found


def _layer_of(spec: ModelSpec, name: str) -> LayerSpec | None:
    """The layer that a parameter belongs to; None if the model has no such layer."""
    match = _LAYER.match(name)
    index = spec.num_layers if match is None else int(match[1])
    return spec.layers[index] if index < spec.num_layers else None


def rotary_order(head_dim: int, rotary_dim: int) -> list[int]:
    """The order of a head's dimensions in which the two of a rotated pair are half a head apart, as in a head that is
    rotated whole: those that are not rotated come in between and at the end, where the table has cosine 1 and sine 0.
    Queries and keys have the same order, so their products do not change."""
    half, middle = rotary_dim // 2, (head_dim + rotary_dim) // 2
    return [*range(half), *range(rotary_dim, middle), *range(half, rotary_dim), *range(middle, head_dim)]


def _text_name(name: str) -> str | None:
    if name.startswith(_NOT_TEXT):
        return None
    for prefix, ours in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def _divided(layer: LayerSpec | None, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The parts of a fused matrix or bias by their own names; another parameter as it is."""
    parts: dict[str, int] = {}
    if layer is not None and ".qkv_proj." in name:
        parts = {"q_proj": layer.mixer.q_size, "k_proj": layer.mixer.kv_size, "v_proj": layer.mixer.kv_size}
    elif layer is not None and ".gate_up_proj." in name:
        parts = {"gate_proj": layer.ffn.size, "up_proj": layer.ffn.size}
    if not parts or tensor.shape[0] != sum(parts.values()):
        yield name, tensor
        return
    first = 0
    for part, count in parts.items():
        yield _FUSED.sub(f".{part}.", name), _rows_of(tensor, first, count)
        first += count


def _rows_of(tensor: StoredTensor, first: int, count: int) -> StoredTensor:
    packed = tensor.packed

    def moved(part: tuple[slice, ...]) -> tuple[slice, ...]:
        start, stop, _ = (part[0] if part else slice(None)).indices(count)
        return slice(first + start, first + stop), *part[1:]

    def read_packed(part: tuple[slice, ...], device: str | torch.device) -> PackedTensor:
        assert packed is not None, "the file is in 16 or 32 bits"
        return packed.read(moved(part), device)

    return replace(
        tensor,
        shape=(count, *tensor.shape[1:]),
        num_bytes=tensor.num_bytes * count // tensor.shape[0],
        read=lambda part: tensor.read(moved(part)),
        packed=None if packed is None else replace(packed, read=read_packed),
    )


def _mapped(
    tensor: StoredTensor,
    change: Callable[[Tensor], Tensor],
    change_packed: Callable[[PackedTensor], PackedTensor] | None = None,
) -> StoredTensor:
    """change_packed: the same of a matrix in fewer bits."""
    packed = tensor.packed

    def read_packed(part: tuple[slice, ...], device: str | torch.device) -> PackedTensor:
        assert packed is not None and change_packed is not None, "vectors are not packed"
        return change_packed(packed.read(part, device))

    return replace(
        tensor,
        read=lambda part: change(tensor.read(part)),
        packed=None if packed is None else replace(packed, read=read_packed),
    )


def _head_rows(order: list[int]) -> Rows:
    return lambda values: values.view(-1, len(order), *values.shape[1:])[:, order].flatten(0, 1)


def _rearranged(tensor: StoredTensor, rows: Rows) -> StoredTensor:
    return _mapped(tensor, rows, lambda packed: packed.map_rows(rows))


def _scaled(tensor: StoredTensor, factor: float) -> StoredTensor:
    return _mapped(tensor, lambda values: values.float() * factor, lambda packed: packed.scaled(factor))
