"""The shared prefixes of the rows of a pass, compared with their page tables."""

from __future__ import annotations

import random

import pytest

from paceline.scheduler.plan import Plan
from paceline.testing import Harness
from tests.helpers import harness, prompt, request


def check(subject: object, plan: Plan, page_size: int) -> int:
    """Compares every pair of rows with their pages. Returns the number of pairs that share pages."""
    table = subject.memory.slots.page_table  # type: ignore[attr-defined]
    common: dict[tuple[int, int], int] = {}
    if plan.sharing is not None:
        rows = plan.sharing.rows.tolist()
        assert len(set(rows)) == len(rows) and len(plan.sharing.common) == len(rows) - 1
        for i, a in enumerate(rows):
            least = 1 << 30
            for j in range(i + 1, len(rows)):
                least = min(least, int(plan.sharing.common[j - 1]))
                common[min(a, rows[j]), max(a, rows[j])] = least
    found = 0
    for a in range(plan.num_rows):
        for b in range(a + 1, plan.num_rows):
            pages = min(plan.starts[a], plan.starts[b]) // page_size
            same = table[plan.slots[a], :pages] == table[plan.slots[b], :pages]
            alike = int(pages if same.all() else same.argmin()) * page_size
            assert common.get((a, b), 0) == alike, (a, b)
            found += alike > 0
    return found


@pytest.mark.parametrize("seed", range(6))
def test_sharing_equals_the_common_pages_of_the_page_tables(seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 4])
    bench = harness(
        overlap=bool(seed % 2), num_pages=400, page_size=page_size, max_running=12, max_batch_tokens=64, chunk_tokens=9
    )
    subject, plan_again = bench.scheduler, bench.scheduler.plan
    pairs = 0

    def planning(now: float) -> Plan | None:
        nonlocal pairs
        plan = plan_again(now)
        if plan is not None:
            pairs += check(subject, plan, page_size)
        return plan

    subject.plan = planning  # type: ignore[method-assign]
    stems = [list(range(1 + 20 * n, 15 + 20 * n)) for n in range(2)]
    stems += [[*stems[0], *range(50, 50 + rng.randint(1, 9))], [*stems[0][:7], 9, 9, 9]]
    for number in range(40):
        tail = [rng.randint(1, 60) for _ in range(rng.randint(1, 12))]
        bench.add(request(prompt(rng.choice(stems), tail), rng.randint(1, 12), id=str(number)))
        for _ in range(rng.randint(0, 2)):
            bench.step()
    bench.run()
    assert pairs > 100


def recorded(bench: Harness) -> list[Plan | None]:
    plans: list[Plan | None] = []
    plan_again = bench.scheduler.plan

    def planning(now: float) -> Plan | None:
        plans.append(plan_again(now))
        return plans[-1]

    bench.scheduler.plan = planning  # type: ignore[method-assign]
    return plans


def test_a_steady_batch_keeps_its_sharing_and_shared_reads_off_has_none() -> None:
    for on in (True, False):
        bench = harness(shared_reads=on)
        for number in range(3):
            bench.add(request(prompt(range(1, 10), number + 20), 6))
        plans = recorded(bench)
        bench.run()
        sharings = [plan.sharing for plan in plans if plan is not None and plan.num_decodes == 3 == plan.num_rows]
        assert len(sharings) > 2 and all(one is sharings[0] for one in sharings)
        if on:
            assert sharings[0] is not None and sharings[0].common.tolist() == [8, 8]
            assert sorted(sharings[0].rows.tolist()) == [0, 1, 2]
        else:
            assert sharings[0] is None
        assert on or all(plan is None or plan.sharing is None for plan in plans)
