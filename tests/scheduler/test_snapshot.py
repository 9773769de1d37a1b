"""A snapshot adds up and is bounded."""

from __future__ import annotations

import base64
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from paceline.config import SchedulerConfig
from paceline.request import Request, SamplingParams
from paceline.scheduler import Scheduler
from paceline.scheduler.invariants import check
from paceline.scheduler.snapshot import (
    CACHED,
    DECODING,
    FREE,
    OWNED,
    PINNED,
    PREFILL,
    SHARED,
    WAITING,
    page_uses,
    snapshot,
)
from paceline.scheduler.tracked_request import Phase
from paceline.testing import Harness
from tests.helpers import harness, prompt, request


def busy_run(overlap: bool, **options: Any) -> Harness:
    """Thirty requests of two tenants in a pool that is too small for them; every second one begins with one prefix."""
    config = {"num_pages": 60, "page_size": 4, "max_running": 6, "chunk_tokens": 16, **options}
    run = Harness(Scheduler(SchedulerConfig(**config)), overlap=overlap)
    tokens = np.random.default_rng(0)
    system = tokens.integers(0, 60, 30)
    for number in range(30):
        own = tokens.integers(0, 60, int(tokens.integers(1, 30)))
        text = np.concatenate([system, own]) if number % 2 else own
        params = SamplingParams(max_tokens=int(tokens.integers(1, 20)))
        tenant = f"t{number // 2 % 2}"
        run.add(Request(f"r{number}", text, params, eos_token_ids=(0,), tenant=tenant, expected_tokens=2))
    return run


@pytest.mark.parametrize("overlap", [False, True])
def test_the_page_map_and_the_totals_agree_at_every_step(overlap: bool) -> None:
    run = busy_run(overlap)
    seen: set[str] = set()
    while run.scheduler.has_work:
        run.step()
        check(run.scheduler)
        found = snapshot(run.scheduler, run.clock())
        memory, codes = found["memory"], np.frombuffer(base64.b64decode(found["map"]), "<u2")
        assert memory["free"] == (codes == FREE).sum() == run.scheduler.memory.pool.num_free
        assert memory["cached"] == (codes == CACHED).sum()
        assert memory["shared"] == (codes == SHARED).sum()
        assert memory["owned"] == (codes >= OWNED).sum()
        assert memory["pinned"] == 0
        assert sum(memory[kind] for kind in ("free", "cached", "shared", "owned")) == 60
        assert {one["slot"] for one in found["running"]} >= set((codes[codes >= OWNED] - OWNED).tolist())
        assert [parent is None or parent < index for index, (parent, *_) in enumerate(found["tree"]["nodes"])]
        json.dumps(found)
        seen |= {kind for kind in memory if memory[kind]}
    assert seen == {"pages", "free", "cached", "shared", "owned"}


def test_a_snapshot_is_bounded_however_many_requests_wait() -> None:
    scheduler = Scheduler(SchedulerConfig(num_pages=100_000, max_running=4))
    for number in range(1000):
        tokens = np.arange(number * 50, number * 50 + 40)
        scheduler.add(Request(f"r{number}", tokens, SamplingParams(max_tokens=5)), float(number))
    scheduler.plan(1000.0)
    found = snapshot(scheduler, 1000.0)
    assert (found["num_waiting"], len(found["waiting"])) == (996, 100)
    assert found["reasons"] == [
        ("a free slot", 996, "one of 4 slots (max_running), all in use: a running request must finish first")
    ]
    assert len(found["tree"]["nodes"]) == 150 and found["tree"]["left_out"] > 800
    assert found["map"] is None
    assert len(json.dumps(found)) < 60_000
    assert found["waiting"][0]["why"].startswith("Request r4 waits for one of 4 slots")


@pytest.mark.parametrize("batching", ["mixed", "static"])
@pytest.mark.parametrize("overlap", [False, True])
def test_counts_of_reasons_agree_with_rows_and_sentences_at_every_step(overlap: bool, batching: str) -> None:
    run = busy_run(overlap, batching=batching, num_pages=24, max_running=3)
    seen: set[str] = set()
    while run.scheduler.has_work:
        run.step()
        found = snapshot(run.scheduler, run.clock())
        rows = found["waiting"]
        assert {kind: count for kind, count, _ in found["reasons"]} == Counter(row["reason"] for row in rows)
        assert len(rows) == found["num_waiting"] == found["phases"]["waiting"]
        for kind, count, clause in found["reasons"]:
            for row in rows:
                if row["reason"] == kind and clause != kind:
                    assert f"Request {row['id']} waits for {clause}" in row["why"]
            assert count > 0
        free = run.scheduler.memory.slots.num_free
        if batching == "static" and free < 3:
            assert {row["reason"] for row in rows} <= {"the batch to finish"}
        elif not free:
            assert {row["reason"] for row in rows} <= {"a free slot"}
        seen |= {row["reason"] for row in rows}
    assert seen >= ({"the batch to finish"} if batching == "static" else {"memory", "a free slot"})


