import numpy as np
import pytest
import torch

from paceline.engine.cuda.packing import sampling_words
from paceline.kernels.sampling import SampleWorkspace, gumbel_reference, sample, sample_reference, split_rows
from paceline.kernels.slot_state import SlotState
from paceline.sampling.types import NO_TOKEN

VOCAB = 3000
PARAMS = [
    (0.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.1),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (1.3, 0, 0.3, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.8, 50, 0.8, 0.0),
    (1.5, 40, 0.95, 0.05),
]


@pytest.mark.parametrize("splits", [1, 4, 64])  # the last: more than rows this short are split into
def test_every_row_samples_by_its_own_parameters(splits: int) -> None:
    torch.manual_seed(splits)
    rows = len(PARAMS)
    state = SlotState.empty(slots=rows, max_length=32, page_size=16, rows=rows + 1, device="cpu")
    slots = torch.randperm(rows).int()
    positions = torch.randint(0, 30, (rows,)).int()
    seeds = [(7 << 33) + i for i in range(rows)]
    for row, params in enumerate(PARAMS):
        state.sampling[slots[row]] = torch.from_numpy(sampling_words(*params, seeds[row]))
    logits = torch.randn(rows + 1, VOCAB) * 3
    results = torch.full((2, rows + 1), -1, dtype=torch.int32)
    workspace = SampleWorkspace.empty(rows + 1, "cpu", splits)
    padded = torch.zeros(1, dtype=torch.int32)
    sample(
        logits,
        torch.cat([slots, padded]),
        torch.cat([positions, padded]),
        torch.tensor([rows], dtype=torch.int32),
        state,
        results,
        torch.tensor([5], dtype=torch.int32),
        workspace,
        block=128,
    )
    expected = [
        sample_reference(logits[row], *params, seeds[row], int(positions[row]) + 1) for row, params in enumerate(PARAMS)
    ]
    assert results[1, :rows].tolist() == expected
    assert (results[0] == -1).all()
    assert results[1, rows] == -1
    for row, token in enumerate(expected):
        slot, position = int(slots[row]), int(positions[row])
        assert state.token_pool[slot, position + 1] == token
        assert state.num_computed[slot] == position + 1
    assert not workspace.arrived.any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter reduces with numpy, which warns of NaN
