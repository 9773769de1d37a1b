"""The supported models: a table of families, and named shapes for random weights.

A family that fits the decoder is one row here and one line in the oracle test. A family that needs new arithmetic gets
a field in `ModelSpec` and a branch in `decoder.py`, never a second decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.model.quantization_config import read_format
from paceline.model.refused_options import refuse_options
from paceline.model.rope_config import longrope, read_ropes, read_rotary_dim, yarn_attention_factor
from paceline.model.spec import DTYPES, ModelError, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """How to read the config of one architecture."""

    name: str
    architecture: str  # in config.json
    gguf: str  # in GGUF metadata; Mistral files are named llama
    models: str  # of this family, for humans
    moe: bool = False  # has mixtures of experts
    lora: bool = True  # runs with LoRA adapters
    gpu: bool = True  # all of its options have kernels
    multimodal: str | None = None  # the architecture of checkpoints with images, of which the text part is used
    bias_key: str | None = None  # config key that enables the biases of q, k, v and the output projection
    mlp_bias_key: str | None = None
    qkv_bias: bool = False  # q, k, v always have a bias
    qk_norm: bool = False
    full_qk_norm: bool = False
    activation: str = "silu"
    norm_placement: str = "pre"
    norms_plus_one: bool = False  # safetensors files have the weights of norms less 1; GGUF files do not
    scaled_embedding: bool = False  # by the root of hidden_size
    multipliers: bool = False  # the config has factors of embeddings, scores, residuals and logits (Granite)
    # Sliding windows: never, always (if a size is given), or switched (by use_sliding_window): for the upper layers, in
    # all layers, or in listed ones (Qwen2-MoE, where transformers and the original disagree about others).
    windowed: str = "never"
    full_interval: int = 0  # every n-th layer has no window, unless the config lists the layers
    local_theta: float | None = None  # layers with a window have RoPE of their own, with this theta
    nope_interval: int = 0  # every n-th layer has no rotary positions, unless the config lists the layers
    gguf_permuted: bool = False  # llama.cpp interleaves the halves of q and k heads
    experts_key: str | None = None  # config key of the size of experts; None: the family has none
    expert_bias: bool = False
    interleaved_experts: bool = False  # safetensors files: as `experts.py` says of gpt-oss
    attention_sinks: bool = False
    renormalised: bool = False  # the weights of a token's experts add up to 1, if norm_topk_prob is not given
    gguf_renormalised: bool = False  # the same; GGUF files have no key
    # Defaults for keys that the config lacks:
    theta: float = 10_000.0
    tied: bool = False
    window: int | None = None
    rms_eps: float = 1e-6
    defaults: Mapping[str, Any] = field(default_factory=dict)  # by config key


FAMILIES = (
    ModelFamily(
        name="llama",
        architecture="LlamaForCausalLM",
        gguf="llama",
        models="Llama 2 and 3, SmolLM 1 and 2",
        bias_key="attention_bias",
        mlp_bias_key="mlp_bias",
        gguf_permuted=True,
    ),
    ModelFamily(
        name="mistral",
        architecture="MistralForCausalLM",
        gguf="llama",
        models="Mistral 7B",
        windowed="always",
        window=4096,
        gguf_permuted=True,
    ),
    ModelFamily(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        gguf="smollm3",
        models="SmolLM3",
        bias_key="attention_bias",
        mlp_bias_key="mlp_bias",
        windowed="switched",
        nope_interval=4,
        gguf_permuted=True,
        theta=2_000_000.0,
        tied=True,
    ),
    ModelFamily(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        gguf="qwen2",
        models="Qwen2, Qwen2.5",
        qkv_bias=True,
        windowed="switched",
        window=4096,
    ),
    ModelFamily(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        gguf="qwen3",
        models="Qwen3",
        bias_key="attention_bias",
        qk_norm=True,
        windowed="switched",
        window=4096,
    ),
    ModelFamily(
        name="qwen3-moe",
        architecture="Qwen3MoeForCausalLM",
        gguf="qwen3moe",
        models="Qwen3-30B-A3B",
        moe=True,
        bias_key="attention_bias",
        qk_norm=True,
        windowed="switched in all layers",
        window=4096,
        experts_key="moe_intermediate_size",
        gguf_renormalised=True,
    ),
    ModelFamily(
        name="qwen2-moe",
        architecture="Qwen2MoeForCausalLM",
        gguf="qwen2moe",
        models="Qwen1.5-MoE, Qwen2-57B-A14B",
        moe=True,
        qkv_bias=True,
        windowed="switched in listed layers",
        window=4096,
        experts_key="moe_intermediate_size",
    ),
    ModelFamily(
        name="mixtral",
        architecture="MixtralForCausalLM",
        gguf="llama",
        models="Mixtral 8x7B",
        moe=True,
        windowed="always",
        gguf_permuted=True,
        theta=1_000_000.0,
        rms_eps=1e-5,
        experts_key="intermediate_size",
        renormalised=True,
        gguf_renormalised=True,
    ),
    ModelFamily(
        name="olmoe",
        architecture="OlmoeForCausalLM",
        gguf="olmoe",
        models="OLMoE",
        moe=True,
        bias_key="attention_bias",
        qk_norm=True,
        full_qk_norm=True,
        rms_eps=1e-5,
        experts_key="intermediate_size",
    ),
    ModelFamily(
        name="gemma",
        architecture="GemmaForCausalLM",
        gguf="gemma",
        models="Gemma 1",
        bias_key="attention_bias",
        activation="gelu_tanh",
        norms_plus_one=True,
        scaled_embedding=True,
        tied=True,
        defaults={"head_dim": 256},
    ),
    ModelFamily(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        gguf="gemma2",
        models="Gemma 2",
        bias_key="attention_bias",
        activation="gelu_tanh",
        norm_placement="both",
        norms_plus_one=True,
        scaled_embedding=True,
        windowed="always",
        full_interval=2,
        tied=True,
        window=4096,
        defaults={
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    ModelFamily(
        name="gemma3",
        architecture="Gemma3ForCausalLM",
        gguf="gemma3",
        models="Gemma 3 (text)",
        multimodal="Gemma3ForConditionalGeneration",
        bias_key="attention_bias",
        qk_norm=True,
        activation="gelu_tanh",
        norm_placement="both",
        norms_plus_one=True,
        scaled_embedding=True,
        windowed="always",
        full_interval=6,
        local_theta=10_000.0,
        theta=1_000_000.0,
        tied=True,
        window=4096,
        defaults={  # the text_config of multimodal checkpoints lists only what differs
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
        },
    ),
    ModelFamily(
        name="phi3",
        architecture="Phi3ForCausalLM",
        gguf="phi3",
        models="Phi-3, Phi-3.5-mini, Phi-4",
        windowed="always",
        rms_eps=1e-5,
    ),
    ModelFamily(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        gguf="olmo2",
        models="OLMo 2",
        bias_key="attention_bias",
        qk_norm=True,
        full_qk_norm=True,
        norm_placement="post",
        rms_eps=1e-5,
    ),
    ModelFamily(
        name="granite",
        architecture="GraniteForCausalLM",
        gguf="granite",
        models="Granite 3",
        bias_key="attention_bias",
        mlp_bias_key="mlp_bias",
        multipliers=True,
        gguf_permuted=True,
    ),
    ModelFamily(
        name="gpt-oss",
        architecture="GptOssForCausalLM",
        gguf="gpt-oss",
        models="gpt-oss-20b, gpt-oss-120b",
        moe=True,
        bias_key="attention_bias",
        activation="clamped_swiglu",
        attention_sinks=True,
        windowed="always",
        full_interval=2,
        window=128,
        theta=150_000.0,
        rms_eps=1e-5,
        experts_key="intermediate_size",
        expert_bias=True,
        interleaved_experts=True,
        renormalised=True,
        gguf_renormalised=True,
        defaults={
            "head_dim": 64,
            "attention_bias": True,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        },
    ),
)

# Names in configs, and ours. Gemma's first configs say gelu, and were trained with its approximation by tanh.
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}


def family_of(architecture: str) -> ModelFamily:
    """The row of a config.json's architecture."""
    for family in FAMILIES:
        if architecture in (family.architecture, family.multimodal):
            return family
    known = ", ".join(name for family in FAMILIES for name in (family.architecture, family.multimodal) if name)
    raise ModelError(f"architecture is {architecture!r}, which is not supported: supported are {known}.")


