"""What the kernels for GPUs cannot compute of a model. Needs neither torch nor Triton."""

from __future__ import annotations

from paceline.config import ConfigError
from paceline.model.layers import Dense, Experts
from paceline.model.spec import ModelSpec

_EXPERT_ACTIVATIONS = ("silu", "clamped_swiglu")
_PER_LAYER = ("window", "rope", "rotary_dim", "sinks", "scale", "score_cap", "residual_scale")  # what may differ


def check_supported(spec: ModelSpec) -> None:
    """Raises ConfigError for a model that the kernels cannot compute."""
    spec.refuse_differences("device cuda", "choose device cpu", allowed=_PER_LAYER)
    for layer in spec.layers:
        mixer, ffn, kind = layer.mixer, layer.ffn, layer.ffn.activation.kind
        if isinstance(ffn, Experts) and (layer.norms != "pre" or kind not in _EXPERT_ACTIVATIONS):
            raise ConfigError(
                f"experts have norms {layer.norms!r} and activation {kind!r}: device cuda has experts with norms "
                f"before blocks and {' or '.join(_EXPERT_ACTIVATIONS)} only; choose device cpu."
            )
        if kind == "clamped_swiglu" and (isinstance(ffn, Dense) or ffn.shared_size):
            raise ConfigError("activation is 'clamped_swiglu': device cuda has it for experts only; choose device cpu.")
        if mixer.head_dim % 16:
            raise ConfigError(f"head_dim is {mixer.head_dim}: device cuda needs a multiple of 16; choose device cpu.")
