import heapq

import numpy as np
import pytest

from paceline.engine.cuda.tiles import SplitRule, extend_tiles, extend_units, shared_tiles


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_tiles_cover_every_query_once_longest_context_first() -> None:
    tiles = extend_tiles(ints(0, 100, 5), ints(17, 3, 16), 8)
    assert tiles[0].tolist() == [1, 0, 103]
    assert sorted(map(tuple, tiles.tolist())) == [
        (0, 0, 8),
        (0, 8, 16),
        (0, 16, 17),
        (1, 0, 103),
        (2, 0, 13),
        (2, 8, 21),
    ]
    assert (np.diff(tiles[:, 2]) <= 0).all()


def test_only_the_given_rows_have_tiles() -> None:
    tiles = extend_tiles(ints(0, 100, 5), ints(17, 3, 16), 8, ints(2, 1))
    assert sorted(map(tuple, tiles[:, :2].tolist())) == [(1, 0), (2, 0), (2, 8)]
    assert extend_tiles(ints(4), ints(1), 8, ints()).shape == (0, 3)


# ---- splits of keys -------------------------------------------------------------------------------------------------


def tiles_of(*rows: tuple[int, int]) -> np.ndarray:
    """The tiles of rows with (cached keys, queries), 64 queries per tile."""
    return extend_tiles(ints(*(start for start, _ in rows)), ints(*(length for _, length in rows)), 64)


def makespan(rule: SplitRule, keys: np.ndarray, splits: np.ndarray) -> float:
    """When the last program ends, if each program always takes the longest split that is left."""
    busy = [0.0] * rule.num_programs
    for length in np.sort(np.repeat(keys / splits, splits))[::-1]:
        for _ in range(rule.kv_heads):
            heapq.heapreplace(busy, busy[0] + float(length))
    return max(busy)


def test_a_few_queries_after_a_long_context_are_split_next_to_other_prompts() -> None:
    rule, tiles = SplitRule(kv_heads=8), tiles_of((24_000, 64), (0, 576), (0, 576))
    assert rule.splits(tiles[:, 2]).tolist() == [26, *[1] * 18]


def test_alone_they_use_as_many_programs_as_run_at_once_and_no_more() -> None:
    rule = SplitRule(kv_heads=8)
    assert rule.splits(tiles_of((24_000, 138))[:, 2]).tolist() == [11, 11, 11]
    assert rule.splits(tiles_of((30_720, 320))[:, 2]).tolist() == [6] * 5
    small = SplitRule(kv_heads=8, max_partials=200)
    assert small.splits(tiles_of((24_000, 138))[:, 2]).tolist() == [1, 1, 1], "the workspace is too small"


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1024)] * 16,
        [(0, 8192)],
        [(30_720, 2048)],
        [(959, 64)],
        [(30_720, 2048), *[(0, 512)] * 4],
        [(4000, 64), *[(0, 1024)] * 16],
    ],
)
def test_batches_that_fill_the_gpu_are_not_split(rows: list[tuple[int, int]]) -> None:
    assert (SplitRule(kv_heads=8).splits(tiles_of(*rows)[:, 2]) == 1).all()


def test_tiles_are_split_to_fill_the_last_wave() -> None:
    """40 tiles of 8 heads are one wave of 264 programs and one of 56."""
    rule, keys = SplitRule(kv_heads=8), tiles_of((30_720, 2560))[:, 2]
    splits = rule.splits(keys)
    assert set(splits.tolist()) == {3}
    assert makespan(rule, keys, splits) < 0.7 * makespan(rule, keys, np.ones_like(splits))


def test_no_tiles_no_splits() -> None:
    assert SplitRule(kv_heads=8).splits(ints()).shape == (0,)


def test_only_keys_within_the_window_are_split() -> None:
    keys = tiles_of((24_000, 64))[:, 2]
    assert SplitRule(kv_heads=8, window=4096).splits(keys).tolist() == [8]
    assert SplitRule(kv_heads=8, window=1000).splits(keys).tolist() == [1]


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
def test_random_batches_gain_from_splits_and_fit_the_workspace(kv_heads: int) -> None:
    rng = np.random.default_rng(kv_heads)
    programs = max(64, 8 * kv_heads)
    rule = SplitRule(kv_heads, 0, programs, max_partials=3 * programs, min_keys=64, merge_keys=8, max_splits=24)
    saved, lost = 0, 0
    for _ in range(150):
        rows = [(int(rng.choice([0, 0, 1500, 6000])), int(rng.integers(1, 300))) for _ in range(rng.integers(1, 6))]
        keys = extend_tiles(ints(*(s for s, _ in rows)), ints(*(n for _, n in rows)), 16)[:, 2]
        splits = rule.splits(keys)
        is_split = splits > 1
        assert int(splits[is_split].sum()) * kv_heads <= rule.max_partials
        assert (splits >= 1).all() and (splits <= rule.max_splits).all()
        assert (keys[is_split] >= rule.min_keys * splits[is_split]).all()
        whole, now = makespan(rule, keys, np.ones_like(splits)), makespan(rule, keys, splits)
        assert now < 1.05 * whole
        saved += now < 0.9 * whole
        lost += bool(is_split.any()) and now > 0.95 * whole
        # The longest split is at most twice the average work of a program, unless it cannot be split further.
        average = int(keys.sum()) * kv_heads / programs
        too_long = keys / splits > 2 * max(average, rule.min_keys)
        assert (splits[too_long] == rule.max_splits).all()
    assert saved > 20 and lost <= 2


# ---- units ----------------------------------------------------------------------------------------------------------


def test_units_contain_every_split_once_longest_first_and_whole_tiles_have_no_partials() -> None:
    tiles = np.array([[1, 0, 900], [0, 8, 200], [2, 0, 200], [0, 0, 90]], np.int32)
    made = extend_units(tiles, ints(3, 1, 2, 1))
    assert made.num_splits == 5
    assert made.units.tolist() == [
        [1, 0, 0, 3, 0], [1, 0, 1, 3, 0], [1, 0, 2, 3, 0],
        [0, 8, 0, 1, 3],
        [2, 0, 0, 2, 3], [2, 0, 1, 2, 3],
        [0, 0, 0, 1, 5],
    ]  # fmt: skip
    assert made.merges.tolist() == [[1, 0, 0, 3, 0], [2, 0, 0, 2, 3]]
    late = extend_units(tiles, ints(1, 3, 1, 2))
    assert late.units[:, :3].tolist() == [[1, 0, 0], [2, 0, 0], [0, 8, 0], [0, 8, 1], [0, 8, 2], [0, 0, 0], [0, 0, 1]]


def test_without_splits_units_are_tiles() -> None:
    tiles = tiles_of((0, 200), (70, 64))
    made = extend_units(tiles, np.ones(len(tiles), np.int32))
    assert made.num_splits == len(made.merges) == 0
    assert np.array_equal(made.units[:, :2], tiles[:, :2])
    assert extend_units(tiles[:0], ints()).units.shape == (0, 5)


# ---- tiles of several rows ------------------------------------------------------------------------------------------


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
    assert full is not None and full.tiles.tolist() == [[0, 3, 32]]  # the tile is full, and row 3 has no neighbour left
    assert shared_tiles(ints(4, 2), ints(31), starts, tokens=8, least=32) is None
