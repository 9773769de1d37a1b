import numpy as np
import pytest
import torch

from paceline.kernels.extend_attention import (
    ExtendTuning,
    extend_attention,
    extend_attention_reference,
    extend_tiles,
    tokens_per_tile,
)
from tests.kernels.cases import poisoned, random_cache, relative_error


@pytest.mark.parametrize(
    ("page_size", "q_heads", "kv_heads", "head_dim", "window"),
    [(1, 2, 2, 64, 0), (16, 4, 2, 64, 0), (64, 6, 2, 64, 0), (16, 8, 1, 128, 0), (16, 4, 2, 64, 20)],
)
def test_extend_attention_matches_its_reference(
    page_size: int, q_heads: int, kv_heads: int, head_dim: int, window: int
) -> None:
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
    )
    assert relative_error(out, expected) < 1e-5


def test_tiles_cover_every_query_once_and_begin_with_the_longest_past() -> None:
    starts, lengths = np.array([0, 100, 5], np.int32), np.array([17, 3, 16], np.int32)
    tiles = extend_tiles(starts, lengths, 8)
    assert tiles[0].tolist() == [1, 0]
    assert sorted(map(tuple, tiles.tolist())) == [(0, 0), (0, 8), (0, 16), (1, 0), (2, 0), (2, 8)]
