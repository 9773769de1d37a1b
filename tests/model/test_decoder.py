"""The options of a model and of its layers against a forward pass written out in plain torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from contiguous_cache import ContiguousCache
from torch import Tensor

from paceline.engine.cpu.linear import arrange
from paceline.model.decoder import Decoder, MixtureOfExperts, route
from paceline.model.layers import Activation, Dense, Experts, RopeSpec, Routing
from paceline.model.rope import inverse_frequencies
from paceline.model.shapes import shape, vary
from paceline.model.spec import ModelError, ModelSpec
from paceline.model.weights import random_weights

BASE = shape("tiny-llama")
TWO_ROPES = (RopeSpec(theta=10_000.0), RopeSpec(theta=300.0, kind="linear", factor=3.0))
EXPERTS = Experts(count=9, per_token=3, size=40)
DENSE = Dense(size=112)
GELU = Dense(size=112, activation=Activation(kind="gelu_tanh"))
SWIGLU = Activation(kind="clamped_swiglu", swiglu_alpha=1.3, swiglu_limit=0.8)
WINDOWS = (None, 5, None, 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "activation": {"ffn": GELU},
    "attention scale": {"scale": 0.1},
    "logit cap": {"logit_cap": 2.5},
    "post norm": {"norms": "post"},
    "norms before and after": {"norms": "both"},
    "full QK-norm": {"qk_norm": "whole"},
    "factors": {"embedding_scale": 3.0, "logit_scale": 0.4},
    "two ropes": {"ropes": (TWO_ROPES[0], TWO_ROPES[1], None, TWO_ROPES[1])},
    "experts": {"ffns": (EXPERTS, DENSE, EXPERTS, EXPERTS)},
    "experts scored by sigmoid, and a shared one": {
        "ffn": replace(EXPERTS, routing=Routing(kind="sigmoid", renormalise=False), shared_size=24),
    },
    "attention sinks": {"sinks": True, "windows": WINDOWS},
    "clamped SwiGLU": {"ffn": Dense(size=112, activation=SWIGLU)},
    "experts with biases": {"ffns": (replace(EXPERTS, bias=True), DENSE, *[replace(EXPERTS, bias=True)] * 2)},
    "FFNs of different kinds, sizes and activations": {
        "ffns": (Dense(size=72, bias=True), EXPERTS, GELU, Experts(count=4, per_token=2, size=24, activation=SWIGLU)),
    },
    "all of them": {
        "scale": 0.3,
        "logit_cap": 4.0,
        "norms": "both",
        "ropes": (TWO_ROPES[1], None, TWO_ROPES[0], TWO_ROPES[1]),
        "windows": WINDOWS,
        "qk_norm": "heads",
        "embedding_scale": 0.7,
        "logit_scale": 1.4,
        "qkv_bias": True,
        "out_bias": True,
        "ffn": replace(GELU, bias=True),
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


def mlp(
    activation: Activation, y: Tensor, gate_up: Tensor, down: Tensor, up_bias: Any = 0.0, down_bias: Any = 0.0
) -> Tensor:
    gate, up = (y @ gate_up.T + up_bias).chunk(2, -1)
    if activation.kind == "clamped_swiglu":
        limit = torch.tensor(activation.swiglu_limit)
        gate = torch.minimum(gate, limit)
        up = torch.maximum(torch.minimum(up, limit), -limit) + 1
        gate = gate / (1 + torch.exp(-activation.swiglu_alpha * gate))
    elif activation.kind == "silu":
        gate = gate * torch.sigmoid(gate)
    else:
        gate = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (gate * up) @ down.T + down_bias


def experts(ffn: Experts, own: dict[str, Tensor], y: Tensor) -> Tensor:
    """Of one token."""
    logits = own["router"] @ y + own.get("router_bias", 0.0)
    scores = logits.sigmoid() if ffn.routing.kind == "sigmoid" else logits.exp() / logits.exp().sum()
    chosen = sorted(range(ffn.count), key=lambda expert: -scores[expert])[: ffn.per_token]
    total = sum(scores[expert] for expert in chosen) if ffn.routing.renormalise else 1.0
    out = torch.zeros_like(y)
    for expert in chosen:
        gate_up, down = (
            own[f"expert_{name}"].view(ffn.count, -1, size)[expert]
            for name, size in (("gate_up", len(y)), ("down", ffn.size))
        )
        biases = (
            own[name].view(ffn.count, -1)[expert] if ffn.bias else 0.0
            for name in ("expert_gate_up_bias", "expert_down_bias")
        )
        out += scores[expert] / total * mlp(ffn.activation, y, gate_up, down, *biases)
    if ffn.shared_size:
        shared = mlp(ffn.activation, y, own["shared_gate_up"], own["shared_down"])
        out += (own["shared_gate"] @ y).sigmoid() * shared
    return out


def formula(spec: ModelSpec, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits of all tokens, straight from the definition of each option."""
    x = weights["embedding"][torch.tensor(tokens)] * spec.embedding_scale
    eps = spec.rms_eps
    positions = torch.arange(len(tokens))
    distance = positions[:, None] - positions
    for index, layer in enumerate(spec.layers):
        own = {name.split(".", 1)[1]: weight for name, weight in weights.items() if name.startswith(f"{index}.")}
        mixer, num_q, num_kv = layer.mixer, layer.mixer.num_heads, layer.mixer.num_kv_heads
        y = x if layer.norms == "post" else norm(x, own["attention_norm"], eps)
        y = y @ own["qkv"].T + own.get("qkv_bias", 0.0)
        qk, v = y.view(len(tokens), -1, mixer.head_dim).split([num_q + num_kv, num_kv], 1)
        if mixer.qk_norm == "whole":
            qk = torch.cat(
                [
                    norm(part.flatten(1), weight.flatten(), eps).view(part.shape)
                    for part, weight in zip(
                        qk.split([num_q, num_kv], 1), own["qk_norm"].split([num_q, num_kv]), strict=True
                    )
                ],
                1,
            )
        elif mixer.qk_norm == "heads":
            qk = norm(qk, own["qk_norm"], eps)
        qk = qk if mixer.rope is None else rotate(qk, mixer.rope)
        q, k = qk.split([num_q, num_kv], 1)
        k, v = k.repeat_interleave(num_q // num_kv, 1), v.repeat_interleave(num_q // num_kv, 1)
        scale = 1 / math.sqrt(mixer.head_dim) if mixer.scale is None else mixer.scale
        hidden = (distance < 0) | (distance >= (mixer.window or len(tokens)))
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -math.inf)
        total = scores.exp().sum(-1, keepdim=True)
        if mixer.sinks:
            total = total + own["sinks"].exp()[:, None, None]
        y = torch.einsum("hqk,khd->qhd", scores.exp() / total, v).reshape(len(tokens), -1)
        y = y @ own["out"].T + own.get("out_bias", 0.0)
        x = x + (y if layer.norms == "pre" else norm(y, own["attention_post_norm"], eps))
        y = x if layer.norms == "post" else norm(x, own["mlp_norm"], eps)
        if isinstance(layer.ffn, Experts):
            y = torch.stack([experts(layer.ffn, own, row) for row in y])
        else:
            biases = own.get("gate_up_bias", 0.0), own.get("down_bias", 0.0)
            y = mlp(layer.ffn.activation, y, own["gate_up"], own["down"], *biases)
        x = x + (y if layer.norms == "pre" else norm(y, own["mlp_post_norm"], eps))
    logits = norm(x, weights["norm"], eps) @ weights["head"].T * spec.logit_scale
    return logits if spec.logit_cap is None else spec.logit_cap * torch.tanh(logits / spec.logit_cap)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_computed_with_weights_as_stored_and_arranged(option: str) -> None:
    spec = vary(BASE, **OPTIONS[option])
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
        model = arrange(Decoder(spec, dict(weights)))
        for first in range(0, len(TOKENS), num_rows):
            chunk = torch.tensor(TOKENS[first : first + num_rows])
            positions = torch.arange(first, first + len(chunk))
            found = model.logits(model.forward(chunk, positions, cache.attend))
            torch.testing.assert_close(found, expected[first : first + num_rows], atol=1e-3, rtol=1e-3)


