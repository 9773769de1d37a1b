"""What a replica holds on any medium, from its KV events."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.cluster.held_pages import HeldPages, PageChanges
from paceline.cluster.kv_events import ClearedPages, PageRun, RemovedPages, StoredPages
from paceline.cluster.router import Router
from paceline.scheduler.kv_events import Medium


def run_of(tokens: Sequence[int]) -> PageRun:
    return PageRun(None, ("a", "", ""), np.array(tokens, np.int32).tobytes(), 1)


ONE, TWO = run_of([1]), run_of([2])
A, B = (run.hashes.tolist() for run in (ONE, TWO))


def test_a_page_that_is_spilled_is_still_held_and_one_that_is_dropped_everywhere_is_not() -> None:
    held = HeldPages()
    assert held.changes([StoredPages(ONE, Medium.GPU), StoredPages(TWO, Medium.GPU)]) == PageChanges(False, [], A + B)
    spilled = [StoredPages(ONE, Medium.CPU), RemovedPages(ONE, Medium.GPU)]
    assert held.changes(spilled) == PageChanges(False, [], [])
    assert held.changes([StoredPages(ONE, Medium.GPU)]) == PageChanges(False, [], [])
    assert held.changes([RemovedPages(ONE, Medium.CPU)]) == PageChanges(False, [], [])
    assert held.changes([RemovedPages(ONE, Medium.GPU)]) == PageChanges(False, A, [])
    assert held.everything() == PageChanges(True, [], B)


def test_a_page_that_comes_and_goes_within_a_step_is_not_mentioned() -> None:
    events = [StoredPages(ONE, Medium.GPU), RemovedPages(ONE, Medium.GPU), StoredPages(TWO, Medium.GPU)]
    assert HeldPages().changes(events) == PageChanges(False, [], B)


def test_what_comes_after_a_clear_is_held() -> None:
    held = HeldPages()
    held.changes([StoredPages(ONE, Medium.GPU)])
    assert held.changes([ClearedPages(), StoredPages(TWO, Medium.GPU)]) == PageChanges(True, [], B)


def test_changes_reach_the_router_in_order() -> None:
    router = Router(2, 1)
    PageChanges(False, [], [1, 2, 3]).apply(router, 1)
    PageChanges(False, [3], [4]).apply(router, 1)
    assert router._pages.prefix_pages([1, 2, 4]) == [0, 3] and router._pages.prefix_pages([3]) == [0, 0]
    PageChanges(True, [], [9]).apply(router, 1)
    assert router._pages.prefix_pages([1]) == [0, 0] and router._pages.prefix_pages([9]) == [0, 1]
