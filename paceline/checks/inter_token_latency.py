"""Inter-token latency of running requests while long prompts arrive."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paceline.checks.harness import CheckResult, CheckSetup, TimedSink, greedy, wait_for
from paceline.config import ConfigError
from paceline.engine.job import Job
from paceline.engine.timeline import Timeline


class _Latencies(NamedTuple):
    """Inter-token latencies of running requests before, after and while long prompts arrive."""

    before: list[float]
    after: list[float]
    busy: list[float]
    first_token_s: float  # mean TTFT of a long prompt
    prompt_tokens: float  # mean number of prompt tokens of a mixed batch
    pass_s: float  # mean time of a mixed batch
    quiet_pass_s: float  # mean time of a decode batch
    settings: str  # the options that decide it

    def quiet(self, percent: float) -> float:
        """The mean of before and after, since contexts grow during the test."""
        return (_p(self.before, percent) + _p(self.after, percent)) / 2

    @property
    def ratio(self) -> float:
        return _p(self.busy, 99) / self.quiet(99)

    def __str__(self) -> str:
        p99, p50 = (
            f"{_p(self.before, percent) * 1e3:.2f}, {_p(self.busy, percent) * 1e3:.2f}, "
            f"{_p(self.after, percent) * 1e3:.2f}"
            for percent in (99, 50)
        )
        return (
            f"{self.settings}: ITL p99 before, during and after {p99} ms ({self.ratio:.2f}x), median {p50}; a mixed "
            f"batch has {self.prompt_tokens:.0f} prompt tokens and takes {self.pass_s * 1e3:.2f} ms (decode batch: "
            f"{self.quiet_pass_s * 1e3:.2f}); TTFT of a long prompt {self.first_token_s:.2f} s"
        )


def _p(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def check_inter_token_latency(
    setup: CheckSetup, running: int = 240, *, prompt_tokens: int = 32_000, num_prompts: int = 3, quiet_tokens: int = 300
) -> CheckResult:
    """The p99 ITL of running requests while long prompts arrive, one after the other, is at most twice that without.

    Without is measured half before and half after, since contexts grow meanwhile. The first prompt, for which kernels
    are compiled and loaded, does not count. If the check fails, it runs again with other options, to show which of them
    matters.
    """
    sizes = (running, prompt_tokens, num_prompts, quiet_tokens)
    found = _long(setup, *sizes)
    print(f"long: {found}", flush=True)
    if found.ratio > 2:
        target = round(1.7 * found.quiet(50), 6)
        for change in ({"chunk_tokens": 512}, {"chunk_tokens": 128}, {"itl_target": target}):
            changed = _long(replace(setup, options={**setup.options, **change}), *sizes)
            print(f"long, with other options: {changed}", flush=True)
    return CheckResult(found.ratio <= 2, f"{running} running, {num_prompts} prompts of {prompt_tokens} tokens; {found}")


def _long(setup: CheckSetup, running: int, prompt_tokens: int, num_prompts: int, quiet_tokens: int) -> _Latencies:
    spec, rng = setup.spec(), random.Random(9)

    def prompt(count: int) -> list[int]:
        return [rng.randrange(spec.vocab_size) for _ in range(count)]

    with setup.llm(spec, kv_tokens=600_000) as llm:
        engine, timeline = llm.engine, Timeline()
        shortest = greedy([1])[0]
        engine.call(lambda _: setattr(engine.loop, "trace", timeline)).result()
        # Outputs as long as possible beside the prompts in the KV cache.
        config = engine.scheduler.config
        if running >= config.max_running:
            raise ConfigError(
                f"running is {running} and max_running is {config.max_running}: the prompts need a slot; lower running."
            )
        tokens_per_row = (config.num_pages * config.page_size - 2 * prompt_tokens) // running
        length = min(512, tokens_per_row // 4)
        kept = greedy([min(tokens_per_row, config.context_tokens) - length - config.page_size])[0]
        rows = [TimedSink() for _ in range(running)]
        # Made before the run: meanwhile this thread would hold the GIL for as long as several passes take.
        long_prompts = iter([engine.encode(prompt(prompt_tokens)) for _ in range(1 + num_prompts)])
        names = [engine.submit(Job(engine.encode(prompt(length)), kept), row) for row in rows]
        wait_for(engine, lambda: all(len(row.tokens) > 8 for row in rows))

        def send_prompt() -> float:
            sink, sent = TimedSink(), time.perf_counter()
            engine.submit(Job(next(long_prompts), shortest), sink)
            wait_for(engine, sink.ended.is_set)
            if sink.refused is not None:
                raise sink.refused
            return sink.times[0] - sent

        def wait_quietly() -> tuple[float, float]:
            began, target = time.perf_counter(), max(len(row.tokens) for row in rows) + quiet_tokens // 2
            wait_for(engine, lambda: all(len(row.tokens) >= target or row.last is not None for row in rows))
            assert all(row.last is None for row in rows), "running requests finished too early: raise kv_tokens"
            return began, time.perf_counter()

        send_prompt()
        quiet = [wait_quietly()]
        firsts = [send_prompt() for _ in range(num_prompts)]
        quiet.append(wait_quietly())
        for name in names:
            engine.abort(name)
        for row in rows:
            row.ended.wait()
    between, after = quiet[0][1], quiet[1][0]
    busy = [one for one in timeline.passes if one.num_prompts and between < one.waited < after]
    assert busy, "no batch had prompt tokens: raise max_running"
    decodes = [one for one in timeline.passes if not one.num_prompts]
    alone = [one for one in decodes for began, ended in quiet if began < one.waited < ended]
    return _Latencies(
        before=[gap for row in rows for gap in row.between(*quiet[0])],
        after=[gap for row in rows for gap in row.between(*quiet[1])],
        busy=[gap for row in rows for gap in row.between(between, after)],
        first_token_s=sum(firsts) / len(firsts),
        prompt_tokens=_mean(one.num_tokens - one.num_decodes for one in busy),
        pass_s=_mean(one.device_s for one in busy),
        quiet_pass_s=_mean(one.device_s for one in alone),
        settings=f"chunk_tokens {config.chunk_tokens}, max_batch_tokens {config.max_batch_tokens}, "
        f"itl_target {config.itl_target}",
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / max(len(listed), 1)
