"""Scheduling policies, aging and fairness between tenants."""

from __future__ import annotations

import gc
import itertools
import math
import random
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import POLICIES
from paceline.request import Request
from paceline.scheduler import Scheduler, StepTime
from paceline.scheduler.fair import TenantState
from paceline.scheduler.policies import MAX_OVERTAKES_BY_RATIO
from paceline.testing import Harness
from tests.helpers import admissions, harness, prompt, request, scheduler


def in_turn(**options: object) -> Harness:
    """One slot: requests are admitted one after the other, so the journal shows their order."""
    return harness(max_running=1, num_pages=4096, page_size=4, max_batch_tokens=4096, **options)


def order_of(subject: Harness, *requests: Request) -> list[str]:
    subject.add_all(*requests)
    subject.run()
    return admissions(subject.scheduler)


def test_fcfs_admits_in_order_of_arrival() -> None:
    ids = order_of(in_turn(policy="fcfs"), *(request(prompt(n, n, n), id=str(n)) for n in (3, 1, 2)))
    assert ids == ["3", "1", "2"]


def test_sjf_and_lof_order_by_expected_output() -> None:
    def lengths() -> list[Request]:
        return [request([n], max_tokens=n, id=str(n)) for n in (5, 2, 9)]

    assert order_of(in_turn(policy="sjf", max_wait=math.inf), *lengths()) == ["2", "5", "9"]
    assert order_of(in_turn(policy="lof", max_wait=math.inf), *lengths()) == ["9", "5", "2"]


def test_expected_tokens_replaces_max_tokens_in_sjf() -> None:
    subject = in_turn(policy="sjf", max_wait=math.inf)
    ids = order_of(subject, request([1], 5, id="five"), request([2], 100, id="guessed", expected_tokens=2))
    assert ids == ["guessed", "five"]


def test_priority_orders_by_priority_then_arrival() -> None:
    ids = order_of(in_turn(policy="priority"), *(request([n], id=f"{n}", priority=n % 3) for n in range(6)))
    assert ids == ["2", "5", "1", "4", "0", "3"]


def test_random_is_seeded() -> None:
    def shuffled(seed: int) -> list[str]:
        return order_of(
            in_turn(policy="random", order_seed=seed, max_wait=math.inf), *(request([n], id=str(n)) for n in range(12))
        )

    assert shuffled(1) == shuffled(1)
    assert shuffled(1) != shuffled(2)
    assert sorted(shuffled(1), key=int) == [str(n) for n in range(12)]


def test_hrrn_prefers_short_requests_until_a_long_one_has_waited_in_proportion() -> None:
    subject = in_turn(policy="hrrn")
    subject.add(request([9] * 8, 400, id="long"))
    subject.clock.advance(1.0)
    subject.add(request([8], 4, id="short"))
    subject.clock.advance(0.05)
    assert order_of(subject) == ["short", "long"], "0.05 s for 9 tokens is a higher ratio than 1.05 s for 808"
    subject = in_turn(policy="hrrn")
    subject.add(request([9] * 8, 400, id="long"))
    subject.clock.advance(1.0)
    subject.add(request([8], 4, id="short"))
    subject.clock.advance(0.005)
    assert order_of(subject) == ["long", "short"]


def test_hrrn_takes_the_predicted_device_time_where_it_is_known() -> None:
    """64 prompt tokens are more than 20 output tokens by number, and take a tenth of their time."""
    subject = in_turn(policy="hrrn")
    for number in range(3):
        subject.add(request(prompt([5] * 60, number), 4))
    subject.run()
    subject.scheduler.journal.events.clear()
    subject.add_all(request(prompt([7] * 64), 1, id="many tokens"), request([8], 20, id="few tokens"))
    subject.clock.advance(0.1)
    assert order_of(subject) == ["many tokens", "few tokens"]


def overtaken_by_short_ones(late: Request, output: int = 6, **options: object) -> int:
    """How many later requests are admitted before `late`, with more short requests than can be served."""
    subject = harness(page_size=4, max_batch_tokens=4096, context_tokens=4096, **options)
    subject.add_all(*(request([n % 60], output, id=f"before-{n}") for n in range(8)))
    for _ in range(3):
        subject.step()
    one = subject.add(late)
    for number in range(2000):
        if one.was_admitted:
            break
        subject.add_all(*(request([number % 60], output, id=f"later-{number}-{n}") for n in range(3)))
        subject.step()
    return sum(name.startswith("later") for name in admissions(subject.scheduler))


