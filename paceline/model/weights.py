"""Loads weights into the fused tensors of the decoder, from a Hugging Face folder, a GGUF file, or at random.

Tensors are copied one by one from the mapped file to their target, so that loading needs the memory of the model and
not twice that. All parameters are checked before the first byte is copied: a missing, unexpected or wrongly shaped one
is an error that names it, never a model that is silently half random.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.experts import name_experts
from paceline.model.fp8_tensors import MIN_COLUMNS, concatenate_fp8, fp8_tensors
from paceline.model.gguf import gguf_tensors
from paceline.model.gguf_file import is_gguf, open_gguf
from paceline.model.gguf_tensors import is_quantised
from paceline.model.int4_tensors import concatenate_int4, int4_tensors
from paceline.model.layout import (
    WHOLE_MODEL,
    Shard,
    StoredPart,
    StoredTensor,
    is_expert_matrix,
    is_matrix,
    stored_parts,
    target_shapes,
)
from paceline.model.mxfp4_tensors import BLOCK as MXFP4_BLOCK
from paceline.model.mxfp4_tensors import concatenate_mxfp4, mxfp4_tensors
from paceline.model.quantised import (
    GROUP,
    Fp8Tensor,
    Int4Tensor,
    Mxfp4Tensor,
    PackedTensor,
    QuantisedTensor,
    concatenate,
    quantise,
)
from paceline.model.quantization_config import CheckpointFormat, read_format
from paceline.model.rank_group import RankGroup, StageLink, shard_of
from paceline.model.read_spec import read_json, read_spec
from paceline.model.registry import FAMILIES
from paceline.model.spec import DTYPES, ModelError, ModelSpec
from paceline.model.stored import adapt
from paceline.model.stored_kv_scales import KV_SCALES, read_kv_scales, with_kv_scale_names

Progress = Callable[[int, int], None]  # bytes done, bytes in total
Keep = Callable[[Any], Any]  # a quantised matrix of a checkpoint as the executor keeps it

_BITS = {"q4": 4, "q8": 8}  # others: as stored
# Stored by some exporters, but computed here: rotary frequencies, causal masks.
_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.bias|\.masked_bias)$")


def load_decoder(
    path: str | Path,
    *,
    dtype: str | None = None,
    device: str | torch.device = "cpu",
    max_positions: int | None = None,
    progress: Progress | None = None,
    group: RankGroup | None = None,
    stages: StageLink | None = None,
    keep: Keep | None = None,
) -> Decoder:
    """Loads the model at `path`, a Hugging Face folder or a GGUF file. `dtype` defaults to the stored one. `group`,
    `stages`: loads this rank's part. keep: matrices of layers, or of their experts if there are some, are stored in
    fewer bits (`stored_quantization`), and become this."""
    spec, stored = _open(Path(path))
    shard = shard_of(group or stages)
    weights = fuse_weights(
        spec, stored, source=str(path), dtype=dtype, device=device, progress=progress, shard=shard, keep=keep
    )
    scales = read_kv_scales(spec, stored, shard, str(path))
    return Decoder(spec, weights, max_positions=max_positions, group=group, stages=stages, kv_scales=scales)


def _open(path: Path) -> tuple[ModelSpec, dict[str, StoredTensor]]:
    """The spec of the model, and its tensors, which are not read yet."""
    spec, stored = read_spec(path), gguf_tensors(open_gguf(path)) if is_gguf(path) else _folder_tensors(path)
    family = next(family for family in FAMILIES if family.name == spec.family)
    if spec.num_experts:
        stored = name_experts(stored, interleaved=family.interleaved_experts and not is_gguf(path))
    return spec, adapt(spec, family, stored, is_gguf=is_gguf(path))


def stored_quantization(path: str | Path, tp: int = 1) -> str:
    """fp8, int4 or gguf if the matrices of the layers are stored so, in a form that a GPU can keep, and `tp` ranks can
    divide their scales; else none. Of a mixture of experts: fp8 or mxfp4 if the experts are."""
    path = Path(path)
    if is_gguf(path):
        spec, is_kept = read_spec(path), is_quantised(open_gguf(path))
        has_kernels = _has_plain_layers(spec) and not spec.num_experts and _can_divide_groups(spec, tp, GROUP)
        return "gguf" if is_kept and has_kernels else "none"
    found = _format(path)
    if found is None:
        return "none"
    spec, stored = _open(path)
    parts = [name for name, part in stored_parts(spec).items() if _is_kept(spec, part.target)]
    if spec.num_experts:
        has_kernels = spec.norm_placement == "pre" and not found.group and _can_divide(spec, tp, found)
    else:
        has_kernels = _has_plain_layers(spec) and (not found.group or _can_divide_groups(spec, tp, found.group))
    are_kept = has_kernels and all(name in stored and stored[name].read_packed is not None for name in parts)
    return found.quantization if are_kept else "none"


def _has_plain_layers(spec: ModelSpec) -> bool:
    """Whether a GPU has kernels for quantised weights of such layers."""
    return spec.norm_placement == "pre" and spec.activation == "silu"


def _can_divide_groups(spec: ModelSpec, tp: int, group: int) -> bool:
    """Whether every rank has whole groups of the columns of `out` and `down`."""
    if tp > min(spec.num_heads, spec.ffn_size):
        return False
    shards = [Shard(rank, tp) for rank in range(tp)]
    starts = [one.heads(spec)[0].start * spec.head_dim for one in shards]
    starts += [one.aligned_part(spec.ffn_size).start for one in shards]
    return not any(start % group for start in starts)


def _can_divide(spec: ModelSpec, tp: int, found: CheckpointFormat) -> bool:
    """Whether every rank begins at a column of the experts where a scale may begin."""
    width = MXFP4_BLOCK if found.quantization == "mxfp4" else MIN_COLUMNS if found.blocks else 1
    ffn = spec.expert_ffn_size
    return tp <= ffn and not any(Shard(rank, tp).aligned_part(ffn).start % width for rank in range(tp))


def has_blocks(path: str | Path) -> bool:
    """Whether FP8 weights have a scale per block, and not per row."""
    found = _format(Path(path))
    return found is not None and found.blocks


def has_int4(path: str | Path) -> bool:
    """Whether linear layers are stored in 4 bits by `quantization_config`. `stored_quantization` asks for more."""
    found = _format(Path(path))
    return found is not None and found.quantization == "int4"


def stored_group(path: str | Path) -> int:
    """Columns with one scale, of a 4-bit checkpoint."""
    found = _format(Path(path))
    assert found is not None and found.quantization == "int4", "the model is not stored in 4 bits"
    return found.group


def _format(path: Path) -> CheckpointFormat | None:
    config = path / "config.json"
    return read_format(read_json(config)) if config.is_file() else None


def _is_kept(spec: ModelSpec, name: str) -> bool:
    """Whether a fused tensor stays quantised where there are kernels for it: experts, or all matrices of layers."""
    return is_expert_matrix(name) if spec.num_experts else "." in name and is_matrix(name)


def check_files(path: str | Path) -> ModelSpec:
    """Raises ModelError if a file is missing, damaged or of another model. Reads headers only."""
    spec, stored = _open(Path(path))
    _check_names(stored_parts(spec), stored, tied=spec.tied, source=str(path))
    return spec


def random_decoder(
    spec: ModelSpec,
    *,
    seed: int = 0,
    dtype: str | None = None,
    device: str | torch.device = "cpu",
    max_positions: int | None = None,
    progress: Progress | None = None,
    group: RankGroup | None = None,
    stages: StageLink | None = None,
) -> Decoder:
    """A model of this shape with random weights. The same seed, device and dtype give the same weights, on all ranks of
    a group together too."""
    shard = shard_of(group or stages)
    weights = random_weights(spec, seed=seed, dtype=dtype, device=device, progress=progress, shard=shard)
    return Decoder(spec, weights, max_positions=max_positions, group=group, stages=stages)


def fuse_weights(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor],
    *,
    source: str,
    dtype: str | None,
    device: str | torch.device,
    progress: Progress | None,
    shard: Shard = WHOLE_MODEL,
    only_vectors: bool = False,
    keep: Keep | None = None,
) -> dict[str, Tensor]:
    """Copies the stored parameters of one rank into the fused tensors of the decoder. only_vectors: norms and biases,
    no matrices. keep: as in `load_decoder`."""
    _check_names(stored_parts(spec), stored, tied=spec.tied, source=source)
    parts, shapes = stored_parts(spec, shard), target_shapes(spec, shard)
    if only_vectors:
        shapes = {name: shape for name, shape in shapes.items() if not is_matrix(name)}
        parts = {name: part for name, part in parts.items() if part.target in shapes}
    torch_dtype = _torch_dtype(dtype or spec.dtype)
    kept: dict[str, list[PackedTensor]] = {}
    if keep is not None:
        kept = {name: [] for name in shapes if _is_kept(spec, name)}
    weights = {
        name: torch.empty(shape, dtype=torch_dtype, device=device) for name, shape in shapes.items() if name not in kept
    }
    total, done = sum(stored[name].num_bytes for name in parts), 0
    for name, part in parts.items():
        read_packed = stored[name].read_packed
        if keep is not None and read_packed is not None and part.target in kept:
            rows = kept[part.target]
            rows.append(read_packed(part.source, device))
            # Converted with its last part, so that memory never has more than one of them twice.
            if sum(len(one.values) for one in rows) == shapes[part.target][0]:
                weights[part.target] = keep(_joined(rows))
                rows.clear()
        else:
            values = stored[name].read(part.source)
            with torch.inference_mode():
                target = weights[part.target][part.row : part.row + part.num_rows]
                target.copy_(values.view(target.shape) if values.numel() == target.numel() else values)
        done += stored[name].num_bytes
        if progress:
            progress(done, total)
    return weights


def _joined(parts: list[PackedTensor]) -> PackedTensor:
    """The rows of all parts of a fused matrix."""
    if of_gguf := [one for one in parts if isinstance(one, QuantisedTensor)]:
        return concatenate(of_gguf)
    if of_mxfp4 := [one for one in parts if isinstance(one, Mxfp4Tensor)]:
        return concatenate_mxfp4(of_mxfp4)
    of_4_bits = [one for one in parts if isinstance(one, Int4Tensor)]
    return concatenate_int4(of_4_bits) if of_4_bits else concatenate_fp8([o for o in parts if isinstance(o, Fp8Tensor)])


class QuantisedWeights:
    """The weights of a model in 4 or 8 bits. Several threads may read matrices."""

    def __init__(self, path: str | Path, *, quantization: str, progress: Progress | None = None) -> None:
        """quantization: auto keeps a quantised file as it is, and rounds matrices that it has in 16 bits to 8; q4 and
        q8 round all of them."""
        self.spec, self._stored = _open(Path(path))
        self._bits = _BITS.get(quantization)
        self._progress, self._done, self._lock = progress, 0, Lock()
        self._total = sum(one.num_bytes for one in self._stored.values())
        self._parts: dict[str, list[str]] = {}  # of every matrix, in the order of its rows
        for name, part in stored_parts(self.spec).items():
            self._parts.setdefault(part.target, []).append(name)
        self.vectors = fuse_weights(
            self.spec,
            self._stored,
            source=str(path),
            dtype="float32",
            device="cpu",
            progress=None,
            only_vectors=True,
        )

    def matrix(self, name: str) -> QuantisedTensor:
        return concatenate([self._read(self._stored[part]) for part in self._parts[name]])

    def _read(self, stored: StoredTensor) -> QuantisedTensor:
        if self._bits is None and stored.read_quantised is not None:
            found = stored.read_quantised()
        else:
            found = quantise(stored.read(()), self._bits or stored.quantised_bits)
        with self._lock:
            self._done += stored.num_bytes
            if self._progress:
                self._progress(self._done, self._total)
        return found


def quantised_bytes(path: str | Path, quantization: str, *, on_gpu: bool = False) -> int:
    """The memory of `QuantisedWeights`, before any is read; on a GPU embedding, head and vectors have 16 bits."""
    spec, bits = read_spec(path), fused_bits(path, quantization)
    num_bytes = 0
    for name, shape in target_shapes(spec).items():
        count = math.prod(shape)
        if is_matrix(name) and (not on_gpu or _is_kept(spec, name)):
            num_bytes += count * bits[name] // 8 + 4 * shape[0] * -(-shape[1] // GROUP)
        else:
            num_bytes += count * (2 if on_gpu else 4)
    return num_bytes


def bits_of_layers(path: str | Path) -> tuple[tuple[int, ...], ...]:
    """The bits of qkv, out, gate_up and down that occur in the layers of a GGUF file."""
    found: dict[str, set[int]] = {"qkv": set(), "out": set(), "gate_up": set(), "down": set()}
    for name, bits in fused_bits(path, "gguf").items():
        if "." in name and is_matrix(name):
            found[name.rpartition(".")[2]].add(bits)
    return tuple(tuple(sorted(bits)) for bits in found.values())


def fused_bits(path: str | Path, quantization: str) -> dict[str, int]:
    """The bits of each fused matrix, the most of its parts."""
    spec, stored = _open(Path(path))
    given = _BITS.get(quantization)
    bits: dict[str, int] = {}
    for name, part in stored_parts(spec).items():
        bits[part.target] = max(bits.get(part.target, 0), given or stored[name].quantised_bits)
    return bits


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


def random_weights(
    spec: ModelSpec,
    *,
    seed: int = 0,
    dtype: str | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    shard: Shard = WHOLE_MODEL,
) -> dict[str, Tensor]:
    """Random fused tensors that keep activations at a constant magnitude through the layers and give distinct
    logits. A rank makes every tensor whole, one after the other, and keeps its part."""
    torch_dtype = _torch_dtype(dtype or spec.dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = target_shapes(spec)
    total, done = sum(math.prod(shape) for shape in shapes.values()) * torch_dtype.itemsize, 0
    weights = {}
    parts = fused_parts(spec, shard)
    for name, shape in shapes.items():
        weight = torch.empty(shape, dtype=torch_dtype, device=device)
        if name.endswith("norm"):
            # The gain that qkv has without a norm; what a block adds must outweigh the embedding, as below.
            added = _embedding_gain(spec) if name.endswith("post_norm") else 1.0
            weight.fill_(2.0 if name.endswith("qk_norm") else added)
        else:
            weight.normal_(0.0, _scale(spec, name, shape), generator=generator)
        weights.update({name: weight} if shard == WHOLE_MODEL else _part_of(name, weight, parts))
        done += weight.numel() * torch_dtype.itemsize
        if progress:
            progress(done, total)
    return weights


def shard_weights(spec: ModelSpec, weights: Mapping[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """One rank's part of the fused tensors of a whole model."""
    parts = fused_parts(spec, shard)
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        found.update(_part_of(name, weight, parts))
    return found


