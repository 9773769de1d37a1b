"""FP8 checkpoints, in files that the test makes: values, scales and layouts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.engine.linear.pack import quantize_decoder
from paceline.engine.precision import KernelFormat
from paceline.kernels.expert_weights import Fp8Experts
from paceline.kernels.quantized_linear import QuantizedMatrix
from paceline.model.decoder import MixtureOfExperts
from paceline.model.files import open_files
from paceline.model.layout import Shard, StoredTensor
from paceline.model.quantization_config import CheckpointFormat, read_format
from paceline.model.spec import ModelError
from paceline.model.stored_kv_scales import read_kv_scales, with_kv_scale_names
from paceline.model.weights import load_decoder
from paceline.parallel.threads import ThreadGroup
from tests.resolving import keep_stored, kernel_formats, plan_of, quantization, why
from tests.tiny_folder import EXPERTS, save_tiny_model

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static"}
GROUP: dict[str, Any] = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
IN_BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": GROUP},
}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def save_fp8(path: Path, config: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """A folder with linear layers in FP8; returns their dequantized weights. options: of the model's config."""
    save_tiny_model(path, options=options)
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    weights, wanted = load_file(path / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        if "proj" not in name:
            continue
        layer, rows = name.removesuffix(".weight"), len(weight)
        scale = weight.abs().max() / 448
        if config is CHANNEL:
            scale = weight.abs().amax(1, keepdim=True) / 448
        elif config is BLOCKS:
            blocks = [-(-size // 128) for size in weight.shape]
            scale = scale * (1 + torch.arange(blocks[0] * blocks[1]).view(blocks))
        wide = scale
        if config is BLOCKS:
            wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, : weight.shape[1]]
        weights[name] = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        weights[f"{layer}.weight_scale" + ("_inv" if config is BLOCKS else "")] = scale
        if config is FP8:
            weights[f"{layer}.input_scale"] = torch.tensor(0.1)
        wanted[name] = weights[name].float() * wide
        assert wanted[name].shape[0] == rows
    save_file(weights, path / "model.safetensors")
    return wanted


@pytest.mark.parametrize("config", [FP8, CHANNEL, BLOCKS], ids=["tensor", "channel", "blocks"])
def test_fp8_checkpoints_have_the_values_of_their_scales(tmp_path: Path, config: dict[str, Any]) -> None:
    """Expanded on any device; kept on a GPU, except for blocks."""
    wanted = save_fp8(tmp_path / "model", config)
    assert open_files(tmp_path / "model").spec.num_layers == 2
    expanded = load_decoder(tmp_path / "model", dtype="float32")
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(expanded.layers[1].qkv.tensor, torch.cat([wanted[name] for name in names]))
    assert torch.equal(expanded.layers[0].mlp.down.weight, wanted["model.layers.0.mlp.down_proj.weight"])
    assert quantization(tmp_path / "model", "cuda") == ("none" if config is BLOCKS else "fp8")
    if config is BLOCKS:
        assert "expanded to bfloat16: only experts have kernels for scales of blocks" in why(tmp_path / "model", "cuda")
    assert quantization(tmp_path / "model") == "none" and "a CPU has no kernels" in why(tmp_path / "model")
    if config is not BLOCKS:
        kept = load_decoder(tmp_path / "model", dtype="bfloat16", keep=keep_stored(tmp_path / "model", "fp8"))
        qkv: Any = kept.layers[1].qkv.weight
        assert isinstance(qkv, QuantizedMatrix) and kept.dtype is torch.bfloat16
        assert torch.equal(qkv.dequantize(), expanded.layers[1].qkv.tensor)


def change(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], without: str = "") -> None:
    """Other values of quantization_config, and tensors in the place of those whose names contain `without`."""
    described = json.loads((path / "config.json").read_text())
    described["quantization_config"] = {**described["quantization_config"], **config}
    (path / "config.json").write_text(json.dumps(described))
    weights = {name: value for name, value in load_file(path / "model.safetensors").items() if without not in name}
    save_file(
        {**(weights if without else load_file(path / "model.safetensors")), **tensors}, path / "model.safetensors"
    )


def test_targets_may_be_regular_expressions_and_some_layers_unquantized(tmp_path: Path) -> None:
    path = tmp_path / "model"
    wanted = save_fp8(path, CHANNEL)
    plain = {f"model.layers.{layer}.mlp.down_proj": torch.randn(32, 64) for layer in range(2)}
    groups = {
        "attention": {**GROUP, "targets": [r"re:.*self_attn\.(q|k|v|o)_proj$"]},
        "mlp": {**GROUP, "targets": [r"re:.*(gate|up)_proj"], "weights": {**GROUP["weights"], "strategy": "tensor"}},
    }
    tensors = {f"{name}.weight": value for name, value in plain.items()}
    change(path, {"config_groups": groups, "ignore": ["lm_head", r"re:.*down_proj"]}, tensors, without="down_proj")
    model = load_decoder(path, dtype="float32")
    assert torch.equal(model.layers[0].out.tensor, wanted["model.layers.0.self_attn.o_proj.weight"])
    assert torch.equal(model.layers[1].mlp.gate_up.tensor[64:], wanted["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(model.layers[1].mlp.down.tensor, plain["model.layers.1.mlp.down_proj"])


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("attn.k_scale", "attn.v_scale"),
    ],
)
def test_scales_of_an_fp8_kv_cache_are_read(names: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_fp8(path, CHANNEL)
    given = {
        f"model.layers.{layer}.self_attn.{name}": torch.full((1,) if layer else (), 0.03 * (1 + layer) + index)
        for layer in range(2)
        for index, name in enumerate(names)
    }
    change(path, {"kv_cache_scheme": KV}, given)
    assert open_files(path).spec.num_layers == 2
    model = load_decoder(path, dtype="float32")
    assert model.kv_scales is not None
    torch.testing.assert_close(model.kv_scales[:, :, 0], torch.tensor([[0.03, 1.03], [0.06, 1.06]]))
    for stage in range(2):
        stored = with_kv_scale_names({name: StoredTensor((), 4, lambda _, v=v: v) for name, v in given.items()})
        found = read_kv_scales(model.spec, stored, Shard(0, 1, stage, 2), "m")
        own = Shard(0, 1, stage, 2).layers(model.spec)
        assert found is not None and torch.equal(found, model.kv_scales[own.start : own.stop])

    first, *_, last = given
    change(path, {}, {first: torch.tensor(0.0)})
    with pytest.raises(ModelError, match=r"layers.0.self_attn.k_scale of shape \[\]: expected one number above 0"):
        load_decoder(path, dtype="float32")
    change(path, {}, {first: torch.tensor(1.0)}, without=last)
    with pytest.raises(ModelError, match=r"lacks model.layers.1.self_attn.v_scale: the file is incomplete"):
        load_decoder(path, dtype="float32")


def test_one_scale_of_keys_and_values_is_that_of_both(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_fp8(path, CHANNEL)
    given = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.5 + layer) for layer in range(2)}
    change(path, {"kv_cache_scheme": KV}, given)
    model = load_decoder(path, dtype="float32")
    assert model.kv_scales is not None and model.kv_scales[:, :, 0].tolist() == [[0.5, 0.5], [1.5, 1.5]]


@pytest.mark.parametrize("groups", [{}, {"group_0": {"weights": None, "targets": ["Linear"]}}])
def test_weights_in_16_bits_may_have_scales_of_an_fp8_kv_cache(groups: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_tiny_model(path)
    config = json.loads((path / "config.json").read_text())
    dense = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": KV, "config_groups": groups}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": dense}))
    plain = load_decoder(path, dtype="float32")
    names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(2) for part in "kv"]
    file = path / "model.safetensors"
    save_file({**load_file(file), **{name: torch.tensor(0.25) for name in names}}, file)
    model = load_decoder(path, dtype="float32")
    assert plain.kv_scales is None and model.kv_scales is not None and (model.kv_scales == 0.25).all()
    assert quantization(path, "cuda") == "none" and torch.equal(model.layers[0].qkv.tensor, plain.layers[0].qkv.tensor)


