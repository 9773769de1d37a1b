"""What the CPU tells of logits: in the order that is promised, and only to those who ask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.request import Request, SamplingParams
from paceline.sampling.logprobs import LogprobTable, LogprobWidth, numbers, output_logprobs, top_ids
from paceline.scheduler.plan import Join, Plan

ROWS = {
    "random": torch.randn(400, generator=torch.Generator().manual_seed(1)),
    "ties": torch.randint(0, 4, (400,), generator=torch.Generator().manual_seed(2)).float(),
    "flat": torch.zeros(400),
    "few numbers": torch.where(torch.arange(400) % 50 > 0, -torch.inf, torch.arange(400) / 10),
    "some are none": torch.where(torch.arange(400) % 7 > 0, torch.nan, torch.arange(400) % 11 / 3),
    "nothing": torch.full((400,), torch.nan),
}


@pytest.mark.parametrize("count", [0, 1, 5, 20, 400])
def test_the_likeliest_come_first_and_equals_by_lower_id(count: int) -> None:
    logits = numbers(torch.stack(list(ROWS.values())))
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    assert top_ids(logits, count).tolist() == order[:, :count].tolist()


def asking(*each: SamplingParams) -> LogprobTable:
    asks = LogprobTable(len(each), 400)
    for slot, params in enumerate(each):
        asks.join(Join.of(Request(f"r{slot}", np.arange(1, 4), params), slot))
    return asks


def plan_of(slots: list[int], samples: list[bool]) -> Plan:
    ones = np.ones(len(slots), np.int32)
    none = np.empty(0, np.int32)
    return Plan(
        step=0, slots=np.array(slots, np.int32), starts=ones, lengths=ones, max_lengths=ones, samples=np.array(samples),
        num_decodes=len(slots), joins=(), page_slots=none, page_indices=none, page_ids=none,
        num_tokens=len(slots), num_context_tokens=0,
    )  # fmt: skip


def test_a_pass_is_as_wide_as_its_sampling_rows_ask() -> None:
    plain = SamplingParams()
    asks = asking(plain, SamplingParams(logprobs=3), SamplingParams(logprobs=0, logprob_token_ids=(5, 6)),
                  SamplingParams(logprobs=20))  # fmt: skip
    assert asks.of_output(plan_of([0], [True])) is None
    assert asks.of_output(plan_of([0, 3], [True, False])) is None, "a prompt that goes on samples nothing"
    assert asks.of_output(plan_of([0, 1, 2], [True] * 3)) == LogprobWidth(3, 2)
    assert asks.of_output(plan_of([3, 2], [True, True])) == LogprobWidth(20, 2)
    asks.join(Join.of(Request("next", np.arange(1, 4), plain), 3))
    assert asks.of_output(plan_of([3], [True])) is None, "another owner of the slot asks nothing"


def test_chances_are_those_of_the_logits_before_they_are_changed() -> None:
    asks = asking(SamplingParams(), SamplingParams(logprobs=2), SamplingParams(logprobs=5, logprob_token_ids=(7, 399)))
    slots = np.array([2, 0, 1])
    logits = torch.randn(3, 400)
    chances = logits.log_softmax(-1)
    tell = output_logprobs(asks, LogprobWidth(5, 2), slots, logits)
    logits.fill_(0)
    told = tell(np.array([9, 8, 7]))
    for row, token in ((0, 9), (2, 7)):
        assert told.chosen[row] == pytest.approx(float(chances[row, token]))
        assert told.top_ids[row].tolist() == chances[row].topk(5).indices.tolist()
        np.testing.assert_allclose(told.top[row], chances[row].topk(5).values, rtol=1e-6)
    np.testing.assert_allclose(told.asked[0], chances[0, [7, 399]], rtol=1e-6)
    assert told.top_ids.dtype == np.int32 and told.chosen.dtype == np.float32
    kept = told.of_rows([2, 0])
    assert kept.chosen.tolist() == told.chosen[[2, 0]].tolist()
