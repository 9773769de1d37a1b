"""Logprobs on the CPU: in the promised order, and only for rows that request them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.request import Request, SamplingParams
from paceline.sampling.logprobs import (
    LogprobRequest,
    LogprobTable,
    LogprobWidth,
    batches,
    output_logprobs,
    top_ids,
    without_nan,
)
from paceline.scheduler.plan import NO_CHANGES, Join, Plan
from paceline.scheduler.tracked_request import TrackedRequest

ROWS = {
    "random": torch.randn(400, generator=torch.Generator().manual_seed(1)),
    "ties": torch.randint(0, 4, (400,), generator=torch.Generator().manual_seed(2)).float(),
    "flat": torch.zeros(400),
    "few finite": torch.where(torch.arange(400) % 50 > 0, -torch.inf, torch.arange(400) / 10),
    "some NaN": torch.where(torch.arange(400) % 7 > 0, torch.nan, torch.arange(400) % 11 / 3),
    "all NaN": torch.full((400,), torch.nan),
}


@pytest.mark.parametrize("count", [0, 1, 5, 20, 400])
def test_most_likely_tokens_are_first_and_ties_by_lower_id(count: int) -> None:
    logits = without_nan(torch.stack(list(ROWS.values())))
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    assert top_ids(logits, count).tolist() == order[:, :count].tolist()


def test_requests_fill_batches_of_one_size() -> None:
    requests = [LogprobRequest(row, 10 * row, count, 1, 2) for row, count in enumerate((3, 5, 0, 1, 4))]
    found = list(batches(requests, 4))
    assert [sum(part.count for part in batch) for batch in found] == [4, 4, 4, 1]
    parts = [part for batch in found for part in batch]
    assert [(part.row, part.index, part.first, part.count) for part in parts] == [
        (0, 0, 1, 3),
        (1, 10, 1, 1),
        (1, 11, 2, 4),
        (3, 30, 1, 1),
        (4, 40, 1, 3),
        (4, 43, 4, 1),
    ]


def table_of(*each: SamplingParams) -> LogprobTable:
    table = LogprobTable(len(each), 400)
    for slot, params in enumerate(each):
        table.join(Join.of(TrackedRequest(Request(f"r{slot}", np.arange(1, 4), params)), slot))
    return table


def plan_of(slots: list[int], samples: list[bool]) -> Plan:
    ones = np.ones(len(slots), np.int32)
    return Plan(
        step=0,
        slots=np.array(slots, np.int32),
        starts=ones,
        lengths=ones,
        max_lengths=ones,
        samples=np.array(samples),
        num_decodes=len(slots),
        joins=(),
        page_changes=(NO_CHANGES,),
        num_tokens=len(slots),
        num_context_tokens=0,
    )


def test_width_is_the_largest_request_of_the_sampling_rows() -> None:
    plain = SamplingParams()
    table = table_of(
        plain,
        SamplingParams(logprobs=3),
        SamplingParams(logprobs=0, logprob_token_ids=(5, 6)),
        SamplingParams(logprobs=20),
    )
    assert table.of_output(plan_of([0], [True])) is None
    assert table.of_output(plan_of([0, 3], [True, False])) is None, "a prompt that continues samples nothing"
    assert table.of_output(plan_of([0, 1, 2], [True] * 3)) == LogprobWidth(3, 2)
    assert table.of_output(plan_of([3, 2], [True, True])) == LogprobWidth(20, 2)
    table.join(Join.of(TrackedRequest(Request("next", np.arange(1, 4), plain)), 3))
    assert table.of_output(plan_of([3], [True])) is None, "the new owner of the slot requests nothing"


def test_logprobs_are_those_of_the_logits_before_they_are_changed() -> None:
    table = table_of(
        SamplingParams(), SamplingParams(logprobs=2), SamplingParams(logprobs=5, logprob_token_ids=(7, 399))
    )
    slots = np.array([2, 0, 1])
    logits = torch.randn(3, 400)
    logprobs = logits.log_softmax(-1)
    logprobs_of = output_logprobs(table, LogprobWidth(5, 2), slots, logits)
    logits.fill_(0)
    found = logprobs_of(np.array([9, 8, 7]))
    for row, token in ((0, 9), (2, 7)):
        assert found.chosen[row] == pytest.approx(float(logprobs[row, token]))
        assert found.top_ids[row].tolist() == logprobs[row].topk(5).indices.tolist()
        np.testing.assert_allclose(found.top[row], logprobs[row].topk(5).values, rtol=1e-6)
    np.testing.assert_allclose(found.asked[0], logprobs[0, [7, 399]], rtol=1e-6)
    assert found.top_ids.dtype == np.int32 and found.chosen.dtype == np.float32
    kept = found.of_rows([2, 0])
    assert kept.chosen.tolist() == found.chosen[[2, 0]].tolist()
