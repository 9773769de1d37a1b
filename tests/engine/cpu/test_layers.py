"""A model whose layers differ in attention heads, windows, rotary positions and FFNs, in whole engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.checks.harness import logits_after
from paceline.engine.cpu.quantized_model import QuantizedModel
from paceline.model.decoder import Decoder
from paceline.model.layers import Activation, Dense, Experts, LayerSpec, RopeSpec
from paceline.model.shapes import shape
from paceline.model.spec import ModelError, ModelSpec
from paceline.model.weights import random_weights, shard_weights
from paceline.parallel.threads import ThreadGroup
from paceline.request import SamplingParams
from tests.parallel.ranks import llm_of

RNG = np.random.default_rng(11)
BEGINNING = RNG.integers(3, 500, 24).tolist()
PROMPTS = [[*BEGINNING[: 8 * (number % 4)], *RNG.integers(3, 500, 5 + 4 * number).tolist()] for number in range(8)]


def mixed_layers() -> ModelSpec:
    spec = shape("tiny-llama")
    mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn
    gelu = Dense(size=72, activation=Activation(kind="gelu_tanh"), bias=True)
    return replace(spec, layers=(
        LayerSpec(mixer=mixer, ffn=Experts(count=5, per_token=2, size=24)),
        LayerSpec(mixer=replace(mixer, window=7, rope=RopeSpec(theta=300.0)), ffn=ffn),
        LayerSpec(mixer=replace(mixer, num_heads=4, num_kv_heads=2, head_dim=24, rope=None), ffn=gelu, norms="both"),
        LayerSpec(mixer=replace(mixer, num_kv_heads=6, head_dim=8, window=5, scale=0.5, qk_norm="heads"), ffn=ffn),
    ))  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_engine_generates_the_tokens_of_the_reference(num_ranks: int) -> None:
    """With chunks of prompts, prefix hits, and pages that are spilled to host memory and fetched."""
    spec = mixed_layers()
    weights = random_weights(spec, seed=2, dtype="float32")
    reference = Decoder(spec, weights)
    groups = [None] if num_ranks == 1 else ThreadGroup.of_size(num_ranks)
    decoders = [
        Decoder(spec, dict(weights) if one is None else shard_weights(spec, weights, one.shard), group=one)
        for one in groups
    ]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    options = {"num_pages": 18, "page_size": 4, "chunk_tokens": 8, "num_host_pages": 60, "max_running": 4}
    with llm_of(decoders, **options) as llm:
        found = [output.token_ids for output in llm.generate(PROMPTS * 2, params)]
        counters = llm.engine.scheduler.counters
        assert counters.spilled_pages > 0 and counters.fetched_tokens > 0
    for prompt, output in zip(PROMPTS * 2, found, strict=True):
        assert logits_after(reference, prompt, output).argmax(-1).tolist() == output


def test_quantized_kernels_refuse_layers_that_differ_in_heads() -> None:
    mixer = shape("tiny-llama").layers[0].mixer
    spec = replace(shape("tiny-llama"), layers=(
        LayerSpec(mixer=mixer, ffn=Dense(size=64)),
        LayerSpec(mixer=replace(mixer, num_kv_heads=3), ffn=Dense(size=64)),
    ))  # fmt: skip
    with pytest.raises(ModelError, match=r"Attention\.num_kv_heads is 2 in some layers and 3 in others, which"):
        QuantizedModel(None, spec, {}, pytest.fail)  # type: ignore[arg-type]
