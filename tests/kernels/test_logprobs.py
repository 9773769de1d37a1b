from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paceline.kernels.logprobs import (
    ASKED,
    TOLD_WORDS,
    TOP_CHANCES,
    TOP_IDS,
    LogprobWorkspace,
    chosen_logprobs,
    cut_rows,
    top_logprobs,
    top_logprobs_reference,
)
from paceline.kernels.slot_state import SAMPLING_WORDS, sampling_words

UNTOLD = -77


@dataclass(frozen=True)
class Row:
    num_top: int | None
    ids: tuple[int, ...] = ()


def tell(
    logits: torch.Tensor, asks: list[Row], chosen: list[int], splits: int = 32, block: int = 128,
    index: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """What is told of the rows of logits, in the second of two places of the ring. Decodes have one more row, which is
    padding."""
    rows, sources = len(asks), len(asks) if index is None else int(index.max()) + 1
    slots = torch.randperm(sources + 2)[: sources + 1].int()
    sampling = torch.zeros(sources + 2, SAMPLING_WORDS, dtype=torch.int32)
    for row, ask in enumerate(asks):
        words = torch.from_numpy(sampling_words(0.0, 0, 1.0, 0.0, 0, ask.num_top, ask.ids))
        sampling[slots[row if index is None else index[row]]] = words
    padded = logits if index is not None else torch.cat([logits, torch.full_like(logits[:1], torch.nan)])
    told = torch.full((2, rows + 2, TOLD_WORDS), UNTOLD, dtype=torch.int32)
    results = torch.full((2, rows + 2), 10**9, dtype=torch.int32)
    results[1, :rows] = torch.tensor(chosen)
    # Of a pass with prompts the device knows how many rows it has, not how many of them sample.
    count = torch.tensor([rows if index is None else sources], dtype=torch.int32)
    step = torch.tensor([5], dtype=torch.int32)
    workspace = LogprobWorkspace.empty(rows + 1, "cpu")
    workspace.totals.fill_(torch.nan)
    top_logprobs(padded, slots, count, sampling, told, step, workspace, index, block=block, max_splits=splits)
    chosen_logprobs(padded, slots, count, sampling, results, told, step, workspace, index)
    assert not workspace.arrived.any()
    idle = [ask.num_top is None for ask in asks]
    assert workspace.totals[:rows][idle].isnan().all(), "a row that asks nothing is not read"
    assert (told[0] == UNTOLD).all() and (told[1, rows:] == UNTOLD).all(), "another step's, or padding"
    return told[1, :rows]


def check(logits: torch.Tensor, asks: list[Row], chosen: list[int], told: torch.Tensor) -> None:
    for line, ask, token, words in zip(logits, asks, chosen, told, strict=True):
        if ask.num_top is None:
            assert (words == UNTOLD).all()
            continue
        floats, count = words.view(torch.float32), min(ask.num_top, len(line))
        ids, chances, asked = top_logprobs_reference(line, ask.num_top, list(ask.ids))
        assert words[TOP_IDS : TOP_IDS + count].tolist() == ids
        found = torch.cat([floats[:1], floats[TOP_CHANCES : TOP_CHANCES + count], floats[ASKED : ASKED + len(ask.ids)]])
        expected = torch.cat([chances[[token]], chances[ids], asked])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        for first, used in ((TOP_CHANCES, count), (TOP_IDS, count), (ASKED, len(ask.ids))):
            assert (words[first + used : first + 20] == UNTOLD).all(), "more than was asked for"


ASKS = [Row(5), Row(None), Row(0), Row(20, (7, 0, 7)), Row(1), Row(0, tuple(range(20))), Row(None), Row(20)]


@pytest.mark.parametrize("splits", [1, 2, 32])
@pytest.mark.parametrize("vocab", [1, 7, 128, 129, 700])
def test_every_row_is_told_what_it_asks(vocab: int, splits: int) -> None:
    torch.manual_seed(vocab + splits)
    asks = [Row(ask.num_top, tuple(token % vocab for token in ask.ids)) for ask in ASKS]
    logits = torch.randn(len(asks), vocab) * 4
    chosen = torch.randint(0, vocab, (len(asks),)).tolist()
    check(logits, asks, chosen, tell(logits, asks, chosen, splits))


def test_rows_of_a_pass_with_prompts_stand_at_their_last_tokens() -> None:
    logits = torch.randn(len(ASKS), 300)
    index = torch.randperm(40)[: len(ASKS)].int()
    chosen = torch.randint(0, 300, (len(ASKS),)).tolist()
    check(logits, ASKS, chosen, tell(logits, ASKS, chosen, index=index))


CONFUSING = {
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
    "some are none": torch.where(torch.arange(1000) % 7 > 0, torch.nan, torch.arange(1000) % 11 / 3),
    "huge": torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 1e4,
    "below all": torch.where(torch.arange(1000) % 5 > 0, -2e38, torch.arange(1000) % 13 / 2),
}


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", CONFUSING)
def test_confusing_rows_rank_by_logit_and_then_by_id(name: str, splits: int) -> None:
    logits = CONFUSING[name].repeat(2, 1)
    best = int(torch.where(logits[0] > -1e30, logits[0], -torch.inf).argmax())
    asks = [Row(20, (0, 900, 999)), Row(3)]
    check(logits, asks, [best, best], tell(logits, asks, [best, best], splits))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which warns of NaN
@pytest.mark.parametrize("nothing", [float("nan"), -float("inf"), float("inf")])
def test_rows_without_a_number_harm_no_other(nothing: float) -> None:
    logits = torch.randn(4, 200)
    logits[1::2] = nothing
    asks, chosen = [Row(20, (3,))] * 4, [4, -1, 5, -1]
    told = tell(logits, asks, chosen)
    check(logits[::2], asks[::2], chosen[::2], told[::2])
    assert told[1::2, TOP_IDS:ASKED].tolist() == [list(range(20))] * 2, "ids that exist"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_any_type(dtype: torch.dtype) -> None:
    """Of bfloat16 many are equal."""
    logits = (torch.randn(len(ASKS), 333) * 3).to(dtype)
    chosen = logits.argmax(-1).tolist()
    check(logits, ASKS, chosen, tell(logits, ASKS, chosen, splits=2))


@pytest.mark.parametrize("max_rows", [1, 33, 300, 1024, 1500, 3000])
def test_a_workspace_has_room_for_every_program(max_rows: int) -> None:
    room = len(LogprobWorkspace.empty(max_rows, "meta").parts)
    for rows in range(1, max_rows + 1):
        for vocab in (500, 151_936):
            splits, _ = cut_rows(rows, vocab, block=1024)
            assert rows * splits <= room and splits <= 32
