"""Penalties, biases and logprobs of the whole engine equal those of transformers, in every setting."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tiny import NUM_TOKENS, PROMPTS, make_llm, pair

from paceline.llm import LLM, RequestOutput
from paceline.request import InvalidRequest, SamplingParams
from tests.helpers import retract_often
from tests.lazy import Lazy

processors = Lazy("transformers.generation.logits_process")

FAMILY = "qwen2"
SETTINGS = [
    {},
    {"overlap": "off"},
    {"retract_every": 1},
    {"retract_every": 2, "overlap": "off"},
    {"retract_every": 3},
    {"page_size": 3, "chunk_tokens": 5},
    {"chunk_tokens": 7, "retract_every": 2},
    {"max_running": 2, "policy": "lof"},
]
PENALISED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 0.8, "presence_penalty": -1.0},
    {"logit_bias": {7: 8.0, 11: 7.5, 13: -50.0}},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.4, "logit_bias": {20: 5.0, 30: 5.0}},
    {},
    {"frequency_penalty": 2.0, "min_tokens": 8, "stop_token_ids": tuple(range(3, 150))},
]


def params(options: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **options, **more})


@torch.inference_mode()
def logits_after(ids: list[int]) -> torch.Tensor:
    return pair(FAMILY).theirs(torch.tensor([ids])).logits[0].float()


@cache
def expected() -> list[list[int]]:
    """Greedy decoding on the logits of transformers, with its logits processors where it has them."""
    outputs = []
    for prompt, options in zip(PROMPTS, PENALISED, strict=True):
        output: list[int] = []
        for _ in range(NUM_TOKENS):
            logits = logits_after(prompt + output)[-1:]
            penalty = options.get("repetition_penalty", 1.0)
            logits = processors.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits)[0]
            counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=len(logits))
            logits = (
                logits
                - options.get("frequency_penalty", 0) * counts
                - options.get("presence_penalty", 0) * (counts > 0)
            )
            for token, bias in options.get("logit_bias", {}).items():
                logits[token] += bias
            if len(output) + 1 < options.get("min_tokens", 0):
                logits[list(options["stop_token_ids"])] = -torch.inf
            output.append(int(logits.argmax()))
            if output[-1] in options.get("stop_token_ids", ()):
                break
        outputs.append(output)
    return outputs


def run(options: dict[str, Any], prompts: list[list[int]], each: list[SamplingParams]) -> list[RequestOutput]:
    options = dict(options)
    every = options.pop("retract_every", None)
    with make_llm(pair(FAMILY).ours, **options) as llm:
        llm.generate([PROMPTS[2]], params({}))  # fills the prefix cache
        if every is not None:
            retract_often(llm.engine.scheduler, every)
        return llm.generate(prompts, each)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_penalties_equal_transformers_in_every_setting(setting: dict[str, Any]) -> None:
    found = run(setting, PROMPTS, [params(options) for options in PENALISED])
    assert [output.token_ids for output in found] == expected()
    assert any(ours != plain for ours, plain in zip(expected(), pair(FAMILY).expected, strict=True))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_logprobs_are_the_log_softmax_in_every_setting(setting: dict[str, Any]) -> None:
    asks = [
        params(options, logprobs=index * 3, prompt_logprobs=index, logprob_token_ids=(5, 250) if index % 2 else ())
        for index, options in enumerate(PENALISED)
    ]
    for prompt, ask, output in zip(PROMPTS, asks, run(setting, PROMPTS, asks), strict=True):
        ids = prompt + output.token_ids
        # Logprobs are those of the model: penalties and biases do not change them.
        logprobs = logits_after(ids).log_softmax(-1)
        assert output.logprobs is not None and output.prompt_logprobs is not None
        found = [*output.prompt_logprobs, *output.logprobs]
        assert len(output.prompt_logprobs) == len(prompt) and len(output.logprobs) == len(output.token_ids)
        assert found[0] is None
        for position in range(1, len(ids)):
            one, row = found[position], logprobs[position - 1]
            assert one is not None and one.token_id == ids[position]
            assert abs(one.logprob - float(row[ids[position]])) < 1e-4
            is_prompt = position < len(prompt)
            num_top = (ask.prompt_logprobs if is_prompt else ask.logprobs) or 0
            top = row.topk(num_top)
            np.testing.assert_allclose([value for _, value in one.top][:num_top], top.values, atol=1e-4)
            assert {token for token, _ in one.top[:num_top]} == set(top.indices.tolist())
            assert [token for token, _ in one.top[num_top:]] == ([] if is_prompt else list(ask.logprob_token_ids))
            for token, value in one.top[num_top:]:
                assert abs(value - float(row[token])) < 1e-4


def test_a_prompt_can_be_scored_alone() -> None:
    with make_llm(pair(FAMILY).ours) as llm:
        whole = llm.generate([PROMPTS[2]], params({}, prompt_logprobs=0))[0]
        alone = llm.generate([PROMPTS[2]], params({}, prompt_logprobs=0, max_tokens=0))[0]
    assert (alone.token_ids, alone.text, alone.finish_reason.value) == ([], "", "length")
    assert whole.prompt_logprobs is not None and alone.prompt_logprobs is not None
    np.testing.assert_allclose(
        [one.logprob for one in alone.prompt_logprobs if one],
        [one.logprob for one in whole.prompt_logprobs if one],
        atol=1e-5,
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_prompt_logprobs_from_a_start_position_are_those_of_the_whole_prompt(setting: dict[str, Any]) -> None:
    """A start at the first and second token, at both sides of the end of a page, and at the last token."""
    prompt = PROMPTS[2]
    starts = (0, 1, 16, 17, 40, len(prompt) - 1)
    asks = [params({}, prompt_logprobs=2, prompt_logprobs_start=start, max_tokens=3) for start in starts]
    outputs = run(setting, [prompt] * len(starts), asks)  # the prompt is cached
    whole = outputs[0].prompt_logprobs
    assert whole is not None and outputs[0].num_cached_tokens == 0
    for start, output in zip(starts, outputs, strict=True):
        found, first = output.prompt_logprobs, max(start, 1)
        assert found is not None and len(found) == len(prompt) and found[:first] == [None] * first
        for ours, theirs in zip(found[first:], whole[first:], strict=True):
            assert ours is not None and theirs is not None and ours.token_id == theirs.token_id
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
            assert abs(ours.logprob - theirs.logprob) < 1e-4
        # All pages that end before the token whose logits are the first needed.
        page_size = setting.get("page_size", 16)
        assert output.num_cached_tokens == max(start - 1, 0) // page_size * page_size


@pytest.fixture
def llm() -> Any:
    with make_llm(pair(FAMILY).ours) as made:
        yield made


def test_n_choices_share_one_prefill_and_have_their_own_seeds(llm: LLM) -> None:
    hot = params({}, temperature=2.0, seed=11, n=5)
    output = llm.generate([PROMPTS[6]], hot)[0]
    assert len({tuple(choice.token_ids) for choice in output.choices}) == 5
    assert output.choices[0].token_ids == llm.generate([PROMPTS[6]], params({}, temperature=2.0, seed=11))[0].token_ids
    # 78 tokens once; the four others, and the later request, compute the tokens after the last full page.
    assert llm.engine.scheduler.counters.computed_tokens == len(PROMPTS[6]) + 5 * (len(PROMPTS[6]) % 16)


def test_best_of_returns_the_choices_with_the_highest_mean_logprob(llm: LLM) -> None:
    hot = {"temperature": 2.0, "seed": 3}
    every = llm.generate([PROMPTS[1]], params({}, n=6, logprobs=0, **hot))[0].choices
    best = llm.generate([PROMPTS[1]], params({}, n=2, best_of=6, **hot))[0].choices
    ranked = sorted(every, key=lambda choice: -choice.mean_logprob)
    assert [choice.token_ids for choice in best] == [choice.token_ids for choice in ranked[:2]]
    assert best[0].logprobs is None


def test_bad_words_do_not_appear(llm: LLM) -> None:
    hot = {"temperature": 3.0, "max_tokens": 200, "seed": 1}
    text = llm.generate([PROMPTS[1]], params({}, **hot))[0].text
    letters = [letter for letter in "etaoins" if text.count(letter) > 1]
    assert letters
    without = llm.generate([PROMPTS[1]], params({}, bad_words=letters, **hot))[0].token_ids
    banned = {llm.tokenizer.encode(letter)[0] for letter in letters}
    assert not banned & set(without)


def test_a_bias_beyond_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias has token id 300: the model's ids are 0 to 299"):
        llm.generate([PROMPTS[1]], params({}, logit_bias={300: 1}))
