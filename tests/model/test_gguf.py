"""GGUF files: tiny ones written here, and the real SmolLM2."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from contiguous_cache import ContiguousCache
from test_oracle import EXPERTS, GPT_OSS, GRANITE, PROMPT, longrope, make_pair

from paceline.model.files import open_files
from paceline.model.gguf import dequantize, gguf_spec
from paceline.model.gguf_file import open_gguf
from paceline.model.read_spec import read_spec
from paceline.model.spec import ModelError
from paceline.model.weights import QuantizedWeights, load_decoder
from paceline.model.weights_plan import Origin
from paceline.text.load import model_name
from tests.lazy import Lazy
from tests.resolving import plan_of
from tests.tiny_gguf import save_gguf

transformers = Lazy("transformers")

CAPITAL = [504, 3575, 282, 4649, 314]  # The capital of France is
CONTINUATION = [7042, 30, 198, 198, 504, 2988, 314, 42]


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama family."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def add_experts(
    writer: gguf.GGUFWriter, layer: str, name: str, value: np.ndarray, kind: gguf.GGMLQuantizationType | None
) -> None:
    """Experts as llama.cpp's converter stores them; kind None: as old files of Mixtral did, one by one."""
    is_gpt_oss = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GPT_OSS] == writer.arch
    if is_gpt_oss and not name.endswith("bias"):
        value = value.swapaxes(1, 2)
    halves = [value]
    if name.startswith("gate_up_proj"):
        halves = [value[:, ::2], value[:, 1::2]] if is_gpt_oss else np.split(value, 2, axis=1)
    parts = ("ffn_gate", "ffn_up") if name.startswith("gate_up_proj") else ("ffn_down",)
    if name.endswith("bias"):
        for part, half in zip(parts, halves, strict=True):
            writer.add_tensor(f"blk.{layer}.{part}_exps.bias", np.ascontiguousarray(half))
        return
    for part, half in zip(parts, halves, strict=True):
        if kind is None:
            for expert, one in enumerate(half):
                writer.add_tensor(f"blk.{layer}.{part}.{expert}.weight", one)
        else:
            raw = gguf.quantize(np.ascontiguousarray(half), kind)
            writer.add_tensor(f"blk.{layer}.{part}_exps.weight", raw, raw_dtype=kind)


