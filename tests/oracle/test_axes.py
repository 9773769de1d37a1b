"""Greedy tokens equal those of transformers, for every family and every setting of the engine."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from tiny import FAMILIES, GREEDY, NUM_TOKENS, PROMPTS, VOCAB, greedy, make_llm, pair

from paceline.config import BATCHING, OVERLAP, POLICIES
from paceline.request import SamplingParams
from tests.helpers import retract_often

AXES: dict[str, tuple[Any, ...]] = {
    "chunk_tokens": (1, 3, 512),
    "page_size": (1, 3, 64),
    "policy": tuple(POLICIES),
    "batching": tuple(BATCHING),
    "overlap": OVERLAP,
    "prefix_cache": (True, False),
    "max_running": (1, 3, 64),
    "retract_every": (None, 1, 3),
    "pool": ("ample", "tight"),
}
# Values of the axes that change what a family computes. All pairs of values with one family cover the others.
EACH: tuple[dict[str, Any], ...] = (
    {"chunk_tokens": 7, "page_size": 64, "max_running": 3},
    {"chunk_tokens": 3, "page_size": 1, "prefix_cache": False, "retract_every": 1},
    {"chunk_tokens": 512, "page_size": 3, "retract_every": 3},
)
every_family = pytest.mark.parametrize("family", FAMILIES)


def run(family: str, **options: Any) -> Any:
    if options.pop("pool", "ample") == "tight":
        # Memory for the largest request and little more: others are retracted, or wait.
        options["num_pages"] = -(-(len(PROMPTS[-1]) + NUM_TOKENS + 30) // options.get("page_size", 16))
    return greedy(family, **options)


@every_family
@pytest.mark.parametrize("setting", EACH, ids=lambda setting: "-".join(map(str, setting.values())))
def test_settings_give_every_family_the_same_tokens(family: str, setting: dict[str, Any]) -> None:
    run(family, **setting)


def all_pairs() -> list[dict[str, Any]]:
    """A small number of settings in which any two values of any two axes occur together."""
    rng, names = random.Random(0), list(AXES)
    open_pairs = {(a, va, b, vb) for a, b in itertools.combinations(names, 2) for va in AXES[a] for vb in AXES[b]}
    settings = []
    while open_pairs:
        a, va, b, vb = min(open_pairs, key=repr)
        best: tuple[int, dict[str, Any]] = (-1, {})
        for _ in range(20):
            setting = {name: rng.choice(AXES[name]) for name in names} | {a: va, b: vb}
            best = max(best, (len(open_pairs & _pairs(setting)), setting), key=lambda item: item[0])
        settings.append(best[1])
        open_pairs -= _pairs(best[1])
    return settings


def _pairs(setting: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
    return {(a, setting[a], b, setting[b]) for a, b in itertools.combinations(AXES, 2)}


@pytest.mark.parametrize("setting", all_pairs(), ids=lambda setting: "-".join(map(str, setting.values())))
def test_all_pairs_of_settings_give_the_same_tokens(setting: dict[str, Any]) -> None:
    run("qwen2", **setting)  # full and windowed layers in one model


@every_family
def test_each_prompt_alone_gives_the_same_tokens(family: str) -> None:
    both = pair(family)
    with make_llm(both.ours) as llm:
        for prompt, expected in zip(PROMPTS, both.expected, strict=True):
            assert llm.generate([prompt], GREEDY)[0].token_ids == expected


@every_family
def test_prefix_cache_hits_give_the_same_tokens(family: str) -> None:
    both, page_size = pair(family), 5
    with make_llm(both.ours, page_size=page_size) as llm:
        llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in again] == both.expected
    assert [output.num_cached_tokens for output in again] == [
        (len(prompt) - 1) // page_size * page_size for prompt in PROMPTS
    ]


# Full attention, windows, both with two rope tables, and experts. A retraction does not touch what else a family does.
@pytest.mark.parametrize(
    ("family", "overlap"), [("llama", "on"), ("llama", "off"), ("qwen2", "on"), ("gemma3", "on"), ("qwen3-moe", "off")]
)
def test_retraction_at_every_step_gives_the_same_tokens(family: str, overlap: str) -> None:
    both = pair(family)
    num_retracted = 0
    for step in range(NUM_TOKENS + 3):
        with make_llm(both.ours, overlap=overlap, chunk_tokens=40, page_size=3) as llm:
            retract_often(llm.engine.scheduler, every=10**6, first=step)
            outputs = llm.generate(PROMPTS, GREEDY)
            assert [output.token_ids for output in outputs] == both.expected
            num_retracted += llm.engine.scheduler.counters.retractions
    assert num_retracted >= NUM_TOKENS


@pytest.mark.parametrize("overlap", OVERLAP)
def test_a_page_pool_that_is_too_small_retracts_and_gives_the_same_tokens(overlap: str) -> None:
    both = pair("llama")
    unseen = next(token for token in range(VOCAB) if all(token not in tokens for tokens in both.expected))

    def may_stop(token: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=(token,))

    with make_llm(both.ours, overlap=overlap, num_pages=170, page_size=1, prefix_cache=False) as llm:
        # Outputs of one token teach the scheduler to expect more of them, and so to admit too many.
        for _ in range(20):
            llm.generate(PROMPTS[:2] * 4, [may_stop(tokens[0]) for tokens in both.expected[:2] * 4])
        outputs = llm.generate(PROMPTS, may_stop(unseen))
        assert [output.token_ids for output in outputs] == both.expected
        assert llm.engine.scheduler.counters.retractions > 0


@every_family
@pytest.mark.parametrize("options", [{"max_running": 1, "chunk_tokens": 5, "page_size": 3}, {}], ids=["alone", "batch"])
def test_logits_are_close_to_transformers(family: str, options: dict[str, Any]) -> None:
    both = pair(family)
    seen: list[torch.Tensor] = []
    with make_llm(both.ours, **options) as llm:
        device = llm.engine.executor.runner  # type: ignore[attr-defined]
        compute = device.logits
        device.logits = lambda hidden: seen.append(compute(hidden)) or seen[-1]
        outputs = llm.generate(PROMPTS, GREEDY)
    found = torch.cat(seen)
    expected = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            logits = both.theirs(torch.tensor([prompt + output.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        expected.append(logits)
    # Logits reach 10, and float32 sums in another order, as on ARM, differ by 2e-4.
    for row in torch.cat(expected):  # in whatever order they were computed
        assert (found - row).abs().amax(dim=1).min() < 3e-4


@every_family
def test_ends_at_eos_like_transformers(family: str) -> None:
    """The end token is one that greedy decoding generates, so that requests end at different steps."""
    both = pair(family)
    ends = both.expected[4][4]
    expected = [tokens[: tokens.index(ends) + 1] if ends in tokens else tokens for tokens in both.expected]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=(ends,))
    for overlap in OVERLAP:
        with make_llm(both.ours, overlap=overlap) as llm:
            outputs = llm.generate(PROMPTS, params)
            assert [output.token_ids for output in outputs] == expected
            while llm.engine.scheduler.has_work:  # the pass after the last one
                pass
            assert (llm.engine.scheduler.counters.discarded_tokens > 0) == (overlap != "off")


@every_family
def test_the_reference_decoder_gives_the_same_tokens(family: str) -> None:
    both = pair(family)
    with make_llm(both.reference) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == both.expected
