"""The router: which replica a request goes to, and why."""

from __future__ import annotations

import ast
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from paceline.bench import stalling
from paceline.cluster import router as router_module
from paceline.cluster.block_hash import block_hashes, root_hash
from paceline.cluster.load import LoadReport
from paceline.cluster.router import Decision, NoReplica, Reason, Router, RouteRequest
from paceline.config import ROUTERS
from paceline.scheduler.step_time import StepTime

PAGE = 4
# Powers of two, so that sums are exact and a reference that adds in another order finds the same ties.
TIMES = StepTime(base=2**-7, per_prefill_token=2**-10, per_decode=2**-12, per_context_token=2**-20)
IDLE = LoadReport(num_pages=1000, step_time=TIMES)


def prompt_of(*groups: int, page: int = PAGE) -> Any:
    """A prompt with one page per number."""
    return np.repeat(np.array(groups, np.int32), page)


def hashes_of(prompt: Any, tenant: str = "default") -> list[int]:
    found: list[int] = block_hashes(prompt, PAGE, root_hash((tenant, "", ""))).tolist()
    return found


class Cluster:
    """A router with replicas that report a load when told to."""

    def __init__(self, num_replicas: int = 3, load: LoadReport = IDLE) -> None:
        self.router, self.now, self._count = Router(num_replicas, PAGE), 0.0, 0
        for replica in range(num_replicas):
            self.router.start(replica, self.now)
            self.router.report(replica, load, self.now, 0)

    def choose(self, prompt: Any, tenant: str = "default", **options: Any) -> Decision:
        self._count += 1
        request = RouteRequest(f"r{self._count}", prompt, (tenant, "", ""), tenant, **options)
        return self.router.choose(request, self.now)

    def report(self, replica: int, now: float | None = None, num_seen: int = 1000, **load: Any) -> None:
        options = {"num_pages": 1000, "step_time": TIMES, **load}
        self.router.report(replica, LoadReport(**options), self.now if now is None else now, num_seen)

    def report_all(self, **load: Any) -> None:
        for replica in range(len(self.router._replicas)):
            self.report(replica, **load)


LONG = prompt_of(*range(100, 120))
OTHER = prompt_of(*range(200, 220))


# ---------------------------------------------------------------------- cache


def test_a_request_goes_where_most_of_its_prompt_is_cached() -> None:
    cluster = Cluster()
    cluster.router.stored(1, hashes_of(LONG)[:12])
    cluster.router.stored(2, hashes_of(LONG)[:18])
    assert cluster.choose(LONG) == Decision(2, Reason.CACHE, 1, 18 * PAGE)


def test_a_prefix_in_another_namespace_is_no_hit() -> None:
    cluster = Cluster()
    cluster.router.stored(2, hashes_of(LONG, "another"))
    assert cluster.choose(LONG).num_cached_tokens == 0


def test_removed_pages_are_no_hit() -> None:
    cluster = Cluster()
    cluster.router.stored(2, hashes_of(LONG))
    cluster.router.removed(2, hashes_of(LONG)[3:])
    decision = cluster.choose(LONG)
    assert decision.reason is Reason.LOAD


def test_what_was_routed_counts_as_cached_before_any_event() -> None:
    cluster = Cluster()
    first = cluster.choose(LONG)
    assert first.reason is Reason.LOAD
    again = cluster.choose(LONG)
    assert (again.replica, again.reason, again.num_cached_tokens) == (first.replica, Reason.CACHE, len(LONG))


def test_an_assumption_without_an_event_expires_and_one_with_an_event_stays() -> None:
    for confirmed, expected in ((False, 0), (True, len(LONG))):
        cluster = Cluster()
        first = cluster.choose(LONG)
        if confirmed:
            cluster.router.stored(first.replica, hashes_of(LONG))
        cluster.router.finished("r1")  # else it is slow
        cluster.now = 11.0
        cluster.report_all()
        assert cluster.choose(LONG).num_cached_tokens == expected


def test_an_assumption_outlives_the_predicted_wait() -> None:
    cluster = Cluster(1)
    cluster.report_all(wait_s=60.0)
    cluster.choose(LONG)
    cluster.now = 61.0
    cluster.report_all()
    assert cluster.choose(LONG).num_cached_tokens == len(LONG)