def write_gguf(
    path: Path,
    model: Any,
    arch: str,
    extra: dict[str, np.ndarray] | None = None,
    experts: gguf.GGMLQuantizationType | None = gguf.GGMLQuantizationType.F32,
) -> None:
    """Saves a model of transformers as llama.cpp's converter would."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if arch != "llama":
            writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    scaling = rope["rope_type"]
    if scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(rope["factor"])
    if scaling in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if scaling == "longrope":
        extra = {f"rope_factors_{kind}.weight": np.float32(rope[f"{kind}_factor"]) for kind in ("short", "long")}
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    if arch in ("gemma2", "gemma3", "phi3", "gpt-oss") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    names = gguf.get_tensor_name_map(next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), 9)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.numpy()
        parts = name.split(".")
        if parts[1] == "layers" and parts[-2] == "experts":
            add_experts(writer, parts[2], parts[-1], value, experts)
            continue
        if parts[-1] == "sinks":
            writer.add_tensor(f"blk.{parts[2]}.attn_sinks.weight", value)
            continue
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        found = names.get_name(name.rpartition(".")[0])
        assert found is not None, f"llama.cpp has no {name} in {arch}"
        part = found.split(".")[-1]
        if arch in ("llama", "smollm3", "granite") and part in heads:
            value = permute(value, heads[part])
        value = value[0] if part == "ffn_gate_inp_shexp" else value
        name = f"{found}.{parts[-1]}"
        writer.add_tensor(name, value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GEMMA = {"head_dim": 20, "query_pre_attn_scalar": 20, "sliding_window": 6, "pad_token_id": 0}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 70_000.0, "factor": 3.0},
}
Q = gguf.GGMLQuantizationType
LINEAR = {"rope_type": "linear", "rope_theta": 9000.0, "factor": 2.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 9000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


def kept(path: Path) -> QuantizedWeights:
    """In the bits in which matrices can be read, most of which may have 32 in the file."""
    plan = plan_of(path, quantization="q8")
    stored = tuple(replace(one, origin=Origin.STORED) for one in plan.matrices)
    return QuantizedWeights(open_files(path), replace(plan, matrices=stored))


@pytest.mark.parametrize(
    ("prefix", "arch", "options"),
    [
        ("Llama", "llama", {"head_dim": 12}),
        ("Llama", "llama", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
        ("Llama", "llama", {"head_dim": 12, "rope_parameters": LINEAR, "tie_word_embeddings": True}),
        ("Mistral", "llama", {"head_dim": 20, "sliding_window": None}),
        ("Qwen2", "qwen2", {"head_dim": 12, "rope_parameters": YARN}),
        ("Qwen3", "qwen3", {"head_dim": 32}),
        ("SmolLM3", "smollm3", {"head_dim": 12, "num_hidden_layers": 5, "pad_token_id": 0}),
        ("Gemma", "gemma", {"head_dim": 20, "pad_token_id": 0}),
        ("Gemma2", "gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
        ("Gemma3", "gemma3", {**GEMMA, "num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPES}),
        ("Phi3", "phi3", {"pad_token_id": 0, "sliding_window": 9}),
        ("Phi3", "phi3", {"pad_token_id": 0, "hidden_size": 64, **longrope(512, 16, 0.75, 1.3)}),
        ("Olmo2", "olmo2", {"pad_token_id": 0}),
        ("Granite", "granite", {**GRANITE, "tie_word_embeddings": True}),
        ("Mixtral", "llama", {"head_dim": 12, "num_local_experts": 5}),
        ("Qwen3Moe", "qwen3moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
        ("Olmoe", "olmoe", {"num_experts": 7, "num_experts_per_tok": 3, "pad_token_id": 0}),
        ("Qwen2Moe", "qwen2moe", {**EXPERTS, "head_dim": 12, "shared_expert_intermediate_size": 40}),
        ("GptOss", "gpt-oss", GPT_OSS),
    ],
)
def test_gguf_file_equals_transformers(prefix: str, arch: str, options: Any, tmp_path: Path) -> None:
    theirs, _ = make_pair(tmp_path / "folder", prefix, options)
    write_gguf(tmp_path / "model.gguf", theirs, arch)
    ours = load_decoder(tmp_path / "model.gguf", dtype="float32")
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(ContiguousCache(ours).feed(PROMPT), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("prefix", "arch", "options"),
    [
        ("Phi3", "phi3", {"pad_token_id": 0, "hidden_size": 64, **longrope(512, 16, 0.75, 1.3)}),
        ("Granite", "granite", GRANITE),
    ],
)
def test_quantized_tensors_are_divided_rearranged_and_scaled(
    prefix: str, arch: str, options: Any, tmp_path: Path
) -> None:
    theirs, _ = make_pair(tmp_path / "folder", prefix, options)
    write_gguf(tmp_path / "model.gguf", theirs, arch)
    layer = load_decoder(tmp_path / "model.gguf", dtype="float32").layers[0]
    weights = kept(tmp_path / "model.gguf")
    for name, expected in (
        ("qkv", layer.qkv.tensor),
        ("out", layer.out.tensor),
        ("gate_up", layer.mlp.gate_up.tensor),
        ("down", layer.mlp.down.tensor),
    ):
        found = weights.matrix(f"0.{name}").dequantize()
        torch.testing.assert_close(found, expected, atol=0.01 * float(expected.abs().max()), rtol=0)


def test_experts_of_a_gguf_file_are_read_one_by_one(tmp_path: Path) -> None:
    options = {**EXPERTS, "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 1}
    theirs, _ = make_pair(tmp_path / "folder", "Qwen3Moe", options)
    write_gguf(tmp_path / "model.gguf", theirs, "qwen3moe", experts=Q.Q8_0)
    experts = load_decoder(tmp_path / "model.gguf", dtype="float32").layers[0].mlp
    for found, name in ((experts.expert_gate_up, "gate_up_proj"), (experts.expert_down, "down_proj")):
        expected = theirs.state_dict()[f"model.layers.0.mlp.experts.{name}"].numpy()
        rounded = gguf.dequantize(gguf.quantize(expected, Q.Q8_0), Q.Q8_0)
        np.testing.assert_array_equal(found.numpy(), rounded)

    theirs, _ = make_pair(tmp_path / "gpt-oss", "GptOss", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 96})
    write_gguf(tmp_path / "mxfp4.gguf", theirs, "gpt-oss", experts=Q.MXFP4)
    experts = load_decoder(tmp_path / "mxfp4.gguf", dtype="float32").layers[0].mlp
    stored = theirs.state_dict()["model.layers.0.mlp.experts.gate_up_proj"].numpy().swapaxes(1, 2)
    halves = [np.ascontiguousarray(stored[:, first::2]) for first in (0, 1)]
    rounded = np.concatenate([gguf.dequantize(gguf.quantize(half, Q.MXFP4), Q.MXFP4) for half in halves], axis=1)
    np.testing.assert_array_equal(experts.expert_gate_up.numpy(), rounded)

    # Old files of Mixtral have one tensor per expert.
    theirs, ours = make_pair(tmp_path / "mixtral", "Mixtral", {"head_dim": 12, "num_local_experts": 3})
    write_gguf(tmp_path / "old.gguf", theirs, "llama", experts=None)
    old = load_decoder(tmp_path / "old.gguf", dtype="float32")
    assert old.spec.family == "mixtral"
    torch.testing.assert_close(ContiguousCache(old).feed(PROMPT), ContiguousCache(ours).feed(PROMPT), atol=0, rtol=0)


def test_llama3_scaling_is_read_from_a_tensor_of_divisors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    theirs, _ = make_pair(tmp_path / "folder", "Llama", {"head_dim": 12, "rope_parameters": scaling})
    plain = 1.0 / 10_000.0 ** (np.arange(0, 12, 2) / 12)
    divisors = (plain / theirs.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    write_gguf(tmp_path / "model.gguf", theirs, "llama", {"rope_freqs.weight": divisors})
    ours = load_decoder(tmp_path / "model.gguf", dtype="float32")
    assert ours.spec.rotations[0].rope.kind == "divisors"
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(ContiguousCache(ours).feed(PROMPT), expected, atol=1e-4, rtol=1e-4)


KINDS = [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.MXFP4]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_dequantized_values_equal_those_of_the_gguf_package(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    if kind.name.endswith("_K"):
        # The package cannot quantize to these; any bytes are valid blocks, apart from NaN scales.
        raw = rng.integers(0, 60, (6, 512 // 256 * gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    else:
        raw = gguf.quantize(rng.standard_normal((6, 512)).astype(np.float32), kind)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("first", np.ones(3, dtype=np.float32))  # so that the second one has an offset
    writer.add_tensor("second", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = open_gguf(tmp_path / "t.gguf")
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "t.gguf").tensors}["second"]
    expected = gguf.dequantize(reference.data, reference.tensor_type)
    found = dequantize(file, file.tensors["second"])
    assert found.shape == (6, 512)
    np.testing.assert_array_equal(found.float().numpy(), expected.astype(np.float32))
    assert np.isfinite(expected).all()
    assert expected.std() > 0


def test_smollm2_spec(smollm2_path: Path) -> None:
    spec = read_spec(smollm2_path)
    mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn
    assert (spec.family, spec.hidden_size, spec.num_layers, ffn.size) == ("llama", 576, 30, 1536)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, spec.vocab_size) == (9, 3, 64, 49152)
    assert (spec.tied, spec.context_tokens, spec.rotations[0].rope.theta, spec.eos_ids) == (True, 8192, 100_000.0, (2,))
    assert 134e6 < spec.num_parameters < 135e6


def test_metadata_equals_that_of_the_gguf_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    values: dict[str, Any] = {
        "a": 7,
        "b": -3,
        "c": 0.5,
        "d": True,
        "e": "ü\n",
        "f": ["x", "", "yy"],
        "g": [1, 2],
    }
    writer.add_uint64("a", 7)
    writer.add_int32("b", -3)
    writer.add_float32("c", 0.5)
    writer.add_bool("d", True)
    writer.add_string("e", "ü\n")
    writer.add_array("f", ["x", "", "yy"])
    writer.add_array("g", [1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert {**open_gguf(tmp_path / "t.gguf").metadata} == {"general.architecture": "llama", **values}


def test_smollm2_known_greedy_continuation(smollm2_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    decoder = load_decoder(smollm2_path, dtype="float32", progress=lambda *seen: progress.append(seen))
    assert ContiguousCache(decoder).greedy(CAPITAL, 8) == CONTINUATION
    done, total = progress[-1]
    assert done == total > 90e6
    assert progress == sorted(progress)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2_equals_transformers_on_the_same_file(smollm2_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    )
    ours = load_decoder(smollm2_path, dtype="float32")
    prompt = torch.randint(0, 49152, (64,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(prompt[None]).logits[0]
    torch.testing.assert_close(ContiguousCache(ours).feed(prompt.tolist()), expected, atol=2e-3, rtol=1e-3)


def small_gguf(path: Path, arch: str = "llama", **metadata: int) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for name, value in metadata.items():
        writer.add_uint32(name.replace("__", "."), value)
    writer.add_tensor("token_embd.weight", np.ones((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split(path: Path, folder: Path, max_tensors: int) -> list[Path]:
    """The file as the parts that llama.cpp's gguf-split makes of it."""
    reader = gguf.GGUFReader(path)
    field = reader.get_field("general.architecture")
    assert field is not None
    writer = gguf.GGUFWriter(folder / "tiny.gguf", field.contents(), split_max_tensors=max_tensors)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("tiny-*.gguf"))


