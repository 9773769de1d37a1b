"""4-bit checkpoints (GPTQ, AWQ, compressed-tensors) stay in 4 bits on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.doctor.model_files import check_model_memory
from paceline.engine.cpu.native import native_library
from paceline.engine.cpu.quantized_model import QuantizedModel
from paceline.llm import LLM, RequestOutput
from paceline.model.files import open_files
from paceline.model.layout import is_matrix, target_shapes
from paceline.model.quantized import Int4Tensor, QuantizedTensor, quantize
from paceline.model.read_spec import read_spec
from paceline.model.spec import ModelError
from paceline.model.weights import QuantizedWeights, load_decoder
from paceline.request import SamplingParams
from tests.helpers import needs_compiler
from tests.resolving import plan_of, quantization, source_of, why
from tests.tiny_int4 import AWQ, FORMATS, GPTQ, change_weights, save_int4

PROMPTS = [[5, 6, 7, 8, 9, 200, 201], [400, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
LAYER = "model.layers.0.self_attn"


def save(path: Path, config: dict[str, Any]) -> Path:
    """A checkpoint whose embedding and head have the values of their 8-bit rounding."""
    save_int4(path, config)
    weights = load_file(path / "model.safetensors")
    tables = [name for name in weights if "embed" in name or "head" in name]
    change_weights(path, {name: quantize(weights[name], 8).dequantize() for name in tables})
    return path


def run(path: Path, **options: Any) -> tuple[Any, list[RequestOutput]]:
    with LLM(path, device="cpu", threads=1, kv_tokens=1024, **options) as llm:
        return llm.engine, llm.generate(PROMPTS, GREEDY)


@needs_compiler
@pytest.mark.parametrize("name", FORMATS)
def test_4_bit_checkpoints_give_the_tokens_of_the_dequantized_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(native_library(), "has_tiles", False)  # which round weights to bfloat16
    path = save(tmp_path / "model", FORMATS[name])
    engine, found = run(path)
    assert isinstance(engine.executor.runner.decoder, QuantizedModel) and engine.info.dtype == "4- and 8-bit"
    keys = engine.executor.runner.cache.keys[0]
    assert keys.dtype == torch.bfloat16 and keys.data_ptr() % 64 == 0 and engine.info.kv_dtype == "bfloat16"
    engine, expected = run(path, quantization="none")
    assert engine.info.dtype == "float32"
    # Keys and values are rounded to bfloat16, inputs to 15 bits and offsets to float16.
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert [token.logprob for token in one.logprobs or ()] == pytest.approx(
            [token.logprob for token in other.logprobs or ()], abs=0.02
        )


@pytest.mark.parametrize("name", FORMATS)
def test_offsets_are_rounded_to_float16(tmp_path: Path, name: str) -> None:
    """By less than 1/128 of a step between two values; tables in 16 bits become 8 bits."""
    save_int4(tmp_path / "model", FORMATS[name])
    files = open_files(tmp_path / "model")
    weights = QuantizedWeights(files, plan_of(tmp_path / "model"))
    exact = load_decoder(files, dtype="float32")
    qkv = weights.matrix("1.qkv")
    error = (qkv.dequantize() - exact.layers[1].qkv.tensor).abs()
    assert qkv.bits == 4 and int(qkv.values.max()) == 15 and int(qkv.values.min()) == 0
    assert (error <= qkv.scales.repeat_interleave(32, 1) / 128).all()
    assert bool(error.max() < 1e-7) is (name == "packed")
    embedding = weights.matrix("embedding")
    assert embedding.bits == 8
    torch.testing.assert_close(embedding.dequantize(), exact.embedding, rtol=0, atol=1.5 / 250)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wide_groups_are_divided(dtype: torch.dtype) -> None:
    values = torch.randint(0, 16, (6, 256), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scales = torch.tensor([[0.003, 0.04]] * 6).to(dtype)
    stored = Int4Tensor(values, scales, torch.tensor([[1, 16], [2, 8], [3, 5], [7, 11], [13, 15], [0, 9]]), 128)
    found = stored.with_offsets()
    assert found.scales.shape == found.offsets.shape == (6, 8)
    steps = scales.float().repeat_interleave(128, 1)
    assert ((found.dequantize() - stored.dequantize()).abs() <= steps / 128).all()
    assert torch.equal(found.scales, scales.float().repeat_interleave(4, 1))  # bfloat16: in the range of float16


def memory(matrices: list[QuantizedTensor], vectors: dict[str, torch.Tensor]) -> int:
    packed = sum(one.values.numel() * one.bits // 8 + 4 * one.scales.numel() for one in matrices)
    return packed + sum(4 * vector.numel() for vector in vectors.values())


@needs_compiler
def test_the_memory_of_4_bit_weights_is_known_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one matrix of a layer is in 16 bits: it becomes 8 bits, and those that are fused with it."""
    path = tmp_path / "model"
    wanted = save_int4(path, GPTQ)
    spec, stored_wide = read_spec(path), dict.fromkeys(("qweight", "qzeros", "scales", "g_idx"))
    for bits in (4, 8):
        plan, files = plan_of(path), source_of(path).files
        assert (plan.dtype, plan.quantization) == ("float32", "int4") and files is not None
        weights = QuantizedWeights(files, plan)
        matrices = {name: weights.matrix(name) for name in target_shapes(spec) if is_matrix(name)}
        assert matrices["0.qkv"].bits == bits and matrices["1.qkv"].bits == matrices["0.down"].bits == 4
        assert plan.num_bytes == memory([*matrices.values()], weights.vectors)
        change_weights(path, {f"{LAYER}.k_proj.{part}": None for part in stored_wide})
        change_weights(path, {f"{LAYER}.k_proj.weight": wanted[f"{LAYER}.k_proj.weight"].half()})
    error = matrices["0.qkv"].dequantize() - load_decoder(path, dtype="float32").layers[0].qkv.tensor
    assert float(error.abs().max()) < 1 / 254
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "float32, weights in 4 bits" in next(check_model_memory(files)).text


@needs_compiler
def test_4_bits_are_expanded_where_no_kernel_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_int4(path, AWQ)
    assert quantization(path, quantization="none") == "none"
    error = "there is no C compiler: install gcc"
    for options, reason in (
        ({"dtype": "bfloat16"}, "info: weights stored in 4 bits are expanded to bfloat16: dtype is bfloat16"),
        ({"tp": 2}, "compute a whole model, and tp or pp is given"),
        ({"pp": 2}, "compute a whole model, and tp or pp is given"),
        ({"native_error": error}, "warning: weights stored in 4 bits are expanded to float32: kernels for 4 and 8 "),
    ):
        assert plan_of(path, **options).quantization == "none" and reason in why(path, **options)
    assert error in why(path, native_error=error)
    described = json.loads((path / "config.json").read_text())
    described |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    (path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match="lacks model"):  # the files are those of another model
        open_files(path)