def test_prompts_that_share_nothing_fill_all_caches() -> None:
    cluster = Cluster(4)
    counts: Counter[int] = Counter()
    for number in range(40):
        decision = cluster.choose(prompt_of(*range(1000 * number, 1000 * number + 20)))
        counts[decision.replica] += 1
        cluster.router.finished(f"r{number + 1}", 8)
        cluster.report_all()
    assert counts == {0: 10, 1: 10, 2: 10, 3: 10}


def test_a_replica_that_reports_fewer_pages_than_events_named_is_unknown_again() -> None:
    cluster = Cluster()
    cluster.router.stored(2, hashes_of(LONG))
    cluster.report(2, num_pages=5)
    assert cluster.choose(LONG).num_cached_tokens == 0


# ---------------------------------------------------------------------- load


def test_a_slightly_busier_holder_keeps_its_prefix() -> None:
    cluster = Cluster()
    cluster.router.stored(1, hashes_of(LONG))
    cluster.report(1, num_running=4, num_context_tokens=400)
    assert cluster.choose(LONG).replica == 1


@pytest.mark.parametrize(("factor", "keeps"), [(1.2, True), (1.3, False)])
def test_a_holder_is_left_when_another_is_faster_by_a_quarter(factor: float, keeps: bool) -> None:
    cluster = Cluster(2)
    cluster.router.stored(1, hashes_of(LONG))
    step_s = TIMES.seconds(0, 1, len(LONG))
    cluster.report(1, wait_s=factor * (step_s + TIMES.per_prefill_token * len(LONG)) - step_s)
    decision = cluster.choose(LONG, max_tokens=1)
    assert (decision.replica, decision.reason) == ((1, Reason.CACHE) if keeps else (0, Reason.REPLICATE))


def test_a_hot_prefix_is_replicated_when_its_holder_is_overloaded() -> None:
    cluster = Cluster()
    cluster.router.stored(1, hashes_of(LONG))
    cluster.report(1, wait_s=10.0, num_running=8, num_waiting=20)
    first = cluster.choose(LONG)
    assert first.replica != 1 and first.reason is Reason.REPLICATE
    second = cluster.choose(LONG)
    assert (second.replica, second.reason) == (first.replica, Reason.CACHE), "the new copy is used"


def test_requests_since_the_last_report_count_as_load() -> None:
    """All of a burst would otherwise go to the replica that was the best before it."""
    cluster = Cluster(2)
    cluster.router.stored(0, hashes_of(LONG))
    counts = Counter(cluster.choose(LONG, max_tokens=64).replica for _ in range(200))
    assert set(counts) == {0, 1} and abs(counts[0] - counts[1]) < 60


def test_a_report_replaces_what_was_assumed_of_the_load() -> None:
    cluster = Cluster(2)
    for _ in range(100):
        cluster.choose(prompt_of(*range(50)), max_tokens=64)
    cluster.report(0, num_seen=0)
    busy = cluster.router._times[0]
    cluster.report(0, num_seen=1000)
    assert cluster.router._times[0] < busy


def test_the_time_of_one_prompt_token_decides_between_cache_and_queue() -> None:
    """Where prompts are slow to compute, waiting for the holder is right; where they are fast, it is not."""
    for per_token, replica in ((1.0, 1), (2**-20, 0)):
        cluster = Cluster(2)
        cluster.router.stored(1, hashes_of(LONG))
        times = StepTime(2**-7, per_token, 2**-12, 2**-20)
        cluster.report(0, step_time=times)
        cluster.report(1, step_time=times, wait_s=8.0)
        assert cluster.choose(LONG, max_tokens=1).replica == replica


# ---------------------------------------------------------------------- tenants


def test_a_tenant_avoids_the_replica_where_its_own_requests_wait() -> None:
    cluster = Cluster(2)
    cluster.router.drain(1, True)
    for number in range(10):
        cluster.choose(prompt_of(number), "heavy")
    cluster.router.drain(1, False)
    cluster.router.drain(0, True)
    for number in range(10):
        cluster.choose(prompt_of(100 + number), "light")
    cluster.router.drain(0, False)
    cluster.report_all(wait_s=1.0, num_running=10)
    assert cluster.choose(prompt_of(500), "heavy").replica == 1
    cluster.report_all(wait_s=1.0, num_running=10)
    assert cluster.choose(prompt_of(600), "light").replica == 0


