"""Random joins, aborts, deadlines and retractions, with the invariants checked at every step."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.checks.harness import ROUNDING, CheckResult, CheckSetup, TimedSink, margin
from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.loop import StepOutput
from paceline.model.spec import ModelSpec
from paceline.request import FinishReason, SamplingParams
from paceline.scheduler.invariants import check as check_invariants
from paceline.scheduler.plan import Plan


@dataclass(slots=True, eq=False)
class _SentRequest:
    prompt: list[int]
    params: SamplingParams
    sink: TimedSink
    timeout: float | None = None
    stream: bool = True
    aborted: bool = False

    def fault(self) -> str | None:
        """What is wrong with the output, if anything."""
        delta, params = self.sink.last, self.params
        if delta is None or delta.finish_reason is None:
            return f"refused: {self.sink.refused}" if self.sink.refused else "never finished"
        reason, count, limit = delta.finish_reason, len(self.sink.tokens), params.max_tokens or 0
        if params.logprobs is not None and [one.token_id for one in self.sink.logprobs] != self.sink.tokens:
            return f"has logprobs of {len(self.sink.logprobs)} tokens that are not its {count} output tokens"
        logprobs = self.sink.logprobs if params.temperature == 0 and not params.min_tokens and params.logprobs else []
        if any((one.token_id, one.logprob) != one.top[0] for one in logprobs):
            return "greedy, but another token has the highest logprob"
        if reason is FinishReason.LENGTH:
            return None if count == limit else f"finished by length with {count} of {limit} tokens"
        if reason is FinishReason.STOP:
            stopped = self.sink.tokens[-1] in params.stop_token_ids and params.min_tokens <= count <= limit
            return None if stopped else f"stopped at token {self.sink.tokens[-1]}, number {count}"
        if reason is FinishReason.ABORT:
            return None if self.aborted else "aborted without a request to abort"
        if reason is FinishReason.DEADLINE:
            return None if self.timeout is not None else "finished by a deadline that was not set"
        return f"finished with {reason}: {delta.error}"


def check_soak(
    setup: CheckSetup,
    seconds: float = 300.0,
    *,
    live: int = 96,
    running: int = 64,
    kv_tokens: int = 24_000,
    longest: int = 600,
    num_tokens: int = 200,
    min_requests: int = 0,
    seed: int = 0,
) -> CheckResult:
    """Random joins, aborts, deadlines and retractions in a small KV cache, with shared prefixes, all kinds of sampling
    and logprobs. The scheduler's invariants hold at every step, every output is complete, greedy ones are within the
    margin. min_requests: so many are sent, however long that takes."""
    spec, rng = setup.spec(4), random.Random(seed)  # with more random layers, rounding alone changes most tokens
    prefixes = [[rng.randrange(spec.vocab_size) for _ in range(rng.randint(longest // 8, longest))] for _ in range(8)]
    faults: list[str] = []
    ended: Counter[str] = Counter()
    greedy: list[_SentRequest] = []  # finished ones: a uniform sample of all

    def judge(one: _SentRequest) -> None:
        if (fault := one.fault()) is not None:
            faults.append(fault)
        elif one.params.temperature == 0 and not one.params.min_tokens and one.sink.tokens:
            ended["greedy"] += 1
            if len(greedy) < 48:
                greedy.append(one)
            elif (place := rng.randrange(ended["greedy"])) < 48:
                greedy[place] = one
        ended[str(one.sink.last.finish_reason) if one.sink.last is not None else "nothing"] += 1

    with setup.llm(spec, kv_tokens=kv_tokens, max_running=running) as llm:
        engine = llm.engine
        num_steps = _disturb(engine, random.Random(seed + 1))
        deadline = time.perf_counter() + seconds
        sent: dict[str, _SentRequest] = {}
        num_sent = num_aborted = 0
        while (time.perf_counter() < deadline or num_sent < min_requests) and engine.failure is None:
            for name in [name for name, one in sent.items() if one.sink.ended.is_set()]:
                judge(sent.pop(name))
            while len(sent) < rng.randint(live // 2, live):
                one = _random_request(rng, spec, prefixes, longest, num_tokens)
                prompt, tenant = engine.encode(one.prompt), rng.choice("abc")
                job = Job(prompt, one.params, tenant=tenant, timeout_s=one.timeout, stream=one.stream)
                name = engine.submit(job, one.sink)
                sent[name] = one
                num_sent += 1
            if rng.random() < 0.3 and num_aborted < 0.2 * num_sent:  # whatever the speed of the device
                name = rng.choice(list(sent))
                sent[name].aborted = True
                engine.abort(name)
                num_aborted += 1
            time.sleep(rng.random() * 0.01)
        for one in sent.values():
            one.sink.ended.wait(timeout=120)
            judge(one)
        if engine.failure is None:
            faults += engine.call(lambda scheduler: scheduler.check_idle(engine.clock())).result()
            retractions = engine.call(lambda scheduler: scheduler.counters.retractions).result()
        else:
            faults.insert(0, f"the engine failed: {engine.failure}")
            retractions = 0
    reference, plain = setup.decoder(spec, "float32"), setup.decoder(spec)
    prompts, outputs = [one.prompt for one in greedy], [one.sink.tokens for one in greedy]
    ours, theirs = margin(reference, prompts, outputs), margin(reference, prompts, outputs, plain)
    bound = 1.5 * theirs.worst + ROUNDING
    num_greedy = ended.pop("greedy", 0)
    return CheckResult(
        not faults and retractions > 0 and num_greedy > 0 and ours.worst < bound,
        f"{seconds:.0f} s, {sum(ended.values())} requests ({', '.join(f'{n} {what}' for what, n in ended.items())}), "
        f"{num_steps()} steps checked, {retractions} retractions, {len(faults)} faults"
        f"{''.join(': ' + fault for fault in faults[:3])}; of {num_greedy} greedy outputs {len(greedy)} compared, "
        f"{ours.judged} tokens, {ours.wrong} not the float32 argmax, worst margin {ours.worst:.3f} (plain torch "
        f"{theirs.wrong}, {theirs.worst:.3f}; bound {bound:.3f})",
    )


def _random_request(
    rng: random.Random, spec: ModelSpec, prefixes: Sequence[list[int]], longest: int, num_tokens: int
) -> _SentRequest:
    prefix = rng.choice(prefixes) if rng.random() < 0.7 else []
    prompt = prefix[: rng.randint(1, len(prefix))] if prefix and rng.random() < 0.2 else list(prefix)
    prompt += [rng.randrange(spec.vocab_size) for _ in range(rng.randint(1, longest // 2))]
    count = rng.randint(1, num_tokens)
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=rng.choice((0, 0, 0.6, 1.0)))
    if params.temperature:
        params = replace(params, top_k=rng.choice((None, 1, 40)), top_p=rng.choice((1.0, 0.9)))
        params = replace(params, seed=rng.choice((None, rng.randrange(1 << 60))))
    if rng.random() < 0.5:  # the output length is not known in advance
        stop_token_ids = tuple(rng.sample(range(spec.vocab_size), min(64, spec.vocab_size // 4)))
        params = replace(params, stop_token_ids=stop_token_ids, min_tokens=rng.choice((0, min(4, count))))
    if rng.random() < 0.3:
        params = replace(params, logprobs=rng.choice((0, 1, 5, 20)))
    timeout = rng.choice((0.05, 0.5)) if rng.random() < 0.05 else None
    return _SentRequest(prompt, params, TimedSink(), timeout, stream=rng.random() < 0.5)


def _disturb(engine: Engine, rng: random.Random) -> Callable[[], int]:
    """Makes the engine check the invariants at every step and retract a random running request now and then.

    Returns a function that returns the number of steps so far.
    """
    scheduler, loop = engine.scheduler, engine.loop
    plan, step, num_steps = scheduler.plan, loop.step, 0

    def planning(now: float) -> Plan | None:
        running = scheduler.running.requests
        if running and rng.random() < 0.03 and (victim := rng.choice(running)).retractions < 2:
            scheduler.retract(victim.id, now, "a soak")
        return plan(now) or plan(now)  # the only running request may have been retracted

    def stepping(*, launch: bool = True) -> StepOutput | None:
        nonlocal num_steps
        updates = step(launch=launch)
        check_invariants(scheduler)
        num_steps += 1
        return updates

    def install(_: object) -> None:
        scheduler.plan = planning  # type: ignore[method-assign]
        loop.step = stepping  # type: ignore[method-assign]

    engine.call(install).result()
    return lambda: num_steps
