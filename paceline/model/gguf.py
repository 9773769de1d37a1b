"""GGUF files: metadata, spec and tensors.

`gguf_tensors.py` reads the values of tensors.

llama.cpp stores q and k of the llama family with the two halves of each head interleaved. `_unpermute` reverts this, so
that the decoder has only one layout.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.model.gguf_file import GGUFFile, TensorInfo, experts, num_stored_bytes
from paceline.model.gguf_tensors import dequantize, packed_form, read_quantized
from paceline.model.layers import Activation, Attention, Dense, Experts, Ffn, RopeSpec, Routing
from paceline.model.layout import StoredTensor
from paceline.model.refused_options import refuse_metadata
from paceline.model.registry import ModelFamily, all_but_every, gguf_family_of, make_layers, windows_between
from paceline.model.rope_config import longrope, yarn_attention_factor
from paceline.model.spec import ModelError, ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paceline.model.quantized import QuantizedTensor


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
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",  # the norm before the MLP
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# With norms on both sides of a block the one before the MLP has its own name; gate and up may be one tensor (Phi-3).
_BETWEEN_NORMS = {"ffn_norm": "pre_feedforward_layernorm"}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}
_IN_SPEC = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read by `gguf_spec`
# Layers of the models whose scores are scaled by the root of hidden_size / num_heads. Files do not say it.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}  # both 27B


def _layer_names(file: GGUFFile, family: ModelFamily) -> dict[str, str]:
    names = dict(_LAYER_NAMES)
    if family.norms == "both":
        names |= _BETWEEN_NORMS
    if "blk.0.ffn_gate.weight" not in file.tensors:
        names |= _FUSED_MLP
    return names


def _hugging_face_name(name: str, layer_names: dict[str, str]) -> str:
    """The Hugging Face name of a tensor; an unknown name is returned unchanged, to be reported as unexpected."""
    if name in _NAMES:
        return _NAMES[name]
    match name.split("."):
        case ["blk", layer, "attn_sinks", "weight"]:
            return f"model.layers.{layer}.self_attn.sinks"
        case ["blk", layer, part, kind] if part in layer_names:
            return f"model.layers.{layer}.{layer_names[part]}.{kind}"
        case ["blk", layer, "ffn_gate" | "ffn_up" | "ffn_down" as part, expert, kind]:  # of old files of Mixtral
            return f"model.layers.{layer}.mlp.experts.{expert}.{part.removeprefix('ffn_')}_proj.{kind}"
    return name


def gguf_tensors(file: GGUFFile) -> dict[str, StoredTensor]:
    """The parameters of the file, by their Hugging Face names."""
    family = _family(file)
    layer_names = _layer_names(file, family)
    heads = {"attn_q": _int(file, "attention.head_count")}
    heads["attn_k"] = _int(file, "attention.head_count_kv", heads["attn_q"])

    def stored(info: TensorInfo) -> StoredTensor:
        part = info.name.split(".")[-2]
        permuted = family.gguf_permuted and part in heads

        def read(rows_and_columns: tuple[slice, ...]) -> Tensor:
            if len(info.shape) == 3:  # of all experts, which are read one by one
                first, stop, _ = rows_and_columns[0].indices(info.shape[0])
                return dequantize(file, experts(info, first, stop))[(slice(None), *rows_and_columns[1:])]
            tensor = dequantize(file, info)
            if part == "ffn_gate_inp_shexp":
                tensor = tensor.reshape(1, -1)
            return (_unpermute(tensor, heads[part]) if permuted else tensor)[rows_and_columns]

        def read_packed(rows_and_columns: tuple[slice, ...], device: str | torch.device) -> QuantizedTensor:
            tensor = read_quantized(file, info)
            if permuted:
                tensor = tensor.map_rows(lambda rows: _unpermute(rows, heads[part]))
            return tensor.part(rows_and_columns).to(device)

        is_matrix = len(info.shape) == 2
        shape = (1, *info.shape) if part == "ffn_gate_inp_shexp" and not is_matrix else info.shape
        found = StoredTensor(shape, num_stored_bytes(info), read)
        if not is_matrix:
            return found
        return replace(found, packed=packed_form(info, read_packed))

    return {
        _hugging_face_name(name, layer_names): stored(info)
        for name, info in file.tensors.items()
        if name not in _IN_SPEC
    }


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


def _family(file: GGUFFile) -> ModelFamily:
    """Mixtral's files have the architecture llama, and experts."""
    return gguf_family_of(file.architecture, experts=_int(file, "expert_count", 0) > 0)


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """The spec of the model in the file."""
    family, arch = _family(file), file.architecture
    refuse_metadata(family.name, {key.removeprefix(f"{arch}."): value for key, value in file.metadata.items()})
    num_heads, hidden = _int(file, "attention.head_count"), _int(file, "embedding_length")
    num_layers = _int(file, "block_count")
    head_dim = _int(file, "attention.key_length", hidden // num_heads)
    rotated = _int(file, "rope.dimension_count", head_dim)
    if rotated != head_dim and family.gguf_permuted:
        raise ModelError(
            f"{arch}.rope.dimension_count is {rotated}: only {arch} models that rotate whole heads ({head_dim}) are "
            "supported, choose another model."
        )
    embedding = file.tensors.get("token_embd.weight")
    vocab = embedding.shape[0] if embedding else _int(file, "vocab_size")
    from gguf.constants import GGMLQuantizationType

    floats = {"F32": "float32", "F16": "float16"}
    kind = GGMLQuantizationType(embedding.type_id).name if embedding else "BF16"
    bos, eos = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    context = _int(file, "context_length")
    mixer = Attention(
        num_heads=num_heads,
        num_kv_heads=_int(file, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rotary_dim=None if rotated == head_dim else rotated,
        # The metadata has no key for biases, so the tensors decide.
        qkv_bias=family.qkv_bias or "blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm=family.qk_norm,
        sinks=family.attention_sinks,
        scale=_attention_scale(file, family, hidden / num_heads),
        score_cap=_float(file, "attn_logit_softcapping", family.defaults.get("attn_logit_softcapping")),
    )
    layers = make_layers(
        family, mixer, [_ffn(file, family)] * num_layers, windows=_windows(file, family, num_layers), context=context,
        ropes=_ropes(file, family), has_rope=all_but_every(num_layers, family.nope_interval),
        residual_scale=_float(file, "residual_scale") or 1.0,
    )  # fmt: skip
    return ModelSpec(
        family=family.name,
        hidden_size=hidden,
        layers=layers,
        vocab_size=vocab,
        context_tokens=context,
        rms_eps=float(file.get(f"{arch}.attention.layer_norm_rms_epsilon")),
        tied="output.weight" not in file.tensors,
        logit_cap=_float(file, "final_logit_softcapping", family.defaults.get("final_logit_softcapping")),
        embedding_scale=math.sqrt(hidden) if family.scaled_embedding else _float(file, "embedding_scale") or 1.0,
        logit_scale=1 / (_float(file, "logit_scale") or 1.0),
        bos_id=bos,
        eos_ids=() if eos is None else (eos,),
        dtype=floats.get(kind, "bfloat16"),
    )


def _ffn(file: GGUFFile, family: ModelFamily) -> Ffn:
    count, activation = _int(file, "expert_count", 0), Activation(kind=family.activation)
    size = _int(file, "feed_forward_length", 0 if count else None)
    if not count:
        return Dense(size=size, activation=activation, bias="blk.0.ffn_up.bias" in file.tensors)
    shared = file.tensors.get("blk.0.ffn_up_shexp.weight")
    return Experts(
        count=count,
        per_token=_int(file, "expert_used_count"),
        size=_int(file, "expert_feed_forward_length", size),
        routing=Routing(renormalise=family.gguf_renormalised),
        activation=activation,
        bias=family.expert_bias,
        shared_size=0 if shared is None else shared.shape[0],
    )


def _float(file: GGUFFile, key: str, default: float | None = None) -> float | None:
    value = file.metadata.get(f"{file.architecture}.{key}", default)
    return None if value is None else float(value)


def _attention_scale(file: GGUFFile, family: ModelFamily, width: float) -> float | None:
    if _SCALED_BY_WIDTH.get(family.name) == _int(file, "block_count"):
        return 1 / math.sqrt(width)
    return _float(file, "attention.scale") or None


def _windows(file: GGUFFile, family: ModelFamily, num_layers: int) -> list[int | None]:
    size = _int(file, "attention.sliding_window", family.window or 0)
    if family.windowed != "always" or not size:
        return [None] * num_layers
    pattern = file.metadata.get(f"{file.architecture}.attention.sliding_window_pattern", family.full_interval)
    if isinstance(pattern, list):  # whether each layer has one
        return [size if has_window else None for has_window in pattern]
    return windows_between(num_layers, int(pattern), size)


def _ropes(file: GGUFFile, family: ModelFamily) -> tuple[RopeSpec, ...]:
    everywhere = _rope(file, family)
    if family.local_theta is None:
        return (everywhere,)
    return everywhere, RopeSpec(theta=_float(file, "rope.freq_base_swa") or family.local_theta)


def _rope(file: GGUFFile, family: ModelFamily) -> RopeSpec:
    arch = file.architecture
    theta = float(file.metadata.get(f"{arch}.rope.freq_base", family.theta))
    if "rope_freqs.weight" in file.tensors:
        divisors = dequantize(file, file.tensors["rope_freqs.weight"]).float().tolist()
        return RopeSpec(theta=theta, kind="divisors", divisors=tuple(divisors))
    if "rope_factors_long.weight" in file.tensors:
        short, long = (
            dequantize(file, file.tensors[f"rope_factors_{name}.weight"]).float().tolist() for name in ("short", "long")
        )
        context = _int(file, "context_length")
        original = _int(file, "rope.scaling.original_context_length", context)
        return longrope(theta, short, long, original, context / original, _float(file, "rope.scaling.attn_factor"))
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
            truncate=bool(family.defaults.get("rope_scaling", {}).get("truncate", True)),  # files do not say it
            attention_factor=yarn_attention_factor(factor),
        )
    raise ModelError(
        f"{arch}.rope.scaling.type is {kind!r}: supported are none, linear and yarn, choose another model."
    )
