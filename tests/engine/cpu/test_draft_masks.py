"""Drafts of rows with a grammar on the CPU: the tokens of plain decoding, in fewer passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed
from paceline.llm import LLM, RequestOutput
from paceline.model.shapes import shape
from paceline.model.weights import random_decoder
from paceline.request import FinishReason, Grammar, SamplingParams, as_tokens
from paceline.sampling import grammar_source as grammar_module
from paceline.scheduler.plan import DRAFT_DEPTHS
from paceline.text.synthetic import synthetic_tokenizer
from tests.engine.cpu.test_drafts import facts
from tests.helpers import RandomDepth
from tests.sampling.test_grammar import CallingSink

RNG = np.random.default_rng(5)
TEXT = RNG.integers(3, 400, 12).tolist()
PROMPTS = [TEXT * 4, TEXT * 2 + [7, 8], [5] * 30, RNG.integers(3, 400, 20).tolist(), TEXT * 3 + TEXT[:5]]
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"key": {"enum": ["red", "blue"]}}, "required": ["key"],
              "additionalProperties": False},
    "minItems": 2,
    "maxItems": 3,
}  # fmt: skip
PLAIN = SamplingParams(temperature=0, max_tokens=24)
# All of them repeat something, and forbid what would repeat it once more.
MIXED = [
    replace(PLAIN, grammar=Grammar.regex("(ab){7}c{1,3}")),
    replace(PLAIN, ignore_eos=True),
    replace(PLAIN, max_tokens=60, grammar=Grammar.json_schema(SCHEMA)),
    replace(PLAIN, grammar=Grammar.choice(["xyxyxyxyxyxyxyxyxyxy", "xyxyxyxyxyxyq"])),
    replace(PLAIN, grammar=Grammar.lark('start: "say " ("la" | "li")~6')),
]
MASKED = [row for row, params in enumerate(MIXED) if params.grammar is not None]


def run(params: list[SamplingParams], speculate: str, **options: Any) -> tuple[list[RequestOutput], int]:
    with LLM(
        load="random", shape="tiny-qwen3", threads=1, **{"kv_tokens": 4096, "speculate": speculate, **options}
    ) as llm:
        if llm.engine.scheduler.draft_depth is not None:
            llm.engine.scheduler.draft_depth = RandomDepth(max(DRAFT_DEPTHS))
        outputs = llm.generate(PROMPTS[: len(params)], params, progress=False)
        return outputs, llm.engine.scheduler.counters.steps


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({}, {"overlap": "off"}),
        ({"temperature": 0.8, "seed": 3, "logprobs": 2}, {}),
        ({"temperature": 0.9, "seed": 4, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.2}, {"overlap": "off"}),
        ({"frequency_penalty": 0.3, "presence_penalty": 0.2, "logprobs": 0}, {"chunk_tokens": 8}),
        ({"min_tokens": 20, "stop_token_ids": (9, 10)}, {}),  # EOS is drafted where nothing else is allowed
        ({"n": 2, "temperature": 0.8, "seed": 9}, {"max_running": 3}),
        ({}, {"kv_tokens": 256, "context_tokens": 200}),  # retractions
        ({"max_tokens": 7}, {"page_size": 1}),
    ],
    ids=str,
)
def test_tokens_are_those_of_plain_decoding(changes: dict[str, Any], options: dict[str, Any]) -> None:
    params = [replace(one, **changes) for one in MIXED]
    (plain, num_plain), (drafted, num_drafted) = run(params, "off", **options), run(params, "ngram", **options)
    assert facts(drafted) == facts(plain)
    if not changes or "n" in changes:
        assert facts(run(params, "auto", **options)[0]) == facts(plain), "with a random depth in each pass"
    accepted = sum(drafted[row].num_accepted_tokens for row in MASKED)
    if "max_tokens" not in changes:
        assert accepted > 10 and num_drafted < num_plain


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_forbidden_draft_is_rejected(overlap: str) -> None:
    """The text repeats itself until the grammar ends that."""
    (output,), _ = run(MIXED[:1], "ngram", overlap=overlap)
    assert output.text.startswith("ab" * 7 + "c") and output.choices[0].finish_reason is FinishReason.STOP
    assert output.num_drafted_tokens > output.num_accepted_tokens > 0


def test_auto_drafts_what_a_grammar_repeats() -> None:
    with LLM(load="random", shape="tiny-qwen3", threads=1, kv_tokens=4096, speculate="auto") as llm:
        depth = llm.engine.scheduler.draft_depth
        assert depth is not None
        observe = depth.observe_pass
        depth.observe_pass = (  # type: ignore[method-assign]  # the machine may be busy
            lambda plan, requests, num, _, model: observe(plan, requests, num, 0.01, model)
        )
        params = SamplingParams(temperature=0, max_tokens=100, grammar=Grammar.regex("(abcd ){60}"))
        (output,) = llm.generate([[5, 6]], params, progress=False)
        assert output.num_accepted_tokens > 40


def test_a_grammar_that_fails_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pass that computes the token behind which it fails without drafts."""
    monkeypatch.setattr(grammar_module, "_LIMITS", {**grammar_module._LIMITS, "step_max_items": 50})
    found = []
    for speculate in ("off", "ngram"):
        with LLM(load="random", shape="tiny-qwen3", threads=1, kv_tokens=4096, speculate=speculate) as llm:
            repeated = llm.tokenizer.encode("b", add_special=False)[0]
            grammar = Grammar.lark('start: "a" many\nmany: many many | "b"')  # its cost grows
            costly = replace(PLAIN, grammar=grammar, logit_bias={repeated: 50.0})
            jobs = [Job(as_tokens(PROMPTS[row]), params) for row, params in enumerate((MIXED[0], costly, MIXED[2]))]
            sinks = [CallingSink(lambda: None) for _ in jobs]
            llm.engine.submit_all(jobs, sinks)
            assert all(sink.ended.wait(60) for sink in sinks)
            found.append([(sink.tokens, sink.last.finish_reason, sink.last.error) for sink in sinks])
    (before, plain, after), (_, drafted, _) = found
    assert found[1] == [before, drafted, after] and "cost limit" in plain[2]
    assert drafted[1:] == plain[1:] and drafted[0][: len(plain[0])] == plain[0]
    assert len(drafted[0]) < len(plain[0]) + 8, "the rest of the pass in which it failed"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_ends_its_own_request() -> None:
    """A token whose embedding is NaN, behind which the logits of every pass are NaN."""
    model = random_decoder(shape("tiny-qwen3"), dtype="float32", device="cpu", max_positions=200)
    tokenizer = synthetic_tokenizer(model.spec.vocab_size)
    bad = tokenizer.encode("q", add_special=False)[0]
    model.embedding = model.embedding.clone()
    model.embedding[bad] = torch.nan
    engine = assemble(model, tokenizer, EngineConfig(device="cpu", threads=1), {"draft_tokens": 7, "num_pages": 128})
    with LLM.from_engine(engine) as llm:
        nan = replace(PLAIN, grammar=Grammar.regex("q{30}"), logit_bias={bad: 50.0})
        with pytest.raises(EngineFailed, match="logits contain NaN"):
            llm.generate(PROMPTS[2:3], nan, progress=False)
        (output,) = llm.generate(PROMPTS[2:3], MIXED[0], progress=False)
        assert output.text.startswith("ab" * 7 + "c")