def test_a_tenant_that_floods_one_prefix_leaves_the_others_a_place() -> None:
    """A replica serves 8 requests at a time, one second each. One tenant sends 200 with one prefix at once; another
    sends one request every second and never waits behind that queue if there is a replica without one."""
    cluster = Cluster(4)
    queued: Counter[int] = Counter()
    waits: list[int] = []
    for second in range(30):
        cluster.now = float(second)
        for replica in range(4):
            left = queued[replica]
            running = min(8, left)
            cluster.report(replica, num_running=running, num_waiting=left - running, wait_s=(left - running) / 8)
        if second < 4:
            for _ in range(50):
                queued[cluster.choose(LONG, "hostile", max_tokens=64).replica] += 1
        decision = cluster.choose(prompt_of(*range(1000 * second, 1000 * second + 20)), "light", max_tokens=64)
        waits.append(queued[decision.replica] - min(queued[replica] for replica in range(4)))
        for replica in range(4):
            queued[replica] = max(0, queued[replica] - 8)
    assert max(waits) <= 8, "a request of the other tenant is never sent to a queue that another replica does not have"


# ---------------------------------------------------------------------- replicas


def test_late_replicas_are_left_out_while_others_are_on_time() -> None:
    cluster = Cluster(3)
    cluster.router.stored(1, hashes_of(LONG))
    cluster.now = 6.0
    cluster.report(0)
    cluster.report(2)
    assert cluster.choose(LONG).replica in (0, 2)


@pytest.mark.parametrize("period_s", [1.0, 10.0])
def test_a_replica_that_is_stopped_most_of_the_time_is_avoided(period_s: float) -> None:
    """One of three serves a tenth of what it predicts, and reports that all is well."""
    share, latency_s = stalling.run("cache", period_s=period_s)
    even, _ = stalling.run("cache", period_s=period_s, stopped=0.0)
    assert share < 0.03 and 0.3 < even < 0.36
    assert latency_s < 0.1 < stalling.run("round-robin", period_s=period_s)[1]


def test_a_replica_that_is_no_longer_stopped_gets_its_share_again() -> None:
    share, _ = stalling.run("cache", until=60.0, seconds=300.0)
    assert share > 0.25


def test_a_replica_without_work_is_not_slow_because_it_reports_rarely() -> None:
    cluster = Cluster(2)
    for second in range(1, 60):
        cluster.now = float(second)
        cluster.report_all()
    assert [cluster.router._slowdown(one, cluster.now) for one in cluster.router._replicas] == [1.0, 1.0]


def test_without_reports_the_replica_with_the_fewest_requests_is_chosen() -> None:
    cluster = Cluster(3)
    cluster.router.stored(1, hashes_of(LONG))
    cluster.now = 6.0
    decisions = [cluster.choose(LONG) for _ in range(6)]
    assert [one.replica for one in decisions] == [0, 1, 2, 0, 1, 2]
    assert {one.reason for one in decisions} == {Reason.LATE}


def test_replicas_that_are_down_or_draining_get_nothing() -> None:
    for late in (False, True):
        cluster = Cluster(3)
        cluster.router.stored(0, hashes_of(LONG))
        cluster.router.stored(1, hashes_of(LONG))
        cluster.router.stop(0)
        cluster.router.drain(1, True)
        cluster.now = 6.0 if late else 0.0
        assert {cluster.choose(LONG).replica for _ in range(5)} == {2}
        cluster.router.stop(2)
        with pytest.raises(NoReplica):
            cluster.choose(LONG)
        cluster.router.drain(1, False)
        assert cluster.choose(LONG).replica == 1, "a drained replica has kept its cache"


def test_a_restarted_replica_begins_empty_and_without_load() -> None:
    cluster = Cluster(2)
    for _ in range(50):
        cluster.choose(LONG)
    cluster.router.stored(1, hashes_of(LONG))
    cluster.report(1, wait_s=100.0, num_running=50)
    cluster.router.stop(1)
    cluster.report(1, wait_s=100.0)  # sent before it went down
    cluster.router.start(1, cluster.now)
    cluster.report(0, wait_s=100.0, num_running=50)
    decision = cluster.choose(LONG)
    assert decision == Decision(1, Reason.REPLICATE, 1, 0)
    for number in range(60):
        cluster.router.finished(f"r{number}", 10)  # those of the process that is gone among them
    assert not cluster.router._tenants and not cluster.router._routed
    assert [one.num_requests for one in cluster.router._replicas] == [0, 0]


