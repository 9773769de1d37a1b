"""Reads the spec of a Hugging Face config.json, as the family's row in `registry.py` says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.model.layers import Activation, Attention, Dense, Experts, Ffn, Routing
from paceline.model.quantization_config import read_format
from paceline.model.refused_options import refuse_options
from paceline.model.registry import ModelFamily, all_but_every, family_of, make_layers, windows_between
from paceline.model.rope_config import read_ropes, read_rotary_dim
from paceline.model.spec import DTYPES, ModelError, ModelSpec

# Names in configs, and ours. Gemma's first configs say gelu, and were trained with its approximation by tanh.
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a Hugging Face config.json. The EOS ids of generation_config.json, if there is one, take
    precedence."""
    architectures = config.get("architectures") or ["(none given)"]
    family = family_of(architectures[0])
    read_format(config)  # raises for weights in a format that is not supported
    if family.multimodal is not None and architectures[0] == family.multimodal:
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
        config = {**config, **(config.get("text_config") or {}), **ids}
    config = {**family.defaults, **config}
    try:
        refuse_options(
            family.name,
            config,
            qk_norm=family.qk_norm != "none",
            factors=family.multipliers,
            clamp=family.activation == "clamped_swiglu",
            windows=family.windowed != "never",
        )
        num_layers = int(config["num_hidden_layers"])
        num_heads = int(config["num_attention_heads"])
        hidden_size = int(config["hidden_size"])
        head_dim = int(config.get("head_dim") or hidden_size // num_heads)
        bias = bool(family.bias_key and config.get(family.bias_key, False))
        ropes = read_ropes(config, family.theta, family.local_theta)
        context = int(config.get("max_position_embeddings") or 0)
        if ropes[0].kind == "yarn":
            context = max(context, int(ropes[0].original_context * ropes[0].factor))
        has_rope = _rotated_layers(family, config, num_layers)
        windows = _windows(family, config, num_layers, has_rope)
        mixer = Attention(
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=head_dim,
            rotary_dim=read_rotary_dim(config, head_dim),
            qk_norm=family.qk_norm,
            qkv_bias=family.qkv_bias or bias,
            out_bias=bias,
            sinks=family.attention_sinks,
            scale=_attention_scale(family, config),
            score_cap=config.get("attn_logit_softcapping"),
        )
        layers = make_layers(
            family, mixer, _ffns(family, config, num_layers), windows=windows, ropes=ropes, has_rope=has_rope,
            context=context, residual_scale=_factor(family, config, "residual"),
        )  # fmt: skip
        return ModelSpec(
            family=family.name,
            hidden_size=hidden_size,
            layers=layers,
            vocab_size=int(config["vocab_size"]),
            context_tokens=context,
            rms_eps=float(config.get("rms_norm_eps", family.rms_eps)),
            logit_cap=config.get("final_logit_softcapping"),
            embedding_scale=math.sqrt(hidden_size) if family.scaled_embedding else _factor(family, config, "embedding"),
            logit_scale=1 / float(config.get("logits_scaling", 1.0)) if family.multipliers else 1.0,
            tied=bool(config.get("tie_word_embeddings", family.tied)),
            bos_id=next(iter(token_ids(config.get("bos_token_id"))), None),
            eos_ids=token_ids((generation or {}).get("eos_token_id", config.get("eos_token_id"))),
            dtype=_dtype(config),
        )
    except KeyError as error:
        raise ModelError(
            f"config.json lacks {error.args[0]!r}, which a {family.name} model needs: fetch it again."
        ) from None
    except (TypeError, AttributeError, OverflowError) as error:
        raise ModelError(
            f"config.json has a value of the wrong type ({error}): compare it with the original."
        ) from None


def _activation(family: ModelFamily, config: Mapping[str, Any]) -> str:
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    if config.get(key) is None:
        return family.activation
    expected = "silu" if family.activation == "clamped_swiglu" else family.activation  # the name in configs of gpt-oss
    if _ACTIVATIONS.get(config[key]) != expected:
        wanted = next(name for name, ours in _ACTIVATIONS.items() if ours == expected)
        raise ModelError(f"{key} is {config[key]!r}: only {wanted} is supported, choose another model.")
    return family.activation


def _attention_scale(family: ModelFamily, config: Mapping[str, Any]) -> float | None:
    if config.get("query_pre_attn_scalar") is not None:  # Gemma
        return 1 / math.sqrt(float(config["query_pre_attn_scalar"]))
    return float(config.get("attention_multiplier", 1.0)) if family.multipliers else None


def _factor(family: ModelFamily, config: Mapping[str, Any], name: str) -> float:
    return float(config.get(f"{name}_multiplier", 1.0)) if family.multipliers else 1.0


def _ffns(family: ModelFamily, config: Mapping[str, Any], num_layers: int) -> list[Ffn]:
    limits = {key: float(config[key]) for key in ("swiglu_alpha", "swiglu_limit") if config.get(key) is not None}
    activation = Activation(kind=_activation(family, config), **limits)
    bias = bool(family.mlp_bias_key and config.get(family.mlp_bias_key, False))
    dense = Dense(size=int(config["intermediate_size"]), activation=activation, bias=bias)
    if family.experts_key is None:
        return [dense] * num_layers
    experts = Experts(
        count=int(config["num_local_experts" if "num_local_experts" in config else "num_experts"]),
        per_token=int(config["num_experts_per_tok"]),
        size=int(config[family.experts_key]),
        routing=Routing(renormalise=bool(config.get("norm_topk_prob", family.renormalised))),
        activation=activation,
        bias=family.expert_bias,
        shared_size=int(config.get("shared_expert_intermediate_size") or 0),
    )
    step, listed = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    return [dense if layer in listed or (layer + 1) % step else experts for layer in range(num_layers)]


def _dtype(config: Mapping[str, object]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in DTYPES else "float32"


def token_ids(value: Any) -> tuple[int, ...]:
    """The ids of a config value: an id, a list of ids, or None."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)


def _rotated_layers(family: ModelFamily, config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Whether each layer has rotary positions."""
    listed = config.get("no_rope_layers") if family.nope_interval else None
    if listed is not None:  # despite its name, 1 means that the layer has them
        return [bool(item) for item in listed]
    interval = family.nope_interval and int(config.get("no_rope_layer_interval") or family.nope_interval)
    return all_but_every(num_layers, interval)


def _windows(
    family: ModelFamily, config: Mapping[str, Any], num_layers: int, has_rope: Sequence[bool]
) -> list[int | None]:
    size = config.get("sliding_window", family.window)
    if (
        family.windowed == "never"
        or size is None
        or (family.windowed.startswith("switched") and not config.get("use_sliding_window"))
    ):
        return [None] * num_layers
    is_listed = family.windowed in ("switched", "switched in listed layers") or bool(family.full_interval)
    if config.get("layer_types") and is_listed:
        return [int(size) if kind == "sliding_attention" else None for kind in config["layer_types"]]
    if family.windowed == "switched in listed layers":
        raise ModelError("use_sliding_window is true and layer_types is missing: list the layers that have a window.")
    if family.full_interval:
        interval = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
        return windows_between(num_layers, int(interval or family.full_interval), int(size))
    if family.nope_interval:
        return [None if rotated else int(size) for rotated in has_rope]
    first = int(config.get("max_window_layers", 28)) if family.windowed == "switched" else 0
    return [int(size) if layer >= first else None for layer in range(num_layers)]