def test_a_split_file_has_the_weights_of_the_whole_one(tmp_path: Path) -> None:
    whole = save_gguf(tmp_path / "whole.gguf")
    parts = split(whole, tmp_path, max_tensors=8)
    assert [part.name for part in parts] == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    expected = load_decoder(whole, dtype="float32")
    for given in parts:  # any of them stands for the model
        assert read_spec(given) == expected.spec
        assert model_name(str(given)) == "tiny"
        found = load_decoder(given, dtype="float32")
        torch.testing.assert_close(ContiguousCache(found).feed(PROMPT), ContiguousCache(expected).feed(PROMPT))
    assert torch.equal(*(kept(path).matrix("1.gate_up").values for path in (parts[0], whole)))


def test_a_part_alone_says_which_parts_are_missing(tmp_path: Path) -> None:
    parts = split(save_gguf(tmp_path / "whole.gguf"), tmp_path, max_tensors=8)
    parts[1].rename(tmp_path / "second.gguf")
    with pytest.raises(ModelError, match=r"00003-of-00003.gguf is one of 3 parts .* lacks tiny-00002-of-00003.gguf"):
        open_gguf(parts[2])
    with pytest.raises(ModelError, match=r"second.gguf has split.no 1 and split.count 3, and its name says 0 and 1"):
        open_gguf(tmp_path / "second.gguf")
    shutil.copyfile(parts[2], parts[1])
    with pytest.raises(ModelError, match=r"00002-of-00003.gguf has split.no 2 and split.count 3, .*says 1 and 3"):
        open_gguf(parts[0])


