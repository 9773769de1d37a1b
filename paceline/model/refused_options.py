"""Options of model files that change what a model computes, and that only some families have, or none.

A file may name any option. One that the family does not compute is refused by name unless its value changes nothing:
ignored, it would give a model that answers, and worse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.model.spec import ModelError

_FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def refuse_options(
    family: str, config: Mapping[str, Any], *, qk_norm: bool, factors: bool, clamp: bool, windows: bool
) -> None:
    """Raises for options of a config.json that the family does not compute. The flags are what it computes: `_FACTORS`,
    a clamped SwiGLU, layers with a sliding window."""
    supported: dict[str, tuple[object, ...]] = {
        "clip_qkv": (None,),
        "is_causal": (True, None),
        "use_bidirectional_attention": (False, None),
        "use_qk_norm": (qk_norm, None),
        "qk_norm": (qk_norm, None),
        "use_linear_attention": (False, None),
        "parallel_attn": (False, None),
        "alibi": (False, None),
        "softmax_scale": (None, *_usual_scale(config)),
        "attention_chunk_size": (None,),
        "qk_layernorm": (False, None),
        "logit_scale": (1.0, None),
    }
    if not factors:
        supported |= dict.fromkeys(_FACTORS, (1.0, None))
    if not clamp:
        supported |= dict.fromkeys(("swiglu_alpha", "swiglu_limit"), (None,))
    _refuse(family, config, supported)
    for kind in config.get("layer_types") or ():
        _refuse(family, {"layer_types": kind}, {"layer_types": _LAYER_TYPES if windows else _LAYER_TYPES[:1]})


def _usual_scale(config: Mapping[str, object]) -> tuple[float, ...]:
    """The factor of the scores of attention, where the file says how long a head is."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    size = config.get("head_dim") or (hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else 0)
    return (size**-0.5,) if isinstance(size, int) and size > 0 else ()


def refuse_metadata(family: str, metadata: Mapping[str, object]) -> None:
    """The same of a GGUF file. metadata: by key, without the architecture."""
    supported = {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "use_parallel_residual": (False,),
    }
    _refuse(family, metadata, supported)


def _refuse(family: str, options: Mapping[str, object], supported: Mapping[str, tuple[object, ...]]) -> None:
    for name, values in supported.items():
        if name in options and options[name] not in values:
            known = " or ".join(json.dumps(value) for value in values)
            raise ModelError(
                f"{name} is {json.dumps(options[name])}: only {known} is supported for {family} models, choose another "
                "model."
            )
