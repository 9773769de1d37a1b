"""Experts in fewer bits on the CUDA executor, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.config import ConfigError, EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.cuda.layers import CudaExperts
from paceline.engine.cuda.model import CudaModel
from paceline.engine.linear.pack import quantize_decoder
from paceline.engine.precision import KernelFormat
from paceline.llm import LLM
from paceline.model.decoder import Decoder, scaled
from paceline.model.shapes import shape
from paceline.parallel.threads import ThreadGroup
from paceline.text.synthetic import synthetic_tokenizer
from tests.engine.cuda.interpreted import (
    BASE,
    GREEDY,
    IN_BOUNDS,
    INTERPRETED,
    PROMPTS,
    decoder,
    on_kernels,
    small_tiles,
)
from tests.kernels.cases import relative_error
from tests.resolving import plan_of

pytestmark = [*INTERPRETED, IN_BOUNDS]


def dequantized(model: Decoder) -> Decoder:
    """With experts as they are in fewer bits, in the dtype of the model."""
    for mlp in model.mixtures:
        assert not isinstance(mlp.expert_gate_up, Tensor) and not isinstance(mlp.expert_down, Tensor)
        mlp.expert_gate_up, mlp.expert_down = mlp.expert_gate_up.dequantize(), mlp.expert_down.dequantize()
    return model


def on_cpu(model: Decoder) -> list[list[int]]:
    config = EngineConfig(device="cpu", threads=1, overlap="off")
    engine = assemble(model, synthetic_tokenizer(model.spec.vocab_size), config, BASE)
    with LLM.from_engine(engine) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("num_tokens", [3, 20])
@pytest.mark.parametrize("is_rank", [False, True])
@pytest.mark.parametrize(
    ("name", "quantization", "group"),
    [
        ("tiny-qwen3-moe", "fp8", None),
        ("tiny-qwen2-moe", "fp8", 128),
        ("tiny-gpt-oss", "fp8", None),
        ("tiny-gpt-oss", "mxfp4", None),
    ],
)
def test_a_forward_pass_is_that_of_dequantized_experts(
    name: str, quantization: str, group: int | None, is_rank: bool, num_tokens: int
) -> None:
    """A scale per row, per block or for 32 columns; with a shared expert, biases, and layers without experts, which
    stay as they are. Ranks norm the inputs of the router before."""
    changes = {"ffn": replace(shape(name).expert_layers[0], size=96)} if quantization == "mxfp4" else {}
    reference, model = decoder(name, **changes), decoder(name, **changes)
    spec = model.spec
    for one in (reference, model):
        quantize_decoder(one, quantization, None if group is None else KernelFormat(group))
    if is_rank:
        model.group = ThreadGroup.of_size(1)[0]
    cuda = CudaModel(model, max_tokens=32, max_rows=4, tuning=small_tiles)
    experts = [layer.block.routed for layer in cuda.layers if isinstance(layer.block, CudaExperts)]
    assert len(experts) == len(spec.expert_layers) and not any(isinstance(one.down, Tensor) for one in experts)
    saved = cuda.saved_expert_bytes / spec.num_expert_parameters  # of four bytes
    # A chunk of MXFP4 has 128 columns, of which 64 or 96 are used here.
    assert 2.95 < saved < 3.45 if quantization == "mxfp4" else 2.7 < saved < 3

    mixer = spec.layers[0].mixer

    def repeat_values(values: Tensor) -> Tensor:
        heads = values.reshape(num_tokens, mixer.num_kv_heads, mixer.head_dim)
        return heads.repeat_interleave(mixer.num_heads // mixer.num_kv_heads, 1).flatten(1)

    def attend(index: int, qkv: Tensor, out: Tensor) -> None:
        out.copy_(repeat_values(qkv[:, mixer.q_size + mixer.kv_size :]))

    tokens = torch.arange(7, 7 + num_tokens)
    cuda.input(num_tokens).copy_(scaled(reference.embedding[tokens], spec.embedding_scale))
    found = cuda.forward(num_tokens, attend, fused=False)
    expected = dequantized(reference).forward(tokens, tokens, lambda index, q, k, v, sinks: repeat_values(v))
    assert relative_error(found, expected) < 1e-5


def test_requests_are_answered_with_rounded_experts() -> None:
    """Prefill, mixed and decode batches. Weights that are kept in fewer bits cannot be replaced."""
    reference = decoder("tiny-qwen3-moe")
    quantize_decoder(reference, "fp8")
    llm, device = on_kernels("tiny-qwen3-moe", quantization="fp8")
    with llm:
        found = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert found == on_cpu(dequantized(reference))
    assert device.model.is_packed and not device.capabilities.weights


def test_columns_that_are_in_no_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="'mxfp4' and matrices have 56, 64 columns: they must be multiples of 32"):
        plan_of(shape("tiny-gpt-oss"), "cuda", quantization="mxfp4")
    dense = decoder("tiny-qwen3")
    quantize_decoder(dense, "mxfp4")
    assert isinstance(dense.layers[0].qkv.weight, Tensor), "a draft model without experts stays as it is"