def fused_parts(spec: ModelSpec, shard: Shard) -> dict[str, list[tuple[StoredPart, StoredPart]]]:
    """For every fused tensor of the whole model, the stored parameters in it that a rank has: where each is in the
    tensor, and what of it the rank has."""
    whole = stored_parts(spec)
    parts: dict[str, list[tuple[StoredPart, StoredPart]]] = {}
    for name, part in stored_parts(spec, shard).items():
        parts.setdefault(whole[name].target, []).append((whole[name], part))
    return parts


def _part_of(name: str, weight: Tensor, parts: Mapping[str, list[tuple[StoredPart, StoredPart]]]) -> dict[str, Tensor]:
    """The part of a whole fused tensor; nothing if the rank has none of it."""
    pieces, target = [], name
    for whole, part in parts.get(name, ()):
        target = part.target
        rows = weight[whole.row : whole.row + whole.num_rows]
        if len(whole.shape) == weight.ndim:
            pieces.append(rows[part.source])
        else:
            # A QK-norm: repeated for every head, or of all heads.
            first = part.source[0].start // weight.shape[1] if part.source else 0
            pieces.append(rows[first : first + part.num_rows])
    return {target: torch.cat(pieces)} if pieces else {}


def _embedding_gain(spec: ModelSpec) -> float:
    """How much larger than without factors the embeddings are."""
    return spec.embedding_scale / (spec.logit_scale if spec.tied else 1.0)


