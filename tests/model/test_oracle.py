"""Every family against transformers: a tiny random model that transformers saved is loaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contiguous_cache import ContiguousCache

from paceline.model.decoder import Decoder
from paceline.model.layout import target_shapes
from paceline.model.registry import SHAPES, shape, spec_from_config
from paceline.model.weights import load_decoder
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
}
PROMPT = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(7)).tolist()


def make_pair(folder: Path, prefix: str, options: dict[str, Any], **saving: Any) -> tuple[Any, Decoder]:
    """A random model of transformers, and ours loaded from the folder it was saved to."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **options})
    theirs = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # transformers initialises norms to 1 and biases to 0, where a missing one would change nothing.
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    theirs.save_pretrained(folder, **saving)
    return theirs, load_decoder(folder, dtype="float32")


@pytest.mark.parametrize("case", CASES)
def test_family_equals_transformers(case: str, tmp_path: Path) -> None:
    theirs, ours = make_pair(tmp_path, *CASES[case])

    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    found = ContiguousCache(ours).feed(PROMPT)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    continuation = theirs.generate(
        torch.tensor([PROMPT[:9]]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 9:].tolist()
    assert ContiguousCache(ours).greedy(PROMPT[:9], 20) == continuation


@pytest.mark.parametrize("case", ["llama", "mistral sliding window", "qwen3"])
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


def test_requests_in_one_ragged_batch_do_not_see_each_other(tmp_path: Path) -> None:
    _, ours = make_pair(tmp_path, *CASES["qwen3"])
    requests = [PROMPT[:5], PROMPT[10:11], PROMPT[20:37]]
    caches = [ContiguousCache(ours) for _ in requests]
    sizes = [len(request) for request in requests]

    def attend(layer: int, *rows: torch.Tensor) -> torch.Tensor:
        parts = zip(*(torch.split(tensor, sizes) for tensor in rows), strict=True)
        return torch.cat([cache.attend(layer, *part) for cache, part in zip(caches, parts, strict=True)])

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
    hidden = decoder.forward(ids, ids, lambda layer, q, k, v: q.reshape(7, -1))
    assert hidden.shape == (7, spec.hidden_size)
    assert decoder.logits(hidden[:2]).shape == (2, spec.vocab_size)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 uses BLAS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama all biases", "qwen2", "qwen3", "mistral sliding window"])
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
        ("Mistral", {"sliding_window": None}),
    ],
)
def test_short_configs_are_completed_as_in_transformers(prefix: str, options: Any) -> None:
    # A config saved by transformers contains values that older ones leave to be derived.
    raw = {**SIZES, "num_hidden_layers": 9, **options}
    theirs = getattr(transformers, f"{prefix}Config")(**raw)
    spec = spec_from_config({**raw, "architectures": [f"{prefix}ForCausalLM"]})
    assert spec.layer_ropes == tuple(0 if listed else None for listed in getattr(theirs, "no_rope_layers", [1] * 9))
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 9
    sizes = [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert spec.windows == tuple(sizes)
    assert spec.ropes[0].theta == theirs.rope_parameters["rope_theta"]
    assert spec.tied == theirs.tie_word_embeddings
    assert spec.rms_eps == theirs.rms_norm_eps
