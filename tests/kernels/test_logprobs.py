from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paceline.engine.cuda.packing import sampling_words
from paceline.kernels.layouts import LOGPROB_WORDS, SAMPLING_WORDS, LogprobWord
from paceline.kernels.logprobs import (
    LogprobWorkspace,
    chosen_logprobs,
    split_rows,
    top_logprobs,
    top_logprobs_reference,
)

UNWRITTEN = -77
TOP_LOGPROBS, TOP_IDS, REQUESTED = LogprobWord.TOP_LOGPROBS, LogprobWord.TOP_IDS, LogprobWord.REQUESTED


@dataclass(frozen=True)
class Row:
    num_top: int | None
    ids: tuple[int, ...] = ()


def run(
    logits: torch.Tensor,
    requests: list[Row],
    chosen: list[int],
    splits: int = 32,
    block: int = 128,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logprobs of the rows of logits, in the second of two places of the ring. A decode batch has one more row,
    which is padding."""
    rows, sources = len(requests), len(requests) if index is None else int(index.max()) + 1
    slots = torch.randperm(sources + 2)[: sources + 1].int()
    sampling = torch.zeros(sources + 2, SAMPLING_WORDS, dtype=torch.int32)
    for row, request in enumerate(requests):
        words = torch.from_numpy(sampling_words(0.0, 0, 1.0, 0.0, 0, request.num_top, request.ids))
        sampling[slots[row if index is None else index[row]]] = words
    padded = logits if index is not None else torch.cat([logits, torch.full_like(logits[:1], torch.nan)])
    ring = torch.full((2, rows + 2, LOGPROB_WORDS), UNWRITTEN, dtype=torch.int32)
    results = torch.full((2, rows + 2), 10**9, dtype=torch.int32)
    results[1, :rows] = torch.tensor(chosen)
    # In a mixed batch the device knows the number of rows, not how many of them sample.
    count = torch.tensor([rows if index is None else sources], dtype=torch.int32)
    step = torch.tensor([5], dtype=torch.int32)
    workspace = LogprobWorkspace.empty(rows + 1, "cpu")
    workspace.totals.fill_(torch.nan)
    top_logprobs(padded, slots, count, sampling, ring, step, workspace, index, block=block, max_splits=splits)
    chosen_logprobs(padded, slots, count, sampling, results, ring, step, workspace, index)
    assert not workspace.arrived.any()
    idle = [request.num_top is None for request in requests]
    assert workspace.totals[:rows][idle].isnan().all(), "a row without logprobs was read"
    assert (ring[0] == UNWRITTEN).all() and (ring[1, rows:] == UNWRITTEN).all(), "another step, or padding, was written"
    return ring[1, :rows]


def check(logits: torch.Tensor, requests: list[Row], chosen: list[int], logprobs: torch.Tensor) -> None:
    for line, request, token, words in zip(logits, requests, chosen, logprobs, strict=True):
        if request.num_top is None:
            assert (words == UNWRITTEN).all()
            continue
        floats, count, num_ids = words.view(torch.float32), min(request.num_top, len(line)), len(request.ids)
        ids, all_logprobs, requested = top_logprobs_reference(line, request.num_top, list(request.ids))
        assert words[TOP_IDS : TOP_IDS + count].tolist() == ids
        top, named = floats[TOP_LOGPROBS : TOP_LOGPROBS + count], floats[REQUESTED : REQUESTED + num_ids]
        found = torch.cat([floats[LogprobWord.CHOSEN : LogprobWord.CHOSEN + 1], top, named])
        expected = torch.cat([all_logprobs[[token]], all_logprobs[ids], requested])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        for first, used in ((TOP_LOGPROBS, count), (TOP_IDS, count), (REQUESTED, num_ids)):
            assert (words[first + used : first + 20] == UNWRITTEN).all(), "more was written than requested"


REQUESTS = [Row(5), Row(None), Row(0), Row(20, (7, 0, 7)), Row(1), Row(0, tuple(range(20))), Row(None), Row(20)]


@pytest.mark.parametrize("splits", [1, 2, 32])
@pytest.mark.parametrize("vocab", [1, 7, 128, 129, 700])
def test_every_row_gets_the_logprobs_it_requests(vocab: int, splits: int) -> None:
    torch.manual_seed(vocab + splits)
    requests = [Row(one.num_top, tuple(token % vocab for token in one.ids)) for one in REQUESTS]
    logits = torch.randn(len(requests), vocab) * 4
    chosen = torch.randint(0, vocab, (len(requests),)).tolist()
    check(logits, requests, chosen, run(logits, requests, chosen, splits))


def test_rows_of_a_mixed_batch_are_indexed_by_their_last_tokens() -> None:
    logits = torch.randn(len(REQUESTS), 300)
    index = torch.randperm(40)[: len(REQUESTS)].int()
    chosen = torch.randint(0, 300, (len(REQUESTS),)).tolist()
    check(logits, REQUESTS, chosen, run(logits, REQUESTS, chosen, index=index))


DIFFICULT = {
    "flat": torch.zeros(1000),
    "zeros of both signs": torch.where(torch.arange(1000) % 2 > 0, 0.0, -0.0),
    "negative zeros first": torch.where(torch.arange(1000) < 500, -0.0, 0.0) - (torch.arange(1000) % 128 > 3).float(),
    "many equals": torch.where(torch.arange(1000) % 3 > 0, 0.0, 1.0),
    "ties": torch.randint(0, 4, (1000,), generator=torch.Generator().manual_seed(1)).float(),
    "all in one lane": torch.where(torch.arange(1000) % 128 == 5, 9.0, 0.0) + torch.arange(1000) / 1e3,
    "in one place": torch.where((torch.arange(1000) > 300) & (torch.arange(1000) < 330), 5.0, 0.0),
    "descending": -torch.arange(1000) / 10,
    "few numbers": torch.where(torch.arange(1000) % 90 > 0, -torch.inf, torch.arange(1000) / 10),
    "one number": torch.where(torch.arange(1000) == 900, 2.0, -torch.inf),
    "some are NaN": torch.where(torch.arange(1000) % 7 > 0, torch.nan, torch.arange(1000) % 11 / 3),
    "huge": torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 1e4,
    "below all": torch.where(torch.arange(1000) % 5 > 0, -2e38, torch.arange(1000) % 13 / 2),
}


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", DIFFICULT)
def test_difficult_rows_rank_by_logit_and_then_by_id(name: str, splits: int) -> None:
    logits = DIFFICULT[name].repeat(2, 1)
    best = int(torch.where(logits[0] > -1e30, logits[0], -torch.inf).argmax())
    requests = [Row(20, (0, 900, 999)), Row(3)]
    check(logits, requests, [best, best], run(logits, requests, [best, best], splits))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which warns of NaN
@pytest.mark.parametrize("nothing", [float("nan"), -float("inf"), float("inf")])
def test_rows_of_nan_do_not_affect_others(nothing: float) -> None:
    logits = torch.randn(4, 200)
    logits[1::2] = nothing
    requests, chosen = [Row(20, (3,))] * 4, [4, -1, 5, -1]
    logprobs = run(logits, requests, chosen)
    check(logits[::2], requests[::2], chosen[::2], logprobs[::2])
    assert logprobs[1::2, TOP_IDS:REQUESTED].tolist() == [list(range(20))] * 2, "the ids must exist"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_any_type(dtype: torch.dtype) -> None:
    """In bfloat16 many logits are equal."""
    logits = (torch.randn(len(REQUESTS), 333) * 3).to(dtype)
    chosen = logits.argmax(-1).tolist()
    check(logits, REQUESTS, chosen, run(logits, REQUESTS, chosen, splits=2))


@pytest.mark.parametrize("max_rows", [1, 33, 300, 1024, 1500, 3000])
def test_the_workspace_fits_every_program(max_rows: int) -> None:
    capacity = len(LogprobWorkspace.empty(max_rows, "meta").parts)
    for rows in range(1, max_rows + 1):
        for vocab in (500, 151_936):
            splits, _ = split_rows(rows, vocab, block=1024)
            assert rows * splits <= capacity and splits <= 32
