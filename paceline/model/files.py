"""The files of a model with their headers read, and nothing else: which parameters it has, and how each is stored."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.model.experts import name_experts
from paceline.model.fp8_tensors import fp8_tensors
from paceline.model.gguf import gguf_tensors
from paceline.model.gguf_file import is_gguf, open_gguf
from paceline.model.int4_tensors import int4_tensors
from paceline.model.layout import PackedForm, StoredPart, StoredTensor, stored_parts
from paceline.model.mxfp4_tensors import mxfp4_tensors
from paceline.model.quantization_config import CheckpointFormat, read_format
from paceline.model.read_spec import read_json, read_spec
from paceline.model.registry import FAMILIES
from paceline.model.spec import ModelError, ModelSpec
from paceline.model.stored import adapt
from paceline.model.stored_kv_scales import KV_SCALES, with_kv_scale_names
from paceline.weight_formats import FP8, GGUF, INT4, MXFP4, WeightFormat

# Stored by some exporters, but computed here: rotary frequencies, causal masks.
_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.bias|\.masked_bias)$")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    path: Path
    spec: ModelSpec
    stored: Mapping[str, StoredTensor]  # by the names of `layout.stored_parts`, and perhaps others
    scheme: WeightFormat | None = None  # of a folder: the format that its config names

    @property
    def quantization(self) -> str | None:
        """The name of the format that linear layers or experts are stored in, `GGUF`, or None: in 16 or 32 bits. Of a
        GGUF file, most bytes decide."""
        if not is_gguf(self.path):
            return None if self.scheme is None else self.scheme.name
        num_packed = sum(
            one.num_bytes for one in self.stored.values() if one.packed is not None and one.packed.is_stored
        )
        return GGUF if 2 * num_packed > sum(one.num_bytes for one in self.stored.values()) else None

    def forms(self) -> dict[str, list[PackedForm | None]]:
        """How the parts of each fused tensor can be read in the bits of a weight format."""
        found: dict[str, list[PackedForm | None]] = {}
        for name, part in stored_parts(self.spec).items():
            found.setdefault(part.target, []).append(self.stored[name].packed)
        return found


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """A model that is not loaded yet. files: None: its weights are random."""

    spec: ModelSpec
    files: ModelFiles | None = None

    @property
    def quantization(self) -> str | None:
        return None if self.files is None else self.files.quantization


def open_files(path: str | Path, *, has_data: bool = True) -> ModelFiles:
    """Raises ModelError if a file is missing, damaged or of another model. has_data: headers may be all there is
    (`remote_headers.py`)."""
    path = Path(path)
    spec, scheme = read_spec(path), None
    if is_gguf(path):
        stored = gguf_tensors(open_gguf(path))
    else:
        scheme = read_format(read_json(path / "config.json"))
        stored = _folder_tensors(path, scheme, has_data=has_data)
    family = next(family for family in FAMILIES if family.name == spec.family)
    if spec.has_experts:
        stored = name_experts(stored, interleaved=family.interleaved_experts and not is_gguf(path))
    stored = adapt(spec, family, stored, is_gguf=is_gguf(path))
    _check_names(stored_parts(spec), stored, tied=spec.tied, source=str(path))
    return ModelFiles(path, spec, stored, None if scheme is None else scheme.format)


def _check_names(
    parts: Mapping[str, StoredPart], stored: Mapping[str, StoredTensor], *, tied: bool, source: str
) -> None:
    if missing := [name for name in parts if name not in stored]:
        raise ModelError(f"{source} lacks {_list(missing)}: the file is incomplete or belongs to another model.")
    unexpected = [
        name
        for name in stored
        if name not in parts
        and not _IGNORED.search(name)
        and not KV_SCALES.search(name)
        and not (tied and name == "lm_head.weight")
        # Exporters of GPTQ write one for every layer. It is small, and the only tensor that is read here.
        and not (name.endswith(".bias") and not stored[name].read(()).any())
    ]
    if unexpected:
        raise ModelError(f"{source} has unexpected parameters {_list(unexpected)}: its config describes another model.")
    for name, part in parts.items():
        if stored[name].shape != part.shape:
            raise ModelError(
                f"{source} has {name} of shape {list(stored[name].shape)} where its config says "
                f"{list(part.shape)}: config and weights belong to different models."
            )


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _folder_tensors(folder: Path, found: CheckpointFormat | None, *, has_data: bool) -> dict[str, StoredTensor]:
    """The tensors of a folder's safetensors files: one file, or the shards its index names."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map: fetch the file again.")
        files = sorted({folder / str(name) for name in weight_map.values()})
    elif single.is_file():
        files = [single]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        hint = " (pytorch_model.bin runs code when opened)" if list(folder.glob("*.bin")) else ""
        raise ModelError(f"{folder} has no .safetensors files{hint}: convert the model to safetensors or GGUF.")
    stored: dict[str, StoredTensor] = {}
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing, but model.safetensors.index.json names it: fetch the model again.")
        stored.update(_file_tensors(file, () if found is None else _DTYPES[found.format]))
    stored = with_kv_scale_names(stored)
    if found is None:
        return stored
    if found.format is INT4:
        return int4_tensors(stored, found, str(folder), has_data=has_data)
    return fp8_tensors(stored, found, str(folder)) if found.format is FP8 else mxfp4_tensors(stored, str(folder))


_DTYPES = {FP8: ("F8_E4M3",), INT4: ("I32", "I64"), MXFP4: ("U8",)}  # of values


def _file_tensors(path: Path, quantized: Sequence[str] = ()) -> dict[str, StoredTensor]:
    """quantized: the dtypes of quantized weights."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
        views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read ({error}): it is damaged or truncated, fetch it again.") from None

    for name, view in views.items():
        is_known = view.get_dtype() in _ITEM_BYTES or view.get_dtype() in quantized
        if not is_known and not _IGNORED.search(name):
            # Quantized values, of which the config says nothing.
            raise ModelError(f"{path} stores {name} as {view.get_dtype()}: use the unquantized model, or a GGUF file.")

    def stored(name: str) -> StoredTensor:
        shape = tuple(views[name].get_shape())
        item_bytes = _ITEM_BYTES.get(views[name].get_dtype()) or {"I32": 4, "I64": 8}.get(views[name].get_dtype(), 1)

        def read(part: tuple[slice, ...]) -> Tensor:
            # Slices are copied, whole tensors are mapped.
            tensor: Tensor = views[name][part] if part else file.get_tensor(name)
            return tensor

        return StoredTensor(shape, math.prod(shape) * item_bytes, read)

    return {name: stored(name) for name in views}


_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
