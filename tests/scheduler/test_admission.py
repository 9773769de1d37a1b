"""Admission: who gets the prompt tokens of a pass, who may go first, and who waits for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.request import Request
from paceline.scheduler import Plan, Scheduler
from tests.helpers import prompt, request, scheduler


def large(**options: Any) -> Scheduler:
    """Memory and slots for everything; driven without a model, since prompts are long."""
    settings: dict[str, Any] = {"num_pages": 40_000, "page_size": 16, "max_running": 64, "max_batch_tokens": 8192}
    return scheduler(**settings | options)


def step(core: Scheduler) -> Plan:
    plan = core.plan(0.0)
    assert plan is not None, "requests are left and none can be planned"
    core.commit(plan, np.ones(int(plan.samples.sum()), np.int32), 0.0)
    return plan


def passes_until_finished(core: Scheduler, *requests: Request) -> int:
    count = 0
    while not all(one.is_finished for one in requests):
        step(core)
        count += 1
    return count


def long_prompts(core: Scheduler, count: int, num_tokens: int = 20_000, **fields: Any) -> list[Request]:
    found = [request(prompt([number + 1] * num_tokens), 1, **fields) for number in range(count)]
    for one in found:
        core.add(one, 0.0)
    return found


# ---------------------------------------------------------------------- the prefill budget


@pytest.mark.parametrize("chunk_tokens", [2048, 8192])
def test_long_prompts_use_the_whole_prefill_budget(chunk_tokens: int) -> None:
    core = large(chunk_tokens=chunk_tokens)
    prompts = long_prompts(core, 12)
    assert passes_until_finished(core, *prompts) == -(-12 * 20_000 // 8192)


@pytest.mark.parametrize("chunk_tokens", [1024, 2048, 8192])
@pytest.mark.parametrize("num_decodes", [1, 50])
def test_a_short_prompt_is_admitted_at_once_while_long_ones_use_the_whole_budget(
    chunk_tokens: int, num_decodes: int
) -> None:
    core = large(chunk_tokens=chunk_tokens, max_running=128)
    for number in range(num_decodes):
        core.add(request([number + 1], 100), 0.0)
    step(core)
    long_prompts(core, 12)
    for _ in range(5):
        assert step(core).num_prefill_tokens == 8192 - num_decodes
        core.add(short := request(prompt([99] * 300), 1), 0.0)
        plan = step(core)
        assert short.is_finished
        assert plan.num_prefill_tokens == 8192 - num_decodes


def test_a_row_has_one_chunk_in_a_pass() -> None:
    """What is left is added to the chunk that a prompt already has."""
    core = large(chunk_tokens=8192)
    long_prompts(core, 2)
    assert step(core).lengths.tolist() == [8192]
    core.add(request(prompt([99] * 300), 1), 0.0)
    plan = step(core)
    assert sorted(plan.lengths.tolist()) == [300, 7892]
    assert len(set(plan.slots.tolist())) == plan.num_rows


def test_long_prompts_hold_no_more_slots_than_get_tokens() -> None:
    core = large(max_running=8)
    long_prompts(core, 12)
    for _ in range(10):
        plan = step(core)
        assert core.num_running <= plan.num_rows + 1
