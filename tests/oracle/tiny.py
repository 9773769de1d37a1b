"""Tiny random models of every family, in transformers and here, and the greedy outputs of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from paceline.config import EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.cpu.linear import arrange
from paceline.llm import LLM, RequestOutput
from paceline.model.decoder import Decoder
from paceline.model.weights import load_decoder
from paceline.request import SamplingParams
from paceline.text.synthetic import synthetic_tokenizer
from tests.helpers import retract_often
from tests.lazy import Lazy

transformers = Lazy("transformers")

VOCAB = 300
NUM_TOKENS = 10
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
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
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "smollm": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 20,
            "query_pre_attn_scalar": 9,
            "sliding_window": 7,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "pad_token_id": 0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 9,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 70_000.0, "factor": 3.0},
            },
            "pad_token_id": 0,
        },
    ),
    "phi3": (
        "Phi3",
        {
            "hidden_size": 64,
            "sliding_window": 50,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.2, 1.5, 2.0, 2.0, 3.0],
                "long_factor": [2.0] * 6,
                "attention_factor": 1.2,
                "original_max_position_embeddings": 256,
            },
            "original_max_position_embeddings": 256,
            "pad_token_id": 0,
        },
    ),
    "olmo2": ("Olmo2", {"pad_token_id": 0}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.7,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 20, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "olmoe": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3, "pad_token_id": 0}),
    "gpt-oss": ("GptOss", {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 9}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 9}),
}


def _prompts() -> list[list[int]]:
    """From one token to several pages; four prompts share a prefix that is long enough to be read once."""
    random = torch.Generator().manual_seed(7)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=random).tolist()

    shared = ids(67)
    return [ids(1), ids(9), shared + ids(5), shared + ids(5), ids(33), shared[:66] + ids(3), shared + ids(11)]


PROMPTS = _prompts()
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Pair:
    theirs: Any
    reference: Decoder
    ours: Decoder  # the same weights, as the engine runs them
    expected: list[list[int]]  # greedy tokens of PROMPTS


@cache
def pair(family: str) -> Pair:
    prefix, options = FAMILIES[family]
    torch.manual_seed(3)
    # Only the eager attention of transformers has soft caps.
    config = getattr(transformers, "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    theirs = getattr(transformers, f"{prefix}ForCausalLM")(
        config(**{**SIZES, **options}, attn_implementation="eager")
    ).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # Norms are initialised to 1 and biases to 0, where a missing one would change nothing.
            if name.endswith(("norm.weight", "bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    folder = Path(mkdtemp(prefix="paceline-oracle-"))
    theirs.save_pretrained(folder)
    reference, ours = load_decoder(folder, dtype="float32"), arrange(load_decoder(folder, dtype="float32"))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    expected = [
        theirs.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    return Pair(theirs, reference, ours, expected)


def make_llm(decoder: Decoder, *, overlap: str = "on", trace: Any = None, **options: Any) -> LLM:
    options = {"num_pages": 4096 // options.get("page_size", 16), "prefix_wait_tokens": 8, **options}
    config = EngineConfig(overlap=overlap, threads=1)
    return LLM.from_engine(assemble(decoder, synthetic_tokenizer(VOCAB), config, options, trace=trace))


def greedy(family: str, *, retract_every: int | None = None, **options: Any) -> tuple[list[RequestOutput], Any]:
    """Runs all prompts at once through the engine and compares with transformers. Returns outputs and counters."""
    both = pair(family)
    with make_llm(both.ours, **options) as llm:
        if retract_every is not None:
            retract_often(llm.engine.scheduler, retract_every)
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == both.expected
        return outputs, llm.engine.scheduler.counters
