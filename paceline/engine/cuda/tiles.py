"""Work units of prefill attention: tiles of queries, and which of them have their keys split (split-KV).

A few queries after a long context are few tiles, and one program per tile and KV head would read the whole context
while the other multiprocessors are idle. So the keys of such tiles are split, and only of these. All of this is
computed once for all layers, without a Python loop over tiles: the host has little time for a prefill batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.kernels.layouts import ExtendUnitWord

Words = npt.NDArray[np.int32]


def extend_tiles(starts: Words, lengths: Words, tokens: int, rows: Words | None = None) -> Words:
    """[tiles, 3]: row, first token within the row's queries, keys up to its last query; of all rows, or of `rows` only.
    The tile with most keys comes first, so that no long one starts late."""
    counts = -(-lengths // tokens)
    if rows is not None:
        named = np.zeros(len(lengths), np.bool_)
        named[rows] = True
        counts[~named] = 0
    tile_rows = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    begins = np.arange(len(tile_rows), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = begins * tokens
    keys = starts[tile_rows] + np.minimum(offsets + tokens, lengths[tile_rows])
    order = np.argsort(-keys, kind="stable")
    return np.stack([tile_rows[order], offsets[order], keys[order]], axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Into how many splits the keys of a tile are divided (docs/log/prefill-attention.md).

    Times are counted in keys that a program reads. The first candidate is a split as long as the average work of a
    program; shorter splits are used where they balance the last wave of programs.
    """

    kv_heads: int
    window: int = 0  # the widest sliding window, if every layer has one
    num_programs: int = 264  # at once: two for each multiprocessor of an H200
    max_partials: int = 1024  # partial results in the workspace, one per split and KV head
    min_keys: int = 512  # of a split
    max_splits: int = 64
    loads: tuple[float, ...] = (1.0, 0.5, 0.25)  # keys of a split, relative to the average program's; descending
    merge_keys: int = 128  # the cost of writing and merging a partial result
    min_saving: float = 0.1  # of the time: for less, nothing is split, or split further

    def splits(self, keys: Words) -> Words:
        """The number of splits of each tile with so many keys, the same for all KV heads."""
        splits = np.ones(len(keys), np.int32)
        if self.window:
            keys = np.minimum(keys, self.window)
        if not len(keys) or int(keys.max()) < 2 * self.min_keys:
            return splits
        average = int(keys.sum()) * self.kv_heads / self.num_programs
        time = self._time(keys, splits)
        for load in self.loads:
            if average > (1 - self.min_saving) * time:
                break
            # Rounded down, so that all run at once. The 0.1 gives tiles of one row, which differ by a few keys, as many
            # splits as each other.
            finer = np.minimum(keys / (load * average) + 0.1, keys // self.min_keys)
            finer = np.clip(finer, 1, self.max_splits).astype(np.int32)
            if int(finer[finer > 1].sum()) * self.kv_heads > self.max_partials:
                break
            finer_time = self._time(keys, finer)
            if finer_time < (1 - self.min_saving) * time:
                splits, time = finer, finer_time
        return splits

    def _time(self, keys: Words, splits: Words) -> float:
        """A lower bound of the time. Since the longest begin first, the real time is little more."""
        lengths = np.sort(np.repeat(keys / splits + np.where(splits > 1, self.merge_keys, 0), splits))[::-1]
        # Of the longest n * programs + 1, some program gets n + 1, and none of them is shorter than the last.
        last = lengths[np.arange(0, len(lengths) * self.kv_heads, self.num_programs) // self.kv_heads]
        rounds = last * np.arange(1, len(last) + 1)
        return max(float(rounds.max()), float(lengths.sum()) * self.kv_heads / self.num_programs)


@dataclass(frozen=True, slots=True, eq=False)
class ExtendUnits:
    """The work units of a prefill batch, for each KV head: tiles, whole or in splits."""

    units: Words  # [n, EXTEND_UNIT_WORDS]
    merges: Words  # [m, EXTEND_UNIT_WORDS]: the first split of every tile that is split
    num_splits: int  # of all tiles that are split


def extend_units(tiles: Words, splits: Words) -> ExtendUnits:
    """The units of tiles with so many splits each, the longest first. Whole tiles need no partial results."""
    rows, tokens, keys = tiles.T
    partials = np.where(splits > 1, splits, 0)
    # The columns of `ExtendUnitWord`, for the first split of each tile.
    firsts = np.stack([rows, tokens, np.zeros_like(rows), splits, np.cumsum(partials) - partials], axis=1)
    firsts = firsts.astype(np.int32)
    num_splits = int(partials.sum())
    if not num_splits:
        return ExtendUnits(firsts, firsts[:0], 0)
    units = np.repeat(firsts, splits, axis=0)
    units[:, ExtendUnitWord.SPLIT] = np.arange(len(units)) - np.repeat(np.cumsum(splits) - splits, splits)
    order = np.argsort(-np.repeat(keys / splits, splits), kind="stable")
    return ExtendUnits(units[order], firsts[splits > 1], num_splits)


@dataclass(frozen=True, slots=True, eq=False)
class SharedTiles:
    """Tiles of several rows each, with all queries of these rows."""

    tiles: Words  # [n, SHARED_TILE_WORDS]
    rows: Words  # of the tiles, one after the other
    tokens: Words  # [n, tokens per tile]: indices into the batch's tokens; -1: padding


def shared_tiles(rows: Words, common: Words, query_starts: Words, tokens: int, least: int) -> SharedTiles | None:
    """Groups neighbours with at least `least` positions in common and at most half a tile of queries each. None if
    there are no such rows. Rows are in depth-first order; rows[i] and rows[i + 1] begin with the same common[i]
    positions.
    """
    lengths = np.diff(query_starts)
    groups: list[tuple[list[int], int]] = []  # rows, positions in common
    members: list[int] = []
    depth = filled = 0
    for row, before in zip(rows.tolist(), [0, *common.tolist()], strict=True):
        length = int(lengths[row])
        if members and min(depth, before) >= least and filled + length <= tokens and 2 * length <= tokens:
            members.append(row)
            depth, filled = min(depth, before), filled + length
            continue
        if len(members) > 1:
            groups.append((members, depth))
        members, depth, filled = ([row], 1 << 30, length) if 2 * length <= tokens else ([], 0, 0)
    if len(members) > 1:
        groups.append((members, depth))
    if not groups:
        return None
    counts = np.array([len(group) for group, _ in groups])
    found = np.full((len(groups), tokens), -1, np.int32)
    for index, (group, _) in enumerate(groups):
        queries = np.concatenate([np.arange(query_starts[row], query_starts[row + 1]) for row in group])
        found[index, : len(queries)] = queries
    tiles = np.stack([np.cumsum(counts) - counts, counts, [depth for _, depth in groups]], axis=1)
    return SharedTiles(tiles.astype(np.int32), np.array([row for group, _ in groups for row in group], np.int32), found)
