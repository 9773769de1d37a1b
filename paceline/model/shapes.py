"""Named shapes for `--load random`, and `vary`, by which they are made from each other."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from paceline.model.errors import ModelError
from paceline.model.layers import Activation, Attention, Dense, Experts, LayerSpec, RopeSpec, Routing, varied_layers
from paceline.model.registry import windows_between
from paceline.model.rope_config import longrope, yarn_attention_factor
from paceline.model.spec import ModelSpec


def vary(spec: ModelSpec, **options: Any) -> ModelSpec:
    """`spec` with other values. Each option is a field of `ModelSpec`, or of `LayerSpec` or `Attention` and then of all
    layers; `num_layers`; or `windows`, `ropes` or `ffns`, with one entry per layer."""
    count = options.pop("num_layers", spec.num_layers)
    each = {name: options.pop(name) for name in ("windows", "ropes", "ffns") if name in options}
    mixer, layer = ({one.name: options.pop(one.name) for one in fields(kind) if one.name in options}
                    for kind in (Attention, LayerSpec))  # fmt: skip
    own = (spec.layers[index % spec.num_layers] for index in range(count))
    layers = [replace(one, mixer=replace(one.mixer, **mixer), **layer) for one in own]
    return replace(spec, layers=varied_layers(layers, **each), **options)


def _spec(family: str, mixer: Attention, ffn: Dense | Experts, num_layers: int, **options: Any) -> ModelSpec:
    """The special ids are those of the synthetic tokenizer, not of the original model."""
    layers = (LayerSpec(mixer=mixer, ffn=ffn),) * num_layers
    return ModelSpec(family=family, layers=layers, bos_id=1, eos_ids=(2,), **options)


_QWEN3_06B = _spec(
    "qwen3", Attention(num_heads=16, num_kv_heads=8, head_dim=128, qk_norm="heads", rope=RopeSpec(theta=1e6)),
    Dense(size=3072), 28, hidden_size=1024, vocab_size=151_936, context_tokens=40_960, rms_eps=1e-6, tied=True,
    dtype="bfloat16",
)  # fmt: skip
# For tests. Every size is small and different, so that a confused axis is an error.
_TINY = _spec(
    "llama", Attention(num_heads=6, num_kv_heads=2, head_dim=16), Dense(size=112), 4, hidden_size=64, vocab_size=512,
    context_tokens=2048,
)  # fmt: skip
_GELU = Activation(kind="gelu_tanh")
_SWIGLU = Activation(kind="clamped_swiglu")
_GLOBAL, _LOCAL = RopeSpec(theta=1e6, kind="linear", factor=8.0), RopeSpec()  # of Gemma 3
_GEMMA: dict[str, object] = {
    "tied": True, "ffn": Dense(size=112, activation=_GELU), "norms": "both", "embedding_scale": 8.0, "rms_eps": 1e-6,
}  # fmt: skip
_GPT_OSS: dict[str, object] = {
    "qkv_bias": True, "out_bias": True, "sinks": True,
    "rope": RopeSpec(
        theta=150_000.0, kind="yarn", factor=32.0, original_context=4096, truncate=False,
        attention_factor=yarn_attention_factor(32.0),
    ),
}  # fmt: skip
_TINY_EXPERTS = Experts(count=12, per_token=3, size=48)
_GEMMA3_WINDOWS = windows_between(34, 6, 1024)

SHAPES: dict[str, ModelSpec] = {
    "qwen3-0.6b": _QWEN3_06B,
    "qwen3-14b": vary(
        _QWEN3_06B, hidden_size=5120, num_layers=40, num_heads=40, ffn=Dense(size=17_408), tied=False,
    ),
    "qwen3-30b-a3b": vary(
        _QWEN3_06B, family="qwen3-moe", hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, tied=False,
        ffn=Experts(count=128, per_token=8, size=768),
    ),
    "llama3.1-8b": _spec(
        "llama", Attention(num_heads=32, num_kv_heads=8, head_dim=128, rope=RopeSpec(
            theta=500_000.0, kind="llama3", factor=8.0, original_context=8192)),
        Dense(size=14_336), 32, hidden_size=4096, vocab_size=128_256, context_tokens=131_072, dtype="bfloat16",
    ),
    "gemma3-4b": vary(
        _spec(
            "gemma3", Attention(num_heads=8, num_kv_heads=4, head_dim=256, qk_norm="heads", scale=1 / 16),
            Dense(size=10_240, activation=_GELU), 34, hidden_size=2560, vocab_size=262_208, context_tokens=131_072,
            tied=True, embedding_scale=math.sqrt(2560), rms_eps=1e-6, dtype="bfloat16",
        ),
        norms="both", windows=_GEMMA3_WINDOWS, ropes=[_LOCAL if window else _GLOBAL for window in _GEMMA3_WINDOWS],
    ),
    "phi3-mini": _spec(
        "phi3", Attention(num_heads=32, num_kv_heads=32, head_dim=96, window=2047), Dense(size=8192), 32,
        hidden_size=3072, vocab_size=32_064, context_tokens=4096, dtype="bfloat16",
    ),
    "smollm2-135m": _spec(
        "llama", Attention(num_heads=9, num_kv_heads=3, head_dim=64, rope=RopeSpec(theta=100_000.0)),
        Dense(size=1536), 30, hidden_size=576, vocab_size=49_152, context_tokens=8192, tied=True, dtype="bfloat16",
    ),
    "gpt-oss-20b": vary(
        _spec(
            "gpt-oss", Attention(num_heads=64, num_kv_heads=8, head_dim=64),
            Experts(count=32, per_token=4, size=2880, bias=True, activation=_SWIGLU), 24, hidden_size=2880,
            vocab_size=201_088, context_tokens=131_072, dtype="bfloat16",
        ),
        windows=windows_between(24, 2, 128), **_GPT_OSS,
    ),
    "tiny-llama": vary(_TINY, rope=RopeSpec(theta=500_000.0, kind="llama3", factor=8.0, original_context=256)),
    "tiny-mistral": vary(_TINY, family="mistral", window=32),
    "tiny-smollm": vary(_TINY, tied=True, rope=RopeSpec(theta=100_000.0)),
    "tiny-smollm3": vary(_TINY, family="smollm3", tied=True, ropes=(*[RopeSpec()] * 3, None)),
    "tiny-qwen2": vary(_TINY, family="qwen2", qkv_bias=True, tied=True, windows=(None, None, 32, 32)),
    "tiny-qwen3": vary(_TINY, family="qwen3", qk_norm="heads", rope=RopeSpec(theta=1e6)),
    "tiny-gemma": vary(_TINY, family="gemma", tied=True, ffn=Dense(size=112, activation=_GELU), embedding_scale=8.0),
    "tiny-gemma2": vary(
        _TINY, family="gemma2", **_GEMMA, windows=(32, None) * 2, scale=0.2, score_cap=5.0, logit_cap=8.0
    ),
    "tiny-gemma3": vary(
        _TINY, family="gemma3", **_GEMMA, qk_norm="heads", windows=(32, 32, None, 32),
        ropes=(_LOCAL, _LOCAL, _GLOBAL, _LOCAL),
    ),
    "tiny-phi3": vary(_TINY, family="phi3", head_dim=48, rotary_dim=36, window=40, rope=longrope(
        10_000.0, [1.0 + pair / 9 for pair in range(18)], [2.0 + pair for pair in range(18)], 512, 4.0)),
    "tiny-olmo2": vary(_TINY, family="olmo2", norms="post", qk_norm="whole"),
    "tiny-granite": vary(
        _TINY, family="granite", tied=True, embedding_scale=12.0, scale=0.4, residual_scale=0.22, logit_scale=0.25
    ),
    "tiny-qwen3-moe": vary(_TINY, family="qwen3-moe", qk_norm="heads", rope=RopeSpec(theta=1e6),
        ffns=(_TINY_EXPERTS, Dense(size=112), _TINY_EXPERTS, _TINY_EXPERTS)),
    "tiny-qwen2-moe": vary(_TINY, family="qwen2-moe", qkv_bias=True, ffn=Experts(
        count=10, per_token=4, size=40, routing=Routing(renormalise=False), shared_size=72)),
    "tiny-olmoe": vary(_TINY, family="olmoe", qk_norm="whole", ffn=Experts(
        count=9, per_token=3, size=56, routing=Routing(renormalise=False))),
    "tiny-gpt-oss": vary(_TINY, family="gpt-oss", **_GPT_OSS, windows=(32, None) * 2, ffn=Experts(
        count=10, per_token=3, size=56, bias=True, activation=_SWIGLU)),
    "tiny-mixtral": vary(_TINY, family="mixtral", ffn=Experts(count=6, per_token=2, size=112)),
}  # fmt: skip


def shape(name: str) -> ModelSpec:
    """The spec of a named shape."""
    if name not in SHAPES:
        raise ModelError(f"shape is {name!r}, which is not known: choose one of {', '.join(SHAPES)}.")
    return SHAPES[name]
