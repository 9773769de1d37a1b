"""Quantized models on the CPU give the logits of the reference decoder with the same weights and rounding, and the same
bits whatever else is in a batch. Both with and without tiles, which compute the tokens of prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import FAMILIES, NUM_TOKENS, PROMPTS, make_llm, pair

from paceline.engine.cpu.inputs import SlotTables
from paceline.engine.cpu.kv_cache import KVCache
from paceline.engine.cpu.native import NativeLibrary, native_library, round_inputs
from paceline.engine.cpu.quantized_model import QuantizedModel, attention_for
from paceline.llm import RequestOutput
from paceline.model.decoder import Attend, Decoder
from paceline.model.layers import Activation, Dense, RopeSpec
from paceline.model.layout import is_matrix, target_shapes
from paceline.model.lora import ADAPTED_MATRICES, LoraRows, LoraWeights, LowRank
from paceline.model.quantized import QuantizedTensor, quantize
from paceline.model.shapes import shape, vary
from paceline.model.spec import ModelSpec
from paceline.model.weights import random_weights
from paceline.request import SamplingParams
from tests.fused import fused_tensors
from tests.helpers import clang_library, library_with_tiles, needs_compiler, portable_library, retract_often

Turn = Callable[[np.ndarray], np.ndarray]

pytestmark = needs_compiler

DENSE = [family for family, (_, options) in FAMILIES.items() if not any("expert" in name for name in options)]
WITH_LOGPROBS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
OPTIONS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"chunk_tokens": 3},
    "pages of 1": {"page_size": 1},
    "pages of 3": {"page_size": 3, "chunk_tokens": 7},
    "no prefix cache": {"prefix_cache": False},
    "retracted": {"retract_every": 1},
    "little memory": {"num_pages": -(-(len(PROMPTS[-1]) + NUM_TOKENS + 30) // 16)},
    "host tier": {"num_pages": 12, "num_host_pages": 64},
    "no overlap": {"overlap": "off"},
    "drafts": {"draft_tokens": 4, "max_running": 4},
}


def weights_of(family: str) -> dict[str, torch.Tensor]:
    return fused_tensors(pair(family).reference)


def quantized(
    spec: ModelSpec, weights: dict[str, torch.Tensor], bits: int, library: NativeLibrary | None = None
) -> tuple[QuantizedModel, Decoder]:
    """The model, and the reference decoder with its weights."""
    matrices: dict[str, QuantizedTensor] = {
        name: quantize(weight, bits) for name, weight in weights.items() if is_matrix(name)
    }
    vectors = {name: weight.contiguous() for name, weight in weights.items() if not is_matrix(name)}
    model = QuantizedModel(library or native_library(), spec, vectors, matrices.__getitem__)
    return model, Decoder(spec, vectors | {name: one.dequantize() for name, one in matrices.items()})


def compare(
    model: QuantizedModel,
    reference: Decoder,
    adapter: LoraWeights | None = None,
    *,
    factor: int = 1,
    turn: Turn = lambda positions: positions,
) -> None:
    """The logits of generated tokens, and those of prompts if tiles compute them. A sum in another order may round an
    input, a key or a value the other way, and change all that follows a little. The reference does not round the
    weights of attention."""
    linear = F.linear

    def with_halves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        is_head = len(weight) == reference.spec.vocab_size  # it is computed for generated tokens, as they are
        return linear(round_inputs(x), weight, bias) if is_head else linear(*halves(x, weight), bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", lambda x, weight, bias=None: linear(round_inputs(x), weight, bias))
        expected = logits_in_chunks(reference, adapter, factor, turn=turn)
        patch.setattr(F, "linear", with_halves)
        expected_of_prompts = logits_in_chunks(reference, adapter, factor, turn=turn, are_prompts=True)
    difference, spread = (logits_in_chunks(model, adapter, factor, turn=turn) - expected).abs(), float(expected.std())
    assert float(difference.mean()) < 7e-4 * spread
    assert float(difference.max()) < 3e-2 * spread
    if model._library.has_tiles:
        difference = (logits_in_chunks(model, adapter, factor, turn=turn, are_prompts=True) - expected_of_prompts).abs()
        assert float(difference.mean()) < 0.015 * spread
        assert float(difference.max()) < 0.25 * spread


def halves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.bfloat16().float() for tensor in tensors]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", DENSE)
def test_every_family_gives_the_logits_of_the_reference(family: str, bits: int) -> None:
    compare(*quantized(pair(family).reference.spec, weights_of(family), bits, library_with_tiles()))


@pytest.mark.parametrize("family", ["qwen2", "smollm"])
def test_clang_gives_the_bits_of_the_other_compiler(family: str) -> None:
    spec, weights = pair(family).reference.spec, weights_of(family)
    pairs = [
        (native_library(), clang_library()),
        (portable_library(16, 0, 0, 1), portable_library(16, 0, 0, 1, "clang")),
    ]
    for are_prompts in (False, True):
        for libraries in pairs:
            found = [quantized(spec, weights, 4, library)[0] for library in libraries]
            expected, other = (logits_in_chunks(model, are_prompts=are_prompts) for model in found)
            assert torch.equal(other, expected)


@cache
def alone(family: str, tiles: bool) -> tuple[QuantizedModel, list[RequestOutput]]:
    """A model, and its outputs for one prompt after the other, each computed in one pass."""
    library = library_with_tiles() if tiles else native_library()
    model, _ = quantized(pair(family).reference.spec, weights_of(family), 4, library)
    with make_llm(model, max_running=1, prefix_cache=False, overlap="off") as llm:
        return model, llm.generate(PROMPTS, WITH_LOGPROBS)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", ["qwen2", "smollm"])  # full and windowed layers, biases; one KV head
@pytest.mark.parametrize("tiles", [False, True], ids=["this CPU", "tiles"])
def test_scheduling_changes_no_bit(family: str, tiles: bool, options: dict[str, Any]) -> None:
    options = dict(options)
    retract_every = options.pop("retract_every", None)
    model, expected = alone(family, tiles)
    with make_llm(model, **options) as llm:
        if retract_every is not None:
            retract_often(llm.engine.scheduler, retract_every)
        found = llm.generate(PROMPTS, WITH_LOGPROBS)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.logprobs for output in found] == [output.logprobs for output in expected]


@pytest.mark.parametrize(
    "options",
    [
        {"norms": "post", "qk_norm": "whole"},
        {"score_cap": 2.0, "embedding_scale": 3.0, "logit_scale": 0.5, "rotary_dim": 12, "qk_norm": "heads"},
        {"norms": "both", "ffn": Dense(size=96, activation=Activation(kind="gelu_tanh")), "logit_cap": 5.0},
        {"out_bias": True, "ffn": Dense(size=96, bias=True), "qkv_bias": True, "scale": 0.2},
        {"windows": (5, None), "ropes": (None, RopeSpec()), "tied": True},
        {"head_dim": 64, "num_heads": 16, "num_kv_heads": 1},
        {"head_dim": 36},
        {"head_dim": 128},
    ],
    ids=str,
)
def test_every_option_of_a_spec_gives_the_logits_of_the_reference(options: dict[str, Any]) -> None:
    model, reference = random_model(options)
    compare(model, reference)
    adapter = random_adapter(model.spec)
    compare(model, reference, adapter)
    assert (logits_in_chunks(model, adapter)[1:] - logits_in_chunks(model)[1:]).abs().max() > 0.1


def test_windows_in_a_context_of_several_chunks() -> None:
    compare(*random_model({"windows": (70, None)}), factor=4)


def test_rotation_positions_are_apart_from_cache_positions() -> None:
    """Also in windows, which are counted in the cache: two tokens that are rotated alike are two tokens."""
    model, reference = random_model({"windows": (20, None)})
    turn: Turn = lambda positions: positions * 7 % 50 + 100  # noqa: E731
    compare(model, reference, turn=turn)
    as_text = logits_in_chunks(model)
    assert (logits_in_chunks(model, turn=turn) - as_text).abs().max() > 0.1
    moved = logits_in_chunks(model, turn=lambda positions: positions + 100)
    assert (moved - as_text).abs().mean() < 0.015 * as_text.std(), "but for rounding only differences matter"


def random_model(options: dict[str, Any]) -> tuple[QuantizedModel, Decoder]:
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "ffn": Dense(size=96), "vocab_size": 120}
    spec = vary(shape("tiny-llama"), context_tokens=256, rope=RopeSpec(), **{**sizes, **options})
    weights = random_weights(spec, seed=4, dtype="float32")
    if spec.tied:
        weights["head"] = weights["embedding"]
    return quantized(spec, weights, 8, library_with_tiles())


def with_halves_in(attend: Attend, spec: ModelSpec, *, are_prompts: bool) -> Attend:
    """Keys and values are kept in bfloat16; tiles take queries in bfloat16, too."""
    scale = spec.layers[0].mixer.softmax_scale

    def rounded(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        if are_prompts:
            q = halves(q * scale)[0] / scale
        return attend(layer, q, *halves(k, v), sinks)

    return rounded


def random_adapter(spec: ModelSpec) -> LoraWeights:
    """Of all matrices, in two parts of different ranks each."""
    generator = torch.Generator().manual_seed(6)
    shapes = target_shapes(spec)

    def parts(rows: int, columns: int) -> tuple[LowRank, ...]:
        return tuple(
            LowRank(
                first,
                torch.randn(rank, columns, generator=generator) * columns**-0.5,
                torch.randn(rows // 2, rank, generator=generator) * 0.2,
            )
            for first, rank in ((0, 3), (rows // 2, 20))
        )

    return LoraWeights(
        tuple(
            {name: parts(*shapes[f"{layer}.{name}"]) for name in ADAPTED_MATRICES} for layer in range(spec.num_layers)
        )
    )


def logits_in_chunks(
    model: Any,
    adapter: LoraWeights | None = None,
    factor: int = 1,
    *,
    turn: Turn = lambda positions: positions,
    are_prompts: bool = False,
) -> torch.Tensor:
    """Of two rows: one computed in three chunks beside the other, on pages in no order. The first has the adapter.
    factor: of all lengths. turn: what tokens are rotated by, of their positions."""
    num_tokens, num_pages = 60 * factor, 40 * factor
    tables = SlotTables(2, 64 * factor, 4)
    tables.tokens[:, :num_tokens] = torch.randint(
        0, 120, (2, num_tokens), generator=torch.Generator().manual_seed(2)
    ).numpy()
    tables.pages[:] = np.random.default_rng(3).permutation(num_pages)[: tables.pages.size].reshape(tables.pages.shape)
    tables.prompts[:] = num_tokens * are_prompts
    attention = attention_for(model, KVCache(model.spec, num_pages, 4, model.kv_dtype))
    parts = []
    for row_starts, row_lengths in (([0, 0], [13, 1]), ([13, 1], [33, 58]), ([46, 59], [1, 1]), ([47], [12])):
        starts, lengths = np.array(row_starts) * factor, np.array(row_lengths) * factor
        inputs = tables.row_inputs(np.arange(len(starts)), starts, lengths)
        lora = None
        if adapter is not None:
            lora = LoraRows([(torch.arange(int(lengths[0])), model.prepare_adapter(adapter))])
        attend = attention.begin(inputs)
        if isinstance(model, Decoder):
            attend = with_halves_in(attend, model.spec, are_prompts=are_prompts)
        rotated_by = torch.from_numpy(turn(inputs.rope_positions))
        hidden = model.forward(torch.from_numpy(inputs.tokens), rotated_by, attend, lora)
        parts.append(model.logits(hidden))
    return torch.cat(parts)
