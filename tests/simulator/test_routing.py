"""Several virtual GPUs behind the router of the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.cluster.block_hash import block_hashes, root_hash
from paceline.config import ROUTERS, ReplicaConfig, SchedulerConfig, WorkloadConfig
from paceline.simulator.profile import load_profile
from paceline.simulator.replica import VirtualReplica
from paceline.simulator.routing import SimulatedRouter
from paceline.simulator.run import SimulationResult, simulate
from paceline.simulator.scenarios import routing
from paceline.simulator.workloads import Arrival, make_workload, random_tokens

H200 = load_profile("h200-qwen3-14b")


def run(router: str = "cache", count: int = 3, *, rate: float = 100.0, **options: Any) -> SimulationResult:
    work = WorkloadConfig(requests=120, rate=rate, prompt_tokens=400, output_tokens=20, groups=12, shared=0.8)
    config = SchedulerConfig(**{"num_pages": 300, "max_running": 8} | options)
    replicas = ReplicaConfig(replicas=count, router=router)
    return simulate(make_workload("prefixes", work), config, H200, replicas=replicas)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_is_served_once_and_the_same_run_is_the_same(router: str) -> None:
    one, two = run(router), run(router)
    assert len({request.id for request in one.served}) == len(one.served) == 120
    assert all(request.arrival <= request.admitted <= request.finished for request in one.served)
    assert one.counters.finished == two.counters.finished and sum(one.counters.finished.values()) == 120
    assert (one.journal, one.summary()) == (two.journal, two.summary())


def test_one_replica_decides_as_without_a_router() -> None:
    alone = run("cache", 1)
    work = WorkloadConfig(requests=120, rate=100.0, prompt_tokens=400, output_tokens=20, groups=12, shared=0.8)
    assert alone.journal == simulate(make_workload("prefixes", work), alone.config, H200).journal


def test_three_replicas_are_faster_than_one() -> None:
    assert run(count=3, rate=400.0).seconds < 0.6 * run(count=1, rate=400.0).seconds


def test_replicas_that_are_idle_for_long_are_not_late() -> None:
    """An idle engine takes no steps. The cached prefix must still be found a minute later."""
    prompt = np.arange(1600, dtype=np.int32)
    arrivals = [Arrival(60.0 * number, f"r{number}", prompt, np.zeros(4, np.int32)) for number in range(5)]
    found = simulate(arrivals, SchedulerConfig(num_pages=300), H200, replicas=ReplicaConfig(replicas=3))
    assert [one.cached_tokens > 1500 for one in found.served] == [False, True, True, True, True]


def test_the_router_knows_exactly_what_every_replica_has_cached() -> None:
    """With little memory, also on the host, so that pages are evicted, spilled and fetched all the time."""
    work = WorkloadConfig(requests=150, rate=200.0, prompt_tokens=300, output_tokens=20, groups=10, shared=0.8)
    arrivals = make_workload("prefixes", work)
    config = SchedulerConfig(num_pages=80, num_host_pages=60, max_running=4, host_page_cost=0.1)
    gpus = [VirtualReplica(arrivals, config, H200, True, None, None) for _ in range(3)]
    router = SimulatedRouter(gpus, "cache")
    for number, arrival in enumerate(arrivals):
        router.add(arrival)
        for gpu in gpus:
            for _ in range(number % 4):
                if gpu.scheduler.has_work:
                    router.stepped(gpu, gpu.step())
    while busy := [gpu for gpu in gpus if gpu.scheduler.has_work]:
        for gpu in busy:
            router.stepped(gpu, gpu.step())
    pages = router._router._pages
    pages.expire(1e9)
    compared = 0
    for arrival in arrivals:
        request = arrival.request()
        hashes = block_hashes(request.prompt, 16, root_hash(request.namespace)).tolist()
        for gpu, found in zip(gpus, pages.prefix_pages(hashes), strict=True):
            on_device = gpu.scheduler.match(request) // 16
            assert found >= on_device
            if not gpu.scheduler.counters.spilled_pages:
                assert found == on_device
            compared += on_device > 0
    assert compared > 20 and sum(gpu.scheduler.counters.spilled_pages for gpu in gpus)
    held = [len(one._media) for one in router._held]
    assert held == [pages._counts[index] for index in range(3)]


def test_cache_aware_routing_raises_the_hit_rate_and_shortens_the_wait_for_the_first_token() -> None:
    found = {router: routing(router, requests=500).summary() for router in ("cache", "round-robin", "least-loaded")}
    cache = found.pop("cache")
    for other in found.values():
        assert cache["hit_rate"] > other["hit_rate"] + 0.1
        assert cache["ttft_p90_ms"] < other["ttft_p90_ms"] / 2


def test_a_tenant_that_floods_one_prefix_starves_nobody() -> None:
    """One tenant sends 600 requests with one prefix within a second, the others 40 in ten. Policy `fair` serves all of
    them in turn at each replica, and the router keeps a place for them."""
    rng = np.random.default_rng(0)
    hot = random_tokens(rng, 1600)
    flood = [
        Arrival(1.0 + number / 600, f"flood-{number}", np.concatenate([hot, random_tokens(rng, 50)]),
                np.zeros(100, np.int32), tenant="hostile")
        for number in range(600)
    ]  # fmt: skip
    polite = [
        Arrival(number / 4, f"polite-{number}", random_tokens(rng, 400), np.zeros(20, np.int32), tenant="polite")
        for number in range(40)
    ]
    config, replicas = SchedulerConfig(num_pages=6000, max_running=32), ReplicaConfig(replicas=4)

    def waits(arrivals: list[Arrival]) -> list[float]:
        served = simulate(arrivals, config, H200, replicas=replicas).served
        return [one.first_token - one.arrival for one in served if one.tenant == "polite"]

    alone, flooded = waits(polite), waits(sorted([*flood, *polite], key=lambda one: one.at))
    assert len(flooded) == 40
    assert max(flooded) < max(alone) + 2.0, "the flood takes longer than ten seconds"
