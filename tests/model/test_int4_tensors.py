"""4-bit checkpoints, in files that the test makes: values, zeros and layouts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import ConfigError
from paceline.engine.precision import KernelFormat
from paceline.kernels.groupwise_linear import GroupwiseMatrix
from paceline.model.files import open_files
from paceline.model.int4_tensors import int4_tensors
from paceline.model.layout import StoredTensor
from paceline.model.quantization_config import read_format
from paceline.model.spec import ModelError
from paceline.model.stored import _rows_of
from paceline.model.weights import load_decoder
from paceline.weight_formats import INT4
from tests.resolving import keep_stored, kernel_formats, plan_of, quantization, why
from tests.tiny_int4 import AWQ, FORMATS, GPTQ, PACKED, PACKED_ZEROS, change_weights, save_int4, stored

LAYER = "model.layers.0.mlp.up_proj"


def packed(**options: Any) -> dict[str, Any]:
    """A config of compressed-tensors with these options of weights."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 128, **options}
    return {**PACKED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize("name", FORMATS)
def test_4_bit_checkpoints_have_the_values_of_their_scales(tmp_path: Path, name: str) -> None:
    """Expanded on any device; kept on a GPU."""
    path = tmp_path / "model"
    wanted = save_int4(path, FORMATS[name])
    assert open_files(path).spec.num_layers == 2
    expanded = load_decoder(path, dtype="float32")
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(expanded.layers[1].qkv.tensor, torch.cat([wanted[name] for name in names]))
    assert torch.equal(expanded.layers[0].mlp.down.weight, wanted["model.layers.0.mlp.down_proj.weight"])
    kept = load_decoder(path, dtype="bfloat16", keep=keep_stored(path, "int4"))
    qkv: Any = kept.layers[1].qkv.weight
    assert isinstance(qkv, GroupwiseMatrix) and qkv.group == 32 and kept.dtype is torch.bfloat16
    assert torch.equal(qkv.dequantize(), expanded.layers[1].qkv.tensor)


def test_a_gpu_keeps_4_bits_unless_options_expand_them(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_int4(path, AWQ)
    kept, wide = plan_of(path, "cuda"), plan_of(path, "cuda", quantization="none")
    assert kept.quantization == "int4" and kernel_formats(path) == (KernelFormat(32),)
    assert kept.num_bytes < wide.num_bytes and wide.quantization == "none"
    for options, reason in (
        ({"dtype": "float16"}, "info: weights stored in 4 bits are expanded to float16: dtype is float16"),
        ({"tp": 64}, "warning: weights stored in 4 bits are expanded to bfloat16: tp 64 divides columns"),
    ):
        assert quantization(path, "cuda", **options) == "none" and reason in why(path, "cuda", **options)


def test_biases_of_zeros_are_left_out_and_others_refused(tmp_path: Path) -> None:
    """Some exporters write one for every layer."""
    path = tmp_path / "model"
    save_int4(path, GPTQ)
    change_weights(path, {f"{LAYER}.bias": torch.zeros(64)})
    assert load_decoder(path, keep=keep_stored(path, "int4")).layers[0].mlp.gate_up.bias is None  # type: ignore[union-attr]
    change_weights(path, {f"{LAYER}.bias": torch.ones(64)})
    with pytest.raises(ModelError, match=f"unexpected parameters {LAYER}.bias"):
        load_decoder(path)


def test_rows_of_a_fused_matrix_are_read_as_they_are_stored() -> None:
    """Also with groups of 128 columns."""
    values, zeros = torch.randint(0, 16, (24, 256), dtype=torch.uint8), torch.randint(1, 16, (24, 2))
    config = {**GPTQ, "group_size": 128}
    parts = stored(values, torch.rand(24, 2).half(), zeros, config)
    tensors = {
        f"x.{name}": StoredTensor(tuple(tensor.shape), 1, lambda part, tensor=tensor: tensor[part] if part else tensor)  # type: ignore[misc]
        for name, tensor in parts.items()
    }
    found = read_format({"quantization_config": config})
    assert found is not None
    whole = int4_tensors(tensors, found, "a file")["x.weight"]
    part = _rows_of(whole, 8, 8)
    assert part.packed is not None and part.packed.format is INT4
    found_rows: Any = part.packed.read((slice(2, 4),), "cpu")
    assert torch.equal(found_rows.values, values[10:12]) and torch.equal(found_rows.zeros, zeros[10:12])
    assert torch.equal(found_rows.dequantize(), whole.read(())[10:12])
    with_offsets = part.packed.read((), "cpu").with_offsets()
    torch.testing.assert_close(with_offsets.dequantize(), whole.read(())[8:16], rtol=0, atol=1 / 128)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({**GPTQ, "bits": 8}, "bits 8, and supported is 4: use the unquantized model"),
        ({**GPTQ, "group_size": -1}, "group_size -1, and supported is 32, 64, 128"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin', and supported is gptq, gptq_v2"),
        ({**AWQ, "version": "gemv"}, "version 'gemv', and supported is gemm"),
        ({**AWQ, "zero_point": False}, "zero_point False, and supported is True"),
        (packed(num_bits=8), "num_bits 8, and supported is 4"),
        (packed(strategy="channel"), "strategy 'channel', and supported is group"),
        (packed(actorder="group"), "actorder 'group', and supported is None"),
    ],
)
def test_a_4_bit_scheme_that_is_not_supported_is_refused_by_name(config: Any, error: str) -> None:
    with pytest.raises(ModelError, match=error):
        read_format({"quantization_config": config})


@pytest.mark.parametrize(
    ("config", "changes", "error"),
    [
        (GPTQ, {f"{LAYER}.scales": None}, f"lacks {LAYER}.scales: the file is incomplete"),
        (GPTQ, {f"{LAYER}.qzeros": torch.zeros(3, 8, dtype=torch.int32)}, r"qzeros has shape \[3, 8\], where \[1, 8\]"),
        ({**GPTQ, "desc_act": True}, {f"{LAYER}.g_idx": torch.arange(32).int() % 2}, "g_idx is not in order"),
        (PACKED_ZEROS, {f"{LAYER}.weight_zero_point": None}, f"lacks {LAYER}.weight_zero_point"),
        ({**AWQ, "group_size": 128}, {}, "down_proj has 64 columns, in groups of 128"),
        (AWQ, {f"{LAYER}.qweight": torch.zeros(32, 4, dtype=torch.int32)}, "of shape|has shape"),
    ],
)
def test_damaged_or_mislabelled_4_bit_files_are_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], error: str
) -> None:
    save_int4(tmp_path / "model", {**config, "group_size": 32} if "group_size" in config else config)
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    change_weights(tmp_path / "model", changes)
    with pytest.raises(ModelError, match=error):
        open_files(tmp_path / "model")


