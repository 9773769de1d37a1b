"""GGUF files: metadata, spec and dequantised tensors.

The header is parsed here and not by the `gguf` package, whose reader makes an array object of every
vocabulary entry and needs four seconds for a small model; this one needs a tenth. Dequantisation is the
package's.

llama.cpp stores q and k of the llama family with the two halves of each head interleaved; `_unpermute`
turns them back, so that the decoder knows one layout only.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.model.registry import Family, gguf_family_of, nope_layers
from paceline.model.spec import ModelError, ModelSpec, RopeSpec, yarn_attention_factor
from paceline.model.weights import StoredTensor

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # rows first, as torch has it; the file has it the other way round
    type_id: int
    offset: int  # from the start of the file


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An opened file: metadata and a map of the bytes."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: mmap.mmap

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture"))

    def get(self, key: str) -> Any:
        if key not in self.metadata:
            raise ModelError(
                f"{self.path} lacks the metadata {key!r}: the file is incomplete, fetch another one."
            )
        return self.metadata[key]


def open_gguf(path: str | Path) -> GGUFFile:
    """Reads the header of a file; remembered, because spec, tokenizer and weights all come from it."""
    path = Path(path)
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}): check the path.") from None
    return _open(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=2)
def _open(path: Path, mtime_ns: int, size: int) -> GGUFFile:
    if size < 24:
        raise ModelError(f"{path} has {size} bytes and is no GGUF file: fetch it again.")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Header(path, data).read()
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} is broken or truncated in its header ({error}): fetch it again.") from None


class _Header:
    """A cursor over the header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def read(self) -> GGUFFile:
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path} does not begin with GGUF: it is no GGUF file, give another one.")
        self.at = 4
        version = self.scalar("<I")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path} has GGUF version {version}: supported are 2 and 3 (little-endian)."
            )
        num_tensors, num_keys = self.scalar("<Q"), self.scalar("<Q")
        metadata = {}
        for _ in range(num_keys):
            key = self.string()
            metadata[key] = self.value(self.scalar("<I"))
        found = [self.tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32)) or 32
        start = -(-self.at // alignment) * alignment
        tensors = {}
        for name, shape, type_id, offset in found:
            info = TensorInfo(name, shape, type_id, start + offset)
            if info.offset + num_stored_bytes(info) > len(self.data):
                raise ModelError(
                    f"{self.path} ends before the data of {name}: it is truncated, fetch it again."
                )
            tensors[name] = info
        return GGUFFile(self.path, metadata, tensors, self.data)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        text = self.data[self.at : self.at + length]
        if len(text) != length:
            raise IndexError("a string runs past the end")
        self.at += length
        return text.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, length = self.scalar("<I"), self.scalar("<Q")
            if item in _SCALARS:
                code = _SCALARS[item]
                if length * struct.calcsize(code) > len(self.data) - self.at:
                    raise IndexError("an array runs past the end")
                values = struct.unpack_from(f"<{length}{code[1]}", self.data, self.at)
                self.at += length * struct.calcsize(code)
                return list(values)
            return [self.value(item) for _ in range(length)]
        if kind not in _SCALARS:
            raise IndexError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dims = self.scalar("<I")
        if num_dims > 4:
            raise IndexError(f"{name} has {num_dims} dimensions")
        shape = tuple(reversed([self.scalar("<Q") for _ in range(num_dims)]))
        return name, shape, self.scalar("<I"), self.scalar("<Q")


def num_stored_bytes(info: TensorInfo) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.type_id)]
    except (ValueError, KeyError):
        raise ModelError(
            f"{info.name} has the unknown quantisation type {info.type_id}: "
            "use a file in a common one such as Q8_0."
        ) from None
    if info.shape and info.shape[-1] % block:
        raise ModelError(
            f"{info.name} has rows of {info.shape[-1]}, no multiple of its block of {block}: fetch it again."
        )
    return math.prod(info.shape) // block * block_bytes


