"""Sampling of the CUDA executor, in the interpreter: seeds, filters, penalties, masks and logprobs as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.cuda.graphs import GraphStage
from paceline.kernels._triton import cdiv
from paceline.llm import LLM, RequestOutput
from paceline.request import Grammar, Request, SamplingParams
from paceline.sampling.types import Masks
from paceline.scheduler import Scheduler
from paceline.scheduler.plan import Plan
from paceline.text.synthetic import synthetic_tokenizer
from tests.engine.cuda.interpreted import (
    BASE,
    GREEDY,
    IN_BOUNDS,
    INTERPRETED,
    PROMPTS,
    RNG,
    decoder,
    expected,
    on_kernels,
    record_graphs,
    retract_often,
)

pytestmark = [*INTERPRETED, IN_BOUNDS]

EVERYTHING = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, repetition_penalty=1.7, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, frequency_penalty=2.0, presence_penalty=1.0),
    SamplingParams(
        temperature=0,
        max_tokens=4,
        ignore_eos=True,
        logit_bias={9: 4.0, 11: 4.5},
        frequency_penalty=1.5,
        bad_words=("a", "b c"),
        logprobs=0,
        logprob_token_ids=(5, 6, 7),
    ),
    SamplingParams(temperature=0, max_tokens=5, grammar=Grammar.regex("[a-d]{2}( [x-z]+)?"), repetition_penalty=1.3),
]
WITH_LOGPROBS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=20),
    SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=1, seed=1, max_tokens=4, ignore_eos=True, logprobs=1, logit_bias={9: 20.0}),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0),
]


def test_sampling_applies_seeds_filters_and_min_tokens() -> None:
    ends = expected("tiny-qwen3", PROMPTS[3:], GREEDY)[0][0]
    params = [
        SamplingParams(max_tokens=3, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=3, seed=2, top_k=1, ignore_eos=True),  # that is greedy
        SamplingParams(max_tokens=3, seed=-3, top_p=0.5, temperature=0.7, ignore_eos=True),
        SamplingParams(max_tokens=4, temperature=0, min_tokens=3, stop_token_ids=(ends,), ignore_eos=True),
    ]
    llm, _ = on_kernels("tiny-qwen3", max_running=4)
    with llm:
        together = [output.token_ids for output in llm.generate(PROMPTS, params)]
        alone = llm.generate(PROMPTS[2], params[2])[0].token_ids
    assert together[2] == alone
    assert together[1] == expected("tiny-qwen3", PROMPTS[1:2], GREEDY)[0][:3]
    assert ends not in together[3][:2] and len(together[3]) >= 3


class Close(float):
    """A logprob: equal to another that differs by rounding only."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 2e-3

    __hash__ = None  # type: ignore[assignment]


def compared(outputs: list[RequestOutput]) -> list[Any]:
    def close(logprobs: Any) -> Any:
        return logprobs and [
            one and (one.token_id, Close(one.logprob), [(token, Close(value)) for token, value in one.top])
            for one in logprobs
        ]

    return [(one.token_ids, one.finish_reason, close(one.logprobs), close(one.prompt_logprobs)) for one in outputs]


def on_the_cpu(params: list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
    reference = decoder("tiny-qwen3")
    config = EngineConfig(device="cpu", threads=1, overlap="off")
    with LLM.from_engine(assemble(reference, synthetic_tokenizer(reference.spec.vocab_size), config, BASE)) as llm:
        return llm.generate(prompts, params)


@pytest.mark.parametrize("by_graph", [False, True])
def test_penalties_biases_logprobs_and_grammars_match_the_cpu(by_graph: bool, prefill_graphs: dict[str, Any]) -> None:
    llm, device = on_kernels("tiny-qwen3", **(prefill_graphs if by_graph else {}))
    with llm:
        assert compared(llm.generate(PROMPTS, EVERYTHING)) == compared(on_the_cpu(EVERYTHING))
        assert device.stats.graphs > 2
        # The next request of such a slot has no options.
        few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        assert llm.generate(PROMPTS[3:], few)[0].token_ids == expected("tiny-qwen3", PROMPTS[3:], few)[0]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_passes_with_masks_sample_in_a_second_graph(overlap: str) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=6, grammar=Grammar.regex("([a-d]{2} )+")),
        SamplingParams(temperature=0.7, top_k=1, max_tokens=4, seed=1, grammar=Grammar.regex("[0-9]{9}")),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, frequency_penalty=1.5),
        SamplingParams(temperature=0, max_tokens=3, grammar=Grammar.choice(["yes", "no"])),
    ]
    llm, device = on_kernels("tiny-qwen3", overlap=overlap)
    chosen = record_graphs(device)
    with llm:
        assert compared(llm.generate(PROMPTS, params)) == compared(on_the_cpu(params))
    sampled = {(key.filters, key.adjusts) for key in chosen if key.stage is GraphStage.TOKENS}
    assert {(True, True), (False, False)} <= sampled, "with and without filters and adjustments"


