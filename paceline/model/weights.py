"""Loads weights into the fused tensors of the decoder, from a Hugging Face folder, a GGUF file, or at random.

Tensors are copied one by one from the mapped file to their target, so that loading needs the memory of the model and
not twice that. All parameters are checked before the first byte is copied: a missing, unexpected or wrongly shaped one
is an error that names it, never a model that is silently half random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.files import ModelFiles, open_files
from paceline.model.layout import WHOLE_MODEL, Shard, StoredPart, StoredTensor, is_matrix, stored_parts, target_shapes
from paceline.model.linear import Matrix, PackedWeight
from paceline.model.quantized import PackedTensor, QuantizedTensor, concatenate, quantize
from paceline.model.rank_group import RankGroup, StageLink, shard_of
from paceline.model.spec import DTYPES, ModelError, ModelSpec
from paceline.model.stored_kv_scales import read_kv_scales
from paceline.model.weights_plan import Origin, WeightsPlan

Progress = Callable[[int, int], None]  # bytes done, bytes in total
Keep = Callable[[PackedTensor], PackedWeight]  # a packed matrix as the executor keeps it


def load_decoder(
    path: str | Path | ModelFiles,
    *,
    dtype: str | None = None,
    device: str | torch.device = "cpu",
    max_positions: int | None = None,
    progress: Progress | None = None,
    group: RankGroup | None = None,
    stages: StageLink | None = None,
    keep: Mapping[str, Keep] | None = None,
) -> Decoder:
    """Loads the model at `path`, a Hugging Face folder or a GGUF file. `dtype` defaults to the stored one. `group`,
    `stages`: loads this rank's part. keep: of each fused tensor that stays as it is stored, what becomes of it."""
    files = path if isinstance(path, ModelFiles) else open_files(path)
    shard = shard_of(group or stages)
    weights = fuse_weights(files, dtype=dtype, device=device, progress=progress, shard=shard, keep=keep or {})
    scales = read_kv_scales(files.spec, files.stored, shard, str(files.path))
    return Decoder(files.spec, weights, max_positions=max_positions, group=group, stages=stages, kv_scales=scales)


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
    files: ModelFiles,
    *,
    dtype: str | None,
    device: str | torch.device,
    progress: Progress | None,
    shard: Shard = WHOLE_MODEL,
    only_vectors: bool = False,
    keep: Mapping[str, Keep],
) -> dict[str, Matrix]:
    """Copies the stored parameters of one rank into the fused tensors of the decoder. only_vectors: norms and biases,
    no matrices. keep: as in `load_decoder`."""
    spec, stored = files.spec, files.stored
    parts, shapes = stored_parts(spec, shard), target_shapes(spec, shard)
    if only_vectors:
        shapes = {name: shape for name, shape in shapes.items() if not is_matrix(name)}
        parts = {name: part for name, part in parts.items() if part.target in shapes}
    torch_dtype = _torch_dtype(dtype or spec.dtype)
    kept: dict[str, list[PackedTensor]] = {name: [] for name in keep}
    found: dict[str, PackedWeight] = {}
    weights = {
        name: torch.empty(shape, dtype=torch_dtype, device=device) for name, shape in shapes.items() if name not in kept
    }
    total, done = sum(stored[name].num_bytes for name in parts), 0
    for name, part in parts.items():
        if (packed := stored[name].packed) is not None and part.target in kept:
            rows = kept[part.target]
            rows.append(packed.read(part.source, device))
            # Converted with its last part, so that memory never has more than one of them twice.
            if sum(one.num_rows for one in rows) == shapes[part.target][0]:
                found[part.target] = keep[part.target](rows[0].join(rows[1:]))
                rows.clear()
        else:
            values = stored[name].read(part.source)
            with torch.inference_mode():
                target = weights[part.target][part.row : part.row + part.num_rows]
                target.copy_(values.view(target.shape) if values.numel() == target.numel() else values)
        done += stored[name].num_bytes
        if progress:
            progress(done, total)
    return {**weights, **found}


class QuantizedWeights:
    """The weights of a model in 4 or 8 bits. Several threads may read matrices."""

    def __init__(self, files: ModelFiles, plan: WeightsPlan, *, progress: Progress | None = None) -> None:
        self._plan, self._stored = plan.by_name, files.stored
        self._progress, self._done, self._lock = progress, 0, Lock()
        self._total = sum(one.num_bytes for one in self._stored.values())
        self._parts: dict[str, list[str]] = {}  # of every matrix, in the order of its rows
        for name, part in stored_parts(files.spec).items():
            self._parts.setdefault(part.target, []).append(name)
        fused = fuse_weights(files, dtype="float32", device="cpu", progress=None, only_vectors=True, keep={})
        self.vectors = {name: one for name, one in fused.items() if isinstance(one, Tensor)}

    def matrix(self, name: str) -> QuantizedTensor:
        plan = self._plan[name]
        assert plan.packed is not None, f"{name} is not packed"
        bits, is_stored = plan.packed.bits, plan.origin is Origin.STORED
        return concatenate([self._read(self._stored[part], bits, is_stored) for part in self._parts[name]])

    def _read(self, stored: StoredTensor, bits: int, is_stored: bool) -> QuantizedTensor:
        if is_stored and stored.packed is not None:
            found = stored.packed.read((), "cpu").with_offsets()
        else:
            found = quantize(stored.read(()), bits)
        with self._lock:
            self._done += stored.num_bytes
            if self._progress:
                self._progress(self._done, self._total)
        return found


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


def _torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}: choose one of {', '.join(DTYPES)}.")
    torch_dtype = getattr(torch, name)
    assert isinstance(torch_dtype, torch.dtype), f"torch has no dtype {name}"
    return torch_dtype
