"""GGUF files on the CUDA executor, in the interpreter: weights stay in 4 or 8 bits."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from paceline.config import ConfigError, EngineConfig, SchedulerConfig
from paceline.engine.build import weight_choice
from paceline.engine.cuda import build
from paceline.engine.cuda.streams import HostStreams
from paceline.engine.linear import groupwise
from paceline.engine.linear.pack import keep_expanded, quantize_decoder
from paceline.engine.precision import KernelFormat
from paceline.kernels.groupwise_linear import GroupwiseMatrix
from paceline.model.norm import weight_of
from paceline.model.quantized import quantize
from paceline.model.read_spec import read_spec
from paceline.model.shapes import shape
from paceline.model.weights import load_decoder
from tests.engine.cuda.interpreted import BASE, GREEDY, IN_BOUNDS, INTERPRETED, PROMPTS, decoder, on_kernels
from tests.engine.cuda.test_int4 import dequantized, on_cpu
from tests.resolving import keep_stored, kernel_formats, plan_of, quantization, resolved, why
from tests.tiny_folder import save_tiny_model
from tests.tiny_gguf import Q, save_gguf

pytestmark = [*INTERPRETED, IN_BOUNDS]
LOAD: dict[str, Any] = {"dtype": "float32", "max_positions": 192}


@pytest.mark.parametrize(("max_rows", "in_memory"), [(2, False), (2, True), (224, False)])
def test_a_gguf_file_gives_the_tokens_of_its_dequantized_weights(
    tmp_path: Path, max_rows: int, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, mixed and decode batches: on kernels that convert in registers, and with expanded weights, in each pass
    or in memory. Matrices of 4 and 8 bits, fused ones with the most of their parts."""
    monkeypatch.setattr(groupwise, "MAX_GROUPWISE_ROWS", max_rows)
    path = save_gguf(tmp_path / "model.gguf")
    keep = keep_stored(path, "gguf")
    expected = on_cpu(dequantized(load_decoder(path, keep=keep, **LOAD)))
    kept = load_decoder(path, keep=keep, **LOAD)
    weights: list[Any] = [[one.weight for one in layer.linears] for layer in kept.layers]
    assert [[one.bits for one in layer] for layer in weights] == [[8, 4, 4, 8], [4, 4, 4, 4]]
    if in_memory:
        keep_expanded(kept, free=1 << 40)
        monkeypatch.setattr(groupwise, "expand_groupwise", None)  # is not called
    llm, device = on_kernels("", model=kept, quantization="gguf")
    with llm:
        assert device.model.is_packed and not device.capabilities.weights
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected


def test_weights_are_also_kept_in_16_bits_if_that_leaves_memory_for_the_kv_cache() -> None:
    """Half of the free memory is too much. A KV cache whose size is given is not free."""

    def expanded(free: int) -> list[torch.Tensor | None]:
        model = decoder("tiny-qwen3")
        quantize_decoder(model, "q4")
        keep_expanded(model, free)
        matrices: list[Any] = [linear.weight for *_, linear in model.linears()]
        assert ("for large batches also in float32" in model.precision) == (matrices[0].expanded is not None)
        assert all(one.expanded is None or torch.equal(one.expanded, one.dequantize()) for one in matrices)
        return [one.expanded for one in matrices]

    needed = sum(one.nbytes for one in expanded(1 << 40) if one is not None)
    assert needed > 0
    assert None not in expanded(3 * needed) and set(expanded(2 * needed)) == {None}


