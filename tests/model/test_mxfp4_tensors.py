"""MXFP4 experts of gpt-oss, in files that the test makes: values, ranks, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import ConfigError
from paceline.kernels.expert_weights import Mxfp4Experts
from paceline.model.decoder import MixtureOfExperts
from paceline.model.files import open_files
from paceline.model.quantization_config import read_format
from paceline.model.spec import ModelError
from paceline.model.weights import load_decoder
from paceline.parallel.threads import ThreadGroup
from tests.lazy import Lazy
from tests.resolving import keep_stored, plan_of, quantization, why

transformers = Lazy("transformers")

EXPERTS, HIDDEN, FFN = 3, 64, 96


def number(code: int) -> float:
    """Of four bits: sign, exponent (bias 1), mantissa; without exponent it is subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -size if sign else size


def expanded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, rows, columns], one number after the other."""
    found = []
    for row, row_scales in zip(blocks.flatten(0, 1).tolist(), scales.flatten(0, 1).tolist(), strict=True):
        found.append(
            [
                number(code) * 2.0 ** (scale - 127)
                for block, scale in zip(row, row_scales, strict=True)
                for byte in block
                for code in (byte & 15, byte >> 4)
            ]
        )
    return torch.tensor(found).view(*blocks.shape[:2], -1)


def save_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """A folder as gpt-oss is published; returns the blocks and scales."""
    torch.manual_seed(5)
    config = transformers.GptOssConfig(
        num_hidden_layers=2, num_local_experts=EXPERTS, vocab_size=50, hidden_size=HIDDEN, intermediate_size=FFN,
        head_dim=16, num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, sliding_window=8,
        eos_token_id=2,
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).save_pretrained(folder)
    weights, quantized = load_file(folder / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = weights.pop(name).shape
        quantized[f"{name}_blocks"] = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8)
        quantized[f"{name}_scales"] = torch.randint(118, 128, (count, rows, columns // 32), dtype=torch.uint8)
    save_file({**weights, **quantized}, folder / "model.safetensors")
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(described))
    return quantized


def test_experts_have_the_values_of_blocks_and_scales(tmp_path: Path) -> None:
    quantized = save_mxfp4(tmp_path)
    for index, layer in enumerate(load_decoder(tmp_path, dtype="float32").layers):
        experts, name = layer.mlp, f"model.layers.{index}.mlp.experts."
        assert isinstance(experts, MixtureOfExperts)
        fused = expanded(quantized[f"{name}gate_up_proj_blocks"], quantized[f"{name}gate_up_proj_scales"])
        assert torch.equal(experts.expert_gate_up, torch.cat((fused[:, ::2], fused[:, 1::2]), 1))  # gates, then ups
        down = expanded(quantized[f"{name}down_proj_blocks"], quantized[f"{name}down_proj_scales"])
        assert torch.equal(experts.expert_down, down)
    rounded = load_decoder(tmp_path, dtype="bfloat16").layers[0].mlp
    first = load_decoder(tmp_path, dtype="float32").layers[0].mlp
    assert isinstance(rounded, MixtureOfExperts) and isinstance(first, MixtureOfExperts)
    assert torch.equal(rounded.expert_down.float(), first.expert_down), "bfloat16 holds every number"


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_columns(size: int, tmp_path: Path) -> None:
    """Four ranks have parts of blocks."""
    save_mxfp4(tmp_path)
    whole = load_decoder(tmp_path, dtype="float32").layers[0].mlp
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))
    parts = [load_decoder(tmp_path, dtype="float32", group=group).layers[0].mlp for group in ThreadGroup.of_size(size)]
    torch.testing.assert_close(sum(part(x) for part in parts), whole(x), atol=1e-4, rtol=1e-4)
    assert sum(part.expert_down.shape[-1] for part in parts if isinstance(part, MixtureOfExperts)) == FFN


def test_experts_are_kept_as_they_are_stored(tmp_path: Path) -> None:
    """On a GPU, with the values of the expanded ones, on ranks too if they have whole blocks."""
    save_mxfp4(tmp_path)
    spec, plan = open_files(tmp_path).spec, plan_of(tmp_path, "cuda")
    assert plan.quantization == quantization(tmp_path, "cuda", tp=2) == "mxfp4" and plan.dtype == "bfloat16"
    for options in ({"tp": 4}, {"quantization": "none"}, {"dtype": "float32"}):
        assert quantization(tmp_path, "cuda", **options) == "none"
    divided = "warning: weights stored in MXFP4 are expanded to bfloat16: tp 4 divides columns that have one scale"
    assert why(tmp_path, "cuda", tp=4) == divided
    assert quantization(tmp_path) == "none" and "a CPU has no kernels for them" in why(tmp_path)
    with pytest.raises(ConfigError, match="quantization is 'mxfp4' and the device is a CPU: leave it out"):
        plan_of(tmp_path, quantization="mxfp4")
    expected_bytes = 2 * (spec.num_parameters - spec.num_expert_parameters) + spec.num_expert_parameters * 17 // 32
    assert plan.num_bytes == expected_bytes
    for group in (None, *ThreadGroup.of_size(2)):
        options: dict[str, Any] = {"dtype": "float32", "group": group}
        kept = load_decoder(tmp_path, keep=keep_stored(tmp_path, "mxfp4"), **options)
        for mine, theirs in zip(kept.layers, load_decoder(tmp_path, **options).layers, strict=True):
            assert isinstance(mine.mlp, MixtureOfExperts) and isinstance(theirs.mlp, MixtureOfExperts)
            assert torch.equal(mine.qkv.tensor, theirs.qkv.tensor) and torch.equal(mine.mlp.router, theirs.mlp.router)
            pairs: Any = (
                (mine.mlp.expert_gate_up, theirs.mlp.expert_gate_up),
                (mine.mlp.expert_down, theirs.mlp.expert_down),
            )
            for found, values in pairs:
                assert isinstance(found, Mxfp4Experts) and torch.equal(found.dequantize(), values)


def test_a_scale_that_kernels_cannot_multiply_with_is_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj has a scale of 2\^128: set quantization to none"):
        load_decoder(tmp_path, keep=keep_stored(tmp_path, "mxfp4"))


def blocks_of_eight(weights: dict[str, Any], name: str) -> None:
    weights[f"{name}_blocks"] = weights[f"{name}_blocks"][..., :8].contiguous()


def fewer_scales(weights: dict[str, Any], name: str) -> None:
    weights[f"{name}_scales"] = weights[f"{name}_scales"][:, :-1].contiguous()


def fewer_rows(weights: dict[str, Any], name: str) -> None:
    for kind in ("blocks", "scales"):
        weights[f"{name}_{kind}"] = weights[f"{name}_{kind}"][:, :-2].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (blocks_of_eight, r"has MXFP4 blocks of shape \[3, 64, 3, 8\], where \[E, rows, n, 16\] is expected"),
        (fewer_scales, r"has MXFP4 scales of shape \[3, 63, 3\], where \[3, 64, 3\] is expected"),
        (fewer_rows, r"down_proj.weight of shape \[62, 96\] where its config says \[64, 96\]"),
        (lambda weights, name: weights.pop(f"{name}_scales"), r"lacks .*down_proj_scales: the file is incomplete"),
        (lambda weights, name: weights.pop(f"{name}_blocks"), r"down_proj_scales and lacks its blocks"),
    ],
)
def test_wrong_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights, "model.layers.1.mlp.experts.down_proj")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        open_files(tmp_path)


def test_a_config_that_names_mxfp4_needs_blocks(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    weights = {name: one for name, one in load_file(tmp_path / "model.safetensors").items() if "experts" not in name}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="has no MXFP4 blocks, which its config names"):
        open_files(tmp_path)


def test_formats_by_name() -> None:
    found = read_format({"quantization_config": {"quant_method": "mxfp4"}})
    assert found is not None and found.method == "mxfp4"
    with pytest.raises(ModelError, match="supported are fp8, gptq, awq, compressed-tensors and mxfp4"):
        read_format({"quantization_config": {"quant_method": "hqq"}})