@pytest.mark.parametrize("overlap", [False, True])
def test_every_token_and_every_request_counts_once(overlap: bool) -> None:
    run = busy_run(overlap, num_pages=24, num_host_pages=60, prefix_wait_tokens=4)
    fetched = finished = 0
    while run.scheduler.has_work:
        run.step()
        found = snapshot(run.scheduler, run.clock())
        for one in found["running"]:
            assert one["cached"] + one["fetched"] + one["computed"] + one["left"] == one["prompt"]
            assert min(one["cached"], one["fetched"], one["computed"], one["left"]) >= 0
            assert one["output"] == len(run.scheduler.requests[one["id"]].output) <= one["max"]
            fetched += one["fetched"]
        for one in found["waiting"]:
            assert one["cached"] + one["on_host"] <= one["tokens"]
        assert sum(found["phases"].values()) == 30
        assert found["phases"]["prefill"] + found["phases"]["decoding"] == found["num_running"]
        finished = found["phases"]["finished"]
        assert found["host"]["used"] <= found["host"]["pages"] == 60
    assert fetched > 0 and finished == 30
    assert found["counters"]["fetched_tokens"] > 0 and found["counters"]["spilled_pages"] > 0


def test_without_host_memory_there_is_nothing_about_it() -> None:
    run = busy_run(False)
    run.step()
    found = snapshot(run.scheduler, run.clock())
    assert found["host"] is None
    assert "host" not in {node[2] for node in found["tree"]["nodes"]}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_are_admitted_in_the_order_of_their_places(policy: str) -> None:
    subject = harness(policy=policy, max_running=1, num_pages=100)
    subject.add_all(*(request(prompt([number]), 2, id=f"r{number}", priority=number * 7 % 5) for number in range(9)))
    found = snapshot(subject.scheduler, 0.0)
    assert found["order"] == "admission" and [one["place"] for one in found["waiting"]] == list(range(1, 10))
    expected = [one["id"] for one in found["waiting"]]
    admitted: list[str] = []
    while subject.scheduler.has_work:
        subject.step()
        admitted += [one["id"] for one in snapshot(subject.scheduler, 0.0)["running"] if one["id"] not in admitted]
    assert admitted == expected
    assert (admitted == [f"r{number}" for number in range(9)]) == (policy == "fcfs")


def test_policies_that_decide_anew_list_requests_by_arrival_after_retracted_ones() -> None:
    subject = harness(policy="fair", max_running=2, num_pages=100)
    subject.add_all(*(request(prompt([number]), 4, id=f"r{number}") for number in range(4)))
    subject.step()
    subject.scheduler.retract("r1", 0.0, "a test")
    found = snapshot(subject.scheduler, 0.0)
    assert found["order"] == "arrival"
    assert [one["id"] for one in found["waiting"]] == ["r1", "r2", "r3"]


def test_shared_prefixes_name_the_running_requests_below_their_deepest_common_node() -> None:
    subject = harness(num_pages=100, page_size=4, max_running=8, prefix_wait=False)
    common = range(20, 36)
    subject.add(request(prompt(common, 1), 9, id="first"))
    subject.step()
    subject.add_all(
        request(prompt(common, range(40, 44), 2), 9, id="second"),
        request(prompt(common, range(40, 44), 3), 9, id="third"),
        request(prompt([9]), 9, id="alone"),
    )
    for _ in range(3):
        subject.step()
    found = snapshot(subject.scheduler, 0.0)
    rows = {one["id"]: one["shared"] for one in found["running"]}
    prefixes = found["shared"]
    assert rows["alone"] is None
    assert prefixes[rows["first"]] == {"tokens": 16, "ids": ["first", "second", "third"]}
    assert prefixes[rows["second"]] == {"tokens": 20, "ids": ["second", "third"]}
    assert rows["second"] == rows["third"]
    drawn = {node[5]: node[3] for node in found["tree"]["nodes"] if node[5] is not None}
    assert drawn == {rows["first"]: 3, rows["second"]: 2}, "the tree marks where each of them ends, with its users"


def test_pinned_pages_are_neither_shared_nor_cached() -> None:
    subject = harness(num_pages=20, page_size=4, pin_quota_pages=8)
    subject.add(request(prompt(range(1, 10)), 1))
    subject.run()
    subject.scheduler.pin("system", list(range(1, 10)), 0.0)
    found = snapshot(subject.scheduler, 0.0)
    codes = np.frombuffer(base64.b64decode(found["map"]), "<u2")
    assert found["memory"]["pinned"] == (codes == PINNED).sum() == 2
    assert found["memory"]["shared"] == (codes == SHARED).sum() == 0
    assert "pinned" in {node[2] for node in found["tree"]["nodes"]}


@pytest.mark.parametrize("overlap", [False, True])
def test_page_uses_are_the_pages_of_the_requests_in_each_phase(overlap: bool) -> None:
    run = busy_run(overlap)
    seen = 0
    while run.scheduler.has_work:
        run.step()
        uses = np.frombuffer(base64.b64decode(page_uses(run.scheduler)), np.uint8)
        codes = np.frombuffer(base64.b64decode(snapshot(run.scheduler, 0.0)["map"]), "<u2")
        slots, tree = run.scheduler.memory.slots, run.scheduler.memory.tree
        for bit, phase in ((PREFILL, Phase.PREFILL), (DECODING, Phase.DECODING), (WAITING, Phase.WAITING)):
            expected: set[int] = set()
            for one in run.scheduler.requests.values():
                if one.phase is phase and one.slot is not None:
                    expected |= set(slots.row(one.slot).tolist())
                elif one.phase is phase:
                    hit = tree.hit(tree.waiting_nodes[one], run.scheduler.step)
                    expected |= set(tree.path_pages(hit).tolist())
            assert set(np.flatnonzero(uses & bit).tolist()) == expected
            seen |= bit if expected else 0
        assert not uses[codes == FREE].any()
        assert (uses[codes >= OWNED] & (PREFILL | DECODING)).all()
    assert seen == PREFILL | DECODING | WAITING
