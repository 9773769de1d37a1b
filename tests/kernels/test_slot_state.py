import numpy as np
import pytest
import torch

from paceline.engine.cuda.packing import pack_diff, sampling_words
from paceline.engine.cuda.sharing import NOTHING_SHARED, SharedUnits
from paceline.kernels.decode_units import DecodeUnits
from paceline.kernels.gather_tokens import gather_tokens, gather_tokens_reference
from paceline.kernels.layouts import DIFF_HEADER_WORDS, SAMPLING_WORDS
from paceline.kernels.slot_state import SlotState, apply_diff, apply_diff_reference
from tests.kernels.cases import poisoned


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def random_state() -> SlotState:
    state = SlotState.empty(slots=5, max_length=600, page_size=16, rows=4, device="cpu")
    state.token_pool.random_(0, 50)
    state.page_table.random_(0, 1000)
    state.num_computed.random_(0, 20)
    return state


def copied(state: SlotState) -> SlotState:
    return SlotState(*(getattr(state, name).clone() for name in SlotState.__dataclass_fields__))


def same(a: SlotState, b: SlotState) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in SlotState.__dataclass_fields__)


def test_a_packed_diff_changes_what_it_contains_and_nothing_else() -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 530).astype(np.int32)
    diff = pack_diff(
        page_slots=column(0, 0, 3),
        page_indices=column(2, 3, 37),
        page_ids=column(77, 78, 79),
        start_slots=column(3, 1),
        start_positions=column(11, 12),
        join_slots=column(3, 4),
        join_sampling=np.stack([sampling_words(0.6, 20, 0.9, 0.1, 1 << 40 | 7, 5), sampling_words(0, 0, 1, 0, 2)]),
        token_runs=[(3, 5, tokens), (4, 0, column(1, 2, 3))],
        row_slots=column(3, 4),
    )
    state = random_state()
    expected = copied(state)
    apply_diff_reference(diff, expected)
    assert not same(state, expected)
    apply_diff(torch.from_numpy(np.concatenate([diff, column(9, 9, 9)])), state, num_programs=3)
    assert same(state, expected)
    assert state.token_pool[3, 5:535].tolist() == tokens.tolist()


