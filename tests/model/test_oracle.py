"""Every family against transformers: a tiny random model that transformers saved is loaded here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contiguous_cache import ContiguousCache
from safetensors.torch import load_file, save_file

from paceline.model.config_json import spec_from_config
from paceline.model.decoder import Decoder, MixtureOfExperts
from paceline.model.layout import target_shapes
from paceline.model.shapes import SHAPES, shape
from paceline.model.weights import load_decoder, shard_weights
from paceline.parallel.threads import ThreadGroup
from tests.fused import fused_tensors
from tests.lazy import Lazy

transformers = Lazy("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # large enough that every part of the model changes the logits
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
GEMMA = {"head_dim": 20, "pad_token_id": 0, "num_hidden_layers": 4, "query_pre_attn_scalar": 9}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 70_000.0, "factor": 3.0},
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.7,
}


def longrope(original: int, head_dim: int, partial: float, attention_factor: float | None) -> dict[str, Any]:
    pairs = int(head_dim * partial) // 2
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": partial,
        "short_factor": [1.0 + 0.2 * pair for pair in range(pairs)],
        "long_factor": [2.0 + 0.7 * pair for pair in range(pairs)],
        "attention_factor": attention_factor,
        "original_max_position_embeddings": original,
    }
    return {"rope_parameters": parameters, "original_max_position_embeddings": original}


EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
# name: (transformers' prefix, options on top of SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama without grouped heads": ("Llama", {"num_key_value_heads": 4}),
    "llama one KV head": ("Llama", {"num_key_value_heads": 1}),
    "llama wide heads": ("Llama", {"head_dim": 20}),
    "llama all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama large eps": ("Llama", {"rms_norm_eps": 0.1}),
    "llama theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "llama3 scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}},
    ),
    "llama yarn scaling": ("Llama", {"rope_parameters": YARN}),
    "llama yarn with its own attention factor": (
        "Llama",
        {"rope_parameters": {**YARN, "attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "llama yarn with mscale": (
        "Llama",
        {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.5, "truncate": False}},
    ),
    "llama dynamic scaling within its context": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "mistral full attention": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral sliding window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 sliding window in upper layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2 window written but off": ("Qwen2", {"use_sliding_window": False, "sliding_window": 5}),
    "qwen2 yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 tied and wide": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 biases": ("Qwen3", {"head_dim": 12, "attention_bias": True}),
    "smollm3 without rope in some layers": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "smollm3 every second layer": ("SmolLM3", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3 window": (
        "SmolLM3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6, "pad_token_id": 0},
    ),
    "gemma": ("Gemma", {"head_dim": 20, "pad_token_id": 0}),
    "gemma2": ("Gemma2", {**GEMMA, "sliding_window": 6, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2 without caps": (
        "Gemma2",
        {**GEMMA, "sliding_window": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3", {**GEMMA, "sliding_window": 6, "rope_parameters": GEMMA3_ROPES}),
    "gemma3 with windows of the whole context": (
        "Gemma3",
        {**GEMMA, "sliding_window": 600, "tie_word_embeddings": False, "rope_parameters": GEMMA3_ROPES},
    ),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3 window": ("Phi3", {"pad_token_id": 0, "sliding_window": 7, "num_key_value_heads": 4}),
    "phi4-mini: longrope, partial rotary, its short factors": (
        "Phi3",
        {"pad_token_id": 0, "hidden_size": 64, "tie_word_embeddings": True, **longrope(512, 16, 0.75, 1.3)},
    ),
    "phi3 longrope with its long factors": ("Phi3", {"pad_token_id": 0, **longrope(8, 12, 1.0, None)}),
    "olmo2": ("Olmo2", {"pad_token_id": 0}),
    "olmo2 wide, one KV head, biases": (
        "Olmo2",
        {"pad_token_id": 0, "num_key_value_heads": 1, "head_dim": 20, "attention_bias": True},
    ),
    "granite": ("Granite", {**GRANITE, "tie_word_embeddings": True}),
    "granite biases": ("Granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe some dense layers, fused names": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3-moe all experts, window": (
        "Qwen3Moe",
        {**EXPERTS, "num_experts_per_tok": 7, "use_sliding_window": True, "sliding_window": 6},
    ),
    "qwen2-moe with a shared expert": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen2-moe fused names": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "olmoe": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3, "pad_token_id": 0, "attention_bias": True}),
    "mixtral one expert, fused names": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1}),
}
GPT_OSS = {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 6}
CASES |= {
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss with tight limits and layers of its own": (
        "GptOss",
        {
            **GPT_OSS,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "swiglu_limit": 0.3,
            "swiglu_alpha": 1.2,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}
PROMPT = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(7)).tolist()


def make_model(prefix: str, options: dict[str, Any]) -> Any:
    """A random model of transformers. Only its eager attention has soft caps."""
    name = "Gemma3Text" if prefix == "Gemma3" else prefix
    config = getattr(transformers, f"{name}Config")(**options, attn_implementation="eager")
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()


def make_pair(folder: Path, prefix: str, options: dict[str, Any], **saving: Any) -> tuple[Any, Decoder]:
    """A random model of transformers, and ours loaded from the folder it was saved to."""
    torch.manual_seed(3)
    theirs = make_model(prefix, {**SIZES, **options})
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # transformers initialises norms to 1 and biases to 0, where a missing one would change nothing.
            if name.endswith(("norm.weight", "bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    theirs.save_pretrained(folder, **saving)
    return theirs, load_decoder(folder, dtype="float32")


@pytest.mark.parametrize("case", CASES)
def test_family_equals_transformers(case: str, tmp_path: Path) -> None:
    saving = {"save_original_format": False} if "fused names" in case else {}
    theirs, ours = make_pair(tmp_path, *CASES[case], **saving)
    assert ours.spec.num_parameters == sum(one.numel() for one in theirs.parameters())

    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    found = ContiguousCache(ours).feed(PROMPT)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    continuation = theirs.generate(
        torch.tensor([PROMPT[:9]]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 9:].tolist()
    assert ContiguousCache(ours).greedy(PROMPT[:9], 20) == continuation


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_multimodal_checkpoint_is_used(prefix: str, tmp_path: Path) -> None:
    _, ours = make_pair(tmp_path, *CASES["gemma3"])
    config = json.loads((tmp_path / "config.json").read_text())
    defaults = transformers.Gemma3TextConfig().to_dict()
    text = {key: value for key, value in config.items() if defaults.get(key) != value and key != "architectures"}
    # In the old form, which released checkpoints have: scaling is that of global layers.
    del text["rope_parameters"]
    text |= {
        "rope_theta": 70_000.0,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [2, 3]}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    (tmp_path / "generation_config.json").unlink()
    weights = {
        f"{prefix}{name.removeprefix('model.')}": value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    save_file({**weights, "vision_tower.patch.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    multimodal = load_decoder(tmp_path, dtype="float32")
    assert multimodal.spec == replace(ours.spec, eos_ids=(2, 3))
    torch.testing.assert_close(ContiguousCache(multimodal).feed(PROMPT), ContiguousCache(ours).feed(PROMPT))


@pytest.mark.parametrize("case", ["phi4-mini: longrope, partial rotary, its short factors", "olmo2", "granite biases"])
def test_ranks_read_their_part_of_what_is_fused_rearranged_or_scaled(case: str, tmp_path: Path) -> None:
    _, whole = make_pair(tmp_path, *CASES[case])
    for group in ThreadGroup.of_size(2):
        found = fused_tensors(load_decoder(tmp_path, dtype="float32", group=group))
        expected = shard_weights(whole.spec, fused_tensors(whole), group.shard)
        assert found.keys() == expected.keys()
        for name in ("1.qkv", "1.out", "1.qk_norm", "1.out_bias", "1.gate_up", "1.down"):
            assert name not in expected or torch.equal(found[name], expected[name]), name


def test_longrope_uses_the_long_factors_where_a_longer_context_is_served(tmp_path: Path) -> None:
    theirs, whole = make_pair(tmp_path, "Phi3", {"pad_token_id": 0, **longrope(64, 12, 1.0, None)})
    short = load_decoder(tmp_path, dtype="float32", max_positions=64)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]  # within 64 tokens: short factors
        expected_long = theirs(torch.tensor([PROMPT * 2])).logits[0]
    torch.testing.assert_close(ContiguousCache(short).feed(PROMPT), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ContiguousCache(whole).feed(PROMPT * 2), expected_long, atol=1e-4, rtol=1e-4)
    assert (ContiguousCache(whole).feed(PROMPT) - expected).abs().max() > 0.1


@pytest.mark.parametrize("case", ["llama", "mistral sliding window", "qwen3", "qwen2-moe with a shared expert"])
def test_chunks_of_any_size_give_the_same_logits(case: str, tmp_path: Path) -> None:
    _, ours = make_pair(tmp_path, *CASES[case])
    whole = ContiguousCache(ours).feed(PROMPT)
    for size in (1, 3, 16):
        cache = ContiguousCache(ours)
        pieces = [cache.feed(PROMPT[at : at + size]) for at in range(0, len(PROMPT), size)]
        torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-4, rtol=1e-4)


def test_sharded_folder_equals_single_file(tmp_path: Path) -> None:
    _, single = make_pair(tmp_path / "single", "Llama", {})
    _, sharded = make_pair(tmp_path / "sharded", "Llama", {}, max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    torch.testing.assert_close(
        ContiguousCache(sharded).feed(PROMPT), ContiguousCache(single).feed(PROMPT), atol=0, rtol=0
    )


@pytest.mark.parametrize("is_fused", [False, True])
def test_ranks_read_their_columns_of_every_expert(is_fused: bool, tmp_path: Path) -> None:
    _, whole = make_pair(
        tmp_path, *CASES["qwen2-moe with a shared expert"], **({"save_original_format": False} if is_fused else {})
    )
    parts = [load_decoder(tmp_path, group=group).layers[1].mlp for group in ThreadGroup.of_size(2)]
    mlp, x = whole.layers[1].mlp, torch.randn(9, 48, generator=torch.Generator().manual_seed(1))
    assert isinstance(mlp, MixtureOfExperts)
    torch.testing.assert_close(sum(part(x) for part in parts), mlp(x), atol=1e-5, rtol=1e-4)
    widths = [part.expert_down.shape[-1] for part in parts if isinstance(part, MixtureOfExperts)]
    assert sum(widths) == 24 and max(widths) < 24


def test_requests_in_one_ragged_batch_do_not_see_each_other(tmp_path: Path) -> None:
    _, ours = make_pair(tmp_path, *CASES["qwen3"])
    requests = [PROMPT[:5], PROMPT[10:11], PROMPT[20:37]]
    caches = [ContiguousCache(ours) for _ in requests]
    sizes = [len(request) for request in requests]

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        parts = zip(*(torch.split(tensor, sizes) for tensor in (q, k, v)), strict=True)
        return torch.cat([cache.attend(layer, *part, sinks) for cache, part in zip(caches, parts, strict=True)])

    # 32-bit ids, as device tables hold them.
    tokens = torch.tensor([token for request in requests for token in request], dtype=torch.int32)
    positions = torch.cat([torch.arange(size, dtype=torch.int32) for size in sizes])
    found = torch.split(ours.logits(ours.forward(tokens, positions, attend)), sizes)
    for request, logits in zip(requests, found, strict=True):
        torch.testing.assert_close(logits, ContiguousCache(ours).feed(request), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("tiny-")])
def test_forward_pass_never_reads_a_value_on_the_host(name: str) -> None:
    # Tensors on the meta device have no values: what a CUDA graph cannot capture fails here too.
    spec = shape(name)
    weights = {name: torch.empty(size, device="meta") for name, size in target_shapes(spec).items()}
    ids = torch.empty(7, dtype=torch.int32, device="meta")
    decoder = Decoder(spec, weights)
    hidden = decoder.forward(ids, ids, lambda layer, q, k, v, sinks: q.reshape(7, -1))
    assert hidden.shape == (7, spec.hidden_size)
    assert decoder.logits(hidden[:2]).shape == (2, spec.vocab_size)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 uses BLAS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama all biases", "qwen2", "qwen3", "mistral sliding window", "gemma3", "olmo2"])
def test_sixteen_bits_stay_near_float32(case: str, dtype: str, tmp_path: Path) -> None:
    prefix, options = CASES[case]
    _, exact = make_pair(tmp_path, prefix, {**options, "initializer_range": 0.1})
    rounded = load_decoder(tmp_path, dtype=dtype)
    found = ContiguousCache(rounded).feed(PROMPT)
    assert str(found.dtype) == f"torch.{dtype}"
    expected = ContiguousCache(exact).feed(PROMPT)
    error = (found.float() - expected).abs().max() / expected.std()
    assert error < (0.25 if dtype == "bfloat16" else 0.05)


@pytest.mark.parametrize(
    ("prefix", "options"),
    [
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("Qwen3", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}),
        ("SmolLM3", {}),
        ("SmolLM3", {"no_rope_layer_interval": 2}),
        ("SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6}),
        ("Mistral", {}),
        ("Mistral", {"max_position_embeddings": 8192}),
        ("Mistral", {"sliding_window": None}),
        ("Phi3", {"pad_token_id": 0, "sliding_window": 7}),
        ("Gemma2", {"max_position_embeddings": 8192}),
        ("Granite", {"sliding_window": None}),
        ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
        ("Qwen2Moe", {**EXPERTS, "use_sliding_window": False, "sliding_window": 6}),
        ("Qwen3Moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 6}),
        ("GptOss", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    ],
)
def test_short_configs_are_completed_as_in_transformers(prefix: str, options: Any) -> None:
    # A config saved by transformers contains values that older ones leave to be derived.
    raw = {**SIZES, "num_hidden_layers": 9, **options}
    theirs = getattr(transformers, f"{prefix}Config")(**raw)
    spec = spec_from_config({**raw, "architectures": [f"{prefix}ForCausalLM"]})
    mixers = [layer.mixer for layer in spec.layers]
    assert [one.rope is not None for one in mixers] == [bool(one) for one in getattr(theirs, "no_rope_layers", [1] * 9)]
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 9
    sizes = [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    context = raw["max_position_embeddings"]
    assert [one.window for one in mixers] == [None if size is None or size >= context else size for size in sizes]
    assert {one.rope.theta for one in mixers if one.rope} == {theirs.rope_parameters["rope_theta"]}
    assert spec.tied == theirs.tie_word_embeddings
    assert spec.rms_eps == theirs.rms_norm_eps