@pytest.mark.parametrize("config", [FP8, CHANNEL, BLOCKS], ids=["tensor", "channel", "blocks"])
def test_experts_of_fp8_checkpoints_are_kept(tmp_path: Path, config: dict[str, Any]) -> None:
    """With the values of the expanded ones, on ranks too, which cut blocks; everything else is expanded."""
    path = tmp_path / "model"
    wanted = save_fp8(path, config, EXPERTS)
    plan, spec = plan_of(path, "cuda"), open_files(path).spec
    assert plan.quantization == quantization(path, "cuda", tp=3) == "fp8"
    format = KernelFormat(128 if config is BLOCKS else 0)
    assert kernel_formats(path) == (format,)
    assert plan.num_bytes == pytest.approx(2 * spec.num_parameters - spec.num_expert_parameters, rel=0.02)  # and scales
    # A rank would have one or two columns: fewer than a kernel multiplies at once.
    assert quantization(path, "cuda", tp=64) == ("none" if config is BLOCKS else "fp8")
    for groups in ([None], *(ThreadGroup.of_size(size) for size in (2, 3))):
        for group in groups:
            options: dict[str, Any] = {"dtype": "float32", "group": group}
            kept = load_decoder(path, keep=keep_stored(path, "fp8"), **options)
            expanded = load_decoder(path, **options)
            mine, theirs = kept.layers[0].mlp, expanded.layers[0].mlp
            assert isinstance(mine, MixtureOfExperts) and isinstance(theirs, MixtureOfExperts)
            assert torch.equal(kept.layers[0].qkv.tensor, expanded.layers[0].qkv.tensor)
            assert torch.equal(mine.router, theirs.router)
            pairs: Any = (
                (mine.expert_gate_up, theirs.expert_gate_up.clone()),
                (mine.expert_down, theirs.expert_down.clone()),
            )
            quantize_decoder(expanded, "fp8", format)
            rounded: Any = expanded.layers[0].mlp
            for (found, values), same in zip(pairs, (rounded.expert_gate_up, rounded.expert_down), strict=True):
                assert isinstance(found, Fp8Experts) and torch.equal(found.dequantize(), values)
                # Kernels are compiled ahead for these.
                assert (found.rows, found.columns, found.scales.shape) == (same.rows, same.columns, same.scales.shape)
    assert torch.equal(values[1], wanted["model.layers.0.mlp.experts.1.down_proj.weight"][:, 128:])


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantization_config is 'bitsandbytes': supported are fp8, gptq, awq, compressed",
        ),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"blocks of \[64, 64\]: only \[128, 128\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2', and supported is e4m3"),
        (
            {**CHANNEL, "format": "int-quantized"},
            "format 'int-quantized', and supported is float-quantized, pack-quant",
        ),
        ({**CHANNEL, "config_groups": {}}, "0 config_groups in 0 formats: only one"),
        (
            {**CHANNEL, "config_groups": {"a": GROUP, "b": {"weights": {**GROUP["weights"], **IN_BLOCKS}}}},
            "2 config_groups in 2 formats: only one",
        ),
        (
            {**CHANNEL, "kv_cache_scheme": {**KV, "type": "int"}},
            "kv_cache_scheme has type 'int', and supported is float",
        ),
        (
            {**CHANNEL, "kv_cache_scheme": {**KV, "strategy": "attn_head"}},
            "has strategy 'attn_head', and supported is te",
        ),
        ({**CHANNEL, "kv_cache_scheme": {**KV, "dynamic": True}}, "has dynamic True, and supported is False"),
        ({**CHANNEL, "kv_cache_scheme": "fp8"}, "has kv_cache_scheme 'fp8': expected an object"),
        ({**CHANNEL, "format": "dense"}, "format 'dense' and quantized weights"),
        ("fp8", "quantization_config is 'fp8'"),
    ],
)
def test_a_format_that_is_not_supported_is_refused_by_name(config: Any, error: str) -> None:
    with pytest.raises(ModelError, match=error):
        read_format({"quantization_config": config})
    assert read_format({}) is None and read_format({"quantization_config": FP8}) == CheckpointFormat("fp8", False)


def test_damaged_or_mislabelled_fp8_files_are_refused(tmp_path: Path) -> None:
    for number, (change, error) in enumerate(
        (
            (lambda w: w.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(3)}), "scales of shape"),
            (lambda w: w.pop("model.layers.0.mlp.up_proj.weight"), "lacks model.layers.0.mlp.up_proj.weight"),
            (
                lambda w: w.pop("model.layers.1.mlp.up_proj.weight_scale"),
                "up_proj.weight in 8 bits and lacks its weight_",
            ),
            (lambda w: [w.pop(name) for name in list(w) if name.endswith("_scale")], "has no scales of FP8 weights"),
        )
    ):
        folder = tmp_path / str(number)
        save_fp8(folder, FP8)
        weights = load_file(folder / "model.safetensors")
        change(weights)  # type: ignore[no-untyped-call]
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(ModelError, match=error):
            open_files(folder)
    folder = tmp_path / "unnamed"
    save_fp8(folder, FP8)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    with pytest.raises(ModelError, match="as F8_E4M3: use the unquantized model"):
        open_files(folder)
