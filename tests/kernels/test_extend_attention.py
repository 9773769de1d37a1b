from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.cuda.tiles import ExtendUnits, SplitRule, extend_tiles, extend_units, shared_tiles
from paceline.kernels.extend_attention import (
    ExtendSplits,
    ExtendTuning,
    ExtendWorkspace,
    extend_attention,
    extend_attention_reference,
    extend_shared,
    tokens_per_tile,
)
from paceline.kernels.layouts import EXTEND_UNIT_WORDS
from tests.kernels.cases import Cache, poisoned, random_cache, relative_error

TUNING = ExtendTuning(block_m=32, block_n=16)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass(frozen=True, eq=False)
class Prompts:
    """A prefill batch with random queries and keys."""

    cache: Cache
    q: torch.Tensor
    slots: list[int]
    starts: list[int]
    lengths: list[int]
    tuning: ExtendTuning = TUNING

    @classmethod
    def random(
        cls,
        slots: list[int],
        starts: list[int],
        lengths: list[int],
        page_size: int = 16,
        q_heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        tuning: ExtendTuning = TUNING,
        shared_pages: list[tuple[int, int, int]] | None = None,
    ) -> "Prompts":
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
    def row_columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        runs = [np.arange(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True)]
        columns = (self.slots, np.concatenate(runs), self.query_starts)
        return tuple(torch.from_numpy(np.array(column, np.int32)) for column in columns)  # type: ignore[return-value]

    def tiles(self, rows: np.ndarray | None = None) -> np.ndarray:
        return extend_tiles(ints(*self.starts), ints(*self.lengths), self.per_tile, rows)

    def expected(self, window: int = 0, **scores: Any) -> torch.Tensor:
        c = self.cache
        return extend_attention_reference(
            self.q, c.k, c.v, c.page_table, self.slots, self.starts, self.query_starts, window, c.scales, **scores
        )

    def out(self) -> torch.Tensor:
        return poisoned(*self.q.shape, dtype=torch.float32)

    def attend(
        self, units: ExtendUnits, window: int = 0, out: torch.Tensor | None = None, **scores: Any
    ) -> torch.Tensor:
        """With a workspace of just the size of these splits."""
        c, out = self.cache, self.out() if out is None else out
        workspace = ExtendWorkspace.empty(units.num_splits * c.k.shape[2], self.tuning, c.k.shape[3], "cpu")
        workspace.partials.fill_(torch.nan)
        workspace.lse.fill_(torch.nan)
        merges, tiles = torch.from_numpy(units.merges), torch.from_numpy(units.units)
        splits = ExtendSplits(merges, units.num_splits, workspace) if units.num_splits else None
        extend_attention(
            self.q,
            c.k,
            c.v,
            c.page_table,
            tiles,
            *self.row_columns,
            out,
            window,
            self.tuning,
            splits,
            c.scales,
            **scores,
        )
        return out

    def in_fp8(self) -> "Prompts":
        return replace(self, cache=self.cache.in_fp8())


@pytest.mark.parametrize(
    ("page_size", "q_heads", "kv_heads", "head_dim", "window", "split"),
    [
        (1, 2, 2, 64, 0, "some"),
        (16, 4, 2, 64, 0, "none"),
        (16, 4, 2, 64, 0, "all"),
        (64, 6, 2, 64, 0, "none"),
        (64, 6, 2, 64, 0, "some"),
        (16, 8, 1, 128, 0, "some"),
        (16, 4, 2, 64, 20, "none"),
        (16, 4, 2, 64, 20, "some"),
        (16, 4, 2, 64, 20, "all"),
    ],
)
def test_extend_attention_matches_its_reference(
    page_size: int, q_heads: int, kv_heads: int, head_dim: int, window: int, split: str
) -> None:
    """Of 8 splits, some have no keys at all; 9 splits are merged in two rounds."""
    prompts = Prompts.random([3, 0, 2, 1], [0, 33, 16, 70], [20, 1, 16, 9], page_size, q_heads, kv_heads, head_dim)
    tiles = prompts.tiles()
    splits = {"none": [1], "some": [9, 1, 3], "all": [8]}[split]
    units = extend_units(tiles, np.resize(ints(*splits), len(tiles)))
    found = prompts.attend(units, window)
    assert relative_error(found, prompts.expected(window)) < 1e-5
    padding = np.full((3, EXTEND_UNIT_WORDS), -1, np.int32)
    padded = ExtendUnits(
        np.concatenate([units.units, padding]), np.concatenate([units.merges, padding]), units.num_splits
    )
    assert torch.equal(prompts.attend(padded, window), found)


