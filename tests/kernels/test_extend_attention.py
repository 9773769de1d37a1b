from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paceline.kernels.extend_attention import (
    ExtendParts,
    ExtendTuning,
    ExtendWorkspace,
    extend_attention,
    extend_attention_reference,
    extend_shared,
    tokens_per_tile,
)
from paceline.kernels.extend_tiles import ExtendUnits, SplitRule, extend_tiles, extend_units, shared_tiles
from tests.kernels.cases import Cache, poisoned, random_cache, relative_error

TUNING = ExtendTuning(block_m=32, block_n=16)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass(frozen=True, eq=False)
class Prompts:
    """A pass with random queries behind random keys."""

    cache: Cache
    q: torch.Tensor
    slots: list[int]
    starts: list[int]
    lengths: list[int]
    tuning: ExtendTuning = TUNING

    @classmethod
    def random(
        cls, slots: list[int], starts: list[int], lengths: list[int], page_size: int = 16, q_heads: int = 4,
        kv_heads: int = 2, head_dim: int = 64, tuning: ExtendTuning = TUNING,
        shared_pages: list[tuple[int, int, int]] | None = None,
    ) -> "Prompts":  # fmt: skip
        longest = max(start + length for start, length in zip(starts, lengths, strict=True))
        cache = random_cache(len(slots), longest, page_size, kv_heads, head_dim, torch.float32, "cpu", shared_pages)
        return cls(cache, torch.randn(sum(lengths), q_heads, head_dim), slots, starts, lengths, tuning)

    @property
    def query_starts(self) -> list[int]:
        return [0, *np.cumsum(self.lengths).tolist()]

    @property
    def per_tile(self) -> int:
        return tokens_per_tile(self.tuning, self.q.shape[1] // self.cache.k.shape[2])

    @property
    def whereabouts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        runs = [np.arange(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True)]
        columns = (self.slots, np.concatenate(runs), self.query_starts)
        return tuple(torch.from_numpy(np.array(column, np.int32)) for column in columns)  # type: ignore[return-value]

    def tiles(self, rows: np.ndarray | None = None) -> np.ndarray:
        return extend_tiles(ints(*self.starts), ints(*self.lengths), self.per_tile, rows)

    def expected(self, window: int = 0) -> torch.Tensor:
        c = self.cache
        return extend_attention_reference(
            self.q, c.k, c.v, c.page_table, self.slots, self.starts, self.query_starts, window
        )

    def out(self) -> torch.Tensor:
        return poisoned(*self.q.shape, dtype=torch.float32)

    def attend(self, units: ExtendUnits, window: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """With room for these parts and nothing behind it."""
        c, out = self.cache, self.out() if out is None else out
        room = units.num_parts * c.k.shape[2]
        workspace = ExtendWorkspace.empty(room, self.tuning, c.k.shape[3], "cpu")
        workspace.partials.fill_(torch.nan)
        workspace.lse.fill_(torch.nan)
        parts = ExtendParts(torch.from_numpy(units.folds), units.num_parts, workspace) if units.num_parts else None
        extend_attention(
            self.q, c.k, c.v, c.page_table, torch.from_numpy(units.units), *self.whereabouts, out, window, self.tuning,
            parts,
        )  # fmt: skip
        return out


@pytest.mark.parametrize(
    ("page_size", "q_heads", "kv_heads", "head_dim", "window"),
    [(1, 2, 2, 64, 0), (16, 4, 2, 64, 0), (64, 6, 2, 64, 0), (16, 8, 1, 128, 0), (16, 4, 2, 64, 20)],
)
@pytest.mark.parametrize("split", ["none", "some", "all"])
def test_extend_attention_matches_its_reference(
    page_size: int, q_heads: int, kv_heads: int, head_dim: int, window: int, split: str
) -> None:
    """Of 8 parts, some have no keys at all; of 9, folded in two rounds, all but one are folded with others."""
    prompts = Prompts.random([3, 0, 2, 1], [0, 33, 16, 70], [20, 1, 16, 9], page_size, q_heads, kv_heads, head_dim)
    tiles = prompts.tiles()
    parts = {"none": [1], "some": [9, 1, 3], "all": [8]}[split]
    units = extend_units(tiles, np.resize(ints(*parts), len(tiles)))
    assert relative_error(prompts.attend(units, window), prompts.expected(window)) < 1e-5
    nobody = np.full((3, 5), -1, np.int32)
    padded = ExtendUnits(np.concatenate([units.units, nobody]), np.concatenate([units.folds, nobody]), units.num_parts)
    assert torch.equal(prompts.attend(padded, window), prompts.attend(units, window))


RULE = SplitRule(kv_heads=2, num_programs=16, room=64, least_keys=32, part_keys=4)


@pytest.mark.parametrize(
    ("starts", "lengths", "num_decodes", "num_split"),
    [
        ([400, 0, 0], [5, 20, 12], 0, 1),
        ([50, 70, 400, 0, 12], [1, 1, 17, 20, 9], 2, 2),
        ([200, 200, 200], [3, 3, 3], 0, 3),
        ([0, 0, 0, 0, 0, 0], [20, 20, 20, 20, 20, 20], 0, 0),
        ([390, 3], [1, 30], 0, 1),
    ],
    ids=["alone", "beside decodes", "ties", "nothing to split", "one query"],
)
def test_a_long_context_beside_short_prompts_is_split_and_nobody_else(
    starts: list[int], lengths: list[int], num_decodes: int, num_split: int
) -> None:
    prompts = Prompts.random(list(range(len(starts)))[::-1], starts, lengths)
    tiles = prompts.tiles(np.arange(num_decodes, len(starts), dtype=np.int32))
    parts = RULE.parts(tiles[:, 2])
    assert int((parts > 1).sum()) == num_split
    units = extend_units(tiles, parts)
    out, expected = prompts.attend(units), prompts.expected()
    assert torch.isnan(out[:num_decodes]).all(), "a decode was written"
    assert relative_error(out[num_decodes:], expected[num_decodes:]) < 1e-5
    # Whole tiles come to the same bits, whoever else is split.
    whole = prompts.attend(extend_units(tiles, np.ones_like(parts)))
    for row, token, _ in tiles[parts == 1].tolist():
        first = prompts.query_starts[row] + token
        last = min(first + prompts.per_tile, prompts.query_starts[row + 1])
        assert torch.equal(out[first:last], whole[first:last])


def test_whichever_part_is_done_first_the_sum_is_the_same_to_the_bit() -> None:
    prompts = Prompts.random([1, 0], [300, 0], [9, 20])
    tiles = prompts.tiles()
    units = extend_units(tiles, RULE.parts(tiles[:, 2]))
    assert units.num_parts > 4
    first = prompts.attend(units)
    for order in (np.arange(len(units.units))[::-1], np.random.default_rng(0).permutation(len(units.units))):
        shuffled = ExtendUnits(np.ascontiguousarray(units.units[order]), units.folds[::-1].copy(), units.num_parts)
        assert torch.equal(prompts.attend(shuffled), first)


def test_parts_without_room_for_their_results_are_not_launched() -> None:
    prompts = Prompts.random([0], [300], [9])
    tiles = prompts.tiles()
    units = extend_units(tiles, np.full(len(tiles), 4, np.int32))
    workspace = ExtendWorkspace.empty(units.num_parts * 2 - 1, TUNING, 64, "cpu")
    parts = ExtendParts(torch.from_numpy(units.folds), units.num_parts, workspace)
    c, out = prompts.cache, prompts.out()
    with pytest.raises(AssertionError, match="8 partial results in room for 7"):
        extend_attention(
            prompts.q, c.k, c.v, c.page_table, torch.from_numpy(units.units), *prompts.whereabouts, out, 0, TUNING,
            parts,
        )  # fmt: skip
    assert torch.isnan(out).all()


@pytest.mark.parametrize(
    ("page_size", "q_heads", "kv_heads", "head_dim"), [(1, 2, 2, 64), (16, 4, 2, 64), (8, 6, 2, 64), (16, 8, 1, 128)]
)
def test_tiles_of_several_rows_match_the_reference(page_size: int, q_heads: int, kv_heads: int, head_dim: int) -> None:
    """Three rows below 48 positions, one of them below 64 with another, and two that share nothing, one of them with
    its keys split."""
    starts, lengths, slots = [64, 70, 3, 48, 90], [3, 1, 5, 4, 2], [3, 0, 2, 1, 4]
    pages = [(0, 3, 64 // page_size), (1, 3, 48 // page_size)]
    prompts = Prompts.random(
        slots, starts, lengths, page_size, q_heads, kv_heads, head_dim, ExtendTuning(block_m=64, block_n=16), pages
    )
    query_starts, c = prompts.query_starts, prompts.cache
    found = shared_tiles(ints(1, 0, 3), ints(64, 48), ints(*query_starts), prompts.per_tile, least=32)
    assert found is not None and found.tiles.tolist() == [[0, 3, 48]]
    out = prompts.out()
    parts = (torch.from_numpy(part) for part in (found.tiles, found.rows, found.tokens))
    extend_shared(prompts.q, c.k, c.v, c.page_table, *parts, *prompts.whereabouts, out, prompts.tuning)
    for row in (2, 4):
        mine = out[query_starts[row] : query_starts[row + 1]]
        assert torch.isnan(mine).all(), "a row that shares nothing was written"
    prompts.attend(extend_units(prompts.tiles(ints(2, 4)), ints(3, 1)), out=out)
    assert relative_error(out, prompts.expected()) < 1e-5
