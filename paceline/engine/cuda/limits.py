"""What the kernels for GPUs cannot compute of a model. Needs neither torch nor Triton."""

from __future__ import annotations

import dataclasses

from paceline.config import ConfigError
from paceline.model.spec import ModelSpec

_EXPERT_ACTIVATIONS = ("silu", "clamped_swiglu")
_UNSUPPORTED_FIELDS: tuple[str, ...] = ()  # of ModelSpec


def check_supported(spec: ModelSpec) -> None:
    """Raises ConfigError for a model that the kernels cannot compute. One that learns an option leaves the list."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name in _UNSUPPORTED_FIELDS and value != field.default:
            raise ConfigError(f"{field.name} is {value!r}, which device cuda does not support: choose device cpu.")
    if spec.num_experts and (spec.norm_placement != "pre" or spec.activation not in _EXPERT_ACTIVATIONS):
        raise ConfigError(
            f"num_experts is {spec.num_experts}, norm_placement {spec.norm_placement!r} and activation "
            f"{spec.activation!r}: device cuda has experts with norms before blocks and "
            f"{' or '.join(_EXPERT_ACTIVATIONS)} only; choose device cpu."
        )
    if spec.activation == "clamped_swiglu" and (spec.has_dense_layers or spec.shared_expert_ffn_size):
        raise ConfigError("activation is 'clamped_swiglu': device cuda has it for experts only; choose device cpu.")
    if spec.head_dim % 16:
        raise ConfigError(f"head_dim is {spec.head_dim}: device cuda needs a multiple of 16; choose device cpu.")