def test_a_cache_in_fp8_is_read_with_its_scales() -> None:
    prompts = Prompts.random([3, 0, 2, 1], [0, 33, 16, 70], [20, 1, 16, 9]).in_fp8()
    tiles = prompts.tiles()
    for window in (0, 20):
        found = prompts.attend(extend_units(tiles, np.resize(ints(9, 1, 3), len(tiles))), window)
        assert relative_error(found, prompts.expected(window)) < 1e-5


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("split", [[1], [9, 1, 3]])
def test_heads_of_any_size_with_a_scale_and_a_soft_cap(window: int, split: list[int]) -> None:
    prompts = Prompts.random([3, 0, 2, 1], [0, 33, 16, 70], [20, 1, 16, 9], 16, 6, 2, 48)
    units = extend_units(prompts.tiles(), np.resize(ints(*split), len(prompts.tiles())))
    scores = {"scale": 0.4, "cap": 3.0}
    assert relative_error(prompts.attend(units, window, **scores), prompts.expected(window, **scores)) < 1e-5


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("split", [[1], [9, 1, 3]])
def test_a_sink_is_in_the_denominator_once(window: int, split: list[int]) -> None:
    prompts = Prompts.random([3, 0, 2, 1], [0, 33, 16, 70], [20, 1, 16, 9], 16, 6, 2)
    units = extend_units(prompts.tiles(), np.resize(ints(*split), len(prompts.tiles())))
    sinks = torch.linspace(-30.0, 8.0, 6)
    assert relative_error(prompts.attend(units, window, sinks=sinks), prompts.expected(window, sinks=sinks)) < 1e-5


RULE = SplitRule(kv_heads=2, num_programs=16, max_partials=64, min_keys=32, merge_keys=4)


@pytest.mark.parametrize(
    ("starts", "lengths", "num_decodes", "num_split"),
    [
        ([400, 0, 0], [5, 20, 12], 0, 1),
        ([50, 70, 400, 0, 12], [1, 1, 17, 20, 9], 2, 2),
        ([200, 200, 200], [3, 3, 3], 0, 3),
        ([0, 0, 0, 0, 0, 0], [20, 20, 20, 20, 20, 20], 0, 0),
        ([390, 3], [1, 30], 0, 1),
    ],
    ids=["alone", "with decodes", "ties", "nothing to split", "one query"],
)
def test_only_a_long_context_among_short_prompts_is_split(
    starts: list[int], lengths: list[int], num_decodes: int, num_split: int
) -> None:
    prompts = Prompts.random(list(range(len(starts)))[::-1], starts, lengths)
    tiles = prompts.tiles(np.arange(num_decodes, len(starts), dtype=np.int32))
    splits = RULE.splits(tiles[:, 2])
    assert int((splits > 1).sum()) == num_split
    units = extend_units(tiles, splits)
    out, expected = prompts.attend(units), prompts.expected()
    assert torch.isnan(out[:num_decodes]).all(), "a decode was written"
    assert relative_error(out[num_decodes:], expected[num_decodes:]) < 1e-5
    # Whole tiles have the same bits, whichever others are split.
    whole = prompts.attend(extend_units(tiles, np.ones_like(splits)))
    for row, token, _ in tiles[splits == 1].tolist():
        first = prompts.query_starts[row] + token
        last = min(first + prompts.per_tile, prompts.query_starts[row + 1])
        assert torch.equal(out[first:last], whole[first:last])