def test_a_config_of_another_format_and_damaged_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_int4(path, GPTQ)
    described = json.loads((path / "config.json").read_text())
    for config, error in ((PACKED, "has no weight_packed"), (None, "as I32: use the unquantized model")):
        (path / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
        with pytest.raises(ModelError, match=error):
            open_files(path)
    (path / "config.json").write_text(json.dumps(described))
    change_weights(path, {f"{LAYER}.g_idx": torch.zeros(32).int() + 1})
    with pytest.raises(ModelError, match="g_idx is not in order"):
        load_decoder(path)
    save_int4(tmp_path / "packed", PACKED)
    change_weights(tmp_path / "packed", {f"{LAYER}.weight_shape": torch.tensor([64, 24])})
    with pytest.raises(ModelError, match=r"weight_shape is \[64, 24\], and its weights are \[64, 32\]"):
        load_decoder(tmp_path / "packed")


@pytest.mark.parametrize(
    ("options", "device", "error"),
    [
        ({}, "cpu", "quantization is 'int4' and the device is a CPU: set quantization to q4"),
        ({"dtype": "float16"}, "cuda", "quantization is 'int4' and dtype is 'float16': set it to bfloat16"),
    ],
)
def test_rounding_to_4_bits_is_refused_where_no_kernel_supports_it(options: Any, device: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        plan_of(None, device, quantization="int4", **options)
