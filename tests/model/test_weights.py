"""Loading: every parameter is checked, and bad files are refused with a clear error."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contiguous_cache import ContiguousCache
from safetensors.torch import load_file, save_file
from test_oracle import PROMPT, make_pair

from paceline.model.config_json import spec_from_config
from paceline.model.layers import Dense, Experts
from paceline.model.layout import Shard, stored_parts, target_shapes
from paceline.model.lora import read_adapter
from paceline.model.read_spec import read_spec
from paceline.model.shapes import SHAPES, shape, vary
from paceline.model.spec import ModelError
from paceline.model.weights import load_decoder, random_decoder, random_weights
from tests.oracle.adapters import write_adapter


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    make_pair(folder, "Qwen2", {})
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy: tests change it."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return tmp_path


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def test_missing_parameter_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(ModelError, match=r"lacks model.layers.1.self_attn.k_proj.bias: .*incomplete"):
        load_decoder(folder)


def test_unexpected_parameter_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(12)}))
    with pytest.raises(ModelError, match=r"unexpected parameters model.layers.0.self_attn.q_norm.weight"):
        load_decoder(folder)


def test_many_names_are_cut_short(folder: Path) -> None:
    change_config(folder, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"unexpected parameters model.layers.2.* and \d+ more"):
        load_decoder(folder)


def test_wrong_shape_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ModelError, match=r"model.norm.weight of shape \[47\] where its config says \[48\]"):
        load_decoder(folder)


def test_quantized_safetensors_are_refused(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelError, match=rf"stores {name} as F8_E4M3: use the unquantized model"):
        load_decoder(folder)


def test_stored_rotary_frequencies_are_ignored(folder: Path) -> None:
    change(
        folder,
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}),
    )
    load_decoder(folder)


def test_stored_copy_of_a_tied_head_is_tolerated(tmp_path: Path) -> None:
    make_pair(tmp_path, "Qwen2", {"tie_word_embeddings": True})
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(131, 48)}))
    decoder = load_decoder(tmp_path)
    assert decoder.head.weight is decoder.embedding


def test_truncated_safetensors(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    for length in (0, 5, 100, len(data) // 2, len(data) - 1):
        (folder / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"model.safetensors cannot be read .*damaged or truncated"):
            load_decoder(folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    make_pair(tmp_path, "Llama", {}, max_shard_size="20KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=rf"{victim.name} is missing, but model.safetensors.index.json names it"):
        load_decoder(tmp_path)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a folder nor a .gguf file"):
        load_decoder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config.json"):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"contains a list instead of an object"):
        load_decoder(tmp_path)


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickled_weights_are_refused_and_not_unpickled(folder: Path) -> None:
    """Under their own name, and under that of safetensors."""
    (folder / "model.safetensors").unlink()
    ran = folder / "ran"
    torch.save({"weight": Payload(ran)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no .safetensors files \(pytorch_model.bin runs code.*convert the model"):
        load_decoder(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read .*damaged"):
        load_decoder(folder)

    adapter = folder / "adapter"
    write_adapter(adapter, {"model.layers.0.self_attn.q_proj": (8, 8)})
    (adapter / "adapter_model.safetensors").write_bytes(pickle.dumps(Payload(ran)))
    with pytest.raises(ModelError, match=r"cannot be read .*damaged"):
        read_adapter(adapter)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"convert adapter_model\.bin"):
        read_adapter(adapter)
    assert not ran.exists()
    pickle.loads((adapter / "adapter_model.bin").read_bytes())
    assert ran.exists(), "the payload works"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM', which is not supported: supported are Llama",
        ),
        ({"architectures": None}, "which is not supported: supported are LlamaForCausalLM, Mistral.*Qwen3"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization_config is 'hqq': supported are fp8",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only silu"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0: only null is supported for qwen2 models"),
        ({"is_causal": False}, "is_causal is false: only true or null is supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true: only false or null"),
        ({"use_qk_norm": True}, "use_qk_norm is true: only false or null is supported for qwen2 models"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_qk_norm": False},
            "use_qk_norm is false: only true or null is supported for qwen3 models",
        ),
        ({"qk_layernorm": True}, "qk_layernorm is true"),
        ({"qk_norm": True}, "qk_norm is true: only false or null is supported for qwen2 models"),
        ({"architectures": ["LlamaForCausalLM"], "qk_norm": True}, "qk_norm is true: only false or null"),
        ({"use_linear_attention": True}, "use_linear_attention is true"),
        ({"softmax_scale": 0.5}, "softmax_scale is 0.5: only null or "),
        ({"attention_chunk_size": 32}, "attention_chunk_size is 32: only null"),
        ({"parallel_attn": True}, "parallel_attn is true"),
        ({"alibi": True}, "alibi is true"),
        ({"logits_scaling": 8.0}, "logits_scaling is 8.0: only 1.0 or null is supported"),
        ({"embedding_multiplier": 12}, "embedding_multiplier is 12"),
        ({"residual_multiplier": 0.2}, "residual_multiplier is 0.2"),
        ({"attention_multiplier": 0.1}, "attention_multiplier is 0.1"),
        ({"logit_scale": 0.0625}, "logit_scale is 0.0625"),
        ({"swiglu_limit": 7.0}, "swiglu_limit is 7.0"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            'layer_types is "linear_attention": only "full_attention" or "sl',
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "layer_types": ["sliding_attention"]},
            'is "sliding_attention": only "full_attention"',
        ),
        (
            {"architectures": ["GraniteForCausalLM"], "layer_types": ["mamba"]},
            'layer_types is "mamba": only "full_attention"',
        ),
        ({"hidden_size": None}, "value of the wrong type"),
        ({"layer_types": 3}, "value of the wrong type"),
        ({"num_key_value_heads": 3}, "num_heads is 4, which is not a multiple of num_kv_heads = 3"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope scaling .longrope. lacks .short_factor."),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope scaling is .proportional.: supported are"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "'llama3' lacks 'original_max"),
        ({"rope_parameters": {"partial_rotary_factor": 0.3}}, "rotary_dim is 3: give an even number"),
        ({"head_dim": 13}, "head_dim is 13: give an even number"),
        ({"max_position_embeddings": None}, "context_tokens is 0"),
    ],
)
def test_configs_we_cannot_run(folder: Path, values: dict[str, Any], words: str) -> None:
    change_config(folder, **values)
    with pytest.raises(ModelError, match=words):
        read_spec(folder)


def test_options_that_change_nothing_are_read(folder: Path) -> None:
    expected = read_spec(folder)
    plain = {"use_qk_norm": False, "is_causal": True, "logits_scaling": 1, "clip_qkv": None, "qk_layernorm": False}
    change_config(folder, **plain, use_bidirectional_attention=False, layer_types=["full_attention"] * 3)
    assert read_spec(folder) == expected
    scale = expected.layers[0].mixer.head_dim ** -0.5
    plain = {"qk_norm": False, "alibi": False, "parallel_attn": False, "softmax_scale": scale}
    change_config(folder, **plain, use_linear_attention=False, attention_chunk_size=None)
    assert read_spec(folder) == expected
    change_config(folder, architectures=["GraniteForCausalLM"], logits_scaling=8.0)
    assert read_spec(folder).logit_scale == 1 / 8


def test_missing_key_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["intermediate_size"]
    with pytest.raises(ModelError, match=r"config.json lacks 'intermediate_size'"):
        spec_from_config(config)


def test_old_spelling_of_rope_settings(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    old = {**config, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    ((rope, *_),) = spec_from_config(old).rotations
    assert (rope.theta, rope.kind, rope.factor) == (5e5, "linear", 2.0)


def test_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"dtype is 'int8': choose one of float32, bfloat16, float16"):
        load_decoder(folder, dtype="int8")


@pytest.mark.parametrize("name", SHAPES)
def test_layout_covers_every_row_of_every_tensor_once(name: str) -> None:
    spec = shape(name)
    ends = dict.fromkeys(target_shapes(spec), 0)
    for part in sorted(stored_parts(spec).values(), key=lambda part: part.row):
        assert part.row == ends[part.target] and part.num_rows > 0, part
        ends[part.target] += part.num_rows
    assert ends == {target: size[0] for target, size in target_shapes(spec).items()}


def test_named_shapes_have_their_known_sizes() -> None:
    assert 0.59e9 < shape("qwen3-0.6b").num_parameters < 0.60e9
    assert 14.7e9 < shape("qwen3-14b").num_parameters < 14.8e9
    assert shape("smollm2-135m").kv_bytes_per_token(2) == 2 * 30 * 3 * 64 * 2
    with pytest.raises(ModelError, match=r"shape is 'gpt-9', which is not known: choose one of qwen3-0.6b"):
        shape("gpt-9")


TINY = [name for name in SHAPES if name.startswith("tiny-")]


@pytest.mark.parametrize(("name", "seed"), [(name, place % 3) for place, name in enumerate(TINY)])
def test_random_model_gives_varied_outputs(name: str, seed: int) -> None:
    decoder = random_decoder(shape(name), seed=seed, dtype="float32")
    logits = ContiguousCache(decoder).feed(PROMPT)
    assert torch.isfinite(logits).all()
    assert 1.0 < logits.std() < 10.0
    assert len(set(logits.argmax(-1).tolist())) > len(PROMPT) // 3
    continuation = ContiguousCache(decoder).greedy(PROMPT[:5], 48)
    assert len(set(continuation)) > 16


def test_random_weights_depend_on_the_seed_alone() -> None:
    spec = shape("tiny-qwen3")
    first, again, other = (random_weights(spec, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding"], other["embedding"])
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == target_shapes(spec)


def test_spec_counts_the_parameters_of_the_layout() -> None:
    for spec in SHAPES.values():
        counted = sum(torch.Size(part.shape).numel() for part in stored_parts(spec).values())
        assert counted == spec.num_parameters


def test_equal_layers_are_one_object_and_every_layer_needs_its_values() -> None:
    spec = shape("tiny-gemma2")
    assert spec.layers[0] is spec.layers[2] and spec.layers[1] is spec.layers[3]
    assert [layer.mixer.window for layer in spec.layers] == [32, None, 32, None]
    assert [group.layers for group in spec.cache_groups] == [(0, 1, 2, 3)], "windows share pages"
    with pytest.raises(ModelError, match=r"windows has 3 entries for 4 layers"):
        vary(spec, windows=(4, 4, 4))


def test_numbers_of_a_model_are_sums_over_its_layers() -> None:
    spec = shape("tiny-llama")
    wide, sparse = Dense(size=200), Experts(count=5, per_token=2, size=24, shared_size=16)
    narrow = replace(spec.layers[0].mixer, num_heads=4, num_kv_heads=1, head_dim=8, qkv_bias=True)
    layers = (replace(spec.layers[0], ffn=wide), replace(spec.layers[1], mixer=narrow, ffn=sparse))
    mixed = replace(spec, layers=layers)
    assert mixed.num_parameters == sum(math.prod(part.shape) for part in stored_parts(mixed).values())
    for size in (1, 2, 4):
        parts = [target_shapes(mixed, Shard(rank, size)) for rank in range(size)]
        assert sum(math.prod(part["0.gate_up"]) + math.prod(part["1.expert_down"]) for part in parts) == (
            2 * 200 * 64 + 5 * 64 * 24
        )
    assert mixed.kv_bytes_per_token(2) == 2 * 2 * (2 * 16 + 1 * 8)
    assert mixed.position_macs == 2 * (6 * 16 + 4 * 8)
    assert mixed.num_active_parameters == mixed.num_parameters - 3 * 3 * 64 * 24
    assert mixed.with_layers([1]).layers == layers[1:]
