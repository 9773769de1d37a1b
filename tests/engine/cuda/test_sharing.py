"""Which rows share KV reads, and the work units that they share."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.engine.cuda.sharing import shared_units


@pytest.mark.parametrize("seed", range(40))
def test_every_shared_chunk_is_in_exactly_one_unit(seed: int) -> None:
    """Against a simple implementation: chunk by chunk, row by row."""
    rng = random.Random(seed)
    num_rows, chunk = rng.randint(2, 40), rng.choice([1, 8])
    rows = rng.sample(range(num_rows + 5), num_rows)
    common = [rng.choice([0, rng.randint(0, 5 * chunk), 7 * chunk]) for _ in rows[1:]]
    most = rng.randint(2, 9)
    found = shared_units(np.array(rows, np.int32), np.array(common, np.int32), num_rows + 5, chunk, most)
    depth = [tokens // chunk for tokens in common]
    wanted = {}  # (row, chunk) -> the rows it is shared with
    for row in range(num_rows):
        for c in range(max(depth[row - 1] if row else 0, depth[row] if row < num_rows - 1 else 0)):
            first = last = row
            while first and depth[first - 1] > c:
                first -= 1
            while last < num_rows - 1 and depth[last] > c:
                last += 1
            wanted[rows[row], c] = set(rows[first : last + 1])
    if found is None:
        assert not wanted
        return
    seen = []
    for source, c, first, count in found.units.tolist():
        members = found.query_rows[first : first + count].tolist()
        assert 1 <= count <= most and source in members
        assert all(set(members) <= wanted[member, c] for member in members)
        seen += [(member, c) for member in members]
    assert sorted(seen) == sorted(wanted)
    assert found.covered.tolist() == [sum((row, c) in wanted for c in range(8)) for row in range(num_rows + 5)]
    assert found.num_saved_tokens == (len(wanted) - len(found.units)) * chunk
    fewest = sum(
        -(-len(run) // most) for run in {(c, frozenset(run)) for (_, c), run in wanted.items()} for run in [run[1]]
    )
    assert len(found.units) == fewest
