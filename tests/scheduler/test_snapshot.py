"""A snapshot adds up and is bounded."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from paceline.config import SchedulerConfig
from paceline.request import Request, SamplingParams
from paceline.scheduler import Scheduler
from paceline.scheduler.invariants import check
from paceline.scheduler.snapshot import CACHED, FREE, OWNED, SHARED, snapshot
from paceline.testing import Harness


@pytest.mark.parametrize("overlap", [False, True])
def test_the_page_map_and_the_totals_agree_at_every_step(overlap: bool) -> None:
    run = Harness(
        Scheduler(SchedulerConfig(num_pages=60, page_size=4, max_running=6, chunk_tokens=16)), overlap=overlap
    )
    tokens = np.random.default_rng(0)
    system = tokens.integers(0, 60, 30)
    for number in range(30):
        own = tokens.integers(0, 60, int(tokens.integers(1, 30)))
        prompt = np.concatenate([system, own]) if number % 2 else own
        params = SamplingParams(max_tokens=int(tokens.integers(1, 20)))
        run.add(Request(f"r{number}", prompt, params, eos_token_ids=(0,), tenant=f"t{number % 2}", expected_tokens=2))
    seen: set[str] = set()
    while run.scheduler.has_work:
        run.step()
        check(run.scheduler)
        found = snapshot(run.scheduler, run.clock())
        memory, codes = found["memory"], np.frombuffer(base64.b64decode(found["map"]), "<u2")
        assert memory["free"] == (codes == FREE).sum() == run.scheduler.memory.pool.num_free
        assert memory["cached"] == (codes == CACHED).sum()
        # A page with one remaining holder counts as shared until it is unlocked.
        assert memory["shared"] == (codes == SHARED).sum()
        assert memory["owned"] == (codes >= OWNED).sum()
        assert sum(memory[kind] for kind in ("free", "cached", "shared", "owned")) == 60
        assert {one["slot"] for one in found["running"]} >= set((codes[codes >= OWNED] - OWNED).tolist())
        for index, (parent, *_) in enumerate(found["tree"]["nodes"]):
            assert parent < index
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
    assert found["reasons"] == [("a free slot", 996)]
    assert len(found["tree"]["nodes"]) == 150 and found["tree"]["left_out"] > 800
    assert found["map"] is None
    assert len(json.dumps(found)) < 60_000
    assert found["waiting"][0]["why"].startswith("Request r4 waits for one of 4 slots")