def test_hrrn_does_not_starve_a_long_prompt_among_short_ones() -> None:
    long = request(prompt([9] * 3000), 2, id="long")
    assert overtaken_by_short_ones(long, policy="hrrn", max_running=4, num_pages=4096) <= 16 * (8 + 1)


@pytest.mark.parametrize("policy", ["fcfs", "hrrn"])
def test_a_request_that_needs_all_memory_is_not_overtaken_forever(policy: str) -> None:
    whole = request(prompt([9] * 200), 56, id="whole")
    overtaken = overtaken_by_short_ones(whole, 40, policy=policy, max_running=4, num_pages=64, max_overtakes=16)
    assert overtaken <= (16 if policy == "fcfs" else MAX_OVERTAKES_BY_RATIO + 16)


def test_lpm_admits_the_longest_cached_prefix_first() -> None:
    subject = in_turn(policy="lpm", max_wait=math.inf)
    order_of(subject, request(prompt(range(40)), 1, id="warm"))
    ids = order_of(
        subject,
        request(prompt(range(500, 540)), 1, id="cold"),
        request(prompt(range(8), 99, 99, 99, 99), 1, id="shallow"),
        request(prompt(range(32), 99, 99, 99, 99), 1, id="deep"),
    )
    assert ids[1:] == ["deep", "shallow", "cold"]


def test_lpm_notices_prefixes_cached_while_requests_wait() -> None:
    subject = in_turn(policy="lpm", max_wait=math.inf)
    cluster = [request(prompt(range(40), n), 1, id=f"shared-{n}") for n in range(3)]
    others = [request(prompt(range(1000 * n, 1000 * n + 40)), 1, id=f"other-{n}") for n in range(1, 4)]
    ids = order_of(subject, others[0], cluster[0], others[1], cluster[1], others[2], cluster[2])
    first = ids.index("shared-0")
    assert ids[first : first + 3] == ["shared-0", "shared-1", "shared-2"]


@pytest.mark.parametrize("policy", ["dfs", "fair"])
def test_requests_that_share_a_prefix_run_together(policy: str) -> None:
    subject = in_turn(policy=policy, max_wait=math.inf)
    rng = random.Random(0)
    everyone = [request(prompt([g] * 40, n), 1, id=f"{g}-{n}") for g in range(6) for n in range(5)]
    rng.shuffle(everyone)
    ids = order_of(subject, *everyone)
    groups = [one.split("-")[0] for one in ids]
    changes = sum(a != b for a, b in itertools.pairwise(groups))
    assert changes == 5, "each group ends before the next begins"


@pytest.mark.parametrize("policy", ["dfs", "fair"])
def test_the_largest_cluster_is_admitted_first(policy: str) -> None:
    subject = in_turn(policy=policy, max_wait=math.inf)
    light = [request(prompt([1] * 40, n), 1, id=f"light-{n}") for n in range(2)]
    heavy = [request(prompt([2] * 40, n), 1, id=f"heavy-{n}") for n in range(5)]
    assert order_of(subject, *light, *heavy)[:5] == [f"heavy-{n}" for n in range(5)]


def test_a_candidate_that_does_not_fit_does_not_move_the_dfs_cursor() -> None:
    subject = harness(policy="dfs", max_wait=math.inf, num_pages=30, page_size=4, max_running=2, look_ahead=0)
    subject.add_all(*(request(prompt([1] * 40, n), 8, id=f"small-{n}") for n in range(4)))
    subject.add(request(prompt([2] * 80), 8, id="big"))
    subject.run()
    assert admissions(subject.scheduler)[-1] == "big"


@pytest.mark.parametrize("policy", POLICIES)
def test_max_wait_zero_is_fcfs_and_every_policy_serves_every_request(policy: str) -> None:
    subject = in_turn(policy=policy, max_wait=0.0)
    rng = random.Random(1)
    everyone = [request(prompt([rng.randrange(3)] * 20, n), rng.randrange(1, 6), id=str(n)) for n in range(20)]
    ids = order_of(subject, *everyone)
    assert sorted(ids, key=int) == [str(n) for n in range(20)]
    if policy not in ("priority", "hrrn"):  # one is an explicit order, the other ages by itself
        assert ids == [str(n) for n in range(20)]


# ---------------------------------------------------------------------- tenants


def service(subject: Scheduler, name: str) -> float:
    return subject.policy.tenants[name].service  # type: ignore[attr-defined]


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    subject = in_turn(policy="fair", fair_quantum=16)
    subject.add_all(*(request(prompt(n, n + 1, n + 2), 4, tenant="flood", id=f"flood-{n}") for n in range(60)))
    for _ in range(40):
        subject.step()
    subject.add(request([1, 2, 3], 4, tenant="quiet", id="quiet"))
    subject.run()
    ids = admissions(subject.scheduler)
    ahead = ids[: ids.index("quiet")]
    already = 10  # admitted before it came: 40 steps of 4 tokens each
    assert len(ahead) <= already + 4


