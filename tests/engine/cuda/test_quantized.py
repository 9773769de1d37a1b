"""FP8 weights on the CUDA executor, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.config import ConfigError
from paceline.engine.linear import fp8
from paceline.engine.linear.adapted import Adapted
from paceline.engine.linear.base import Place, Setting
from paceline.engine.linear.formats import Linears
from paceline.engine.linear.fp8 import scaled_mm
from paceline.engine.linear.pack import quantize_decoder
from paceline.engine.linear.stream import ResidualStream, StreamBuffers
from paceline.kernels.linear import decode_tuning
from paceline.kernels.quantize_rows import apply_scales, quantize_rows, quantize_rows_reference
from paceline.kernels.quantized_linear import quantize_fp8
from paceline.kernels.silu_mul import gated_reference, silu_mul_reference
from paceline.model.norm import weight_of
from paceline.model.shapes import shape
from tests.engine.cuda.interpreted import GREEDY, IN_BOUNDS, INTERPRETED, PROMPTS, decoder, on_kernels
from tests.kernels.cases import poisoned, relative_error
from tests.resolving import plan_of

pytestmark = [*INTERPRETED, IN_BOUNDS]


@pytest.mark.parametrize("rows", [3, 20, 26])
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen2", "tiny-gemma2", "tiny-olmo2", "tiny-granite"])
def test_a_forward_pass_is_that_of_dequantized_weights(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows with activations as they are, more with rounded ones, whose scales are applied by the reader of the
    output or, with still more rows, by the GEMM. Against torch, which rounds the same inputs."""
    monkeypatch.setattr(fp8, "_MAX_UNSCALED_ROWS", 25)
    fused = rows == 3
    model = decoder(name)
    quantize_decoder(model, "fp8")
    llm, device = on_kernels(name, quantization="fp8", max_batch_tokens=80)
    llm.close()
    assert device.model.is_packed and not device.capabilities.weights
    cuda, spec = device.model, model.spec
    matrices = spec.num_parameters - spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    # A byte and a scale per row instead of four bytes, and norms and biases as before.
    assert 0.6 * 4 * matrices < cuda.saved_weight_bytes < 3 * matrices
    tokens = torch.arange(7, 7 + rows)
    cuda.input(len(tokens)).copy_(model.embedding[tokens])

    def attend(index: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.tanh(qkv[:, : spec.layers[0].mixer.q_size]))  # attention is not linear

    found = cuda.forward(len(tokens), attend, fused=fused)
    x = model.embedding[tokens].clone()
    mixer, gelu, eps = spec.layers[0].mixer, spec.layers[0].ffn.activation.kind == "gelu_tanh", spec.rms_eps

    def added(out: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return out if norm is None else torch.nn.functional.rms_norm(out, (len(norm),), norm, eps)

    for layer in model.layers:
        attention_norm, mlp_norm = weight_of(layer.attention_norm), weight_of(layer.mlp_norm)
        q = linear(x, layer.qkv.weight, layer.qkv.bias, fused, norm=attention_norm, eps=eps)[:, : mixer.q_size]
        if mixer.qk_norm == "whole":
            assert layer.qk_norm is not None
            q = added(q, layer.qk_norm[: mixer.num_heads].flatten())
        x = x + added(linear(torch.tanh(q), layer.out.weight, None, fused), weight_of(layer.attention_post_norm))
        mlp = layer.dense
        assert mlp is not None
        gate_up = linear(x, mlp.gate_up.weight, None, fused, norm=mlp_norm, eps=eps)
        if gelu:
            gate_up = gated_reference(gate_up, gelu=True)
        x = x + added(linear(gate_up, mlp.down.weight, None, fused, gated=not gelu), weight_of(layer.mlp_post_norm))
    normed = torch.nn.functional.rms_norm(x, (spec.hidden_size,), model.norm.weight, spec.rms_eps)
    assert relative_error(found, normed) < 1e-4


def linear(
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    fused: bool,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> torch.Tensor:
    if fused:
        x = x if norm is None else torch.nn.functional.rms_norm(x, (len(norm),), norm, eps)
        x = silu_mul_reference(x) if gated else x
    else:
        values, scales = quantize_rows_reference(x, norm, eps, gated)
        x = values.float() * scales[:, None]
    return torch.nn.functional.linear(x, weight.dequantize(), bias)


def test_adapters_are_added_before_the_activation_and_after_the_scales() -> None:
    torch.manual_seed(3)
    rows, spec = 5, shape("tiny-qwen3")
    hidden = spec.hidden_size
    matrix, norm, delta = quantize_fp8(torch.randn(2 * 48, hidden)), torch.rand(hidden) + 0.5, torch.randn(96, hidden)
    setting = Setting(spec, torch.float32, torch.device("cpu"), rows, False, decode_tuning)
    inner = Linears(setting, [matrix], rows).make(matrix, Place(gated=True, norm=norm))
    adapted = Adapted(inner, lambda source, out: out.add_(source @ delta.T))
    x, normed, partial = torch.randn(rows, hidden), torch.empty(rows, hidden), torch.empty(rows, hidden)
    squares, ones = torch.empty(0, 1), torch.ones(hidden)
    buffers = StreamBuffers(x, normed, partial, squares, ones, "pre", 1e-6, gelu=False, can_defer=True, group=None)
    stream = ResidualStream(buffers, rows, fused=False, pdl=False, adapts=True, square_columns=0)
    found = stream.activated(adapted.project(stream, torch.empty(rows, 96), torch.empty(rows, 48), defer=True))
    wanted = torch.nn.functional.rms_norm(x, (hidden,), norm, 1e-6)
    wide = linear(wanted, matrix, None, fused=False) + wanted @ delta.T
    assert relative_error(found, silu_mul_reference(wide)) < 1e-5


def test_requests_are_answered_with_fp8_weights_and_kv() -> None:
    """Prefill, mixed and decode batches, with graphs; the same tokens again from the prefix cache."""
    llm, device = on_kernels("tiny-qwen3", quantization="fp8", fp8_kv=True)
    with llm:
        first = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        again = llm.generate(PROMPTS[:1], GREEDY)[0]
        assert again.num_cached_tokens and all(len(tokens) == 4 for tokens in first)
        assert device.stats.passes > 4


@pytest.mark.parametrize("is_gemm_output", [False, True])
@pytest.mark.parametrize("kind", ["plain", "norm", "residual", "gated"])
@pytest.mark.parametrize("width", [32, 40])
def test_rows_are_rounded_with_a_scale_of_their_own(kind: str, is_gemm_output: bool, width: int) -> None:
    """is_gemm_output: of a GEMM that has not applied its scales. A row of 40 is computed in two blocks."""
    torch.manual_seed(1)
    rows = 5
    x = torch.randn(rows, width * (2 if kind == "gated" else 1)) * torch.tensor([1, 20, 1e-6, 0, 1])[:, None]
    x[0, width - 1] = x[0, -1] = 9.0
    norm = torch.rand(width) + 0.5 if kind in ("norm", "residual") else None
    residual = torch.randn(rows, width) if kind == "residual" else None
    stream = None if residual is None else residual.clone()
    gemm_scales = (torch.rand(rows) + 0.5, torch.rand(x.shape[1]) + 0.5) if is_gemm_output else None
    wanted, wanted_scales = quantize_rows_reference(x, norm, 1e-6, kind == "gated", residual, gemm_scales)
    out = torch.full((rows, width), 7.0).to(torch.float8_e4m3fn)
    scales, factors = (poisoned(rows, dtype=torch.float32), None) if gemm_scales is None else gemm_scales
    quantize_rows(x, out, scales, norm, 1e-6, kind == "gated", stream, factors)
    assert relative_error(scales, wanted_scales) < 1e-6
    assert relative_error(out.float(), wanted.float()) < 2e-3, "only numbers between two may be rounded otherwise"
    if residual is not None and stream is not None:
        assert relative_error(stream, residual) < 1e-6


def test_scales_are_applied_to_the_output_of_a_gemm() -> None:
    x, scales, factors = torch.randn(3, 2100)[:, :2070], torch.rand(3), torch.rand(2070)
    wanted = x * scales[:, None] * factors
    apply_scales(x, scales, factors)
    assert relative_error(x, wanted) < 1e-6


def test_a_gemm_of_fp8_numbers_applies_both_scales() -> None:
    weight = quantize_fp8(torch.randn(6, 16))
    x, scales = quantize_rows_reference(torch.randn(3, 16))
    out = torch.empty(3, 6)
    scaled_mm(x, weight.values, out, scales[:, None], weight.factors[None, :])
    assert relative_error(out, (x.float() * scales[:, None]) @ weight.dequantize().T) < 1e-6


@pytest.mark.parametrize(
    ("options", "device", "error"),
    [
        ({}, "cpu", "quantization is 'fp8' and the device is a CPU"),
        ({"dtype": "float16"}, "cuda", "quantization is 'fp8' and dtype is 'float16': set it to bfloat16"),
    ],
)
def test_fp8_weights_are_refused_where_no_kernel_supports_them(options: Any, device: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        plan_of(None, device, quantization="fp8", **options)
