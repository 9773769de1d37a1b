"""Evicted KV is kept in host memory and fetched again: same tokens, less computation, no leaks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from paceline.config import ConfigError, SchedulerConfig
from paceline.request import FinishReason
from paceline.scheduler import EventKind
from paceline.scheduler.invariants import find_faults
from paceline.scheduler.now import Now
from paceline.testing import Harness
from tests.helpers import events, harness, prompt, request, seeds
from tests.scheduler.test_state_machine import random_run

A, B, C = range(1, 17), range(21, 37), range(41, 57)  # four pages each


def small(num_pages: int = 6, num_host_pages: int = 16, **options: Any) -> Harness:
    """Device memory for one of the prompts above, host memory for more."""
    return harness(num_pages=num_pages, num_host_pages=num_host_pages, **options)


def run(subject: Harness, tokens: Any, max_tokens: int = 2, **fields: Any) -> Any:
    one = subject.add(request(tokens, max_tokens, **fields))
    subject.run()
    return one


def test_an_evicted_prefix_is_fetched_and_not_computed_again() -> None:
    subject = small()
    run(subject, prompt(A, 91))
    run(subject, prompt(B, 92))  # evicts them
    counters = subject.scheduler.counters
    computed, evicted = counters.computed_tokens, counters.evicted_pages
    again = run(subject, prompt(A, 93))
    assert counters.spilled_pages >= evicted > 0
    assert again.num_cached == 16, "all of its whole pages"
    assert again.num_fetched >= 12
    assert counters.computed_tokens == computed + 1
    subject.assert_reference()
    assert [event.detail for event in events(subject.scheduler, EventKind.FETCH, again.id)] == [(again.num_fetched,)]
    (admitted,) = events(subject.scheduler, EventKind.ADMIT, again.id)
    assert admitted.detail == (16 - again.num_fetched, 1), "tokens found on the device, tokens to compute"


def test_explain_reports_fetched_tokens() -> None:
    subject = small(chunk_tokens=4)
    run(subject, prompt(A, 91))
    run(subject, prompt(B, 92))
    one = subject.add(request(prompt(A, range(93, 99)), 1))
    subject.step()
    said = f"20 of 22 prompt tokens are planned, {one.num_fetched} of them fetched from host memory."
    assert one.num_fetched >= 12 and subject.scheduler.explain(one.id).endswith(said)


def test_without_host_memory_an_evicted_prefix_is_computed_again() -> None:
    subject = small(num_host_pages=0)
    for tokens in (prompt(A, 91), prompt(B, 92), prompt(A, 93)):
        run(subject, tokens)
    counters = subject.scheduler.counters
    assert all(plan.swap is None for plan in subject.executor.plans)
    assert (counters.spilled_pages, counters.fetched_tokens) == (0, 0)
    assert counters.computed_tokens > 17 + 17 + 1
    assert not events(subject.scheduler, EventKind.SPILL) and not events(subject.scheduler, EventKind.FETCH)


def test_a_fetched_prefix_keeps_its_host_copy_and_is_not_spilled_again() -> None:
    subject = small()
    for tokens in (prompt(A, 91), prompt(B, 92), prompt(A, 93), prompt(B, 94)):
        run(subject, tokens)
    spilled = subject.scheduler.counters.spilled_pages
    for _ in range(3):
        run(subject, prompt(A, 95))
        run(subject, prompt(B, 96))
    counters = subject.scheduler.counters
    assert counters.fetched_tokens > 64
    # Only the last page of each run, with its own token and its output, is new.
    assert counters.spilled_pages - spilled <= 6
    subject.assert_reference()


def test_a_fetched_prefix_is_shared_by_all_requests_of_the_same_pass() -> None:
    subject = small(num_pages=12)
    run(subject, prompt(A, 91))
    run(subject, prompt(B, range(60, 85)), 3)
    computed = subject.scheduler.counters.computed_tokens
    first, second = subject.add_all(request(prompt(A, 93), 2), request(prompt(A, 94), 2))
    subject.run()
    assert first.num_fetched > 0 and second.num_fetched == 0
    assert first.num_cached == second.num_cached == 16
    assert subject.scheduler.counters.computed_tokens == computed + 2
    subject.assert_reference()


def test_a_retracted_request_fetches_its_own_kv() -> None:
    subject = harness(num_pages=14, num_host_pages=64, max_running=4)
    for number in range(4):
        subject.add(request(prompt(number, range(8)), 24, eos_token_ids=(0,), expected_tokens=1))
    subject.run()
    counters = subject.scheduler.counters
    assert counters.retractions and counters.fetched_tokens
    assert all(one.num_cached <= len(one.prompt) for one in subject.requests.values())
    subject.assert_reference()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_plan_copies_more_than_max_swap_pages(most: int) -> None:
    """A long prompt is fetched over several passes, each of which computes one page of it."""
    subject = harness(num_pages=20, num_host_pages=64, max_swap_pages=most, prefix_wait_tokens=1)
    long = range(100, 164)
    run(subject, prompt(long, 91))
    for start in range(200, 360, 8):  # a few pages at a time, so that all of them can be spilled
        run(subject, prompt(range(start, start + 8)), 1)
    before = len(subject.executor.plans)
    again = run(subject, prompt(long, 93))
    swaps = [plan.swap for plan in subject.executor.plans if plan.swap is not None]
    assert max(len(swap.spill_pages) for swap in swaps) == most
    assert max(len(swap.fetch_pages) for swap in swaps) == most
    assert again.num_fetched > most * 4
    passes = [plan for plan in subject.executor.plans[before:] if plan.num_prefill_tokens]
    assert all(plan.num_prefill_tokens <= 4 for plan in passes[:-1]), "one page per pass while more is fetched"
    subject.assert_reference()


def behind_a_gap(**options: Any) -> tuple[Any, list[Any]]:
    """A prompt whose tokens 8 to 32 are in host memory and whose first 8 are not cached; and its passes."""
    subject = small(num_pages=9, num_host_pages=32, host_page_cost=12.0, chunk_context=4, **options)
    assert subject.scheduler.memory.host.from_token == 8
    run(subject, prompt(A, range(60, 76), 91))
    run(subject, prompt(B, C, 92))
    before = len(subject.executor.plans)
    again = run(subject, prompt(A, range(60, 76), 93))
    subject.assert_reference()
    return again, [plan for plan in subject.executor.plans[before:] if plan.num_prefill_tokens]


def test_tokens_that_are_cheaper_to_compute_are_neither_spilled_nor_fetched() -> None:
    """A page costs 12 tokens to fetch and 4 to compute, 8 from token 4 on, 12 from token 8 on."""
    again, (first, second) = behind_a_gap(prefix_wait_tokens=24)
    assert again.num_fetched == 24
    assert (first.starts.tolist(), first.lengths.tolist()) == ([0], [8]), "up to the tokens in host memory"
    assert (second.starts.tolist(), second.lengths.tolist()) == ([32], [1])


def test_tokens_that_are_not_worth_another_pass_are_computed_with_the_rest() -> None:
    again, (only,) = behind_a_gap(prefix_wait_tokens=25)
    assert again.num_fetched == 0 and only.lengths.tolist() == [33]


@pytest.mark.parametrize(("tokens", "is_there"), [(A, False), (C, True)])
def test_full_host_memory_forgets_the_least_recently_used(tokens: range, is_there: bool) -> None:
    subject = small(num_host_pages=4)
    for each in (prompt(A, 91), prompt(B, 92), prompt(C, 93), prompt(range(70, 86), 94)):
        run(subject, each)
    assert subject.scheduler.counters.forgotten_pages > 0
    assert bool(run(subject, prompt(tokens, 95)).num_fetched) == is_there
    subject.assert_reference()


@pytest.mark.parametrize("num_host_pages", [1, 2, 3])
def test_host_memory_of_one_to_three_pages(num_host_pages: int) -> None:
    subject = small(num_host_pages=num_host_pages)
    for number in range(12):
        run(subject, prompt((A, B, C)[number % 3], number))
    counters = subject.scheduler.counters
    assert counters.forgotten_pages and counters.fetched_tokens
    subject.assert_reference()


def test_pages_fetched_for_an_aborted_request_stay_cached() -> None:
    subject = small(overlap=True)
    run(subject, prompt(A, 91))
    run(subject, prompt(B, 92))
    gone = subject.add(request(prompt(A, 93), 4))
    subject.step()  # one pass is committed, the next is in flight
    assert gone.num_fetched > 0
    subject.scheduler.abort(gone.id, subject.clock())
    fetched = subject.scheduler.counters.fetched_tokens
    again = run(subject, prompt(A, 94))
    assert subject.reasons[gone.id] is FinishReason.ABORT
    assert again.num_cached == 16 and subject.scheduler.counters.fetched_tokens == fetched
    subject.assert_reference()


def test_pages_evicted_one_by_one_do_not_make_the_tree_deep() -> None:
    subject = harness(num_pages=20, num_host_pages=64)
    run(subject, prompt(range(100, 164), 91))
    memory = subject.scheduler.memory
    for _ in range(12):
        memory.pool.free(memory.tree.evict(1, subject.scheduler.step))
    nodes = [node for node in memory.tree.nodes() if node.depth]
    assert [(len(node.pages), len(node.host_pages)) for node in nodes] == [(4, 0), (0, 12)]
    subject.add(request(prompt(range(100, 140), 92), 2))  # its path ends inside the long one
    subject.run()
    subject.assert_reference()


def fetched(subject: Harness, tokens: Any) -> list[int]:
    """Fetches the first page of a prompt with the plan being made. Returns its device page, if it can be fetched."""
    memory, key = subject.scheduler.memory, prompt(tokens).astype(np.int32).tobytes()
    now = Now(subject.scheduler.step, 0.0)
    node = memory.host.match_child(memory.tree.namespace(("default", "", "")), key, 4, 1, now.step)
    if node is None:
        return []
    pages = memory.allocate(1, now)
    memory.host.fetch(node, pages, now.step)
    memory.tree.lock(None, node)
    memory.tree.unlock(None, node)
    return pages.tolist()


def test_a_page_is_not_fetched_by_the_plan_that_spills_it() -> None:
    subject = small()
    run(subject, prompt(A, 91))
    memory = subject.scheduler.memory
    memory.pool.free(memory.tree.evict(memory.tree.num_evictable_pages, subject.scheduler.step))
    assert fetched(subject, A) == [], "its copy to the host has not run yet"
    swap = memory.host.take_swap()
    assert swap is not None and len(swap.spill_pages) == 4 and not len(swap.fetch_pages)
    subject.scheduler.step += 1
    assert len(fetched(subject, A)) == 1


def test_a_page_allocated_twice_in_one_plan_is_filled_once() -> None:
    subject = small()
    run(subject, prompt(A, 91))
    run(subject, prompt(B, 92))
    memory = subject.scheduler.memory
    memory.pool.free(memory.tree.evict(memory.tree.num_evictable_pages, subject.scheduler.step))
    memory.host.take_swap()
    subject.scheduler.step += 1
    first = fetched(subject, A)
    memory.pool.free(memory.tree.evict(1, subject.scheduler.step))  # the request it was fetched for has left
    assert fetched(subject, B) == first
    swap = memory.host.take_swap()
    assert swap is not None and swap.fetch_pages.tolist() == first
    node = memory.tree.namespace(("default", "", "")).children[prompt(B).astype(np.int32).tobytes()[:16]]
    assert swap.fetch_hosts.tolist() == node.host_pages[:1].tolist()


def test_flushing_the_cache_frees_host_memory_too() -> None:
    subject = small()
    for tokens in (prompt(A, 91), prompt(B, 92)):
        run(subject, tokens)
    subject.scheduler.flush_cache()
    memory = subject.scheduler.memory
    assert memory.host.num_pages_used == 0 and memory.pool.num_free == memory.pool.num_pages
    assert len(list(memory.tree.nodes())) == 1, "only the root is left"
    assert run(subject, prompt(A, 93)).num_cached == 0
    assert not find_faults(subject.scheduler)


def test_equal_arrivals_give_equal_journals_and_swaps() -> None:
    def once() -> tuple[str, list[Any]]:
        subject = small(overlap=True, num_pages=12, max_swap_pages=3)
        tokens = np.random.default_rng(3)
        for number in range(30):
            subject.add(request(prompt((A, B, C)[int(tokens.integers(3))], number), 3, id=f"r{number}"))
            subject.step()
        subject.run()
        swaps = [plan.swap for plan in subject.executor.plans if plan.swap is not None]
        assert swaps and subject.scheduler.counters.fetched_tokens
        moves = [[getattr(swap, name).tolist() for name in swap.__slots__] for swap in swaps]
        return subject.scheduler.journal.digest(), moves

    assert once() == once()


def test_no_step_scans_the_whole_tree_or_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Harness(small().scheduler, checked=False)

    def never(*_: Any) -> None:
        raise AssertionError("the whole tree or pool was scanned")

    monkeypatch.setattr(type(subject.scheduler.memory.tree), "nodes", never)
    monkeypatch.setattr(type(subject.scheduler.memory.pool), "free_pages", never)
    for number in range(9):
        run(subject, prompt((A, B, C)[number % 3], number))
    assert subject.scheduler.counters.fetched_tokens > 0


def options(seed: int) -> dict[str, Any]:
    """Host memory options for a random run, mostly small."""
    rng = random.Random(seed)
    found: dict[str, Any] = {
        "prefix_cache": True,
        "num_host_pages": rng.choice([1, 2, 8, 40, 400]),
        "max_swap_pages": rng.choice([1, 2, 5, 128]),
    }
    if rng.random() < 0.3:  # spill only from some page on
        found |= {"host_page_cost": 8.0, "chunk_context": 4}
    return found


@seeds(25, 1000, first=5000)
def test_random_runs_end_with_the_tokens_of_the_reference(seeds: range) -> None:
    """Joins, aborts, deadlines, retractions, tiny pools: a wrong fetched page would change every later token."""
    totals = dict.fromkeys(("retractions", "spilled_pages", "forgotten_pages", "fetched_tokens"), 0)
    for seed in seeds:
        scheduler = random_run(seed, **options(seed)).harness.scheduler
        host, nodes = scheduler.memory.host, scheduler.memory.tree.nodes()
        assert host.pool.num_free + sum(len(node.host_pages) for node in nodes) == host.pool.num_pages
        scheduler.flush_cache()
        assert host.num_pages_used == 0, "nothing leaks"
        for name in totals:
            totals[name] += getattr(scheduler.counters, name)
    assert all(count > 10 for count in totals.values()), totals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_host_pages": -1}, "num_host_pages is -1: must be at least 0."),
        ({"num_host_pages": 8, "prefix_cache": False}, "num_host_pages is 8 and prefix_cache is off: host memory"),
        (
            {"num_host_pages": 8, "host_page_cost": 1e6, "context_tokens": 4096},
            "host_page_cost = 1e\\+06 all of a context of 4096 tokens is faster to recompute than to fetch",
        ),
        ({"max_swap_pages": 0}, "max_swap_pages is 0: must be at least 1."),
    ],
)
def test_invalid_host_options_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**given)
