"""Which rows share KV reads, and the work units that they share."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from paceline.engine.cuda.sharing import (
    LONG_SHARED_CHUNK,
    SHARED_ALIGN,
    SharedUnits,
    ShareRule,
    shared_runs,
    shared_units,
)
from paceline.kernels.layouts import SharedRowWord, SharedUnitWord
from paceline.scheduler.plan import NO_CHANGES, Plan, Sharing
from tests.kernels import trees


def column(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def decode_plan(common: list[int], own: int = 100, more: int = 256) -> Plan:
    """Row i and i + 1 have common[i] positions in common; each row has `own` others, and may grow by `more`."""
    rows = np.arange(len(common) + 1, dtype=np.int32)
    starts = np.maximum(column([0, *common]), column([*common, 0])) + own
    return Plan(
        step=0,
        slots=rows,
        starts=starts,
        lengths=np.ones_like(rows),
        max_lengths=starts + more,
        samples=np.ones(len(rows), np.bool_),
        num_decodes=len(rows),
        joins=(),
        page_changes=(NO_CHANGES,),
        num_tokens=len(rows),
        num_context_tokens=0,
        sharing=Sharing(1, rows, column(common)),
    )


def segments_of_rows(shared: SharedUnits) -> dict[int, list[tuple[int, int, int]]]:
    """(index, begin, end) of every shared unit of each row, by index."""
    found = defaultdict(list)
    for _, first, count, begin, end, index in shared.units.tolist():
        for row in shared.query_rows[first : first + count].tolist():
            found[row].append((index, begin, end))
    return {row: sorted(segments) for row, segments in found.items()}


@pytest.mark.parametrize("seed", range(40))
def test_every_shared_block_is_in_exactly_one_unit(seed: int) -> None:
    """Against a simple implementation: block by block, row by row."""
    rng = random.Random(seed)
    num_rows, align, most = rng.randint(2, 40), rng.choice([1, 8]), rng.randint(2, 9)
    chunk = align * rng.randint(1, 4)
    rows = rng.sample(range(num_rows + 5), num_rows)
    common = [rng.choice([0, rng.randint(0, 5), 7]) * align for _ in rows[1:]]
    wanted = trees.Sharing(common, chunk, align, most)
    runs, run_of_row = shared_runs(column(common), min_tokens=1)
    if not any(common):
        assert not runs
        return
    found = shared_units(column(rows), runs, run_of_row, num_rows + 5, chunk, most, align)
    segments = segments_of_rows(found)
    for place, row in enumerate(rows):
        assert tuple(found.rows[row]) == wanted.rows[place]
        borders = [0]
        for index, (found_index, begin, end) in enumerate(segments.get(row, [])):
            assert found_index == index and begin == borders[-1] < end <= begin + chunk and end % align == 0
            borders.append(end)
        assert borders[-1] == wanted.covered(place)
    for source, first, count, begin, end, _ in found.units.tolist():
        members = found.query_rows[first : first + count].tolist()
        assert 1 <= count <= most and source in members
        for block in range(begin // align, end // align):
            assert {rows.index(row) for row in members} <= set(wanted.group(rows.index(source), block))
    assert not found.rows[np.setdiff1d(np.arange(num_rows + 5), rows)].any()
    assert len(found.units) == len(wanted.units), "as few as possible"
    saved = sum((count - 1) * (end - begin) for _, _, count, begin, end, _ in wanted.units)
    assert found.num_saved_tokens == saved
    lengths = found.units[:, SharedUnitWord.END] - found.units[:, SharedUnitWord.BEGIN]
    assert (np.diff(lengths) <= 0).all(), "a long unit starts late"


@pytest.mark.parametrize(
    ("common", "covered"), [(255, 0), (256, 256), (319, 256), (320, 320), (321, 320), (4095, 4032), (4096, 4096)]
)
def test_rows_share_up_to_the_alignment_before_they_diverge(common: int, covered: int) -> None:
    plan = decode_plan([common] * 15)
    found, _ = ShareRule(group=2, max_units=1 << 14).choose(plan, 16)
    assert (found is not None) == (covered > 0)
    if found is not None:
        assert set(found.rows[:, SharedRowWord.NUM_TOKENS].tolist()) == {covered}
        assert found.num_saved_tokens == 15 * covered


def test_nested_runs_continue_where_the_run_around_them_ends() -> None:
    plan = decode_plan([640, 1000, 1000, 640, 640, 1500], own=10)
    found, block_m = ShareRule(group=2, max_units=1 << 14, target_units=1).choose(plan, 7)
    assert found is not None and block_m == 16 and found.chunk == 1024
    assert segments_of_rows(found) == {
        **{row: [(0, 0, 640)] for row in (0, 4)},
        **{row: [(0, 0, 640), (1, 640, 960)] for row in (1, 2, 3)},
        **{row: [(0, 0, 640), (1, 640, 1472)] for row in (5, 6)},
    }


def test_the_chunk_is_the_longest_that_gives_enough_units() -> None:
    """16 groups of 16 rows below 2,048 tokens use 1,024, which was the fastest; where they diverge does not matter."""
    rule = ShareRule(group=2, max_units=1 << 14)
    for tokens, chunk, num_units in ((2048, 1024, 32), (2047, 1024, 32), (1500, 1024, 32), (4000, 1024, 64)):
        found, block_m = rule.choose(decode_plan(([tokens] * 15 + [0]) * 15 + [tokens] * 15), 256)
        assert found is not None and (found.chunk, len(found.units), block_m) == (chunk, num_units, 32)
        assert set(found.rows[:, SharedRowWord.NUM_TOKENS].tolist()) == {tokens // SHARED_ALIGN * SHARED_ALIGN}
    found, _ = rule.choose(decode_plan([2048] * 15), 16)
    assert found is not None and (found.chunk, len(found.units)) == (256, 8), "one group: the shortest chunk"
    found, _ = ShareRule(group=2, max_units=70).choose(decode_plan([4000] * 15), 16)
    assert found is not None and found.chunk == LONG_SHARED_CHUNK, "a shorter one needs too many partial results"


def test_rows_that_diverge_one_by_one_have_few_partial_results() -> None:
    """Every prefix of one long text: a segment per row would be a partial result for each row after it."""
    plan = decode_plan([256 + 64 * row for row in range(200)])
    found, _ = ShareRule(group=2, max_units=1 << 14).choose(plan, 201)
    assert found is not None
    tokens, segments = found.rows.T
    assert (segments <= tokens // 256).all() and segments.max() > 40
    assert (plan.starts - tokens < 100 + 256 + 64).all()


@pytest.mark.parametrize("seed", range(30))
def test_what_is_shared_fits_the_buffers(seed: int) -> None:
    """Of any size. Rows that grow to their full length must fit too."""
    rng = random.Random(seed)
    depths = [0, 64, *(rng.randint(200, 5000) for _ in range(rng.randint(1, 6)))]
    plan = decode_plan([rng.choice(depths) for _ in range(rng.randint(1, 60))], more=rng.choice([1, 3000]))
    count, counts = plan.num_rows, []
    for max_units in (1, count, 2 * count, 4 * count, 1 << 14):
        rule = ShareRule(group=2, max_units=max_units, min_saving=0, min_pair_tokens=0)
        found, _ = rule.choose(plan, count)
        if found is None:
            counts.append(0)
            continue
        tokens, segments = found.rows.T
        own = (plan.max_lengths - tokens) // found.chunk + 1
        partials, units = int((segments + own).sum()), len(found.units) + int(own.sum())
        assert max(partials, units, len(found.query_rows)) <= max_units
        assert (tokens <= plan.starts).all(), "a shared unit ends after the position being decoded"
        counts.append(len(found.units))
    assert counts[0] == 0 and counts == sorted(counts)