def test_a_diff_contains_the_shared_units() -> None:
    rng = np.random.default_rng(1)
    units, query_rows, rows = (rng.integers(0, 9, shape).astype(np.int32) for shape in ((700, 6), 3, (3, 2)))
    shared = SharedUnits(128, units, query_rows, rows)
    for given in (shared, NOTHING_SHARED):
        diff = pack_diff(page_slots=column(1), page_indices=column(2), page_ids=column(3), shared=given)
        state, found, expected = random_state(), *(DecodeUnits.empty(4, 900, 900, "cpu") for _ in range(2))
        found.num_shared.fill_(77)
        apply_diff_reference(diff, copied(state), expected)
        apply_diff(torch.from_numpy(diff), state, found, num_programs=2)
        assert state.page_table[1, 2] == 3
        for name in ("num_shared", "shared_chunk", "shared_units", "query_rows", "shared_rows"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.num_shared.item() == 0


def test_an_empty_diff_changes_nothing() -> None:
    state = random_state()
    expected = copied(state)
    apply_diff(torch.from_numpy(pack_diff()), state, num_programs=2)
    assert same(state, expected)
    words = np.ones((1, SAMPLING_WORDS), np.int32)
    assert pack_diff(join_slots=column(1), join_sampling=words).size == DIFF_HEADER_WORDS + 1 + SAMPLING_WORDS


@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_decode_rows_gather_their_last_token_and_padding_gets_zeros(scale: float) -> None:
    state = random_state()
    state.row_slots.copy_(torch.tensor([4, 0, 2, 0]))
    state.num_rows.fill_(3)
    embeddings = torch.randn(50, 24)
    out = poisoned(4, 24, dtype=torch.float32)
    slots, positions = torch.empty(4, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    squares = poisoned(4, 1, dtype=torch.float32)
    gather_tokens(state, embeddings, out, slots, positions, squares=squares, scale=scale)
    assert torch.allclose(squares[:, 0], out.square().sum(-1))
    expected, expected_slots, expected_positions = gather_tokens_reference(
        state, embeddings, None, None, 3, scale=scale
    )
    assert torch.equal(out[:3], expected)
    assert not out[3].any()
    assert torch.equal(slots[:3], expected_slots)
    assert torch.equal(positions[:3], expected_positions)


def test_ragged_rows_gather_consecutive_tokens() -> None:
    state = random_state()
    state.row_slots[:3] = torch.tensor([4, 0, 2])
    embeddings = torch.randn(50, 24)
    token_rows = torch.tensor([0, 1, 1, 1, 2, 2, -1, -1], dtype=torch.int32)
    query_starts = torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    out = poisoned(8, 24, dtype=torch.float32)
    slots, positions = torch.empty(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    gather_tokens(state, embeddings, out, slots, positions, token_rows, query_starts)
    expected = gather_tokens_reference(state, embeddings, token_rows, query_starts, 8)
    for got, want in zip((out, slots, positions), expected, strict=True):
        assert torch.equal(got, want)
    assert not out[6:].any(), "padding"


def test_a_stage_behind_another_gathers_slots_and_positions_only() -> None:
    state = random_state()
    state.row_slots[:3] = torch.tensor([4, 0, 2])
    state.num_rows.fill_(3)
    out = torch.full((3, 24), 7.0)
    slots, positions = (torch.empty(3, dtype=torch.int32) for _ in range(2))
    gather_tokens(state, None, out, slots, positions, scale=2.0)
    _, expected_slots, expected_positions = gather_tokens_reference(state, torch.randn(50, 24), None, None, 3)
    assert torch.equal(slots, expected_slots) and torch.equal(positions, expected_positions)
    assert (out == 7).all()


@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_rank_gathers_the_tokens_of_its_part_of_the_vocabulary(is_ragged: bool) -> None:
    state = random_state()
    state.row_slots[:3] = torch.tensor([4, 0, 2])
    state.num_rows.fill_(3)
    whole = torch.randn(50, 24)
    ragged = (
        torch.tensor([0, 1, 1, 2], dtype=torch.int32) if is_ragged else None,
        torch.tensor([0, 1, 3, 4], dtype=torch.int32) if is_ragged else None,
    )
    count = 4 if is_ragged else 3
    total = torch.zeros(count, 24)
    for first, end in ((0, 17), (17, 30), (30, 50)):
        out = poisoned(count, 24, dtype=torch.float32)
        slots, positions = (torch.empty(count, dtype=torch.int32) for _ in range(2))
        gather_tokens(state, whole[first:end].contiguous(), out, slots, positions, *ragged, first_id=first)
        expected = gather_tokens_reference(state, whole[first:end], *ragged, count, first)
        for got, want in zip((out, slots, positions), expected, strict=True):
            assert torch.equal(got, want)
        total += out
    assert torch.equal(total, gather_tokens_reference(state, whole, *ragged, count)[0])


def test_a_page_beyond_the_table_is_out_of_bounds() -> None:
    """Checks the checker (bounds.py) that all these tests run with, by an entry just beyond that of the last slot."""
    from triton.runtime.errors import InterpreterError

    state = random_state()
    slots, indices = state.page_table.shape
    apply_diff(torch.from_numpy(pack_diff(column(slots - 1), column(indices - 1), column(7))), state, num_programs=1)
    assert state.page_table[-1, -1] == 7
    with pytest.raises(InterpreterError, match="_apply_diff_kernel: 1 of 1 addresses of a store are outside"):
        apply_diff(torch.from_numpy(pack_diff(column(slots - 1), column(indices), column(7))), state, num_programs=1)
