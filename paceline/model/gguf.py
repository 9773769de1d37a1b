"""GGUF files: metadata, spec and tensors.

`gguf_tensors.py` reads the values of tensors.

llama.cpp stores q and k of the llama family with the two halves of each head interleaved. `_unpermute` reverts this, so
that the decoder has only one layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.model.gguf_file import GGUFFile, TensorInfo, num_stored_bytes
from paceline.model.gguf_tensors import dequantise, quantised_bits, read_quantised
from paceline.model.layout import StoredTensor
from paceline.model.registry import ModelFamily, gguf_family_of, nope_layers
from paceline.model.spec import ModelError, ModelSpec, RopeSpec, yarn_attention_factor

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.quantised import QuantisedTensor


# Names in GGUF files and the Hugging Face names of the same parameters.
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
    """The Hugging Face name of a tensor; an unknown name is returned unchanged, to be reported as unexpected."""
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

        def read(rows_and_columns: tuple[slice, ...]) -> Tensor:
            tensor = dequantise(file, info)
            return (_unpermute(tensor, heads[part]) if permuted else tensor)[rows_and_columns]

        def quantised() -> QuantisedTensor:
            tensor = read_quantised(file, info)
            return tensor.map_rows(lambda rows: _unpermute(rows, heads[part])) if permuted else tensor

        is_matrix = len(info.shape) == 2
        return StoredTensor(
            info.shape, num_stored_bytes(info), read, quantised if is_matrix else None, quantised_bits(info)
        )

    return {_hugging_face_name(name): stored(info) for name, info in file.tensors.items() if name not in _IN_SPEC}


def _unpermute(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorders the rows of each head from pairs (real, imaginary, real, ...) to halves (all real, all imaginary)."""
    rows = tensor.shape[0]
    pairs = tensor.reshape(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _int(file: GGUFFile, key: str, default: int | None = None) -> int:
    key = f"{file.architecture}.{key}"
    value = file.metadata.get(key, default) if default is not None else file.get(key)
    if isinstance(value, list):
        if len(set(value)) > 1:
            raise ModelError(
                f"{key} differs between layers in {file.path}: this is not supported, choose another model."
            )
        value = value[0]
    if not isinstance(value, int):
        raise ModelError(f"{key} is {value!r} in {file.path}: expected an integer, fetch the file again.")
    return value


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """The spec of the model in the file."""
    family, arch = gguf_family_of(file.architecture), file.architecture
    num_experts = int(file.metadata.get(f"{arch}.expert_count", 0))
    if num_experts:
        raise ModelError(
            f"{arch}.expert_count is {num_experts}: mixtures of experts are not supported, choose a dense model."
        )
    num_heads, hidden = _int(file, "attention.head_count"), _int(file, "embedding_length")
    num_layers = _int(file, "block_count")
    head_dim = _int(file, "attention.key_length", hidden // num_heads)
    rotated = _int(file, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(
            f"{arch}.rope.dimension_count is {rotated}: only models that rotate whole heads ({head_dim}) are "
            "supported, choose another model."
        )
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
        ropes=(_rope(file, family),),
        rms_eps=float(file.get(f"{arch}.attention.layer_norm_rms_epsilon")),
        tied="output.weight" not in file.tensors,
        # The metadata has no key for biases, so the tensors decide.
        qkv_bias=family.qkv_bias or "blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=family.qk_norm,
        layer_ropes=nope_layers(num_layers, family.nope_interval) if family.nope_interval else (),
        bos_id=bos,
        eos_ids=() if eos is None else (eos,),
        dtype=floats.get(kind, "bfloat16"),
    )


def _rope(file: GGUFFile, family: ModelFamily) -> RopeSpec:
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
        return RopeSpec(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_context=original,
            attention_factor=yarn_attention_factor(factor),
        )
    raise ModelError(
        f"{arch}.rope.scaling.type is {kind!r}: supported are none, linear and yarn, choose another model."
    )