def test_results_have_the_same_bits_in_any_order_of_splits() -> None:
    prompts = Prompts.random([1, 0], [300, 0], [9, 20])
    tiles = prompts.tiles()
    units = extend_units(tiles, RULE.splits(tiles[:, 2]))
    assert units.num_splits > 4
    first = prompts.attend(units)
    for order in (np.arange(len(units.units))[::-1], np.random.default_rng(0).permutation(len(units.units))):
        shuffled = ExtendUnits(np.ascontiguousarray(units.units[order]), units.merges[::-1].copy(), units.num_splits)
        assert torch.equal(prompts.attend(shuffled), first)


def test_splits_that_do_not_fit_the_workspace_are_not_launched() -> None:
    prompts = Prompts.random([0], [300], [9])
    tiles = prompts.tiles()
    units = extend_units(tiles, np.full(len(tiles), 4, np.int32))
    workspace = ExtendWorkspace.empty(units.num_splits * 2 - 1, TUNING, 64, "cpu")
    splits = ExtendSplits(torch.from_numpy(units.merges), units.num_splits, workspace)
    c, out, tiles_on_device = prompts.cache, prompts.out(), torch.from_numpy(units.units)
    with pytest.raises(AssertionError, match="8 partial results do not fit a workspace for 7"):
        extend_attention(
            prompts.q, c.k, c.v, c.page_table, tiles_on_device, *prompts.row_columns, out, 0, TUNING, splits
        )
    assert torch.isnan(out).all()


@pytest.mark.parametrize(
    ("page_size", "q_heads", "kv_heads", "head_dim", "fp8", "with_sinks"),
    [
        (1, 2, 2, 64, False, False),
        (16, 4, 2, 64, False, False),
        (8, 6, 2, 64, False, True),
        (16, 8, 1, 128, False, False),
        (16, 4, 2, 64, True, True),
    ],
)
def test_tiles_of_several_rows_match_the_reference(
    page_size: int, q_heads: int, kv_heads: int, head_dim: int, fp8: bool, with_sinks: bool
) -> None:
    """Three rows share 48 positions, two of them 64, and two rows share nothing, one of them with its keys split."""
    starts, lengths, slots = [64, 70, 3, 48, 90], [3, 1, 5, 4, 2], [3, 0, 2, 1, 4]
    pages = [(0, 3, 64 // page_size), (1, 3, 48 // page_size)]
    prompts = Prompts.random(
        slots, starts, lengths, page_size, q_heads, kv_heads, head_dim, ExtendTuning(block_m=64, block_n=16), pages
    )
    prompts = prompts.in_fp8() if fp8 else prompts
    query_starts, c = prompts.query_starts, prompts.cache
    found = shared_tiles(ints(1, 0, 3), ints(64, 48), ints(*query_starts), prompts.per_tile, least=32)
    assert found is not None and found.tiles.tolist() == [[0, 3, 48]]
    out, scores = prompts.out(), {"sinks": torch.linspace(-30.0, 8.0, q_heads) if with_sinks else None}
    parts = (torch.from_numpy(part) for part in (found.tiles, found.rows, found.tokens))
    options = {"tuning": prompts.tuning, "scales": c.scales, **scores}
    extend_shared(prompts.q, c.k, c.v, c.page_table, *parts, *prompts.row_columns, out, **options)
    for row in (2, 4):
        mine = out[query_starts[row] : query_starts[row + 1]]
        assert torch.isnan(mine).all(), "a row that shares nothing was written"
    prompts.attend(extend_units(prompts.tiles(ints(2, 4)), ints(3, 1)), out=out, **scores)
    assert relative_error(out, prompts.expected(**scores)) < 1e-5
