"""GGUF files: tiny ones written here, and the real SmolLM2."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from contiguous_cache import ContiguousCache
from test_oracle import PROMPT, make_pair

from paceline.model.gguf import dequantise, gguf_spec
from paceline.model.gguf_file import open_gguf
from paceline.model.read_spec import read_spec
from paceline.model.spec import ModelError
from paceline.model.weights import load_decoder
from tests.lazy import Lazy

transformers = Lazy("transformers")

CAPITAL = [504, 3575, 282, 4649, 314]  # The capital of France is
CONTINUATION = [7042, 30, 198, 198, 504, 2988, 314, 42]

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama family."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write_gguf(path: Path, model: Any, arch: str, extra: dict[str, np.ndarray] | None = None) -> None:
    """Saves a model of transformers as llama.cpp's converter would."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    scaling = config.rope_parameters["rope_type"]
    if scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    if scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.numpy()
        parts = name.split(".")
        if parts[1] == "layers":
            part = GGUF_NAMES[".".join(parts[3:-1])]
            if arch in ("llama", "smollm3") and part in heads:
                value = permute(value, heads[part])
            name = f"blk.{parts[2]}.{part}.{parts[-1]}"
        else:
            name = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(parts[1], "output") + ".weight"
        writer.add_tensor(name, value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


LINEAR = {"rope_type": "linear", "rope_theta": 9000.0, "factor": 2.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 9000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


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
    ],
)
def test_gguf_file_equals_transformers(prefix: str, arch: str, options: Any, tmp_path: Path) -> None:
    theirs, _ = make_pair(tmp_path / "folder", prefix, options)
    write_gguf(tmp_path / "model.gguf", theirs, arch)
    ours = load_decoder(tmp_path / "model.gguf", dtype="float32")
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(ContiguousCache(ours).feed(PROMPT), expected, atol=1e-4, rtol=1e-4)


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
    assert ours.spec.ropes[0].kind == "divisors"
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(ContiguousCache(ours).feed(PROMPT), expected, atol=1e-4, rtol=1e-4)


Q = gguf.GGMLQuantizationType


KINDS = [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_dequantised_values_equal_those_of_the_gguf_package(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    if kind.name.endswith("_K"):
        # The package cannot quantise to these; any bytes are valid blocks, apart from NaN scales.
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
    found = dequantise(file, file.tensors["second"])
    assert found.shape == (6, 512)
    np.testing.assert_array_equal(found.float().numpy(), expected.astype(np.float32))
    assert np.isfinite(expected).all()
    assert expected.std() > 0


def test_smollm2_spec(smollm2_path: Path) -> None:
    spec = read_spec(smollm2_path)
    assert (spec.family, spec.hidden_size, spec.num_layers, spec.ffn_size) == ("llama", 576, 30, 1536)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (9, 3, 64, 49152)
    assert (spec.tied, spec.context_tokens, spec.ropes[0].theta, spec.eos_ids) == (True, 8192, 100_000.0, (2,))
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
    with pytest.raises(ModelError, match=r"llama.expert_count is 8: mixtures of experts"):
        read_spec(small_gguf(tmp_path / "moe.gguf", llama__expert_count=8))
    truncated = tmp_path / "truncated.gguf"
    shutil.copyfile(smollm2_path, truncated)
    with truncated.open("r+b") as file:
        file.truncate(50_000_000)
    with pytest.raises(ModelError, match=r"ends before the data of blk.*truncated, fetch it again"):
        load_decoder(truncated)
