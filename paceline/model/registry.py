"""The supported models: a table of families.

A family that fits the decoder is one row here and one line in the oracle test. A family that needs new arithmetic gets
a field in a value of `layers.py` and a branch in `decoder.py`, never a second decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.model.errors import ModelError
from paceline.model.layers import Attention, Ffn, LayerSpec, RopeSpec, varied_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """How to read the config of one architecture."""

    name: str
    architecture: str  # in config.json
    gguf: str  # in GGUF metadata; Mistral files are named llama
    models: str  # of this family, for humans
    lora: bool = True  # runs with LoRA adapters
    gpu: bool = True  # all of its options have kernels
    multimodal: str | None = None  # the architecture of checkpoints with images, of which the text part is used
    bias_key: str | None = None  # config key that enables the biases of q, k, v and the output projection
    mlp_bias_key: str | None = None
    qkv_bias: bool = False  # q, k, v always have a bias
    qk_norm: str = "none"  # one of QK_NORMS
    activation: str = "silu"  # one of ACTIVATIONS
    norms: str = "pre"  # one of NORM_PLACEMENTS
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
    ModelFamily(name="llama", architecture="LlamaForCausalLM", gguf="llama", models="Llama 2 and 3, SmolLM 1 and 2",
        bias_key="attention_bias", mlp_bias_key="mlp_bias", gguf_permuted=True),
    ModelFamily(name="mistral", architecture="MistralForCausalLM", gguf="llama", models="Mistral 7B",
        windowed="always", window=4096, gguf_permuted=True),
    ModelFamily(name="smollm3", architecture="SmolLM3ForCausalLM", gguf="smollm3", models="SmolLM3",
        bias_key="attention_bias", mlp_bias_key="mlp_bias", windowed="switched", nope_interval=4, gguf_permuted=True,
        theta=2_000_000.0, tied=True),
    ModelFamily(name="qwen2", architecture="Qwen2ForCausalLM", gguf="qwen2", models="Qwen2, Qwen2.5",
        qkv_bias=True, windowed="switched", window=4096),
    ModelFamily(name="qwen3", architecture="Qwen3ForCausalLM", gguf="qwen3", models="Qwen3",
        bias_key="attention_bias", qk_norm="heads", windowed="switched", window=4096),
    ModelFamily(name="qwen3-moe", architecture="Qwen3MoeForCausalLM", gguf="qwen3moe", models="Qwen3-30B-A3B",
        bias_key="attention_bias", qk_norm="heads", windowed="switched in all layers", window=4096,
        experts_key="moe_intermediate_size", gguf_renormalised=True),
    ModelFamily(name="qwen2-moe", architecture="Qwen2MoeForCausalLM", gguf="qwen2moe",
        models="Qwen1.5-MoE, Qwen2-57B-A14B", qkv_bias=True, windowed="switched in listed layers", window=4096,
        experts_key="moe_intermediate_size"),
    ModelFamily(name="mixtral", architecture="MixtralForCausalLM", gguf="llama", models="Mixtral 8x7B",
        windowed="always", gguf_permuted=True, theta=1_000_000.0, rms_eps=1e-5, experts_key="intermediate_size",
        renormalised=True, gguf_renormalised=True),
    ModelFamily(name="olmoe", architecture="OlmoeForCausalLM", gguf="olmoe", models="OLMoE",
        bias_key="attention_bias", qk_norm="whole", rms_eps=1e-5, experts_key="intermediate_size"),
    ModelFamily(name="gemma", architecture="GemmaForCausalLM", gguf="gemma", models="Gemma 1",
        bias_key="attention_bias", activation="gelu_tanh", norms_plus_one=True, scaled_embedding=True, tied=True,
        defaults={"head_dim": 256}),
    ModelFamily(name="gemma2", architecture="Gemma2ForCausalLM", gguf="gemma2", models="Gemma 2",
        bias_key="attention_bias", activation="gelu_tanh", norms="both", norms_plus_one=True, scaled_embedding=True,
        windowed="always", full_interval=2, tied=True, window=4096,
        defaults={
            "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }),
    ModelFamily(name="gemma3", architecture="Gemma3ForCausalLM", gguf="gemma3", models="Gemma 3 (text)",
        multimodal="Gemma3ForConditionalGeneration", bias_key="attention_bias", qk_norm="heads", activation="gelu_tanh",
        norms="both", norms_plus_one=True, scaled_embedding=True, windowed="always", full_interval=6,
        local_theta=10_000.0, theta=1_000_000.0, tied=True, window=4096,
        defaults={  # the text_config of multimodal checkpoints lists only what differs
            "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208, "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
        }),
    ModelFamily(name="phi3", architecture="Phi3ForCausalLM", gguf="phi3", models="Phi-3, Phi-3.5-mini, Phi-4",
        windowed="always", rms_eps=1e-5),
    ModelFamily(name="olmo2", architecture="Olmo2ForCausalLM", gguf="olmo2", models="OLMo 2",
        bias_key="attention_bias", qk_norm="whole", norms="post", rms_eps=1e-5),
    ModelFamily(name="granite", architecture="GraniteForCausalLM", gguf="granite", models="Granite 3",
        bias_key="attention_bias", mlp_bias_key="mlp_bias", multipliers=True, gguf_permuted=True),
    ModelFamily(name="gpt-oss", architecture="GptOssForCausalLM", gguf="gpt-oss", models="gpt-oss-20b, gpt-oss-120b",
        bias_key="attention_bias", activation="clamped_swiglu", attention_sinks=True, windowed="always",
        full_interval=2, window=128, theta=150_000.0, rms_eps=1e-5, experts_key="intermediate_size", expert_bias=True,
        interleaved_experts=True, renormalised=True, gguf_renormalised=True,
        defaults={
            "head_dim": 64, "attention_bias": True,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
            },
        }),
)  # fmt: skip


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


def make_layers(
    family: ModelFamily,
    mixer: Attention,
    ffns: Sequence[Ffn],
    *,
    windows: Sequence[int | None],
    ropes: Sequence[RopeSpec],
    has_rope: Sequence[bool],
    context: int,
    residual_scale: float,
) -> tuple[LayerSpec, ...]:
    """The layers of a model; the sequences have one entry per layer, except ropes: its last one is that of layers with
    a window. A window that no request can outgrow hides nothing (Phi-3-mini-128k) and is left out."""
    layer = LayerSpec(mixer=mixer, ffn=ffns[0], norms=family.norms, residual_scale=residual_scale)
    kinds = zip(windows, has_rope, strict=False)  # `varied_layers` refuses another number of either
    return varied_layers(
        [layer] * len(ffns),
        windows=[None if window is None or window >= context else window for window in windows],
        ropes=[ropes[0 if window is None else -1] if rotated else None for window, rotated in kinds],
        ffns=ffns,
    )


def all_but_every(num_layers: int, interval: int) -> list[bool]:
    """True for all layers but every `interval`-th; 0: for all."""
    return [interval == 0 or (layer + 1) % interval > 0 for layer in range(num_layers)]


def windows_between(num_layers: int, interval: int, size: int) -> list[int | None]:
    """A window in all layers except every `interval`-th; 0: in all."""
    return [size if has_window else None for has_window in all_but_every(num_layers, interval)]