def gguf_family_of(architecture: str, *, experts: bool = False) -> ModelFamily:
    """The row of a GGUF file's general.architecture, with or without experts."""
    for family in FAMILIES:
        if family.gguf == architecture and (family.experts_key is not None) == experts:
            return family
    if any(family.gguf == architecture for family in FAMILIES):
        what = "has" if experts else "lacks"
        raise ModelError(
            f"general.architecture is {architecture!r} and the file {what} {architecture}.expert_count: fetch it again."
        )
    known = ", ".join(dict.fromkeys(family.gguf for family in FAMILIES))
    raise ModelError(f"general.architecture is {architecture!r}, which is not supported: supported are {known}.")


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
            qk_norm=family.qk_norm,
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
        layer_ropes = _layer_ropes(family, config, num_layers)
        windows = _windows(family, config, num_layers, layer_ropes)
        if family.local_theta is not None:
            layer_ropes = tuple(0 if window is None else 1 for window in windows)
        # One that no request can outgrow hides nothing (Phi-3-mini-128k).
        windows = tuple(None if window is None or window >= context else window for window in windows)
        return ModelSpec(
            family=family.name,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=head_dim,
            ffn_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            context_tokens=context,
            ropes=ropes,
            rms_eps=float(config.get("rms_norm_eps", family.rms_eps)),
            activation=_activation(family, config),
            **_swiglu(config),
            attention_sinks=family.attention_sinks,
            norm_placement=family.norm_placement,
            attention_scale=_attention_scale(family, config),
            score_cap=config.get("attn_logit_softcapping"),
            logit_cap=config.get("final_logit_softcapping"),
            embedding_scale=math.sqrt(hidden_size) if family.scaled_embedding else _factor(family, config, "embedding"),
            residual_scale=_factor(family, config, "residual"),
            logit_scale=1 / float(config.get("logits_scaling", 1.0)) if family.multipliers else 1.0,
            rotary_dim=read_rotary_dim(config, head_dim),
            tied=bool(config.get("tie_word_embeddings", family.tied)),
            qkv_bias=family.qkv_bias or bias,
            out_bias=bias,
            mlp_bias=bool(family.mlp_bias_key and config.get(family.mlp_bias_key, False)),
            qk_norm=family.qk_norm,
            full_qk_norm=family.full_qk_norm,
            windows=windows,
            layer_ropes=layer_ropes,
            bos_id=_first_id(config.get("bos_token_id")),
            **_experts(family, config, num_layers),
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


def _swiglu(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: float(config[key]) for key in ("swiglu_alpha", "swiglu_limit") if config.get(key) is not None}


def _attention_scale(family: ModelFamily, config: Mapping[str, Any]) -> float | None:
    if config.get("query_pre_attn_scalar") is not None:  # Gemma
        return 1 / math.sqrt(float(config["query_pre_attn_scalar"]))
    return float(config.get("attention_multiplier", 1.0)) if family.multipliers else None


def _factor(family: ModelFamily, config: Mapping[str, Any], name: str) -> float:
    return float(config.get(f"{name}_multiplier", 1.0)) if family.multipliers else 1.0


def _experts(family: ModelFamily, config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields of a mixture of experts."""
    if family.experts_key is None:
        return {}
    num_experts = int(config["num_local_experts" if "num_local_experts" in config else "num_experts"])
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    is_sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
    return {
        "num_experts": num_experts,
        "experts_per_token": int(config["num_experts_per_tok"]),
        "expert_ffn_size": int(config[family.experts_key]),
        "renormalise_experts": bool(config.get("norm_topk_prob", family.renormalised)),
        "expert_bias": family.expert_bias,
        "shared_expert_ffn_size": int(config.get("shared_expert_intermediate_size") or 0),
        "sparse_layers": tuple(is_sparse),
    }


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in DTYPES else "float32"


def token_ids(value: Any) -> tuple[int, ...]:
    """The ids of a config value: an id, a list of ids, or None."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)


def _first_id(value: Any) -> int | None:
    ids = token_ids(value)
    return ids[0] if ids else None


def _layer_ropes(family: ModelFamily, config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    if not family.nope_interval:
        return (0,) * num_layers
    listed = config.get("no_rope_layers")  # despite its name, 1 means that the layer has rotary positions
    if listed is not None:
        return tuple(0 if item else None for item in listed)
    interval = int(config.get("no_rope_layer_interval") or family.nope_interval)
    return nope_layers(num_layers, interval)


def nope_layers(num_layers: int, interval: int) -> tuple[int | None, ...]:
    """`ModelSpec.layer_ropes` with rotary positions in all layers except every `interval`-th."""
    return tuple(0 if (layer + 1) % interval else None for layer in range(num_layers))


def windows_between(num_layers: int, interval: int, size: int) -> tuple[int | None, ...]:
    """`ModelSpec.windows` with a window in all layers except every `interval`-th."""
    return tuple(size if (layer + 1) % interval else None for layer in range(num_layers))


def _windows(
    family: ModelFamily, config: Mapping[str, Any], num_layers: int, layer_ropes: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    size = config.get("sliding_window", family.window)
    if (
        family.windowed == "never"
        or size is None
        or (family.windowed.startswith("switched") and not _switched_on(config))
    ):
        return (None,) * num_layers
    is_listed = family.windowed in ("switched", "switched in listed layers") or bool(family.full_interval)
    if config.get("layer_types") and is_listed:
        return tuple(int(size) if kind == "sliding_attention" else None for kind in config["layer_types"])
    if family.windowed == "switched in listed layers":
        raise ModelError("use_sliding_window is true and layer_types is missing: list the layers that have a window.")
    if family.full_interval:
        interval = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
        return windows_between(num_layers, int(interval or family.full_interval), int(size))
    if family.nope_interval:
        return tuple(int(size) if rope is None else None for rope in layer_ropes)
    first = int(config.get("max_window_layers", 28)) if family.windowed == "switched" else 0
    return tuple(int(size) if layer >= first else None for layer in range(num_layers))


def _switched_on(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_sliding_window", False))


def _tiny(family: str, **options: Any) -> ModelSpec:
    """A model for tests. Every size is small and different, so that a confused axis is an error."""
    base: dict[str, Any] = {
        "hidden_size": 64, "num_layers": 4, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16,
        "ffn_size": 112, "vocab_size": 512, "context_tokens": 2048, "bos_id": 1, "eos_ids": (2,),
    }  # fmt: skip
    return ModelSpec(family=family, **{**base, **options})


_QWEN3_06B = ModelSpec(
    family="qwen3", hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128,
    ffn_size=3072, vocab_size=151_936, context_tokens=40_960, ropes=(RopeSpec(theta=1e6),), rms_eps=1e-6,
    tied=True, qk_norm=True, bos_id=1, eos_ids=(2,), dtype="bfloat16",
)  # fmt: skip

_GEMMA: dict[str, Any] = {
    "tied": True, "activation": "gelu_tanh", "norm_placement": "both", "embedding_scale": 8.0, "rms_eps": 1e-6
}  # fmt: skip

_GPT_OSS: dict[str, Any] = {
    "qkv_bias": True, "out_bias": True, "expert_bias": True, "attention_sinks": True, "activation": "clamped_swiglu",
    "ropes": (RopeSpec(
        theta=150_000.0, kind="yarn", factor=32.0, original_context=4096, truncate=False,
        attention_factor=yarn_attention_factor(32.0)
    ),),
}  # fmt: skip

# Shapes for `--load random`. The special ids are those of the synthetic tokenizer, not of the original model.
SHAPES: dict[str, ModelSpec] = {
    "qwen3-0.6b": _QWEN3_06B,
    "qwen3-14b": replace(
        _QWEN3_06B, hidden_size=5120, num_layers=40, num_heads=40, ffn_size=17_408, tied=False,
        windows=(), layer_ropes=(), sparse_layers=(),
    ),
    "qwen3-30b-a3b": replace(
        _QWEN3_06B, family="qwen3-moe", hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, ffn_size=6144,
        num_experts=128, experts_per_token=8, expert_ffn_size=768, tied=False,
        windows=(), layer_ropes=(), sparse_layers=(),
    ),
    "llama3.1-8b": ModelSpec(
        family="llama", hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        ffn_size=14_336, vocab_size=128_256, context_tokens=131_072, bos_id=1, eos_ids=(2,), dtype="bfloat16",
        ropes=(RopeSpec(theta=500_000.0, kind="llama3", factor=8.0, original_context=8192),),
    ),
    "gemma3-4b": ModelSpec(
        family="gemma3", hidden_size=2560, num_layers=34, num_heads=8, num_kv_heads=4, head_dim=256,
        ffn_size=10_240, vocab_size=262_208, context_tokens=131_072, bos_id=1, eos_ids=(2,), dtype="bfloat16",
        ropes=(RopeSpec(theta=1e6, kind="linear", factor=8.0), RopeSpec()), qk_norm=True, attention_scale=1 / 16,
        windows=windows_between(34, 6, 1024), layer_ropes=tuple(int((layer + 1) % 6 > 0) for layer in range(34)),
        **{**_GEMMA, "embedding_scale": math.sqrt(2560)},
    ),
    "phi3-mini": ModelSpec(
        family="phi3", hidden_size=3072, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=96,
        ffn_size=8192, vocab_size=32_064, context_tokens=4096, windows=(2047,) * 32, bos_id=1, eos_ids=(2,),
        dtype="bfloat16",
    ),
    "smollm2-135m": ModelSpec(
        family="llama", hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
        ffn_size=1536, vocab_size=49_152, context_tokens=8192, ropes=(RopeSpec(theta=100_000.0),), tied=True,
        bos_id=1, eos_ids=(2,), dtype="bfloat16",
    ),
    "gpt-oss-20b": ModelSpec(
        family="gpt-oss", hidden_size=2880, num_layers=24, num_heads=64, num_kv_heads=8, head_dim=64, ffn_size=2880,
        vocab_size=201_088, context_tokens=131_072, num_experts=32, experts_per_token=4, expert_ffn_size=2880,
        windows=windows_between(24, 2, 128), **_GPT_OSS, bos_id=1, eos_ids=(2,), dtype="bfloat16",
    ),
    "tiny-llama": _tiny("llama", ropes=(RopeSpec(
        theta=500_000.0, kind="llama3", factor=8.0, original_context=256),)),
    "tiny-mistral": _tiny("mistral", windows=(32,) * 4),
    "tiny-smollm": _tiny("llama", tied=True, ropes=(RopeSpec(theta=100_000.0),)),
    "tiny-smollm3": _tiny("smollm3", tied=True, layer_ropes=nope_layers(4, 4)),
    "tiny-qwen2": _tiny("qwen2", qkv_bias=True, tied=True, windows=(None, None, 32, 32)),
    "tiny-qwen3": _tiny("qwen3", qk_norm=True, ropes=(RopeSpec(theta=1e6),)),
    "tiny-gemma": _tiny("gemma", tied=True, activation="gelu_tanh", embedding_scale=8.0),
    "tiny-gemma2": _tiny(
        "gemma2", **_GEMMA, windows=(32, None) * 2, attention_scale=0.2, score_cap=5.0, logit_cap=8.0
    ),
    "tiny-gemma3": _tiny(
        "gemma3", **_GEMMA, qk_norm=True, windows=(32, 32, None, 32), layer_ropes=(1, 1, 0, 1),
        ropes=(RopeSpec(theta=1e6, kind="linear", factor=8.0), RopeSpec()),
    ),
    "tiny-phi3": _tiny("phi3", head_dim=48, rotary_dim=36, windows=(40,) * 4, ropes=(longrope(
        10_000.0, [1.0 + pair / 9 for pair in range(18)], [2.0 + pair for pair in range(18)], 512, 4.0),)),
    "tiny-olmo2": _tiny("olmo2", norm_placement="post", qk_norm=True, full_qk_norm=True),
    "tiny-granite": _tiny(
        "granite", tied=True, embedding_scale=12.0, attention_scale=0.4, residual_scale=0.22, logit_scale=0.25
    ),
    "tiny-qwen3-moe": _tiny("qwen3-moe", qk_norm=True, ropes=(RopeSpec(theta=1e6),), num_experts=12,
        experts_per_token=3, expert_ffn_size=48, sparse_layers=(True, False, True, True)),
    "tiny-qwen2-moe": _tiny("qwen2-moe", qkv_bias=True, num_experts=10, experts_per_token=4, expert_ffn_size=40,
        renormalise_experts=False, shared_expert_ffn_size=72),
    "tiny-olmoe": _tiny("olmoe", qk_norm=True, full_qk_norm=True, num_experts=9, experts_per_token=3,
        expert_ffn_size=56, renormalise_experts=False),
    "tiny-gpt-oss": _tiny("gpt-oss", **_GPT_OSS, windows=(32, None) * 2, num_experts=10, experts_per_token=3,
        expert_ffn_size=56),
    "tiny-mixtral": _tiny("mixtral", num_experts=6, experts_per_token=2, expert_ffn_size=112),
}  # fmt: skip


def shape(name: str) -> ModelSpec:
    """The spec of a named shape."""
    if name not in SHAPES:
        raise ModelError(f"shape is {name!r}, which is not known: choose one of {', '.join(SHAPES)}.")
    return SHAPES[name]