def test_a_finished_request_leaves_nothing_behind() -> None:
    cluster = Cluster(2)
    for number in range(20):
        cluster.choose(LONG, f"tenant-{number}")
        cluster.router.finished(f"r{number + 1}", 10)
    router = cluster.router
    assert not router._routed and not router._tenants
    assert all(not one.unreported and not one.num_requests and not one.num_new_tokens for one in router._replicas)


@pytest.mark.parametrize("strategy", [name for name in ROUTERS if name != "cache"])
def test_other_strategies_use_every_replica_that_is_up(strategy: str) -> None:
    router = Router(4, PAGE, strategy)
    for replica in range(4):
        router.start(replica, 0.0)
    router.stop(3)
    counts = Counter(router.choose(RouteRequest(f"r{n}", LONG, ("a",)), 0.0).replica for n in range(60))
    assert set(counts) == {0, 1, 2}
    assert strategy == "random" or set(counts.values()) == {20}


def test_equal_calls_give_equal_decisions() -> None:
    def decisions() -> list[Decision]:
        rng, cluster, found = np.random.default_rng(0), Cluster(8), []
        for number in range(500):
            groups = rng.integers(0, 5, 10)
            found.append(cluster.choose(prompt_of(*groups), f"t{number % 3}"))
            if number % 7 == 0:
                cluster.report(number % 8, num_running=int(rng.integers(0, 30)), wait_s=float(rng.random()))
            if number > 50:
                cluster.router.finished(f"r{number - 50}", 20)
        return found

    assert decisions() == decisions()


def test_the_router_reads_no_clock_and_does_no_io() -> None:
    forbidden = {"time", "datetime", "threading", "asyncio", "socket", "os", "io", "torch", "logging"}
    folder = Path(router_module.__file__).parent
    for name in ("router.py", "page_index.py", "held_pages.py", "load.py", "block_hash.py"):
        tree = ast.parse((folder / name).read_text())
        found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not found & forbidden, name


# ---------------------------------------------------------------------- reference implementation

NUM = 3
REPLICAS = st.integers(0, NUM - 1)
GROUPS = st.lists(st.integers(0, 1), max_size=6)