@pytest.mark.parametrize("nothing", [float("nan"), -float("inf")])
@pytest.mark.parametrize("filters", [True, False])
def test_rows_of_nan_have_no_token_and_do_not_affect_others(filters: bool, nothing: float) -> None:
    cases = PARAMS if filters else [(0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0)] * 2
    rows = len(cases)
    state = SlotState.empty(slots=2 * rows, max_length=8, page_size=16, rows=2 * rows, device="cpu")
    slots, positions = torch.arange(2 * rows).int(), torch.full((2 * rows,), 3).int()
    for row in range(2 * rows):
        state.sampling[row] = torch.from_numpy(sampling_words(*cases[row // 2], row))
    logits = torch.randn(2 * rows, VOCAB) * 3
    logits[1::2] = nothing
    results = torch.full((2, 2 * rows), 9, dtype=torch.int32)
    count, step = torch.tensor([2 * rows], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    workspace = SampleWorkspace.empty(2 * rows, "cpu", 4)
    sample(logits, slots, positions, count, state, results, step, workspace, filters=filters, block=128)
    assert results[0, 1::2].tolist() == [NO_TOKEN] * rows
    assert results[0, ::2].tolist() == [sample_reference(logits[2 * i], *p, 2 * i, 4) for i, p in enumerate(cases)]
    assert state.token_pool[1::2, 4].tolist() == [0] * rows, "the next pass reads the token"
    assert not workspace.arrived.any()


def test_ties_go_to_the_smaller_token_without_filters() -> None:
    state = SlotState.empty(slots=1, max_length=8, page_size=1, rows=1, device="cpu")
    state.sampling[0] = torch.from_numpy(sampling_words(0, 0, 1, 0, 0))
    logits = torch.zeros(1, 1000)
    logits[0, [300, 700]] = 1.0
    results = torch.zeros(1, 1, dtype=torch.int32)
    zero, one = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    sample(logits, zero, zero, one, state, results, zero, SampleWorkspace.empty(1, "cpu"), filters=False, block=128)
    assert results.item() == 300


@pytest.mark.parametrize("max_rows", [1, 32, 33, 64, 96, 128, 300])
def test_the_workspace_fits_the_candidates_of_every_batch(max_rows: int) -> None:
    """33 to 63 rows of a large vocabulary have most: twice as many as larger batches."""
    workspace = SampleWorkspace.empty(max_rows, "meta")
    for rows in range(1, max_rows + 1):
        for vocab in (500, 32_000, 151_936):
            splits, groups = split_rows(rows, vocab, workspace.part_value.shape[1], block=1024)
            assert rows * splits * groups <= workspace.candidates.numel() == workspace.candidate_ids.numel()
            assert rows * splits <= workspace.counts.numel()


def test_noise_is_gumbel_and_depends_on_seed_position_and_token() -> None:
    noise = torch.stack([gumbel_reference(seed, position, 4000) for seed in (1, 1 << 35) for position in (3, 4)])
    assert abs(float(noise.mean()) - 0.5772) < 0.03
    assert abs(float(noise.var()) - np.pi**2 / 6) < 0.06
    correlation = torch.corrcoef(noise) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.06


SEEDED = torch.Generator().manual_seed(1)
DIFFICULT = {
    "flat": torch.zeros(1500),
    "zeros of both signs": torch.where(torch.arange(1500) % 50 > 0, -0.0, 0.0),
    "many equals": torch.where(torch.arange(1500) % 2 > 0, 0.0, 1.0),
    "ties": torch.randint(0, 4, (1500,), generator=SEEDED).float(),
    "ruled out": torch.where(torch.arange(1500) % 7 > 0, -torch.inf, torch.randn(1500, generator=SEEDED)),
    "few left": torch.where(torch.arange(1500) % 400 > 0, -torch.inf, torch.randn(1500, generator=SEEDED)),
    "one left": torch.where(torch.arange(1500) == 9, 0.0, -torch.inf),
    "in one place": torch.where(torch.arange(1500) < 300, -torch.inf, torch.arange(1500) / 100),
    "huge": torch.randn(1500, generator=SEEDED) * 1e4,
    "forbidden": torch.where(torch.arange(1500) % 300 > 0, -1e30, torch.randn(1500, generator=SEEDED)),
}


@pytest.mark.parametrize("name", DIFFICULT)
def test_filters_keep_the_right_tokens_of_difficult_rows(name: str) -> None:
    """Also where so many logits reach the bound of a small top-k that they cannot be collected."""
    cases = [(1.0, 1, 1.0, 0.0), (0.7, 40, 0.9, 0.0), (1.0, 120, 1.0, 0.1), (1.0, 300, 0.8, 0.0), (2.0, 0, 0.5, 0.0)]
    state = SlotState.empty(slots=len(cases), max_length=8, page_size=1, rows=len(cases), device="cpu")
    for row, params in enumerate(cases):
        state.sampling[row] = torch.from_numpy(sampling_words(*params, row))
    logits = DIFFICULT[name].repeat(len(cases), 1).clone()
    slots, results = torch.arange(len(cases)).int(), torch.zeros(1, len(cases), dtype=torch.int32)
    rows, zero = torch.tensor([len(cases)]).int(), torch.zeros(1, dtype=torch.int32)
    workspace = SampleWorkspace.empty(len(cases), "cpu", splits=2)
    for position in range(3):
        positions = torch.full((len(cases),), position, dtype=torch.int32)
        sample(logits, slots, positions, rows, state, results, zero, workspace, block=256)
        expected = [sample_reference(logits[row], *params, row, position + 1) for row, params in enumerate(cases)]
        assert results[0].tolist() == expected
