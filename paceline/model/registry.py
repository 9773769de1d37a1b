"""The supported models: a table of families, and named shapes for random weights.

A family that fits the decoder is one row here and one line in the oracle test. A family that needs new arithmetic gets
a field in `ModelSpec` and a branch in `decoder.py`, never a second decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.model.spec import DTYPES, ModelError, ModelSpec, RopeSpec, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """How to read the config of one architecture."""

    name: str
    architecture: str  # in config.json
    gguf: str  # in GGUF metadata; Mistral files are named llama
    bias_key: str | None = None  # config key that enables the biases of q, k, v and the output projection
    mlp_bias_key: str | None = None
    qkv_bias: bool = False  # q, k, v always have a bias
    qk_norm: bool = False
    windowed: str = "never"  # sliding windows: never, always (if a size is given) or switched (by use_sliding_window)
    nope_interval: int = 0  # every n-th layer has no rotary positions, unless the config lists the layers
    gguf_permuted: bool = False  # llama.cpp interleaves the halves of q and k heads
    # Defaults for keys that the config lacks:
    theta: float = 10_000.0
    tied: bool = False
    window: int | None = None


FAMILIES = (
    ModelFamily(
        name="llama",
        architecture="LlamaForCausalLM",
        gguf="llama",
        bias_key="attention_bias",
        mlp_bias_key="mlp_bias",
        gguf_permuted=True,
    ),
    ModelFamily(
        name="mistral",
        architecture="MistralForCausalLM",
        gguf="llama",
        windowed="always",
        window=4096,
        gguf_permuted=True,
    ),
    ModelFamily(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        gguf="smollm3",
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
        qkv_bias=True,
        windowed="switched",
        window=4096,
    ),
    ModelFamily(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        gguf="qwen3",
        bias_key="attention_bias",
        qk_norm=True,
        windowed="switched",
        window=4096,
    ),
)


def family_of(architecture: str) -> ModelFamily:
    """The row of a config.json's architecture."""
    for family in FAMILIES:
        if family.architecture == architecture:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ModelError(f"architecture is {architecture!r}, which is not supported: supported are {known}.")


def gguf_family_of(architecture: str) -> ModelFamily:
    """The row of a GGUF file's general.architecture."""
    for family in FAMILIES:
        if family.gguf == architecture:
            return family
    known = ", ".join(dict.fromkeys(family.gguf for family in FAMILIES))
    raise ModelError(f"general.architecture is {architecture!r}, which is not supported: supported are {known}.")


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a Hugging Face config.json. The EOS ids of generation_config.json, if there is one, take
    precedence."""
    architectures = config.get("architectures") or ["(none given)"]
    family = family_of(architectures[0])
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"quantization_config is {method!r}: use the unquantised model, or a GGUF file of it.")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act is {activation!r}: only silu is supported, choose another model.")
    try:
        num_layers = int(config["num_hidden_layers"])
        num_heads = int(config["num_attention_heads"])
        hidden_size = int(config["hidden_size"])
        layer_ropes = _layer_ropes(family, config, num_layers)
        bias = bool(family.bias_key and config.get(family.bias_key, False))
        rope = read_rope(config, family.theta)
        context = int(config.get("max_position_embeddings") or 0)
        if rope.kind == "yarn":
            context = max(context, int(rope.original_context * rope.factor))
        return ModelSpec(
            family=family.name,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            ffn_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            context_tokens=context,
            ropes=(rope,),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", family.tied)),
            qkv_bias=family.qkv_bias or bias,
            out_bias=bias,
            mlp_bias=bool(family.mlp_bias_key and config.get(family.mlp_bias_key, False)),
            qk_norm=family.qk_norm,
            windows=_windows(family, config, num_layers, layer_ropes),
            layer_ropes=layer_ropes,
            bos_id=_first_id(config.get("bos_token_id")),
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


def _windows(
    family: ModelFamily, config: Mapping[str, Any], num_layers: int, layer_ropes: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    size = config.get("sliding_window", family.window)
    if family.windowed == "never" or size is None or (family.windowed == "switched" and not _switched_on(config)):
        return (None,) * num_layers
    if config.get("layer_types") and family.windowed == "switched":
        return tuple(int(size) if kind == "sliding_attention" else None for kind in config["layer_types"])
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

# Shapes for `--load random`. The special ids are those of the synthetic tokenizer, not of the original model.
SHAPES: dict[str, ModelSpec] = {
    "qwen3-0.6b": _QWEN3_06B,
    "qwen3-14b": replace(
        _QWEN3_06B, hidden_size=5120, num_layers=40, num_heads=40, ffn_size=17_408, tied=False,
        windows=(), layer_ropes=(),
    ),
    "smollm2-135m": ModelSpec(
        family="llama", hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
        ffn_size=1536, vocab_size=49_152, context_tokens=8192, ropes=(RopeSpec(theta=100_000.0),), tied=True,
        bos_id=1, eos_ids=(2,), dtype="bfloat16",
    ),
    "tiny-llama": _tiny("llama", ropes=(RopeSpec(
        theta=500_000.0, kind="llama3", factor=8.0, original_context=256),)),
    "tiny-mistral": _tiny("mistral", windows=(32,) * 4),
    "tiny-smollm": _tiny("llama", tied=True, ropes=(RopeSpec(theta=100_000.0),)),
    "tiny-smollm3": _tiny("smollm3", tied=True, layer_ropes=nope_layers(4, 4)),
    "tiny-qwen2": _tiny("qwen2", qkv_bias=True, tied=True, windows=(None, None, 32, 32)),
    "tiny-qwen3": _tiny("qwen3", qk_norm=True, ropes=(RopeSpec(theta=1e6),)),
}  # fmt: skip


def shape(name: str) -> ModelSpec:
    """The spec of a named shape."""
    if name not in SHAPES:
        raise ModelError(f"shape is {name!r}, which is not known: choose one of {', '.join(SHAPES)}.")
    return SHAPES[name]