class Reference:
    """The same decisions from plain lists, recomputed from scratch: a set of pages per replica, every routed request
    that has not finished, the last report."""

    def __init__(self) -> None:
        self.up, self.draining = [False] * NUM, [False] * NUM
        self.reports: list[tuple[LoadReport, float]] = [(LoadReport(), -math.inf)] * NUM
        self.held: list[set[int]] = [set() for _ in range(NUM)]
        self.assumed: list[list[tuple[float, set[int]]]] = [[] for _ in range(NUM)]
        self.requests: dict[
            str, tuple[int, int, str, int, int, bool]
        ] = {}  # replica, number, tenant, tokens, new, seen
        self.routed = [0] * NUM
        self.pressure = [0.0] * NUM
        self.typical = router_module._FIRST_STEP_TIME
        self.output, self.weight = 128.0, 1.0
        # Of each replica: since when a report is due, and (when it came, how late it was, after how long)
        self.since = [math.inf] * NUM
        self.gaps: list[list[tuple[float, float, float]]] = [[] for _ in range(NUM)]
        self.measured = [0.0] * NUM

    def slowdown(self, replica: int, now: float) -> float:
        gaps, gap = list(self.gaps[replica]), max(0.0, now - self.since[replica])
        if gap > self.allowed(replica):
            gaps.append((now, gap - self.allowed(replica), gap))
        else:
            now = self.measured[replica]
        stalled = sum(late * math.exp((at - now) / 30) for at, late, _ in gaps)
        observed = sum(all_of_it * math.exp((at - now) / 30) for at, _, all_of_it in gaps)
        return (observed + 1) / (observed - stalled + 1)

    def allowed(self, replica: int) -> float:
        load, times, unseen = self.reports[replica][0], self.times(replica), self.unseen(replica)
        rows = load.num_running + load.num_waiting + len(unseen) + 1
        step = times.seconds(0, rows, load.num_context_tokens + sum(tokens for tokens, _ in unseen))
        most = load.max_prefill_tokens
        prompts = load.num_prompt_tokens + sum(new for _, new in unseen) + (most if load.num_waiting else 0)
        return 0.05 + 2 * (step + times.per_prefill_token * min(prompts, most))

    def report(self, replica: int, load: LoadReport, now: float) -> None:
        if self.since[replica] < math.inf:
            gap = now - self.since[replica]
            self.gaps[replica].append((now, max(0.0, gap - self.allowed(replica)), gap))
            self.since[replica] = now
        self.measured[replica], self.reports[replica] = now, (load, now)

    def known(self, replica: int) -> set[int]:
        return self.held[replica].union(*(pages for _, pages in self.assumed[replica]))

    def choose(self, request: RouteRequest, now: float) -> Decision | None:
        usable = [index for index in range(NUM) if self.up[index] and not self.draining[index]]
        if not usable:
            return None
        for replica in range(NUM):
            gone = set[int]().union(*(pages for expires, pages in self.assumed[replica] if expires <= now))
            self.assumed[replica] = [(at, pages - gone) for at, pages in self.assumed[replica] if at > now]
        hashes = hashes_of(request.keys, request.tenant)
        prefixes = []
        for replica in range(NUM):
            held = self.known(replica)
            prefixes.append(next((at for at, page in enumerate(hashes) if page not in held), len(hashes)))
        on_time = [index for index in usable if now - self.reports[index][1] <= 5.0]
        costs = {index: self.cost(index, request, prefixes[index]) * self.slowdown(index, now) for index in range(NUM)}
        if not on_time:
            open_here = Counter(one[0] for one in self.requests.values())
            chosen, reason = min(usable, key=lambda index: (open_here[index], index)), Reason.LATE
        else:
            least = min(costs[index] for index in on_time)
            near = [index for index in on_time if costs[index] <= least * 1.25]
            best = min(near, key=lambda index: (-prefixes[index], costs[index], index))
            hot = bool(hashes) and 2 * max(prefixes[index] for index in on_time) >= len(hashes)
            if hot and 2 * prefixes[best] >= len(hashes):
                chosen, reason = best, Reason.CACHE
            else:
                same = [index for index in on_time if costs[index] <= least * 1.05]
                chosen = min(same, key=lambda index: (self.pressure[index], index))
                reason = Reason.REPLICATE if hot else Reason.LOAD
        wait = self.wait(chosen)
        self.assumed[chosen].append((now + wait + 10.0, set(hashes[prefixes[chosen] :])))
        self.routed[chosen] += 1
        if all(one[0] != chosen for one in self.requests.values()):
            self.since[chosen] = now
        cached = prefixes[chosen] * PAGE
        num_tokens = len(request.keys)
        self.requests[request.id] = (
            chosen,
            self.routed[chosen],
            request.tenant,
            num_tokens,
            num_tokens - cached,
            False,
        )
        self.pressure[chosen] += self.weight * (num_tokens - cached)
        self.weight *= 1.02
        return Decision(chosen, reason, self.routed[chosen], cached)

    def times(self, replica: int) -> StepTime:
        return self.reports[replica][0].step_time or self.typical

    def unseen(self, replica: int) -> list[tuple[int, int]]:
        return [(one[3], one[4]) for one in self.requests.values() if one[0] == replica and not one[5]]

    def wait(self, replica: int) -> float:
        new = sum(count for _, count in self.unseen(replica))
        return self.reports[replica][0].wait_s + self.times(replica).per_prefill_token * new

    def cost(self, replica: int, request: RouteRequest, prefix: int) -> float:
        load, times, unseen = self.reports[replica][0], self.times(replica), self.unseen(replica)
        rows = load.num_running + load.num_waiting + len(unseen) + 1
        context = load.num_context_tokens + sum(tokens for tokens, _ in unseen) + len(request.keys)
        output = min(self.output, request.max_tokens or math.inf)
        cost = self.wait(replica) + output * times.seconds(0, rows, context)
        cost += times.per_prefill_token * (len(request.keys) - prefix * PAGE)
        here = [one[2] for one in self.requests.values() if one[0] == replica]
        return cost + (self.wait(replica) * here.count(request.tenant) / len(here) if here else 0.0)

    def down(self, replica: int) -> None:
        self.up[replica] = False
        self.reports[replica] = LoadReport(), -math.inf
        self.held[replica], self.assumed[replica] = set(), []
        self.requests = {id: one for id, one in self.requests.items() if one[0] != replica}
        self.routed[replica], self.pressure[replica] = 0, 0.0
        self.since[replica], self.gaps[replica], self.measured[replica] = math.inf, [], 0.0


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.reference, self.now, self.count = Router(NUM, PAGE), Reference(), 0.0, 0
        for replica in range(NUM):
            self.start(replica)

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.5, 2.0, 6.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(groups=GROUPS, tenant=st.sampled_from("ab"), max_tokens=st.sampled_from([None, 1, 64]))
    def choose(self, groups: list[int], tenant: str, max_tokens: int | None) -> None:
        self.count += 1
        request = RouteRequest(f"r{self.count}", prompt_of(*groups), (tenant, "", ""), tenant, max_tokens)
        expected_costs = [self.reference.cost(replica, request, 0) for replica in range(NUM)]
        costs = self.router._costs(request, [0] * NUM)
        assert [one for one, up in zip(costs, self.reference.up, strict=True) if up] == pytest.approx(
            [one for one, up in zip(expected_costs, self.reference.up, strict=True) if up], rel=1e-9
        )
        expected = self.reference.choose(request, self.now)
        if expected is None:
            with pytest.raises(NoReplica):
                self.router.choose(request, self.now)
        else:
            assert self.router.choose(request, self.now) == expected

    @rule(data=st.data())
    @precondition(lambda self: self.reference.requests)
    def finish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.reference.requests)))
        tokens = data.draw(st.sampled_from([0, 1, 100]))
        self.router.finished(request_id, tokens)
        replica = self.reference.requests.pop(request_id)[0]
        if all(one[0] != replica for one in self.reference.requests.values()):
            self.reference.since[replica] = math.inf
        if tokens:
            self.reference.output += 0.02 * (tokens - self.reference.output)

    @rule(
        replica=REPLICAS,
        rows=st.integers(0, 40),
        wait=st.sampled_from([0.0, 0.25, 4.0]),
        measured=st.booleans(),
        seen=st.integers(0, 20),
    )
    def report(self, replica: int, rows: int, wait: float, measured: bool, seen: int) -> None:
        load = LoadReport(1000, rows, rows // 4, 64 * rows, wait, TIMES if measured else None, 8 * rows, 64)
        self.router.report(replica, load, self.now, seen)
        reference = self.reference
        if reference.up[replica]:
            reference.report(replica, load, self.now)
            reference.typical = TIMES if measured else reference.typical
            for id, one in reference.requests.items():
                if one[0] == replica and one[1] <= seen:
                    reference.requests[id] = (*one[:5], True)
            for other in range(NUM):
                expired = [pages for expires, pages in reference.assumed[other] if expires <= self.now]
                gone = set[int]().union(*expired)
                reference.assumed[other] = [
                    (at, pages - gone) for at, pages in reference.assumed[other] if at > self.now
                ]

    @rule(replica=REPLICAS, groups=GROUPS, tenant=st.sampled_from("ab"), first=st.integers(0, 3))
    def stored(self, replica: int, groups: list[int], tenant: str, first: int) -> None:
        pages = hashes_of(prompt_of(*groups), tenant)[first:]
        self.router.stored(replica, pages)
        new = set(pages) - self.reference.held[replica]
        self.reference.held[replica] |= new
        self.reference.assumed[replica] = [(at, held - new) for at, held in self.reference.assumed[replica]]

    @rule(replica=REPLICAS, groups=GROUPS, tenant=st.sampled_from("ab"), first=st.integers(0, 3))
    def removed(self, replica: int, groups: list[int], tenant: str, first: int) -> None:
        pages = hashes_of(prompt_of(*groups), tenant)[first:]
        self.router.removed(replica, pages)
        self.reference.held[replica] -= set(pages)

    @rule(replica=REPLICAS)
    def cleared(self, replica: int) -> None:
        self.router.cleared(replica)
        self.reference.held[replica], self.reference.assumed[replica] = set(), []

    @rule(replica=REPLICAS, draining=st.booleans())
    def drain(self, replica: int, draining: bool) -> None:
        self.router.drain(replica, draining)
        self.reference.draining[replica] = draining

    @rule(replica=REPLICAS)
    def stop(self, replica: int) -> None:
        self.router.stop(replica)
        self.reference.down(replica)

    @rule(replica=REPLICAS)
    def start(self, replica: int) -> None:
        self.router.start(replica, self.now)
        self.reference.down(replica)
        self.reference.up[replica] = True
        self.reference.reports[replica] = LoadReport(), self.now


TestRouterAgainstReference = RouterMachine.TestCase
TestRouterAgainstReference.settings = settings(max_examples=40)
