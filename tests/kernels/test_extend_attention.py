import numpy as np
import pytest
import torch

from paceline.kernels.extend_attention import (
    ExtendTuning,
    ExtendWorkspace,
    extend_attention,
    extend_attention_reference,
    extend_shared,
    extend_splits,
    extend_tiles,
    shared_tiles,
    tokens_per_tile,
)
from tests.kernels.cases import poisoned, random_cache, relative_error


@pytest.mark.parametrize(
    ("page_size", "q_heads", "kv_heads", "head_dim", "window"),
    [(1, 2, 2, 64, 0), (16, 4, 2, 64, 0), (64, 6, 2, 64, 0), (16, 8, 1, 128, 0), (16, 4, 2, 64, 20)],
)
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_extend_attention_matches_its_reference(
    page_size: int, q_heads: int, kv_heads: int, head_dim: int, window: int, splits: int
) -> None:
    """Of 8 parts, some have no keys at all."""
    starts, lengths, slots = [0, 33, 16, 70], [20, 1, 16, 9], [3, 0, 2, 1]
    query_starts = [0, *np.cumsum(lengths).tolist()]
    tokens = query_starts[-1]
    cache = random_cache(4, 96, page_size, kv_heads, head_dim, torch.float32)
    q = torch.randn(tokens, q_heads, head_dim)
    expected = extend_attention_reference(q, cache.k, cache.v, cache.page_table, slots, starts, query_starts, window)
    tuning = ExtendTuning(block_m=32, block_n=16)
    tiles = extend_tiles(
        np.array(starts, np.int32), np.array(lengths, np.int32), tokens_per_tile(tuning, q_heads // kv_heads)
    )
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).astype(np.int32)
    out = poisoned(tokens, q_heads, head_dim, dtype=torch.float32)
    workspace = ExtendWorkspace.empty(tuning, head_dim, "cpu")
    extend_attention(
        q,
        cache.k,
        cache.v,
        cache.page_table,
        torch.from_numpy(tiles),
        torch.tensor(slots, dtype=torch.int32),
        torch.from_numpy(positions),
        torch.tensor(query_starts, dtype=torch.int32),
        out,
        window,
        tuning,
        splits,
        workspace,
    )
    assert relative_error(out, expected) < 1e-5
    assert not workspace.arrived.any()


def test_few_tiles_behind_a_long_context_are_split_as_far_as_there_is_room() -> None:
    assert extend_splits(num_tiles=32, kv_heads=8, num_keys=32_000) == 1
    assert extend_splits(num_tiles=2, kv_heads=8, num_keys=32_000) == 16
    assert extend_splits(num_tiles=1, kv_heads=8, num_keys=2_100) == 4
    assert extend_splits(num_tiles=1, kv_heads=8, num_keys=900) == 1
    assert extend_splits(num_tiles=0, kv_heads=8, num_keys=0) == 1


def test_tiles_cover_every_query_once_and_begin_with_the_longest_past() -> None:
    starts, lengths = np.array([0, 100, 5], np.int32), np.array([17, 3, 16], np.int32)
    tiles = extend_tiles(starts, lengths, 8)
    assert tiles[0].tolist() == [1, 0]
    assert sorted(map(tuple, tiles.tolist())) == [(0, 0), (0, 8), (0, 16), (1, 0), (2, 0), (2, 8)]


def test_of_some_rows_only_those_have_tiles() -> None:
    starts, lengths = np.array([0, 100, 5], np.int32), np.array([17, 3, 16], np.int32)
    tiles = extend_tiles(starts, lengths, 8, np.array([2, 1], np.int32))
    assert sorted(map(tuple, tiles.tolist())) == [(1, 0), (2, 0), (2, 8)]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_neighbours_with_few_queries_and_a_long_prefix_share_a_tile() -> None:
    """Depth-first 4 2 0 1 3; row 1 has too many queries, and 3 has too little in common with 0."""
    lengths = [3, 5, 4, 2, 1]
    starts = ints(0, *np.cumsum(lengths))
    found = shared_tiles(ints(4, 2, 0, 1, 3), ints(32, 40, 64, 7), starts, tokens=8, least=32)
    assert found is not None
    assert found.tiles.tolist() == [[0, 3, 32]]
    assert found.rows.tolist() == [4, 2, 0]
    assert found.tokens.tolist() == [[14, 8, 9, 10, 11, 0, 1, 2]]
    full = shared_tiles(ints(4, 2, 0, 3), ints(32, 40, 33), starts, tokens=8, least=32)
    assert full is not None and full.tiles.tolist() == [[0, 3, 32]]  # row 3 finds no room, and nobody to go with
    assert shared_tiles(ints(4, 2), ints(31), starts, tokens=8, least=32) is None


@pytest.mark.parametrize(
    ("page_size", "q_heads", "kv_heads", "head_dim"), [(1, 2, 2, 64), (16, 4, 2, 64), (8, 6, 2, 64), (16, 8, 1, 128)]
)
def test_tiles_of_several_rows_match_the_reference(page_size: int, q_heads: int, kv_heads: int, head_dim: int) -> None:
    """Three rows below 48 positions, one of them below 64 with another, and one row that shares nothing."""
    starts, lengths, slots = [64, 70, 3, 48], [3, 1, 5, 4], [3, 0, 2, 1]
    query_starts = [0, *np.cumsum(lengths).tolist()]
    tokens = query_starts[-1]
    pages = [(0, 3, 64 // page_size), (1, 3, 48 // page_size)]
    cache = random_cache(4, 96, page_size, kv_heads, head_dim, torch.float32, shared_pages=pages)
    q = torch.randn(tokens, q_heads, head_dim)
    expected = extend_attention_reference(q, cache.k, cache.v, cache.page_table, slots, starts, query_starts)
    tuning = ExtendTuning(block_m=64, block_n=16)
    per_tile = tokens_per_tile(tuning, q_heads // kv_heads)
    found = shared_tiles(ints(1, 0, 3), ints(64, 48), ints(*query_starts), per_tile, least=32)
    assert found is not None and found.tiles.tolist() == [[0, 3, 48]]
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).astype(np.int32)
    out = poisoned(tokens, q_heads, head_dim, dtype=torch.float32)
    both = (torch.tensor(slots, dtype=torch.int32), torch.from_numpy(positions), torch.from_numpy(ints(*query_starts)))
    parts = (torch.from_numpy(part) for part in (found.tiles, found.rows, found.tokens))
    extend_shared(q, cache.k, cache.v, cache.page_table, *parts, *both, out, tuning)
    assert torch.isnan(out[query_starts[2] : query_starts[3]]).all(), "a row that shares nothing was written"
    rest = extend_tiles(ints(*starts), ints(*lengths), per_tile, ints(2))
    extend_attention(q, cache.k, cache.v, cache.page_table, torch.from_numpy(rest), *both, out, tuning=tuning)
    assert relative_error(out, expected) < 1e-5