def test_masks_are_not_written_while_the_previous_pass_reads_its_own() -> None:
    llm, device = on_kernels("tiny-qwen3")
    with llm:
        request = Request("a", np.arange(3, 8), SamplingParams(max_tokens=9))
        scheduler = Scheduler(SchedulerConfig(**BASE))
        scheduler.add(request, 0.0)

        def launch() -> Any:
            plan = scheduler.plan(0.0)
            assert plan is not None
            return device.launch_delayed(plan)

        words = cdiv(device.model.spec.vocab_size, 32)
        first = launch()
        bits = first.mask_buffer(1, words)
        bits[:] = -1
        first.sample(Masks(np.array([0]), bits))
        second = launch()
        with pytest.raises(AssertionError, match="may still read"):
            second.mask_buffer(1, words)
        first.wait()
        assert second.mask_buffer(1, words).shape == (1, words)
        with pytest.raises(AssertionError, match="must be written into host_bits"):
            second.sample(Masks(np.array([0]), np.zeros((1, words), np.int32)))


def test_a_plan_is_uploaded_while_the_previous_pass_waits_for_its_masks() -> None:
    def tokens(*, ahead: bool) -> list[int]:
        llm, device = on_kernels("tiny-qwen3")
        with llm:
            request = Request("a", np.arange(3, 8), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
            scheduler = Scheduler(SchedulerConfig(**BASE))
            scheduler.add(request, 0.0)
            words = cdiv(device.model.spec.vocab_size, 32)
            found: list[int] = []
            before: tuple[Plan, Any] | None = None

            def take(plan: Plan, pending: Any) -> None:
                result = pending.wait()
                scheduler.commit(plan, result.tokens, 0.0, 0.0)
                found.extend(result.tokens.tolist())

            plan = scheduler.plan(0.0)
            while plan is not None:
                pending = device.launch_delayed(plan)
                if before is not None:
                    take(*before)
                bits = pending.mask_buffer(1, words)
                bits[:] = 1 << (3 * len(found))  # few tokens, others each time
                following = scheduler.plan(0.0)
                if following is not None and ahead:
                    device.prepare(following)
                pending.sample(Masks(np.array([0]), bits))
                plan, before = following, (plan, pending)
            assert before is not None
            take(*before)
            return found

    found = tokens(ahead=True)
    assert found == tokens(ahead=False) and len(set(found)) == 5


def test_a_prepared_plan_must_be_launched_next() -> None:
    llm, device = on_kernels("tiny-qwen3")
    with llm:
        scheduler = Scheduler(SchedulerConfig(**BASE))
        scheduler.add(Request("a", np.arange(3, 8), SamplingParams(max_tokens=9)), 0.0)
        first, second = scheduler.plan(0.0), scheduler.plan(0.0)
        assert first is not None and second is not None
        device.prepare(first)
        with pytest.raises(AssertionError, match="another plan was prepared"):
            device.launch(second)
        with pytest.raises(AssertionError, match="prepared and not launched"):
            device.prepare(second)


def logprob_ids(output: RequestOutput) -> list[list[int]]:
    return [[one.token_id, *(token for token, _ in one.top)] for one in output.logprobs or ()]


def logprob_values(output: RequestOutput) -> list[float]:
    return [value for one in output.logprobs or () for value in (one.logprob, *(value for _, value in one.top))]


@pytest.mark.parametrize("case", ["with adjustments", "with masks", "without adjustments"])
def test_graphs_compute_logprobs(case: str) -> None:
    """Rows with 20, 1 and no alternatives, and one without logprobs; a row with 5 joins when that one has ended."""
    params = [*WITH_LOGPROBS, replace(WITH_LOGPROBS[0], logprobs=5, max_tokens=2, logprob_token_ids=(3, 500))]
    if case == "with masks":
        params[3] = replace(params[3], ignore_eos=False, grammar=Grammar.regex("[a-d]{9}"), logprobs=5)
    if case == "without adjustments":
        params[2] = replace(params[2], logit_bias=())
    prompts = [*PROMPTS, PROMPTS[1]]
    llm, device = on_kernels("tiny-qwen3")
    ran = record_graphs(device)
    with llm:
        outputs = llm.generate(prompts, params)
        for ours, cpus in zip(outputs, on_the_cpu(params, prompts), strict=True):
            assert (ours.token_ids, ours.finish_reason) == (cpus.token_ids, cpus.finish_reason)
            assert logprob_ids(ours) == logprob_ids(cpus)
            np.testing.assert_allclose(logprob_values(ours), logprob_values(cpus), atol=1e-3)
        with_logprobs = [key for key in ran if key.logprobs]
        # Later requests without logprobs use graphs without them.
        del ran[:]
        llm.generate(PROMPTS[:2], GREEDY)
        assert ran and not any(key.logprobs for key in ran)
    stage = GraphStage.TOKENS if case == "with masks" else GraphStage.ALL
    assert {(case != "without adjustments", stage)} <= {(key.adjusts, key.stage) for key in with_logprobs}
    biased = outputs[2].logprobs
    assert biased is not None and outputs[1].logprobs is None
    if case == "without adjustments":
        assert biased[0].token_id == biased[0].top[0][0] and biased[0].logprob == biased[0].top[0][1]
    else:
        assert biased[-1].token_id == 9 != biased[-1].top[0][0], "logprobs are the model's own, without the bias"


def test_prompt_logprobs_from_a_start_position_match_the_cpus_of_the_whole_prompt(
    prefill_graphs: dict[str, Any],
) -> None:
    """In chunks, after a cached prefix and after retractions; a start in a later chunk, and at the last token."""
    prompt, starts = RNG.integers(3, 512, 22).tolist(), (6, 21)
    once = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    (reference,) = on_the_cpu([once], [prompt])
    llm, _ = on_kernels("tiny-qwen3", chunk_tokens=8, overlap="off", **prefill_graphs)
    with llm:
        llm.generate([prompt], replace(once, prompt_logprobs=None))
        retract_often(llm)
        outputs = llm.generate([prompt] * 2, [replace(once, prompt_logprobs_start=start) for start in starts])
        assert llm.engine.scheduler.counters.retractions > 1
    assert [output.num_cached_tokens for output in outputs] == [4, 20]
    whole = compared([reference])[0][3]
    for start, (tokens, _, _, found) in zip(starts, compared(outputs), strict=True):
        assert tokens == reference.token_ids and found == [*[None] * start, *whole[start:]]


def test_prompt_logprobs_of_a_batch_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In few launches: libraries would load a kernel for every new number of rows."""
    params = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=count) for count in (0, 3, 1)]
    llm, device = on_kernels("tiny-qwen3")
    launched: list[int] = []
    launch = device.prompt_logprobs.launch
    monkeypatch.setattr(device.prompt_logprobs, "launch", lambda rows: (launched.append(rows), launch(rows)))
    with llm:
        found = llm.generate(PROMPTS[:3], params)
        assert compared(found) == compared(on_the_cpu(params, PROMPTS[:3]))
    most = device.prompt_logprobs.max_rows
    assert sum(launched) >= sum(len(prompt) - 1 for prompt in PROMPTS[:3]) and len(launched) == launched.count(most)


def test_retracted_requests_keep_their_penalties_and_grammars() -> None:
    llm, _ = on_kernels("tiny-qwen3", overlap="off")
    retract_often(llm)
    with llm:
        assert compared(llm.generate(PROMPTS, EVERYTHING)) == compared(on_the_cpu(EVERYTHING))
        assert llm.engine.scheduler.counters.retractions > 2
