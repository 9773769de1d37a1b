"""The fused tensors of a decoder, under the names of `layout.target_shapes`."""

from __future__ import annotations

from torch import Tensor

from paceline.model.decoder import Decoder, MixtureOfExperts
from paceline.model.norm import weight_of


def fused_tensors(decoder: Decoder) -> dict[str, Tensor]:
    found: dict[str, Tensor | None] = {"embedding": decoder.embedding, "norm": decoder.norm.weight}
    if not decoder.spec.tied:
        found["head"] = decoder.head.tensor
    for index, layer in enumerate(decoder.layers):
        own: dict[str, Tensor | None] = {"qk_norm": layer.qk_norm, "sinks": layer.sinks}
        for linear in layer.linears:
            own |= {linear.name: linear.tensor, f"{linear.name}_bias": linear.bias}
        for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            own[name] = weight_of(getattr(layer, name))
        if isinstance(layer.mlp, MixtureOfExperts):
            own |= {name: getattr(layer.mlp, name) for name in ("router", "router_bias", "shared_gate")}
            for name in ("expert_gate_up", "expert_down", "expert_gate_up_bias", "expert_down_bias"):
                matrices = getattr(layer.mlp, name)
                own[name] = None if matrices is None else matrices.flatten(0, 1)
        found |= {f"{index}.{name}": tensor for name, tensor in own.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
