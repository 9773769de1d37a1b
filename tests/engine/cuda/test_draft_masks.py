"""Drafts of rows with a grammar, on the GPU's kernels in Triton's interpreter: the tokens of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from paceline.engine.cuda.graphs import GraphStage
from paceline.engine.output import EngineFailed
from paceline.llm import RequestOutput
from paceline.request import Grammar, SamplingParams
from tests.engine.cuda.interpreted import (
    GREEDY,
    IN_BOUNDS,
    INTERPRETED,
    RNG,
    decoder,
    on_kernels,
    record_graphs,
    retract_often,
)
from tests.helpers import Logprob

pytestmark = [*INTERPRETED, IN_BOUNDS]

TEXT = RNG.integers(3, 512, 7).tolist()
PROMPTS = [TEXT * 2, [5] * 10, RNG.integers(3, 512, 6).tolist(), TEXT + TEXT[:4]]
# Text that repeats itself; the drafts behind its last repetition are forbidden.
MASKED = replace(GREEDY, max_tokens=14, ignore_eos=False, grammar=Grammar.regex("(ab){6}c{1,3}"))
OTHER = replace(MASKED, grammar=Grammar.choice(["xyxyxyxyxyxyxyxyxyxy", "xyxyxyxyxyxyq"]))
FREE = replace(GREEDY, max_tokens=6, logit_bias={7: 14.0, 9: 14.0})
MIXED = [MASKED, FREE, OTHER, MASKED]


def run(params: list[SamplingParams], drafts: int, *, disturb: bool = False, **options: Any) -> list[RequestOutput]:
    llm, _ = on_kernels("tiny-qwen3", draft_tokens=drafts, **options)
    if disturb:
        retract_often(llm)
    with llm:
        return llm.generate(PROMPTS[: len(params)], params)


def facts(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (choice.token_ids, choice.finish_reason, [Logprob(one.logprob) for one in choice.logprobs or ()])
        for output in outputs
        for choice in output.choices
    ]


# Every row has other parameters.
CHANGED = [
    replace(MASKED, logprobs=0, frequency_penalty=0.3),
    replace(FREE, temperature=0.8, seed=3, logprobs=2),
    replace(OTHER, temperature=0.9, seed=4, top_p=0.9, repetition_penalty=1.2, min_tokens=6),
    replace(MASKED, temperature=0.8, seed=3, logprobs=2),
]


@cache
def plain(changed: bool) -> list[Any]:
    return facts(run(CHANGED if changed else MIXED, 0))


@pytest.mark.parametrize(
    ("changed", "options"),
    [(False, {"overlap": "off"}), (True, {}), (True, {"num_pages": 32, "disturb": True})],
    ids=str,
)
def test_tokens_are_those_of_plain_decoding(changed: bool, options: dict[str, Any]) -> None:
    drafted = run(CHANGED if changed else MIXED, 7, **options)
    assert facts(drafted) == plain(changed)
    accepted = [output.num_accepted_tokens for output in drafted]
    assert all(accepted[row] for row in (0, 2)), f"accepted drafts: {accepted}"


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_forbidden_draft_is_rejected(overlap: str) -> None:
    """The text repeats itself, and the grammar ends the repetition."""
    (output,) = run([MASKED], 7, overlap=overlap)
    assert output.text.startswith("abababababab" + "c") and output.finish_reason == "stop"
    assert output.num_drafted_tokens > output.num_accepted_tokens > 0


def test_a_pass_with_masks_has_three_stages() -> None:
    llm, device = on_kernels("tiny-qwen3", draft_tokens=7)
    keys = record_graphs(device)
    with llm:
        llm.generate(PROMPTS[:2], [MASKED, FREE])
        llm.engine.call(lambda _: list(iter(device.run_background_work, False))).result()
    stages = {key.stage for key in keys if key.drafts}
    assert stages >= {GraphStage.DRAFTS, GraphStage.LOGITS, GraphStage.TOKENS}
    found = {(key.stage, key.drafts > 0) for _, key in device.graphs._graphs}
    assert {(stage, True) for stage in stages} <= found, "all of them are captured"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_ends_its_request_and_leaves_nothing_to_others() -> None:
    """A grammar forces a token whose embedding is NaN, so the logits of every later pass are NaN."""
    llm, _ = on_kernels("tiny-qwen3", model=decoder("tiny-qwen3"), draft_tokens=7, num_pages=32)
    with llm:
        expected = llm.generate([[5] * 10], MASKED)[0].token_ids
    model = decoder("tiny-qwen3")
    model.embedding = model.embedding.clone()
    model.embedding[llm.tokenizer.encode("!", add_special=False)[0]] = torch.nan
    llm, _ = on_kernels("tiny-qwen3", model=model, draft_tokens=7, num_pages=32)
    with llm:
        for _ in range(2):
            with pytest.raises(EngineFailed, match="logits contain NaN"):
                llm.generate([[8] * 10], replace(MASKED, grammar=Grammar.regex("(!a){6}")))
            assert llm.generate([[5] * 10], MASKED)[0].token_ids == expected
