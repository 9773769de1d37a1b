"""The part `mix` of `paceline bench offline`: requests of every kind, and whether a launch was slow meanwhile.

What a process does for the first time delays the requests that run: kernels and libraries are loaded, memory is
allocated, CUDA graphs are captured. Nothing of it may happen in a launch that a request waits for.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from paceline.bench.runner import BenchRunner
from paceline.bench.workloads import OfflineWorkload, structured, sweep
from paceline.engine.timeline import Timeline
from paceline.llm import LLM
from paceline.request import Grammar, SamplingParams

_SIZES = (1, 4, 20, 60, 200, 512)  # requests of a batch with random features
_CYCLE = 8  # batches, of which one has long prompts, one long contexts and one the most requests
_LONG_PROMPTS, _LARGEST, _LONG_CONTEXTS = 1, 3, 5  # their places in the cycle
_JSON = Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 64})

Change = Callable[[OfflineWorkload], OfflineWorkload]


def mix(runner: BenchRunner, llm: LLM) -> dict[str, object]:
    """Runs batches of random sizes, lengths and features for `mix_seconds`, in an engine that has run nothing yet."""
    rng, until = random.Random(1), time.perf_counter() + runner.config.mix_seconds
    number, longest = 0, 0.0
    for at in itertools.count():
        work = _batch(runner, llm, rng, at % _CYCLE)
        with traced(llm) as timeline:
            llm.generate(work.prompts, work.params)
            llm.embed([prompt[:1024] for prompt in work.prompts[:8]])
        longest = max(longest, longest_launch(timeline))
        number += len(work.prompts)
        if time.perf_counter() > until:
            break
    slow = dict(llm.engine.executor.slow_launches)
    return {"mix_requests": number, "mix_launch_ms": round(longest * 1e3, 1), "slow_launches": slow}


def mix_line(found: Mapping[str, Any]) -> str:
    slow = ", ".join(f"{count} {cause}" for cause, count in found["slow_launches"].items()) or "none"
    return (
        f"mix of all features: {found['mix_requests']} requests, longest launch {found['mix_launch_ms']:.1f} ms; "
        f"launches of more than 50 ms that a request waited for: {slow}"
    )


def features(llm: LLM) -> dict[str, Change]:
    """Every feature of sampling, and what else a request can ask for."""
    numbers = itertools.count()

    def with_params(**changes: Any) -> Change:
        return lambda work: work._replace(params=[replace(each, **changes) for each in work.params])

    found: dict[str, Change] = {
        "top-k, top-p": with_params(top_k=50, top_p=0.9),
        "min-p": with_params(min_p=0.05),
        "penalties": with_params(repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.3),
        "bias": with_params(logit_bias={5: 1.0, 7: -1.0}),
        "logprobs": with_params(logprobs=5),
        "prompt logprobs": with_params(prompt_logprobs=5),
        "everything at once": with_params(top_p=0.9, presence_penalty=0.3, logprobs=5, prompt_logprobs=1),
        "n = 4": with_params(n=4),
        "embeddings": lambda work: work._replace(pooling="mean"),
    }
    if llm.engine.executor.capabilities.logits:
        found["grammar"] = lambda work: structured(len(work.prompts), 32, 7000 + next(numbers))
    return found


def _batch(runner: BenchRunner, llm: LLM, rng: random.Random, place: int) -> OfflineWorkload:
    """Requests that are submitted at once. place: in the cycle."""
    if place == _LONG_PROMPTS:  # 24 prompts beside short ones, which are first and decode meanwhile
        return _join(_random(runner, llm, rng, 20), _long(runner, llm, rng, 24, 16_000, 16))
    if place == _LONG_CONTEXTS:
        return _long(runner, llm, rng, 16, 24_000, 128)
    return _random(runner, llm, rng, max(_SIZES) if place == _LARGEST else rng.choice(_SIZES))


def _random(runner: BenchRunner, llm: LLM, rng: random.Random, count: int) -> OfflineWorkload:
    changes = [change for name, change in features(llm).items() if name not in ("embeddings", "grammar")]
    prompts, params = [], []
    for _ in range(count):
        one = rng.choice(changes)(runner.fitted(sweep(1, rng.randint(1, 64), rng.randrange(10_000))))
        prompts.append(one.prompts[0] * rng.choice((1, 1, 2, 8)))
        is_json = llm.engine.executor.capabilities.logits and rng.random() < 0.1
        params.append(replace(one.params[0], ignore_eos=False, grammar=_JSON) if is_json else one.params[0])
    return OfflineWorkload(prompts, params)


def _long(runner: BenchRunner, llm: LLM, rng: random.Random, count: int, length: int, output: int) -> OfflineWorkload:
    """Prompts of so many tokens, or as many as the model's context holds."""
    length = min(length, llm.engine.scheduler.config.context_tokens - output)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output)
    prompts = [[rng.randrange(10_000) for _ in range(length)] for _ in range(count)]
    return runner.fitted(OfflineWorkload(prompts, [params] * count))


def _join(*works: OfflineWorkload) -> OfflineWorkload:
    return OfflineWorkload(
        [one for work in works for one in work.prompts], [one for work in works for one in work.params]
    )


@contextmanager
def traced(llm: LLM) -> Iterator[Timeline]:
    """A timeline of what runs inside."""
    timeline = Timeline()
    llm.engine.call(lambda _: setattr(llm.engine.loop, "trace", timeline)).result()
    yield timeline
    llm.engine.call(lambda _: setattr(llm.engine.loop, "trace", None)).result()


def longest_launch(timeline: Timeline) -> float:
    """In seconds, of all launches, also of those that no request waited for."""
    return max((span.ended - span.began for span in timeline.spans if span.what == "launch"), default=0.0)