def _scale(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> float:
    if name in ("embedding", "head"):
        # Logits have a standard deviation of about 3: as peaked as a real model's, without near-ties at the top that
        # rounding to 16 bits would turn into ties.
        return 3.0 / math.sqrt(spec.hidden_size) / (spec.logit_scale if name == "head" or spec.tied else 1.0)
    if name.endswith("sinks"):
        return 1.0  # as large as other scores
    if len(shape) == 1:
        return 0.1  # a bias
    # The output of the layers must outweigh the embedding, or a tied model predicts its input token. Queries must
    # distinguish keys, or attention is a mean and every output soon repeats itself.
    # A router must prefer some experts clearly: near-ties would be decided by rounding.
    if name.endswith("router"):
        return 4.0 / math.sqrt(spec.hidden_size)
    gain = 4.0 * _embedding_gain(spec) if name.endswith(("out", "down")) else 2.0 if name.endswith("qkv") else 1.0
    return gain / math.sqrt(shape[-1])


def _folder_tensors(folder: Path) -> dict[str, StoredTensor]:
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
    found = _format(folder)
    stored: dict[str, StoredTensor] = {}
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing, but model.safetensors.index.json names it: fetch the model again.")
        stored.update(_file_tensors(file, () if found is None else _QUANTISED_DTYPES[found.quantization]))
    stored = with_kv_scale_names(stored)
    if found is None:
        return stored
    if found.quantization == "mxfp4":
        return mxfp4_tensors(stored, str(folder))
    return (fp8_tensors if found.quantization == "fp8" else int4_tensors)(stored, found, str(folder))


_QUANTISED_DTYPES = {"fp8": ("F8_E4M3",), "int4": ("I32", "I64"), "mxfp4": ("U8",)}


def _file_tensors(path: Path, quantised: Sequence[str] = ()) -> dict[str, StoredTensor]:
    """quantised: the dtypes of quantised weights."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
        views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read ({error}): it is damaged or truncated, fetch it again.") from None

    for name, view in views.items():
        is_known = view.get_dtype() in _ITEM_BYTES or view.get_dtype() in quantised
        if not is_known and not _IGNORED.search(name):
            # Quantised values, of which the config says nothing.
            raise ModelError(f"{path} stores {name} as {view.get_dtype()}: use the unquantised model, or a GGUF file.")

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


def _torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}: choose one of {', '.join(DTYPES)}.")
    torch_dtype = getattr(torch, name)
    assert isinstance(torch_dtype, torch.dtype), f"torch has no dtype {name}"
    return torch_dtype