@pytest.mark.parametrize(("kv_share", "is_kept"), [(0.0, True), (0.97, False)])
def test_a_kv_cache_of_a_given_size_is_not_free(
    kv_share: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, free = decoder("tiny-qwen3"), 200 << 20
    monkeypatch.setattr(HostStreams, "free_memory", lambda _: free)
    page_bytes = BASE["page_size"] * model.spec.kv_bytes_per_token(4)
    given = {"num_pages": max(16, int(kv_share * free / page_bytes))}
    found: list[int] = []
    monkeypatch.setattr(build, "keep_expanded", lambda _, left: found.append(left))
    with suppress(ConfigError):  # the test needs no buffers beside such a KV cache
        build.build_cuda(
            model, EngineConfig(quantization="q4"), SchedulerConfig(**{**BASE, **given}), given, prefill_sizes=()
        )
    assert found == [free - given["num_pages"] * page_bytes] and (found[0] > free / 2) == is_kept


def test_kept_weights_are_those_of_the_file_rounded_to_float16(tmp_path: Path) -> None:
    """Except a matrix in 16 bits, which is rounded to 8."""
    path = save_gguf(tmp_path / "model.gguf", kinds={"ffn_down": Q.F16})
    kept, wide = (load_decoder(path, keep=keep, **LOAD) for keep in (keep_stored(path, "gguf"), None))
    for mine, theirs in zip(kept.layers, wide.layers, strict=True):
        for found, values in zip(mine.linears, theirs.linears, strict=True):
            assert isinstance(found.weight, GroupwiseMatrix)
            if found.name == "down":
                assert found.weight.bits == 8
                expected = quantize(values.tensor, 8).dequantize().half().float()
            elif found.name == "gate_up":
                continue
            else:
                expected = values.tensor.half().float()
            assert torch.equal(found.weight.dequantize(), expected)


@pytest.mark.parametrize(("quantization", "bits"), [("q4", 4), ("q8", 8)])
def test_models_can_be_rounded_to_the_same_format(quantization: str, bits: int) -> None:
    def model() -> Any:
        return decoder("tiny-qwen3")

    reference = model()
    quantize_decoder(reference, quantization)
    assert reference.layers[0].qkv.weight.bits == bits and reference.precision.endswith(f"weights in {bits} bits")
    expected = on_cpu(dequantized(reference))
    llm, _ = on_kernels("", model=model(), quantization=quantization)
    with llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected


def test_a_gpu_keeps_a_quantized_file_unless_options_expand_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the model is so small that bfloat16 is faster."""
    path = save_gguf(tmp_path / "model.gguf")
    assert quantization(path, "cuda") == "none"
    assert why(path, "cuda").startswith("info: ")
    assert "expanded to bfloat16: that is faster for a model as small as this" in why(path, "cuda")
    assert quantization(path, "cuda", quantization="gguf") == "gguf"
    largest = 2 * read_spec(path).hidden_size * read_spec(path).layers[0].ffn.size
    monkeypatch.setattr(weight_choice, "LARGE_MATRIX", largest)
    plan = plan_of(path, "cuda")
    assert (plan.quantization, plan.dtype) == ("gguf", "bfloat16")
    assert kernel_formats(path) == (KernelFormat(bits=((4, 8), (4,), (4,), (4, 8))),)
    kept = load_decoder(path, dtype="bfloat16", keep=keep_stored(path, "gguf"))
    tensors: list[Any] = [kept.embedding, kept.head.weight, kept.norm.weight]
    for layer in kept.layers:
        tensors += [*(one.weight for one in layer.linears), weight_of(layer.attention_norm), weight_of(layer.mlp_norm)]

    def num_bytes(tensor: Any) -> int:
        if not isinstance(tensor, GroupwiseMatrix):
            return int(tensor.nbytes)
        padded = tensor.values.shape[0] * tensor.values.shape[2] * 16 // tensor.bits
        return tensor.num_bytes * tensor.num_columns // padded

    assert plan.num_bytes == sum(map(num_bytes, tensors))
    assert quantization(path, "cuda", tp=2) == "gguf" and quantization(path, "cuda", quantization="none") == "none"
    for options, reason in (
        ({"dtype": "float16"}, "info: weights stored in 4 and 8 bits are expanded to float16: dtype is float16"),
        ({"tp": 4}, "bfloat16: tp 4 divides columns that have one scale"),
    ):
        assert quantization(path, "cuda", **options) == "none" and reason in why(path, "cuda", **options)


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    wide = save_gguf(
        tmp_path / "wide.gguf",
        kinds=dict.fromkeys(
            ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
            gguf.GGMLQuantizationType.F32,
        ),
    )
    save_tiny_model(tmp_path / "folder", vocab_size=512)
    for path in (None, wide, tmp_path / "folder"):
        with pytest.raises(ConfigError, match="quantization is 'gguf', which needs a quantized GGUF file"):
            plan_of(path, "cuda", quantization="gguf")
    assert quantization(wide, "cuda") == "none"
    with pytest.raises(ConfigError, match="quantization is 'int4' and the device is a CPU: set quantization to q4"):
        plan_of(None, quantization="int4")
    with pytest.raises(ConfigError, match="quantization is 'q8' and the model has a mixture of experts"):
        plan_of(shape("tiny-qwen3-moe"), "cuda", quantization="q8")


def test_a_draft_model_in_16_bits_is_rounded_to_8(tmp_path: Path) -> None:
    """Beside a model from a GGUF file: both have the same kind of kernels."""
    path = save_gguf(tmp_path / "model.gguf")
    folder = save_tiny_model(tmp_path / "draft", vocab_size=512)
    chosen = resolved(path, "cuda", quantization="gguf", speculate="draft", draft_model=str(folder))
    assert chosen.draft_weights is not None and chosen.precision.formats[1] == KernelFormat()
    assert {one.format for one in chosen.draft_weights.matrices if one.packed} == {"q8"}
    draft = decoder("tiny-qwen3")
    quantize_decoder(draft, chosen.weights.quantization, KernelFormat())
    assert draft.layers[0].out.weight.bits == 8  # type: ignore[union-attr]
