"""A draft model on the CPU: its drafts are right if it is the target model itself; whatever it drafts, the output stays
that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import ConfigError, EngineConfig, SchedulerConfig
from paceline.engine.build import executor, resolution
from paceline.engine.cpu.executor import CpuExecutor
from paceline.engine.cpu.quantized_model import DecoderModel, QuantizedModel
from paceline.engine.draft_model import with_vocabulary
from paceline.llm import LLM, RequestOutput
from paceline.model.decoder import Decoder
from paceline.model.files import UnloadedModel
from paceline.model.shapes import shape
from paceline.model.spec import ModelError
from paceline.model.weights import random_decoder
from paceline.request import Request, SamplingParams
from paceline.scheduler.draft_depth import DraftDepth
from paceline.scheduler.plan import DRAFT_DEPTHS
from tests.helpers import needs_compiler
from tests.tiny_folder import save_tiny_model

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 400, count).tolist() for count in (40, 1, 17, 30)]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=4, max_tokens=20, ignore_eos=True)


class FourDrafts(DraftDepth):
    """Independent of time."""

    def choose(self, requests: Sequence[Request]) -> int:
        return 4


def run(params: SamplingParams, **options: Any) -> tuple[list[RequestOutput], LLM]:
    llm = LLM(load="random", shape="tiny-qwen3", threads=1, kv_tokens=4096, **options)
    if llm.engine.scheduler.draft_depth is not None:
        llm.engine.scheduler.draft_depth = FourDrafts(max(DRAFT_DEPTHS))
    with llm:
        return llm.generate(PROMPTS, params, progress=False), llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_drafts_of_the_same_model_are_accepted(overlap: str) -> None:
    plain, _ = run(SAMPLED, overlap=overlap)
    outputs, llm = run(SAMPLED, overlap=overlap, speculate="draft", draft_model="tiny-qwen3")
    assert tokens(outputs) == tokens(plain)
    counters = llm.engine.scheduler.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 40


@pytest.mark.parametrize("draft", ["tiny-llama", "tiny-mistral", "tiny-qwen2"])
def test_drafts_of_another_model_change_nothing(draft: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=2, presence_penalty=0.5, n=2)
    plain, _ = run(params)
    outputs, llm = run(params, speculate="draft", draft_model=draft, chunk_tokens=7)
    assert tokens(outputs) == tokens(plain)
    counters = llm.engine.scheduler.counters
    assert counters.drafted_tokens > counters.accepted_tokens


def test_the_kv_cache_has_memory_for_both_models() -> None:
    from paceline.engine.kv_sizing import UnitBytes, num_kv_pages

    models = [(shape("tiny-qwen3"), 4), (shape("tiny-llama"), 4)]
    options: dict[str, Any] = {"free": 10_000_000, "default_fraction": 0.5}
    one, both = (
        num_kv_pages(EngineConfig(), UnitBytes.of(16, some), SchedulerConfig(), {}, **options)
        for some in (models[:1], models)
    )
    assert both < one


def test_a_vocabulary_of_another_size_is_cut_or_filled() -> None:
    for name, size in (("tiny-llama", 600), ("tiny-qwen3", 300)):
        decoder = random_decoder(shape(name), seed=0, dtype="float32", device="cpu", max_positions=64)
        before = decoder.embedding.clone()
        decoder = with_vocabulary(decoder, size)
        common = min(size, len(before))
        assert decoder.embedding.shape[0] == decoder.head.tensor.shape[0] == decoder.spec.vocab_size == size
        assert (decoder.embedding[:common] == before[:common]).all() and not decoder.embedding[common:].any()


def run_folder(path: Path, params: SamplingParams, **options: Any) -> tuple[list[RequestOutput], LLM]:
    llm = LLM(str(path), threads=1, kv_tokens=2048, **options)
    if llm.engine.scheduler.draft_depth is not None:
        llm.engine.scheduler.draft_depth = FourDrafts(max(DRAFT_DEPTHS))
    prompts = [[token % 290 for token in prompt] for prompt in PROMPTS]
    with llm:
        return llm.generate(prompts, params, progress=False), llm


@needs_compiler
@pytest.mark.parametrize("params", [SAMPLED, replace(SAMPLED, temperature=0)], ids=["sampled", "greedy"])
def test_drafts_of_a_quantized_model_change_nothing(tmp_path: Path, params: SamplingParams) -> None:
    path = save_tiny_model(tmp_path / "model")
    # Another model, with a vocabulary that is padded to another size.
    other = save_tiny_model(tmp_path / "draft", vocab_size=297, num_tokens=280, seed=1)
    (path / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    plain, _ = run_folder(path, params, quantization="q4")
    for draft, is_same in ((path, True), (other, False)):
        options = {"quantization": "q4", "speculate": "draft", "draft_model": str(draft)}
        outputs, llm = run_folder(path, params, **options)
        assert tokens(outputs) == tokens(plain)
        counters = llm.engine.scheduler.counters
        assert counters.drafted_tokens > 40 and (counters.accepted_tokens == counters.drafted_tokens) is is_same


@needs_compiler
def test_the_precision_of_a_draft_model_follows_from_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of any model: `auto` keeps a quantized file as it is, and only that."""
    path, draft = (save_tiny_model(tmp_path / name, seed=index) for index, name in enumerate(("model", "draft")))
    choose = resolution.choose_weights

    def as_if_quantized(source: UnloadedModel, config: EngineConfig, *rest: Any, **options: Any) -> Any:
        is_draft = source.files is not None and source.files.path == draft
        return choose(source, replace(config, quantization="q8") if is_draft else config, *rest, **options)

    monkeypatch.setattr(resolution, "choose_weights", as_if_quantized)
    found: list[DecoderModel | None] = []
    make = executor.build_cpu

    def record(decoder: DecoderModel, config: EngineConfig, scheduler: SchedulerConfig, draft: Any) -> CpuExecutor:
        found.extend([decoder, draft])
        return make(decoder, config, scheduler, draft)

    monkeypatch.setattr(executor, "build_cpu", record)
    plain, _ = run_folder(path, SAMPLED)
    outputs, _ = run_folder(path, SAMPLED, speculate="draft", draft_model=str(draft))
    assert tokens(outputs) == tokens(plain)
    assert [type(one) for one in found] == [Decoder, type(None), Decoder, QuantizedModel]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "draft"}, "speculate is 'draft' and draft_model is None: name a draft model"),
        ({"draft_model": "tiny-llama"}, "draft_model is 'tiny-llama' and speculate is None"),
        (
            {"speculate": "draft", "draft_model": "a", "executor": "virtual"},
            "executor is 'virtual', which runs no model",
        ),
        ({"speculate": "draft", "draft_model": "qwen3-0.6b"}, "more than the model's"),
        ({"speculate": "draft", "draft_model": "no-such-shape"}, "no-such-shape"),
    ],
)
def test_bad_options_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        LLM(load="random", shape="tiny-qwen3", threads=1, **options)
