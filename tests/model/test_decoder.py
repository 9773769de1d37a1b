"""The options of ModelSpec against a forward pass written out in plain torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from contiguous_cache import ContiguousCache
from torch import Tensor

from paceline.engine.cpu.model import CpuModel
from paceline.model.decoder import Decoder, Experts, route
from paceline.model.registry import shape
from paceline.model.rope import inverse_frequencies
from paceline.model.spec import ModelError, ModelSpec, RopeSpec
from paceline.model.weights import random_weights

BASE = shape("tiny-llama")
TWO_ROPES = (RopeSpec(theta=10_000.0), RopeSpec(theta=300.0, kind="linear", factor=3.0))
EXPERTS = {"num_experts": 9, "experts_per_token": 3, "expert_ffn_size": 40}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "activation": {"activation": "gelu_tanh"},
    "attention scale": {"attention_scale": 0.1},
    "logit cap": {"logit_cap": 2.5},
    "post norm": {"norm_placement": "post"},
    "norms before and after": {"norm_placement": "both"},
    "full QK-norm": {"qk_norm": True, "full_qk_norm": True},
    "factors": {"embedding_scale": 3.0, "logit_scale": 0.4},
    "two ropes": {"ropes": TWO_ROPES, "layer_ropes": (0, 1, None, 1)},
    "experts": {**EXPERTS, "sparse_layers": (True, False, True, True)},
    "experts scored by sigmoid, and a shared one": {
        **EXPERTS,
        "sparse_layers": (),
        "router": "sigmoid",
        "renormalise_experts": False,
        "shared_expert_ffn_size": 24,
    },
    "attention sinks": {"attention_sinks": True, "windows": (None, 5, None, 3)},
    "clamped SwiGLU": {"activation": "clamped_swiglu", "swiglu_alpha": 1.3, "swiglu_limit": 0.8},
    "experts with biases": {**EXPERTS, "sparse_layers": (True, False, True, True), "expert_bias": True},
    "all of them": {
        "activation": "gelu_tanh",
        "attention_scale": 0.3,
        "logit_cap": 4.0,
        "norm_placement": "both",
        "ropes": TWO_ROPES,
        "layer_ropes": (1, None, 0, 1),
        "windows": (None, 5, None, 3),
        "qk_norm": True,
        "embedding_scale": 0.7,
        "logit_scale": 1.4,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
}
TOKENS = torch.randint(0, 512, (23,), generator=torch.Generator().manual_seed(5)).tolist()


def weights_of(spec: ModelSpec) -> dict[str, Tensor]:
    weights = random_weights(spec, seed=4, dtype="float32")
    generator = torch.Generator().manual_seed(9)
    for name, weight in weights.items():
        if name.endswith("norm"):  # random norms, so that a missing or misplaced one shows
            weight.mul_(torch.rand(weight.shape[-1], generator=generator) + 0.5)
    return weights


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, rope: RopeSpec) -> Tensor:
    """x[T, heads, D] at positions 0 to T - 1, as multiplication of complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(len(x)).float(), inverse_frequencies(rope, x.shape[-1]))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def mlp(spec: ModelSpec, y: Tensor, gate_up: Tensor, down: Tensor, up_bias: Any = 0.0, down_bias: Any = 0.0) -> Tensor:
    gate, up = (y @ gate_up.T + up_bias).chunk(2, -1)
    if spec.activation == "clamped_swiglu":
        gate = torch.minimum(gate, torch.tensor(spec.swiglu_limit))
        up = torch.maximum(torch.minimum(up, torch.tensor(spec.swiglu_limit)), torch.tensor(-spec.swiglu_limit)) + 1
        gate = gate / (1 + torch.exp(-spec.swiglu_alpha * gate))
    elif spec.activation == "silu":
        gate = gate * torch.sigmoid(gate)
    else:
        gate = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (gate * up) @ down.T + down_bias