def test_a_part_of_another_split_is_refused(tmp_path: Path) -> None:
    for name, layers in (("a", 2), ("b", 3)):
        (tmp_path / name).mkdir()
        split(
            save_gguf(tmp_path / f"{name}.gguf", num_layers=layers),
            tmp_path / name,
            max_tensors=11 if name == "a" else 15,
        )
    last = "tiny-00002-of-00002.gguf"
    shutil.copyfile(tmp_path / "b" / last, tmp_path / "a" / last)
    with pytest.raises(ModelError, match=r"have \d+ of 21 tensors: fetch them again"):
        open_gguf(tmp_path / "a" / last)


@pytest.mark.parametrize("option", ["attention.clamp_kqv", "attention.max_alibi_bias", "use_parallel_residual"])
def test_metadata_of_what_is_not_computed_is_refused(option: str, tmp_path: Path) -> None:
    words = f"{option} is 8: only .* is supported for llama models"
    with pytest.raises(ModelError, match=words):
        read_spec(small_gguf(tmp_path / "other.gguf", **{f"llama.{option}": 8}))
    with pytest.raises(ModelError, match=r"attention.causal is 0: only true is supported"):
        read_spec(small_gguf(tmp_path / "embedding.gguf", **{"llama.attention.causal": 0}))
    with pytest.raises(ModelError, match="lacks the metadata"):  # which is checked later
        read_spec(small_gguf(tmp_path / "same.gguf", **{"llama.attention.causal": 1, f"llama.{option}": 0}))


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    whole = small_gguf(tmp_path / "whole.gguf", llama__block_count=3).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(0, len(whole) - 1, 7):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"truncated|too short for a GGUF file"):
            open_gguf(cut)


def test_random_bytes_are_refused_without_a_crash(tmp_path: Path) -> None:
    whole = bytearray(small_gguf(tmp_path / "whole.gguf", llama__block_count=3).read_bytes())
    rng = np.random.default_rng(0)
    broken = tmp_path / "broken.gguf"
    refused = 0
    for _ in range(300):
        noisy = bytearray(whole)
        for at in rng.integers(0, 200, 3):
            noisy[at] = rng.integers(0, 256)
        broken.write_bytes(noisy)
        try:
            gguf_spec(open_gguf(broken))
        except ModelError:
            refused += 1
    assert refused == 300  # this file lacks metadata, so even undamaged it is refused


def test_other_files_are_refused(tmp_path: Path, smollm2_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>not found</html>" * 9)
    with pytest.raises(ModelError, match=r"does not begin with GGUF"):
        open_gguf(tmp_path / "page.gguf")
    with pytest.raises(ModelError, match=r"nowhere.gguf cannot be read .*check the path"):
        open_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(
        ModelError, match=r"general.architecture is 'mamba'.*supported are llama, smollm3, qwen2, qwen3"
    ):
        read_spec(small_gguf(tmp_path / "mamba.gguf", "mamba"))
    with pytest.raises(ModelError, match=r"lacks the metadata 'llama.attention.head_count'"):
        read_spec(small_gguf(tmp_path / "empty.gguf"))
    with pytest.raises(ModelError, match=r"general.architecture is 'qwen3' and the file has qwen3.expert_count"):
        read_spec(small_gguf(tmp_path / "moe.gguf", "qwen3", qwen3__expert_count=8))
    truncated = tmp_path / "truncated.gguf"
    shutil.copyfile(smollm2_path, truncated)
    with truncated.open("r+b") as file:
        file.truncate(50_000_000)
    with pytest.raises(ModelError, match=r"ends before the data of blk.*truncated, fetch it again"):
        load_decoder(truncated)
