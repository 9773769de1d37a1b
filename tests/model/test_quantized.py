"""Weights in 4 and 8 bits: unpacked from GGUF files, and rounded."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from paceline.model import quantized
from paceline.model.files import open_files
from paceline.model.gguf_file import open_gguf
from paceline.model.gguf_tensors import packed_form, read_quantized
from paceline.model.layout import PackedForm, is_matrix, target_shapes
from paceline.model.quantized import GROUP, QuantizedTensor, concatenate, quantize
from paceline.model.weights import QuantizedWeights
from tests.resolving import plan_of, source_of
from tests.tiny_folder import save_tiny_model
from tests.tiny_gguf import save_gguf

Q = gguf.GGMLQuantizationType
KEPT = {Q.Q4_0: 4, Q.Q4_1: 4, Q.Q4_K: 4, Q.Q5_0: 8, Q.Q5_1: 8, Q.Q5_K: 8, Q.Q8_0: 8}
ROUNDED = [Q.Q6_K, Q.Q3_K, Q.F16, Q.F32]


def write(path: Path, kind: gguf.GGMLQuantizationType, rows: int = 6) -> np.ndarray:
    """A file with one matrix of this type. Returns its values."""
    rng = np.random.default_rng(5)
    if kind.name.endswith("_K"):  # the package cannot quantize to these
        size = gguf.GGML_QUANT_SIZES[kind][1]
        raw = rng.integers(0, 256, (rows, 2, size), dtype=np.uint8)
        scale = {Q.Q4_K: 0, Q.Q5_K: 0, Q.Q6_K: size - 2, Q.Q3_K: size - 2}[kind]
        raw[:, :, scale : scale + 2] = np.float16(0.0123).tobytes()[0], np.float16(0.0123).tobytes()[1]
        if kind in (Q.Q4_K, Q.Q5_K):
            raw[:, :, 2:4] = np.frombuffer(np.float16(0.0345).tobytes(), np.uint8)
        raw = raw.reshape(rows, -1)
    else:
        raw = gguf.quantize(rng.standard_normal((rows, 512)).astype(np.float32), kind)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("norm", np.ones(3, dtype=np.float32))
    writer.add_tensor("matrix", raw, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return gguf.dequantize(raw, kind).astype(np.float32).reshape(rows, -1)


def form_of(path: Path) -> PackedForm:
    return packed_form(open_gguf(path).tensors["matrix"], lambda *_: None)  # type: ignore[arg-type, return-value]


def read(path: Path) -> QuantizedTensor:
    file = open_gguf(path)
    return read_quantized(file, file.tensors["matrix"])


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_these_types_are_kept_as_they_are(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    expected = write(tmp_path / "t.gguf", kind)
    found = read(tmp_path / "t.gguf")
    assert found.bits == form_of(tmp_path / "t.gguf").format.bits == KEPT[kind]
    # Products of two scales have more digits than float16.
    tolerance = 2**-10 * float(np.abs(expected).max()) if kind.name.endswith("_K") else 0
    np.testing.assert_allclose(found.dequantize().numpy(), expected, rtol=0, atol=tolerance)
    low, high = (0, 15) if found.bits == 4 else (-128, 127)
    assert low <= int(found.values.min()) < int(found.values.max()) <= high


@pytest.mark.parametrize("kind", ROUNDED, ids=lambda kind: kind.name)
def test_other_types_are_rounded_to_eight_bits(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    expected = torch.from_numpy(write(tmp_path / "t.gguf", kind))
    found = read(tmp_path / "t.gguf")
    assert found.bits == form_of(tmp_path / "t.gguf").format.bits == 8
    largest = expected.view(len(expected), -1, GROUP).abs().amax(-1).repeat_interleave(GROUP, 1)
    assert ((found.dequantize() - expected).abs() <= largest / 250).all()


def test_a_file_is_quantized_if_most_of_its_weights_are(tmp_path: Path) -> None:
    for kind, expected in ((Q.Q4_1, True), (Q.Q8_0, True), (Q.F16, False), (Q.BF16, False)):
        write(tmp_path / f"{kind.name}.gguf", kind)
        assert form_of(tmp_path / f"{kind.name}.gguf").is_stored is expected
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for count, quantization in ((2, "gguf"), (7, None)):
        path = save_gguf(tmp_path / f"{count}.gguf", kinds=dict.fromkeys(matrices[:count], Q.F32))
        assert open_files(path).quantization == quantization


@pytest.mark.parametrize(("quantization", "bits"), [("q4", 4), ("q8", 8)])
def test_the_memory_of_the_weights_is_known_before_they_are_read(tmp_path: Path, quantization: str, bits: int) -> None:
    path = save_tiny_model(tmp_path / "model")
    files, plan = source_of(path).files, plan_of(path, quantization=quantization)
    assert files is not None
    weights = QuantizedWeights(files, plan)
    matrices = [weights.matrix(name) for name in target_shapes(files.spec) if is_matrix(name)]
    expected = sum(one.values.numel() * bits // 8 + 2 * (one.scales.numel() + one.offsets.numel()) for one in matrices)
    expected += sum(4 * vector.numel() for vector in weights.vectors.values())
    assert plan.num_bytes == expected


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    weight = torch.randn(9, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = quantize(weight, bits)
    monkeypatch.setattr(quantized, "_CHUNK", 200)
    found = quantize(weight, bits)
    for name in ("values", "scales", "offsets"):
        assert torch.equal(getattr(found, name), getattr(whole, name))


@pytest.mark.parametrize("columns", [32, 80, 7])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_off_by_half_a_step_at_most(bits: int, columns: int) -> None:
    weight = torch.randn(9, columns, generator=torch.Generator().manual_seed(1))
    weight[2] = 0
    weight[3] = 0.25
    found = quantize(weight, bits)
    assert found.values.shape == weight.shape
    step = found.scales.repeat_interleave(GROUP, 1)[:, :columns]
    error = (found.dequantize() - weight).abs()
    assert (error <= step * 0.55 + weight.abs() * 2**-10 + 1e-6).all()  # and the rounding of scale and offset
    assert (found.dequantize()[2] == 0).all()


def test_concatenated_matrices_have_the_most_bits_of_any() -> None:
    weights = [torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    parts = [quantize(weights[0], 4), quantize(weights[1], 8)]
    both = concatenate(parts)
    assert both.bits == 8
    torch.testing.assert_close(both.dequantize(), torch.cat([one.dequantize() for one in parts]), rtol=0, atol=0)
