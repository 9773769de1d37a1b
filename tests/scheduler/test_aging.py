"""Aging: how long younger requests can delay an older one, whatever they are (docs/waiting.md)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SchedulerConfig
from paceline.engine.executor import Result
from paceline.engine.loop import Loop
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.request import Request, SamplingParams
from paceline.scheduler import Scheduler, StepTime
from paceline.scheduler.aging import GivenLimits
from paceline.scheduler.tracked_request import TrackedRequest
from tests.helpers import admissions, harness, prompt, request, scheduler, tracked

AGING = ("fair", "lpm", "dfs", "sjf", "lof", "random")
# Prefill at 10,000 tokens a second, a decode pass of 10 ms: both matter in small examples.
STEP_TIME = StepTime(base=1e-2, per_prefill_token=1e-4, per_decode=1e-4, per_context_token=1e-8)


@dataclass(frozen=True)
class Arrival:
    at: float
    prefix: int  # which one; requests with the same begin alike
    prefix_pages: int
    own_tokens: int
    output: int
    tenant: str = "default"

    def request(self, number: int) -> Request:
        prefix = np.random.default_rng(self.prefix).integers(0, 50_000, 16 * self.prefix_pages)
        own = np.random.default_rng(10_000 + number).integers(0, 50_000, self.own_tokens)
        params = SamplingParams(max_tokens=self.output, ignore_eos=True)
        return Request(f"{number}", np.concatenate([prefix, own]), params, tenant=self.tenant)


@dataclass(frozen=True)
class Served:
    waits: list[float]
    spans: list[tuple[float, float]]  # from admission to end
    longest_pass: float
    longest_request: float


def serve(arrivals: list[Arrival], policy: str, **options: float | int) -> Served:
    """Serves arrivals, in order of time, with ample memory."""
    clock = VirtualClock()
    core = Scheduler(SchedulerConfig(num_pages=50_000, policy=policy, **options))  # type: ignore[arg-type]
    executor = VirtualExecutor(clock, STEP_TIME)
    loop = Loop(core, executor, clock, overlap=False)
    requests: list[TrackedRequest] = []
    coming, longest_pass = 0, 0.0
    while coming < len(arrivals) or core.has_work:
        if not core.has_work:
            clock.advance_to(arrivals[coming].at)
        while coming < len(arrivals) and arrivals[coming].at <= clock.now:
            requests.append(core.add(arrivals[coming].request(coming), arrivals[coming].at))
            coming += 1
        before = clock.now
        loop.step()
        longest_pass = max(longest_pass, clock.now - before)
    spans = [(float(one.first_admitted), float(one.finished)) for one in requests]  # type: ignore[arg-type]
    return Served(
        [admitted - one.at for (admitted, _), one in zip(spans, arrivals, strict=True)],
        spans,
        longest_pass,
        max(finished - admitted for admitted, finished in spans),
    )


# ---------------------------------------------------------------------- floods of cached requests


def passed_by(policy: str, cold_tokens: int, own_tokens: int) -> tuple[int, float]:
    """One slot, and always three younger requests that are cached but for `own_tokens`, against a cold one. Returns how
    many of them are admitted before it, and how long it waits."""
    subject = harness(policy=policy, max_running=1, num_pages=4096, page_size=4, max_batch_tokens=16_384)
    flood = 0

    def refill() -> None:
        nonlocal flood
        while subject.scheduler.num_waiting < 4:
            flood += 1
            output = 9 if policy == "lof" else 2
            own = [100 + (flood * 31 + index) % 800 for index in range(own_tokens)]
            subject.add(request(prompt([5] * 32, *own), output, id=f"flood-{flood}"))

    subject.add(request(prompt([5] * 32, 1), 1))
    subject.run()
    cold = subject.add(request(prompt([9] * cold_tokens), 1 if policy == "lof" else 3, id="cold"))
    while cold.first_admitted is None:
        refill()
        subject.step()
        assert flood < 5000, "starved"
    return flood, cold.first_admitted - cold.arrival


@pytest.mark.parametrize("policy", AGING)
@pytest.mark.parametrize(("cold_tokens", "own_tokens"), [(500, 1), (2000, 16), (2000, 1), (8000, 16)])
def test_a_flood_of_cached_requests_delays_a_cold_one_by_max_wait(
    policy: str, cold_tokens: int, own_tokens: int
) -> None:
    """Nothing older waits, so fcfs would admit it at once: max_wait and one request are all that it may wait."""
    count, waited = passed_by(policy, cold_tokens, own_tokens)
    assert waited <= 0.2 + 0.02, f"{count} younger requests were admitted first, in {waited:.2f} s"


def test_without_aging_a_cold_request_starves() -> None:
    """Shows that the test above can fail."""
    subject = harness(policy="lpm", max_wait=math.inf, max_running=1, num_pages=4096, page_size=4)
    subject.add(request(prompt([5] * 40), 1))
    subject.run()
    cold = subject.add(request(prompt([9] * 64), 1))
    for number in range(300):
        subject.add(request(prompt([5] * 40, number % 7), 1))
        subject.step()
    assert cold.first_admitted is None


def test_what_a_request_waited_before_does_not_let_a_flood_delay_it_longer() -> None:
    """A long wait behind older requests must not be repaid by a long wait behind younger ones.

    A backlog of 40 requests; behind it a cold one, `late`, just before the backlog is served. Then a flood: fcfs would
    admit `late` after the last of the backlog.
    """
    backlog = [Arrival(0.0, 1000 + n, 20, 10, 20) for n in range(40)]
    alone = serve([*backlog, Arrival(0.001, 7, 20, 10, 2)], "fcfs", max_running=1).waits[-1]
    late = Arrival(0.9 * alone, 7, 20, 10, 2)
    flood = [Arrival(0.9 * alone + 0.001 * n, 9, 2, 1, 4) for n in range(300)]
    found, fcfs = (serve([*backlog, late, *flood], policy, max_running=1) for policy in ("lpm", "fcfs"))
    assert found.waits[40] <= 1.5 * fcfs.waits[40] + 0.2 + found.longest_pass + found.longest_request


def test_the_time_of_a_request_that_ran_already_does_not_delay_a_new_one() -> None:
    """The first request takes 4 s, which nobody predicts. What arrives meanwhile waits for it, and for max_wait."""
    flood = [Arrival(1.1 + 0.01 * n, 9, 2, 1, 1) for n in range(600)]
    found = serve(
        [Arrival(0.0, 1, 1, 1, 400), Arrival(0.9, 9, 2, 1, 1), Arrival(1.0, 7, 0, 500, 1), *flood], "lpm", max_running=1
    )
    assert found.waits[2] <= found.spans[0][1] - 1.0 + 0.2 + found.longest_pass


# ---------------------------------------------------------------------- the bound


def random_arrivals(rng: random.Random, tenants: int = 1) -> list[Arrival]:
    """Phases of different load: bursts and streams, cached and cold, short and long."""
    prefixes = [(number, rng.choice((2, 10, 50, 200))) for number in range(rng.randint(1, 5))]
    found, at = [], 0.0
    for _ in range(rng.randint(1, 4)):
        gap, output = rng.choice((0.0, 0.002, 0.01, 0.05)), rng.choice((1, 1, 4, 16, 60))
        own, cold = rng.choice((1, 16, 100)), rng.choice((0.0, 0.1, 0.3, 1.0))
        for _ in range(rng.randint(4, 40)):
            at += 2 * rng.random() * gap
            tenant = f"tenant-{rng.randrange(tenants)}"
            if rng.random() < cold:
                output_tokens = rng.choice((1, output, 40))
                found.append(Arrival(at, 100 + len(found), 0, rng.randint(1, 2000), output_tokens, tenant))
            else:
                prefix, pages = rng.choice(prefixes)
                found.append(Arrival(at, prefix, pages, own, output, tenant))
        at += rng.choice((0.0, 0.1, 1.0))
    return found


@settings(max_examples=16)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(AGING),
    slots=st.sampled_from((1, 1, 2, 4, 16)),
    max_wait=st.sampled_from((0.02, 0.2)),
)
def test_a_request_waits_at_most_half_longer_than_under_fcfs(
    seed: int, policy: str, slots: int, max_wait: float
) -> None:
    """One tenant, ample memory, any arrivals: 1.5 times the wait under fcfs + max_wait + one pass + one request.

    With several slots, another order makes other batches, and these take another time in total: a request more.
    """
    arrivals = random_arrivals(random.Random(seed))
    fcfs = serve(arrivals, "fcfs", max_running=slots)
    found = serve(arrivals, policy, max_running=slots, max_wait=max_wait)
    more = (found.longest_pass + found.longest_request) * (1 if slots == 1 else 2)
    for number, (waited, first_come) in enumerate(zip(found.waits, fcfs.waits, strict=True)):
        assert waited <= 1.5 * first_come + max_wait + more, f"request {number}: {first_come:.3f} s under fcfs"


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), tenants=st.sampled_from((1, 2, 3)))
def test_younger_requests_of_a_tenant_get_half_of_what_older_ones_get(seed: int, tenants: int) -> None:
    """With tenants, the order within one is bounded in its own device time, whatever the others do. One slot, so that
    a request takes the device from its admission to its end."""
    arrivals = random_arrivals(random.Random(seed), tenants)
    found = serve(arrivals, "fair", max_running=1, max_wait=0.05)
    for number, (one, (admitted, _)) in enumerate(zip(arrivals, found.spans, strict=True)):
        younger = older = 0.0
        for other, (from_, until) in enumerate(found.spans):
            if arrivals[other].tenant == one.tenant and one.at <= from_ < admitted:
                if other > number:
                    younger += until - from_
                else:
                    older += until - from_
        assert younger <= 0.05 + 0.5 * older + found.longest_pass + found.longest_request, f"request {number}"


@pytest.mark.parametrize("seed", range(2))
def test_aging_keeps_most_of_the_hit_rate(seed: int) -> None:
    """The cluster of an overdue request follows it, so the hit rate stays near that of pure depth-first."""

    def hit_rate(policy: str, max_wait: float) -> float:
        subject = harness(
            policy=policy, max_wait=max_wait, num_pages=120, page_size=4, max_running=4, max_batch_tokens=512
        )
        rng = random.Random(seed)
        everyone = [request(prompt([group] * 64, n, group), 4) for group in range(12) for n in range(8)]
        rng.shuffle(everyone)
        subject.add_all(*everyone)
        subject.run()
        return subject.scheduler.counters.hit_rate

    fcfs, aging, depth_first = hit_rate("fcfs", 0.0), hit_rate("fair", 0.02), hit_rate("dfs", math.inf)
    assert fcfs < depth_first - 0.125, "the workload distinguishes a bad policy"
    assert aging >= (fcfs + depth_first) / 2


# ---------------------------------------------------------------------- the segment tree


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 99)),
            st.tuples(st.just("discard"), st.integers(0, 99)),
            st.tuples(st.just("move"), st.integers(0, 99), st.integers(-9, 9)),
        ),
        max_size=200,
    )
)
def test_limits_equal_those_of_a_dictionary(actions: list[tuple[str, int] | tuple[str, int, int]]) -> None:
    limits, expected, number = GivenLimits(), dict[TrackedRequest, float](), 0
    for action, *values in actions:
        if action == "append":
            number += 1
            one = tracked([1], id=str(number))
            one.number = number
            limits.append(one, float(values[0]))
            expected[one] = float(values[0])
        elif action == "discard" and expected:
            one = list(expected)[values[0] % len(expected)]
            limits.discard(one)
            del expected[one]
        elif action == "move":
            after = values[0] * number // 99
            limits.move(after, float(values[1]))
            expected = {one: limit + values[1] * (one.number > after) for one, limit in expected.items()}
        for given_s in (-50.0, 20.0, 50.0):
            assert list(limits.reached(given_s)) == [one for one, limit in expected.items() if limit <= given_s]
        assert limits.last_number == number


# ---------------------------------------------------------------------- short memory


@pytest.mark.parametrize("policy", ["lpm", "dfs", "fair"])
def test_while_memory_is_short_sixteen_younger_requests_pass_between_two_overdue_ones(policy: str) -> None:
    """Memory for two prefixes, always requests that need one of them, and some with prefixes of their own. These would
    starve by the cache alone, and evict what all others need in their turn."""
    clock = VirtualClock()
    core = Scheduler(SchedulerConfig(num_pages=160, policy=policy, max_running=2))
    loop = Loop(core, VirtualExecutor(clock, STEP_TIME), clock, overlap=False)
    num_victims, num_flood = 6, 0
    victims: list[TrackedRequest] = []
    while len(victims) < num_victims or not all(victim.is_finished for victim in victims):
        while core.num_waiting < 12:
            core.add(Arrival(0.0, num_flood % 2, 64, 16, 8).request(100 + num_flood), clock.now)
            num_flood += 1
        loop.step()
        if core.counters.steps == 20:
            arrivals = [Arrival(0.0, 10 + number, 64, 16, 8) for number in range(num_victims)]
            victims = [core.add(one.request(number), clock.now) for number, one in enumerate(arrivals)]
        assert num_flood < 500, "starved"
    order = [int(name) for name in admissions(core)]
    passed = np.diff([order.index(number) for number in range(len(victims))]) - 1
    assert passed.max() == 16
    assert core.counters.hit_rate > 0.85


def test_no_pass_is_committed_without_its_device_time() -> None:
    """Aging is in device time: passes without it would switch it off."""
    core = scheduler()
    core.add(request(max_tokens=5), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    with pytest.raises(TypeError, match="device_s"):
        core.commit(plan, np.array([1], np.int32), 0.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="device_s"):
        Result(np.array([1], np.int32))  # type: ignore[call-arg]