@settings(max_examples=10)
@given(
    seed=st.integers(0, 10_000),
    quantum=st.sampled_from([1, 50, 500]),
    weights=st.sampled_from([{}, {"a": 3.0}, {"a": 1.0, "b": 2.0, "c": 5.0}]),
    slots=st.sampled_from([1, 4]),
)
def test_backlogged_tenants_get_equal_weighted_service(
    seed: int, quantum: int, weights: dict[str, float], slots: int
) -> None:
    """The gap of weighted service between tenants that always have something waiting stays bounded, whatever their
    requests look like: a quantum, and what may already be running (a prompt, and the output of all slots)."""
    rng = random.Random(seed)
    longest, output, weight_out = 40, 12, 2.0
    subject = Harness(
        scheduler(
            policy="fair",
            fair_quantum=quantum,
            tenant_weights=weights,
            max_running=slots,
            num_pages=4096,
            output_weight=weight_out,
            max_batch_tokens=64,
        ),
        checked=False,
    )
    lightest = min(weights.get(name, 1.0) for name in "abc")
    bound = quantum + 2 * (longest + slots * weight_out * output) / lightest
    count = 0
    for _ in range(250):
        for name in "abc":
            while subject.scheduler.policy.tenants.get(name) is None or service_backlog(subject.scheduler, name) < 3:  # type: ignore[attr-defined]
                count += 1
                size = rng.randrange(1, longest) if name != "a" else 1
                tokens = [rng.randrange(3) for _ in range(size)]
                subject.add(request(tokens, rng.randrange(1, output), tenant=name, id=f"{name}-{count}"))
        subject.step()
        services = [service(subject.scheduler, name) for name in "abc"]
        assert max(services) - min(services) <= bound, f"{services} drift apart by more than {bound}"


def test_output_tokens_count_towards_a_tenants_service() -> None:
    """Two tenants with equal prompts: the one with outputs of 20 tokens is admitted far less often."""
    subject = in_turn(policy="fair", fair_quantum=10, output_weight=2.0)
    for number in range(60):
        subject.add(request([1, number], 1, tenant="short", id=f"short-{number}"))
        subject.add(request([2, number], 20, tenant="long", id=f"long-{number}"))
    for _ in range(200):
        subject.step()
    ids = admissions(subject.scheduler)
    num_long = sum(one.startswith("long-") for one in ids)
    assert len(ids) > 40 and num_long * 4 < len(ids), f"{num_long} of {len(ids)} admissions"


def service_backlog(subject: Scheduler, name: str) -> int:
    return subject.policy.tenants[name].num_waiting  # type: ignore[attr-defined]


def test_idle_time_earns_no_credit() -> None:
    subject = in_turn(policy="fair", fair_quantum=10)
    subject.add(request([1], 4, tenant="sleeper"))
    subject.run()
    subject.add_all(*(request([n, n], 8, tenant="worker", id=f"w-{n}") for n in range(40)))
    for _ in range(200):
        subject.step()
    subject.add_all(*(request([n, n], 8, tenant="sleeper", id=f"s-{n}") for n in range(20)))
    subject.run()
    ids = admissions(subject.scheduler)
    start = ids.index("s-0")
    window = ids[start : start + 10]
    assert 3 <= sum(one.startswith("s-") for one in window) <= 7, "they take turns; neither catches up"


def test_weights_set_the_shares() -> None:
    subject = in_turn(policy="fair", fair_quantum=10, tenant_weights={"big": 3.0})
    for n in range(60):
        subject.add_all(
            request([n, 1], 4, tenant="big", id=f"big-{n}"), request([n, 2], 4, tenant="small", id=f"small-{n}")
        )
    subject.run()
    first = admissions(subject.scheduler)[:40]
    assert 27 <= sum(one.startswith("big") for one in first) <= 33


def test_idle_tenants_are_forgotten() -> None:
    subject = in_turn(policy="fair")
    for number in range(2500):
        subject.scheduler.add(request([1], 1, tenant=f"tenant-{number}", id=f"r-{number}"), subject.clock())
        subject.loop.step()
    subject.run()
    assert len(subject.scheduler.policy.tenants) <= 2100  # type: ignore[attr-defined]
    assert len(list(subject.scheduler.memory.tree.nodes())) < 2 * 2500 + 10