def test_tokens_are_rotated_by_the_given_positions_wherever_they_are_cached() -> None:
    spec, weights = replace(BASE, **OPTIONS["defaults"]), weights_of(replace(BASE, **OPTIONS["defaults"]))
    turns = torch.arange(len(TOKENS)) * 3 % 7
    found = []
    for model in (Decoder(spec, weights), arrange(Decoder(spec, dict(weights)))):
        for positions in (turns, turns + 5):
            cache = ContiguousCache(Decoder(spec, weights))
            found.append(model.logits(model.forward(torch.tensor(TOKENS), positions, cache.attend)))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], atol=1e-3, rtol=1e-3)
    assert not torch.allclose(found[0], formula(spec, weights, TOKENS), atol=0.01)


@pytest.mark.parametrize("option", ["experts", "experts with biases"])
def test_experts_of_some_rows_equal_all_experts_masked(option: str) -> None:
    spec = vary(BASE, **OPTIONS[option])
    mlp = Decoder(spec, weights_of(spec)).layers[0].mlp
    assert isinstance(mlp, MixtureOfExperts)
    x = torch.randn(17, spec.hidden_size, generator=torch.Generator().manual_seed(2))
    logits = torch.nn.functional.linear(x, mlp.router, mlp.router_bias)
    torch.testing.assert_close(mlp(x), mlp.masked(x, *route(logits, mlp.options)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Activation(kind="relu"), "Activation.kind is 'relu': choose one of silu, gelu_tanh, clamped_swiglu"),
        (lambda: Activation(swiglu_limit=0.0), "Activation.swiglu_limit is 0.0: give a positive number"),
        (lambda: Dense(size=0), "Dense.size is 0: give at least 1"),
        (lambda: Routing(kind="top"), "Routing.kind is 'top': choose one of softmax, sigmoid"),
        (lambda: replace(EXPERTS, count=0), "Experts.count is 0: give at least 1"),
        (lambda: replace(EXPERTS, per_token=10), "Experts.per_token is 10: give 1 to count = 9"),
        (
            lambda: replace(EXPERTS, bias=True, shared_size=8),
            "Experts.bias is True: a shared expert beside it is not supported",
        ),
        (lambda: vary(BASE, norms="none"), "LayerSpec.norms is 'none': choose one of pre, post, both"),
        (lambda: vary(BASE, residual_scale=0.0), "LayerSpec.residual_scale is 0.0: give a positive number"),
        (lambda: vary(BASE, num_kv_heads=4), "Attention.num_heads is 6, which is not a multiple of num_kv_heads = 4"),
        (lambda: vary(BASE, head_dim=15), "Attention.head_dim is 15: give an even number"),
        (lambda: vary(BASE, window=0), "Attention.window is 0: give at least 1"),
        (lambda: vary(BASE, qk_norm="all"), "Attention.qk_norm is 'all': choose one of none, heads, whole"),
        (lambda: vary(BASE, scale=0.0), "Attention.scale is 0.0: give a positive number"),
        (lambda: vary(BASE, score_cap=-1.0), "Attention.score_cap is -1.0: give a positive number"),
        (
            lambda: vary(BASE, sinks=True, score_cap=5.0),
            "Attention.score_cap is 5.0: sinks with a cap are not supported",
        ),
        (lambda: vary(BASE, rotary_dim=18), "Attention.rotary_dim is 18: give an even number up to head_dim = 16"),
        (lambda: vary(BASE, logit_cap=math.inf), "ModelSpec.logit_cap is inf: give a positive number"),
        (lambda: vary(BASE, embedding_scale=0.0), "ModelSpec.embedding_scale is 0.0: give a positive number"),
        (lambda: vary(BASE, num_layers=0), "ModelSpec.num_layers is 0: give at least 1"),
        (lambda: vary(BASE, ropes=(None, None)), "ropes has 2 entries for 4 layers: give one per layer"),
    ],
)
def test_wrong_option_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        make()