def dequantise(file: GGUFFile, info: TensorInfo) -> Tensor:
    """The values of one tensor: float32, or the stored 16-bit type."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(info.type_id)
    num_bytes = num_stored_bytes(info)
    raw = np.frombuffer(file.data, dtype=np.uint8, count=num_bytes, offset=info.offset)
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        plain = raw.view(np.float32 if kind == GGMLQuantizationType.F32 else np.float16)
        return torch.from_numpy(plain.reshape(info.shape).copy())
    if kind == GGMLQuantizationType.BF16:
        return torch.from_numpy(raw.view(np.int16).reshape(info.shape).copy()).view(torch.bfloat16)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        rows = raw.reshape(*info.shape[:-1], info.shape[-1] // block * block_bytes)
        return torch.from_numpy(dequantize(rows, kind))
    except NotImplementedError:
        raise ModelError(
            f"{info.name} is stored as {kind.name}, which cannot be read: use a Q4_K or Q8_0 file."
        ) from None


# Names in GGUF files against Hugging Face names; {} is the layer.
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_SPEC = ("rope_freqs.weight",)  # read by `gguf_spec`


def _hugging_face_name(name: str) -> str:
    """An unknown name is returned as it is, to be reported as unexpected."""
    if name in _NAMES:
        return _NAMES[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return name


def gguf_tensors(file: GGUFFile) -> dict[str, StoredTensor]:
    """The parameters of the file, by their Hugging Face names."""
    family = gguf_family_of(file.architecture)
    heads = {"attn_q": _int(file, "attention.head_count")}
    heads["attn_k"] = _int(file, "attention.head_count_kv", heads["attn_q"])

    def stored(info: TensorInfo) -> StoredTensor:
        part = info.name.split(".")[-2]
        permuted = family.gguf_permuted and part in heads

        def read() -> Tensor:
            tensor = dequantise(file, info)
            return _unpermute(tensor, heads[part]) if permuted else tensor

        return StoredTensor(info.shape, num_stored_bytes(info), read)

    return {
        _hugging_face_name(name): stored(info) for name, info in file.tensors.items() if name not in _IN_SPEC
    }


def _unpermute(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from pairs (real, imaginary, real, ...) to halves (all real, all imaginary)."""
    rows = tensor.shape[0]
    pairs = tensor.reshape(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _int(file: GGUFFile, key: str, default: int | None = None) -> int:
    key = f"{file.architecture}.{key}"
    value = file.metadata.get(key, default) if default is not None else file.get(key)
    if isinstance(value, list):
        if len(set(value)) > 1:
            raise ModelError(
                f"{key} differs between layers in {file.path}: this is not supported, use another model."
            )
        value = value[0]
    if not isinstance(value, int):
        raise ModelError(f"{key} is {value!r} in {file.path}: expected a whole number, fetch the file again.")
    return value


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """What the model in the file is."""
    family, arch = gguf_family_of(file.architecture), file.architecture
    num_experts = int(file.metadata.get(f"{arch}.expert_count", 0))
    if num_experts:
        raise ModelError(f"{arch}.expert_count is {num_experts}: mixtures of experts are not supported.")
    num_heads, hidden = _int(file, "attention.head_count"), _int(file, "embedding_length")
    num_layers = _int(file, "block_count")
    head_dim = _int(file, "attention.key_length", hidden // num_heads)
    rotated = _int(file, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(f"{arch}.rope.dimension_count is {rotated}: only models that rotate whole heads "
                         f"({head_dim}) are supported.")  # fmt: skip
    embedding = file.tensors.get("token_embd.weight")
    vocab = embedding.shape[0] if embedding else _int(file, "vocab_size")
    from gguf.constants import GGMLQuantizationType

    floats = {"F32": "float32", "F16": "float16"}
    kind = GGMLQuantizationType(embedding.type_id).name if embedding else "BF16"
    bos, eos = (
        file.metadata.get("tokenizer.ggml.bos_token_id"),
        file.metadata.get("tokenizer.ggml.eos_token_id"),
    )
    return ModelSpec(
        family=family.name,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_int(file, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_size=_int(file, "feed_forward_length"),
        vocab_size=vocab,
        context_tokens=_int(file, "context_length"),
        rope=_rope(file, family),
        rms_eps=float(file.get(f"{arch}.attention.layer_norm_rms_epsilon")),
        tied="output.weight" not in file.tensors,
        # Metadata does not say whether there are biases; the tensors do.
        qkv_bias=family.qkv_bias or "blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=family.qk_norm,
        rope_layers=nope_layers(num_layers, family.nope_interval) if family.nope_interval else (),
        bos_id=bos,
        eos_ids=() if eos is None else (eos,),
        dtype=floats.get(kind, "bfloat16"),
    )


def _rope(file: GGUFFile, family: Family) -> RopeSpec:
    arch = file.architecture
    theta = float(file.metadata.get(f"{arch}.rope.freq_base", family.theta))
    if "rope_freqs.weight" in file.tensors:
        divisors = dequantise(file, file.tensors["rope_freqs.weight"]).float().tolist()
        return RopeSpec(theta=theta, kind="divisors", divisors=tuple(divisors))
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return RopeSpec(theta=theta)
    factor = float(file.metadata.get(f"{arch}.rope.scaling.factor", 1.0))
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        original = _int(file, "rope.scaling.original_context_length", _int(file, "context_length"))
        return RopeSpec(theta=theta, kind="yarn", factor=factor, original_context=original,
                        attention_factor=yarn_attention_factor(factor))  # fmt: skip
    raise ModelError(f"{arch}.rope.scaling.type is {kind!r}: supported are none, linear and yarn.")