def experts(spec: ModelSpec, own: dict[str, Tensor], y: Tensor) -> Tensor:
    """Of one token."""
    logits = own["router"] @ y + own.get("router_bias", 0.0)
    scores = logits.sigmoid() if spec.router == "sigmoid" else logits.exp() / logits.exp().sum()
    chosen = sorted(range(spec.num_experts), key=lambda expert: -scores[expert])[: spec.experts_per_token]
    total = sum(scores[expert] for expert in chosen) if spec.renormalise_experts else 1.0
    out = torch.zeros_like(y)
    for expert in chosen:
        gate_up, down = (
            own[f"expert_{name}"].view(spec.num_experts, -1, size)[expert]
            for name, size in (("gate_up", spec.hidden_size), ("down", spec.expert_ffn_size))
        )
        biases = (
            own[name].view(spec.num_experts, -1)[expert] if spec.expert_bias else 0.0
            for name in ("expert_gate_up_bias", "expert_down_bias")
        )
        out += scores[expert] / total * mlp(spec, y, gate_up, down, *biases)
    if spec.shared_expert_ffn_size:
        out += (own["shared_gate"] @ y).sigmoid() * mlp(spec, y, own["shared_gate_up"], own["shared_down"])
    return out


def formula(spec: ModelSpec, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits of all tokens, straight from the definition of each option."""
    x = weights["embedding"][torch.tensor(tokens)] * spec.embedding_scale
    num_q, num_kv, eps = spec.num_heads, spec.num_kv_heads, spec.rms_eps
    positions = torch.arange(len(tokens))
    distance = positions[:, None] - positions
    for layer in range(spec.num_layers):
        own = {name.split(".", 1)[1]: weight for name, weight in weights.items() if name.startswith(f"{layer}.")}
        y = x if spec.norm_placement == "post" else norm(x, own["attention_norm"], eps)
        y = y @ own["qkv"].T + own.get("qkv_bias", 0.0)
        qk, v = y.view(len(tokens), -1, spec.head_dim).split([num_q + num_kv, num_kv], 1)
        if spec.full_qk_norm:
            qk = torch.cat(
                [
                    norm(part.flatten(1), weight.flatten(), eps).view(part.shape)
                    for part, weight in zip(
                        qk.split([num_q, num_kv], 1), own["qk_norm"].split([num_q, num_kv]), strict=True
                    )
                ],
                1,
            )
        elif spec.qk_norm:
            qk = norm(qk, own["qk_norm"], eps)
        rope = spec.layer_ropes[layer]
        qk = qk if rope is None else rotate(qk, spec.ropes[rope])
        q, k = qk.split([num_q, num_kv], 1)
        k, v = k.repeat_interleave(num_q // num_kv, 1), v.repeat_interleave(num_q // num_kv, 1)
        scale = 1 / math.sqrt(spec.head_dim) if spec.attention_scale is None else spec.attention_scale
        hidden = (distance < 0) | (distance >= (spec.windows[layer] or len(tokens)))
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -math.inf)
        total = scores.exp().sum(-1, keepdim=True)
        if spec.attention_sinks:
            total = total + own["sinks"].exp()[:, None, None]
        y = torch.einsum("hqk,khd->qhd", scores.exp() / total, v).reshape(len(tokens), -1)
        y = y @ own["out"].T + own.get("out_bias", 0.0)
        x = x + (y if spec.norm_placement == "pre" else norm(y, own["attention_post_norm"], eps))
        y = x if spec.norm_placement == "post" else norm(x, own["mlp_norm"], eps)
        if spec.sparse_layers[layer]:
            y = torch.stack([experts(spec, own, row) for row in y])
        else:
            biases = own.get("gate_up_bias", 0.0), own.get("down_bias", 0.0)
            y = mlp(spec, y, own["gate_up"], own["down"], *biases)
        x = x + (y if spec.norm_placement == "pre" else norm(y, own["mlp_post_norm"], eps))
    logits = norm(x, weights["norm"], eps) @ weights["head"].T * spec.logit_scale
    return logits if spec.logit_cap is None else spec.logit_cap * torch.tanh(logits / spec.logit_cap)


@pytest.mark.parametrize("option", OPTIONS)
def test_decoder_and_cpu_model_compute_every_option(option: str) -> None:
    spec = replace(BASE, **OPTIONS[option])
    weights = weights_of(spec)
    expected = formula(spec, weights, TOKENS)
    plain = formula(BASE, weights_of(BASE), TOKENS)
    # Random weights make up for factors, see `random_weights`.
    is_same = torch.allclose(expected, plain, atol=0.01)
    assert option in ("defaults", "factors") or not is_same, "the option changes nothing"
    decoder = Decoder(spec, weights)
    torch.testing.assert_close(ContiguousCache(decoder).feed(TOKENS), expected, atol=1e-3, rtol=1e-3)
    for num_rows in (len(TOKENS), 1):  # packed and transposed weights
        cache = ContiguousCache(decoder)
        model = CpuModel(Decoder(spec, dict(weights)))
        for first in range(0, len(TOKENS), num_rows):
            chunk = torch.tensor(TOKENS[first : first + num_rows])
            positions = torch.arange(first, first + len(chunk))
            found = model.logits(model.forward(chunk, positions, cache.attend))
            torch.testing.assert_close(found, expected[first : first + num_rows], atol=1e-3, rtol=1e-3)


def test_tokens_are_rotated_by_the_given_positions_wherever_they_are_cached() -> None:
    spec, weights = replace(BASE, **OPTIONS["defaults"]), weights_of(replace(BASE, **OPTIONS["defaults"]))
    turns = torch.arange(len(TOKENS)) * 3 % 7
    found = []
    for model in (Decoder(spec, weights), CpuModel(Decoder(spec, dict(weights)))):
        for positions in (turns, turns + 5):
            cache = ContiguousCache(Decoder(spec, weights))
            found.append(model.logits(model.forward(torch.tensor(TOKENS), positions, cache.attend)))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], atol=1e-3, rtol=1e-3)
    assert not torch.allclose(found[0], formula(spec, weights, TOKENS), atol=0.01)


@pytest.mark.parametrize("option", ["experts", "experts with biases"])
def test_experts_of_some_rows_equal_all_experts_masked(option: str) -> None:
    spec = replace(BASE, **OPTIONS[option])
    mlp = Decoder(spec, weights_of(spec)).layers[0].mlp
    assert isinstance(mlp, Experts)
    x = torch.randn(17, spec.hidden_size, generator=torch.Generator().manual_seed(2))
    logits = torch.nn.functional.linear(x, mlp.router, mlp.router_bias)
    torch.testing.assert_close(mlp(x), mlp.masked(x, *route(logits, mlp.routing)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu"}, "activation is 'relu': choose one of silu, gelu_tanh, clamped_swiglu"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0: give a positive number"),
        ({"attention_sinks": True, "score_cap": 5.0}, "score_cap is 5.0: attention sinks with a cap are not supported"),
        ({"norm_placement": "none"}, "norm_placement is 'none': choose one of pre, post, both"),
        ({"attention_scale": 0.0}, "attention_scale is 0.0: give a positive number, or None for the default"),
        ({"score_cap": -1.0}, "score_cap is -1.0: give a positive number"),
        ({"logit_cap": math.inf}, "logit_cap is inf: give a positive number"),
        ({"embedding_scale": 0.0}, "embedding_scale is 0.0: give a positive number"),
        ({"rotary_dim": 18}, "rotary_dim is 18: give an even number up to head_dim = 16"),
        ({"layer_ropes": (0, 1, 0, 0)}, "layer_ropes has the index 1, but ropes has 1 entries: give an index below 1"),
        ({**EXPERTS, "sparse_layers": (), "router": "top"}, "router is 'top': choose one of softmax, sigmoid"),
        ({"sparse_layers": (True,) * 4}, "num_experts is 0: give at least 1"),
        ({**EXPERTS, "sparse_layers": (), "experts_per_token": 10}, "experts_per_token is 10: give 1 to num_exp"),
        ({**EXPERTS, "sparse_layers": (), "mlp_bias": True}, "mlp_bias is True: layers with experts have exp"),
        (
            {**EXPERTS, "sparse_layers": (), "expert_bias": True, "shared_expert_ffn_size": 8},
            "expert_bias is True: a shared expert with biases is not supported",
        ),
        ({"layer_ropes": (0, 0)}, "layer_ropes has 2 entries for 4 layers: give one per layer"),
    ],
)
def test_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(BASE, **options)