def test_adding_a_tenant_does_not_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in tenants, not in time: of 10,000 active ones, each is looked at a few times while they arrive."""
    looked_at = 0

    def is_active(tenant: TenantState) -> bool:
        nonlocal looked_at
        looked_at += 1
        return tenant.num_waiting > 0 or tenant.num_running > 0

    monkeypatch.setattr(TenantState, "is_active", property(is_active))
    core = scheduler(policy="fair", max_waiting=10_000)
    for number in range(10_000):
        core.add(request([1], 1, tenant=f"tenant-{number}", id=str(number)), 0.0)
    assert looked_at < 10 * 10_000


# ---------------------------------------------------------------------- any queue length


@pytest.mark.parametrize("policy", POLICIES)
def test_admitting_does_not_scan_the_queue(policy: str) -> None:
    """Counted in candidates, not in time: 2,000 waiting requests cost as much as 40."""

    def looked_at(num_waiting: int) -> int:
        core = scheduler(policy=policy, max_running=4, num_pages=4096, max_waiting=50_000, max_batch_tokens=64)
        tokens = np.random.default_rng(0)
        for number in range(num_waiting):
            head = tokens.integers(0, 8)
            core.add(request(prompt([int(head)] * 8, int(tokens.integers(9)), number % 97), 2, id=str(number)), 0.0)
        count = 0
        original = core.admission._try_admit

        def counted(*args: object) -> object:
            nonlocal count
            count += 1
            return original(*args)  # type: ignore[arg-type]

        core.admission._try_admit = counted  # type: ignore[method-assign, assignment]
        for _ in range(20):
            plan = core.plan(1.0)
            assert plan is not None
            core.commit(plan, np.ones(int(plan.samples.sum()), np.int32), 1.0, 0.0)
        return count

    assert looked_at(2_000) <= 3 * looked_at(40) + 20


@pytest.mark.parametrize("policy", POLICIES)
def test_aborted_requests_are_not_kept_alive(policy: str) -> None:
    """Requests aborted while they wait are freed, although they never reached the top of a heap."""
    core = scheduler(policy=policy, max_running=1, max_wait=math.inf)
    core.add(request([1], 60, priority=9, id="runner"), 0.0)
    core.plan(0.0)
    gone = [core.add(request(prompt([2] * 8, n), 50, deadline=1e9), 0.0) for n in range(400)]
    for one in gone:
        core.abort(one.id, 0.0)
    core.take_ended()
    core.commit(core._in_flight[0].plan, np.array([1], np.int32), 0.0, 0.0)
    core.plan(0.0)
    core.journal.events.clear()
    watched = [weakref.ref(one.prompt) for one in gone]
    del gone, one
    gc.collect()
    assert sum(ref() is not None for ref in watched) <= 64, "aborted requests are still referenced"


def times_of_victim(hostile: int, share: float) -> list[float]:
    """Seconds from arrival to end of a steady tenant's requests, on a share of the device and its slots, beside another
    tenant that always has `hostile` requests waiting."""
    slow = 1 / share
    subject = Harness(
        scheduler(num_pages=8192, page_size=16, max_running=int(32 * share), max_batch_tokens=512, chunk_tokens=256),
        step_time=StepTime(1e-3 * slow, 1e-5 * slow, 1e-5 * slow, 1e-8 * slow),
        checked=False,
    )
    rng, numbers, arrival = random.Random(0), itertools.count(), 0.3

    def add(tenant: str) -> None:
        number = next(numbers)
        tokens = [(number * 7919 + index) % 60_000 for index in range(400)]
        subject.add(request(tokens, rng.randint(50, 150), id=f"{tenant}-{number}", tenant=tenant))

    for _ in range(30):
        while subject.clock() < arrival:
            while subject.scheduler.num_waiting < hostile:
                add("hostile")
            if subject.step() is None:
                subject.clock.advance_to(arrival)
        add("victim")
        arrival += rng.expovariate(20)
    victims = [one for one in subject.requests.values() if one.tenant == "victim"]
    while not all(one.is_finished for one in victims):
        subject.step()
    return sorted((one.finished or math.inf) - one.arrival for one in victims)


def test_a_hostile_tenant_costs_its_victim_no_more_than_its_fair_share() -> None:
    """Under a flood, the victim's p99 stays within twice its p99 alone on half the device."""
    alone, beside = times_of_victim(0, share=0.5), times_of_victim(50, share=1.0)
    p99 = int(0.99 * len(alone))
    assert beside[p99] <= 2 * alone[p99], f"alone {alone[p99]:.3f} s, beside the flood {beside[p99]:.3f} s"
