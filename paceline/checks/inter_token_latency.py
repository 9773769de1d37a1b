"""What long prompts do to the time between the tokens of those that run."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paceline.checks.harness import Clocked, Lab, Verdict, greedy, wait_for
from paceline.config import ConfigError
from paceline.engine.job import Job
from paceline.engine.timeline import Timeline


class _Gaps(NamedTuple):
    """Times between tokens of running requests, before long prompts arrive, after that, and while they do."""

    before: list[float]
    after: list[float]
    busy: list[float]
    first_token_s: float  # of a long prompt, on average
    prompt_tokens: float  # in a pass with prompts, on average
    pass_s: float  # of such a pass, on average
    quiet_pass_s: float
    settings: str  # what decides it

    def quiet(self, percent: float) -> float:
        """The mean of before and after: contexts grow all the time, and those between are in the middle."""
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
            f"{self.settings}: p99 before, while and after {p99} ms ({self.ratio:.2f}x), median {p50}; a pass has "
            f"{self.prompt_tokens:.0f} prompt tokens and takes {self.pass_s * 1e3:.2f} ms "
            f"({self.quiet_pass_s * 1e3:.2f} without); a long prompt's first token after {self.first_token_s:.2f} s"
        )


def _p(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def check_inter_token_latency(
    lab: Lab, running: int = 240, *, prompt_tokens: int = 32_000, num_prompts: int = 3, quiet_tokens: int = 300
) -> Verdict:
    """Running requests' p99 time between tokens while long prompts arrive, one behind the other, over the same without:
    2 at most. Without is half before and half after, since contexts grow meanwhile; the first prompt, for which kernels
    are compiled and loaded, does not count. With the options as they are; if that is too much, with some others, to see
    what decides it."""
    sizes = (running, prompt_tokens, num_prompts, quiet_tokens)
    found = _long(lab, *sizes)
    print(f"long, as it is: {found}", flush=True)
    if found.ratio > 2:
        target = round(1.7 * found.quiet(50), 6)
        for change in ({"chunk_tokens": 512}, {"chunk_tokens": 128}, {"itl_target": target}):
            changed = _long(replace(lab, options={**lab.options, **change}), *sizes)
            print(f"long, changed: {changed}", flush=True)
    return Verdict(found.ratio <= 2, f"{running} running, {num_prompts} prompts of {prompt_tokens} tokens; {found}")


def _long(lab: Lab, running: int, prompt_tokens: int, num_prompts: int, quiet_tokens: int) -> _Gaps:
    spec, rng = lab.spec(), random.Random(9)

    def prompt(count: int) -> list[int]:
        return [rng.randrange(spec.vocab_size) for _ in range(count)]

    with lab.llm(spec, kv_tokens=600_000) as llm:
        engine, timeline = llm.engine, Timeline()
        shortest = greedy([1])[0]
        engine.call(lambda _: setattr(engine.loop, "trace", timeline)).result()
        # As long as memory lets them run together with the prompts.
        config = engine.scheduler.config
        if running >= config.max_running:
            raise ConfigError(
                f"running is {running} and max_running {config.max_running}: the prompts need a slot; give fewer."
            )
        room = (config.num_pages * config.page_size - 2 * prompt_tokens) // running
        length = min(512, room // 4)
        kept = greedy([min(room, config.context_tokens) - length - config.page_size])[0]
        rows = [Clocked() for _ in range(running)]
        # Made now: while it runs, this thread would hold Python's lock for as long as several passes take.
        long_prompts = iter([engine.encode(prompt(prompt_tokens)) for _ in range(1 + num_prompts)])
        names = [engine.submit(Job(engine.encode(prompt(length)), kept), row) for row in rows]
        wait_for(engine, lambda: all(len(row.tokens) > 8 for row in rows))

        def send_prompt() -> float:
            sink, sent = Clocked(), time.perf_counter()
            engine.submit(Job(next(long_prompts), shortest), sink)
            wait_for(engine, sink.ended.is_set)
            if sink.refused is not None:
                raise sink.refused
            return sink.times[0] - sent

        def wait_quietly() -> tuple[float, float]:
            began, target = time.perf_counter(), max(len(row.tokens) for row in rows) + quiet_tokens // 2
            wait_for(engine, lambda: all(len(row.tokens) >= target or row.last is not None for row in rows))
            assert all(row.last is None for row in rows), "running requests ended too early: give more memory"
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
    assert busy, "no pass had a prompt: give more slots than requests that run"
    decodes = [one for one in timeline.passes if not one.num_prompts]
    alone = [one for one in decodes for began, ended in quiet if began < one.waited < ended]
    return _Gaps(
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
