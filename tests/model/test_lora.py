"""Adapters of PEFT folders: what they add equals merged weights, for every family; what is not supported is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.engine.cpu.linear import arrange
from paceline.model.layout import Shard
from paceline.model.lora import LoraRows, LoraWeights, arrange_adapter, read_adapter, remarks
from paceline.model.shapes import shape
from paceline.model.spec import ModelError
from paceline.model.weights import load_decoder
from tests.model.contiguous_cache import ContiguousCache
from tests.oracle.adapters import ALL, ATTENTION, linear_shapes, merge, write_adapter
from tests.oracle.tiny import FAMILIES, SIZES, transformers

TOKENS = torch.randint(3, 300, (9,), generator=torch.Generator().manual_seed(1))
FUSED = {"phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}


def tiny(family: str) -> Any:
    prefix, options = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    model = getattr(transformers, f"{prefix}ForCausalLM")(config(**{**SIZES, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def logits(model: Any, lora: LoraRows | None = None) -> torch.Tensor:
    cache = ContiguousCache(model)
    hidden = model.forward(TOKENS, torch.arange(len(TOKENS)), cache.attend, lora)
    return model.logits(hidden)


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "phi3", "olmo2", "granite", "qwen3-moe", "qwen2", "smollm3", "gemma2", "mixtral"]
)
def test_adapter_equals_merged_weights(family: str, tmp_path: Path) -> None:
    theirs = tiny(family)
    theirs.save_pretrained(tmp_path / "base")
    targets = FUSED.get(family, ATTENTION if "experts" in str(FAMILIES[family]) else ALL)
    shapes = linear_shapes(theirs, targets)
    pairs = write_adapter(tmp_path / "adapter", shapes, rank=3)
    merge(theirs, pairs, 2.0)
    theirs.save_pretrained(tmp_path / "merged")
    base, merged = (load_decoder(tmp_path / name, dtype="float32") for name in ("base", "merged"))
    file = read_adapter(tmp_path / "adapter")
    weights = arrange_adapter(file, base.whole_spec, torch.float32)
    expected, plain = logits(merged), logits(base)
    assert (plain - expected).abs().max() > 0.1  # it changes something
    for model in (base, arrange(load_decoder(tmp_path / "base", dtype="float32"))):
        prepared = model.prepare_adapter(weights)
        found = logits(model, LoraRows([(torch.arange(len(TOKENS)), prepared)]))
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


def test_rows_of_several_adapters_and_ranks_and_none_are_computed_in_one_batch(tmp_path: Path) -> None:
    base = tiny("llama")
    base.save_pretrained(tmp_path / "base")
    model = arrange(load_decoder(tmp_path / "base", dtype="float32"))
    shapes = linear_shapes(base, ALL)
    prepared = []
    for seed, rank in enumerate((2, 16)):
        write_adapter(tmp_path / str(seed), shapes, rank=rank, seed=seed)
        weights = arrange_adapter(read_adapter(tmp_path / str(seed)), model.whole_spec, torch.float32)
        prepared.append(model.prepare_adapter(weights))
    x, every = torch.randn(7, 48), torch.arange(7)
    rows = [torch.tensor([0, 4]), torch.tensor([2, 3, 6])]
    batch, expected = torch.zeros(2, 7, 96), torch.zeros(2, 7, 96)
    LoraRows(list(zip(rows, prepared, strict=True))).add(1, "qkv", x, batch[0])
    for own, weights in zip(rows, prepared, strict=True):
        alone = torch.zeros(7, 96)
        LoraRows([(every, weights)]).add(1, "qkv", x, alone)
        expected[0, own] = alone[own]
    torch.testing.assert_close(batch, expected)
    assert batch[0, [0, 2]].abs().min() > 0 and not batch[0, [1, 5]].any()


def test_patterns_and_rslora_scale_each_module_as_peft_does(tmp_path: Path) -> None:
    spec = shape("tiny-llama")
    shapes = {f"model.layers.0.self_attn.{name}": (spec.hidden_size, spec.hidden_size) for name in ("q_proj", "o_proj")}
    config = {"use_rslora": True, "alpha_pattern": {"q_proj": 5}, "rank_pattern": {r"layers\.0\.self_attn\.o_proj": 9}}
    write_adapter(tmp_path, shapes, rank=4, config=config, rank_of={"o_proj": 9})
    scales = read_adapter(tmp_path).scales
    assert scales == {"model.layers.0.self_attn.q_proj": 5 / 2, "model.layers.0.self_attn.o_proj": 8 / 3}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_add_up_to_the_whole_adapter(size: int, tmp_path: Path) -> None:
    base = tiny("llama")
    base.save_pretrained(tmp_path / "base")
    spec = load_decoder(tmp_path / "base", dtype="float32").whole_spec
    write_adapter(tmp_path / "adapter", linear_shapes(base, ALL))
    file = read_adapter(tmp_path / "adapter")

    def added(weights: LoraWeights, matrix: str, x: torch.Tensor, rows: int) -> torch.Tensor:
        y = torch.zeros(len(x), rows)
        LoraRows([(torch.arange(len(x)), weights)]).add(0, matrix, x, y)
        return y

    whole = arrange_adapter(file, spec, torch.float32)
    parts = [arrange_adapter(file, spec, torch.float32, Shard(rank, size)) for rank in range(size)]
    x = torch.randn(5, spec.hidden_size)
    attended, ranks = torch.randn(5, spec.layers[0].mixer.q_size), [Shard(rank, size) for rank in range(size)]
    widths = [
        slice(*(heads * spec.layers[0].mixer.head_dim for heads in (one.start, one.stop)))
        for one, _ in (rank.heads(spec.layers[0].mixer) for rank in ranks)
    ]
    total = sum(added(part, "out", attended[:, own], spec.hidden_size) for part, own in zip(parts, widths, strict=True))
    torch.testing.assert_close(total, added(whole, "out", attended, spec.hidden_size), atol=1e-5, rtol=1e-4)
    widths = [2 * rank.spec(spec).layers[0].ffn.size for rank in ranks]
    gate_up = [added(part, "gate_up", x, width) for part, width in zip(parts, widths, strict=True)]
    found = torch.cat([half for index in range(2) for half in (one.chunk(2, dim=1)[index] for one in gate_up)], dim=1)
    torch.testing.assert_close(found, added(whole, "gate_up", x, 2 * spec.layers[0].ffn.size))


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    spec = shape("tiny-llama")
    good = {"model.layers.0.self_attn.q_proj": (spec.layers[0].mixer.q_size, spec.hidden_size)}

    def refused(pattern: str, shapes: Any = good, tensors: Any = None, **config: Any) -> None:
        write_adapter(tmp_path, shapes, config=config)
        if tensors is not None:
            file = tmp_path / "adapter_model.safetensors"
            save_file(tensors(load_file(file)), file)
        with pytest.raises(ModelError, match=pattern):
            arrange_adapter(read_adapter(tmp_path), spec, torch.float32)

    for name, value in {
        "use_dora": True,
        "modules_to_save": ["lm_head"],
        "bias": "all",
        "fan_in_fan_out": True,
        "lora_bias": True,
        "peft_type": "IA3",
        "init_lora_weights": "pissa_niter_4",
        "r": 0,
        "lora_alpha": "8",
        "rank_pattern": {"q_proj": -1},
        "alpha_pattern": {"q_(": 3},
    }.items():
        refused(f"has {name} ", **{name: value})
    refused("target_modules 7: expected names", target_modules=7)
    refused("exclude_modules 'q_\\(', which is no regular", exclude_modules="q_(")
    refused("adapts none of the modules in .*q_proj", exclude_modules=["q_proj"])
    refused("adapts none of the modules in .*q_proj", target_modules=["v_proj"])
    refused("of rank 4 where .* says 8", r=8)
    a, b = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight" for side in "AB")
    refused("lacks lora_B", tensors=lambda found: {a: found[a]})
    refused("NaN", tensors=lambda found: {**found, a: found[a] * float("nan")})
    refused("rank and must be equal", tensors=lambda found: {**found, b: found[b][:, :3].contiguous()})
    refused("has the tensor .*magnitude", tensors=lambda found: {**found, "x.lora_magnitude_vector": torch.ones(3)})
    refused("stored? .* as torch.int64|stores .* as torch.int64", tensors=lambda found: {**found, a: found[a].long()})
    refused("and that of the served model has", {"model.layers.0.self_attn.q_proj": (spec.layers[0].mixer.q_size, 24)})
    refused(
        "adapts model.layers.99.self_attn.q_proj, .* has no such modules",
        {"model.layers.99.self_attn.q_proj": (spec.layers[0].mixer.q_size, spec.hidden_size)},
    )
    refused("has no such modules", {"model.layers.0.foo": (8, 8)}, target_modules="all-linear")
    refused("lm_head: only linear layers", {"lm_head": (spec.vocab_size, spec.hidden_size), **good})
    refused("embed_tokens: only linear layers", {"model.embed_tokens": (8, 8), **good})
    refused(
        "ranks up to 128",
        r=129,
        rank_pattern={},
        shapes=good,
        tensors=lambda _: {a: torch.ones(129, 8), b: torch.ones(8, 129)},
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"convert adapter_model\.bin"):
        read_adapter(tmp_path)
    with pytest.raises(ModelError, match="which is no folder"):
        read_adapter(tmp_path / "none")


@pytest.mark.parametrize("module", ["mlp.experts.3.up_proj", "mlp.gate", "mlp.shared_expert.up_proj"])
def test_adapters_of_experts_are_refused_also_beside_others(module: str, tmp_path: Path) -> None:
    spec = shape("tiny-qwen2-moe")
    own = {
        "model.layers.0.self_attn.q_proj": (spec.layers[0].mixer.q_size, spec.hidden_size),
        f"model.layers.0.{module}": (8, 8),
    }
    write_adapter(tmp_path, own)
    with pytest.raises(ModelError, match="mixture of experts"):
        arrange_adapter(read_adapter(tmp_path), spec, torch.float32)


@pytest.mark.parametrize(
    ("config", "used", "remark"),
    [
        (
            {"target_modules": ["q_proj", "v_proj", "w1", "embed_tokens"]},
            {"q_proj", "v_proj"},
            "has embed_tokens and 1 more",
        ),
        ({"exclude_modules": ["v_proj"]}, {"q_proj"}, "does not adapt model.layers.0.self_attn.v_proj and 2 more"),
        ({"exclude_modules": r".*\.v_proj"}, {"q_proj"}, "does not adapt"),
        ({"target_modules": r".*\.self_attn\.v_proj"}, {"v_proj"}, "does not adapt model.layers.0.self_attn.q_proj"),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": []}, {"q_proj", "v_proj"}, None),
        ({"target_modules": None}, {"q_proj", "v_proj"}, None),
    ],
)
def test_what_the_config_excludes_or_the_file_lacks_is_left_out(
    config: dict[str, Any], used: set[str], remark: str | None, tmp_path: Path
) -> None:
    theirs = tiny("llama")
    theirs.save_pretrained(tmp_path / "base")
    pairs = write_adapter(tmp_path / "adapter", linear_shapes(theirs, ("q_proj", "v_proj")), config=config)
    merge(theirs, {name: pair for name, pair in pairs.items() if name.rpartition(".")[2] in used}, 2.0)
    theirs.save_pretrained(tmp_path / "merged")
    assert_equals_merged(tmp_path, remark)


def test_a_fused_matrix_of_another_size_is_refused_also_beside_others(tmp_path: Path) -> None:
    spec = shape("tiny-phi3")
    own = {"model.layers.0.self_attn.o_proj": (spec.hidden_size, spec.layers[0].mixer.q_size)}
    write_adapter(
        tmp_path, {**own, "model.layers.0.self_attn.qkv_proj": (spec.layers[0].mixer.q_size, spec.hidden_size)}
    )
    with pytest.raises(ModelError, match=r"qkv_proj with B of shape .*, which is not that of the served model"):
        arrange_adapter(read_adapter(tmp_path), spec, torch.float32)


def test_modules_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    theirs = tiny("llama")
    theirs.save_pretrained(tmp_path / "base")
    shapes = linear_shapes(theirs, ("q_proj", "o_proj"))
    more = {f"{name}_extra": rows for name, rows in shapes.items()}
    other_layers = {name.replace(".layers.0.", ".layers.77."): rows for name, rows in shapes.items() if ".0." in name}
    experts = {"model.layers.0.mlp.experts.1.up_proj": (8, 8)}
    pairs = write_adapter(tmp_path / "adapter", {**shapes, **more, **other_layers, **experts})
    merge(theirs, {name: pairs[name] for name in shapes}, 2.0)
    theirs.save_pretrained(tmp_path / "merged")
    assert_equals_merged(tmp_path, "the model does not have model.layers.0.mlp.experts.1.up_proj and 8 more")


def assert_equals_merged(folder: Path, remark: str | None) -> None:
    base, merged = (load_decoder(folder / name, dtype="float32") for name in ("base", "merged"))
    file = read_adapter(folder / "adapter")
    weights = base.prepare_adapter(arrange_adapter(file, base.whole_spec, torch.float32))
    found = logits(base, LoraRows([(torch.arange(len(TOKENS)), weights)]))
    torch.testing.assert_close(found, logits(merged), atol=2e-4, rtol=1e-3)
    said = remarks(file, base.whole_spec)
    assert len(said) == (remark is not None) and all(remark in one for one in said), said


def test_digest_depends_on_matrices_and_config(tmp_path: Path) -> None:
    shapes = {"model.layers.0.self_attn.q_proj": (8, 8)}
    digests = []
    for seed, alpha in ((0, 8), (0, 8), (1, 8), (0, 9)):
        write_adapter(tmp_path, shapes, seed=seed, config={"lora_alpha": alpha})
        digests.append(read_adapter(tmp_path).digest)
    assert digests[0] == digests[1] and len(set(digests)) == 3
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 9
