"""Who does what in prefill attention: queries in tiles, and the keys of a tile whole or in parts.

A few queries behind a long context are few tiles, and one program a tile and KV head would walk through it while the
other multiprocessors have nothing left to do. So the keys of such tiles, and of these alone, are split. All of it is
worked out once for all layers, without a loop over tiles: the host has little time for a pass with prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]


def extend_tiles(starts: Words, lengths: Words, tokens: int, rows: Words | None = None) -> Words:
    """[tiles, 3]: row, first token within the row's queries, keys up to its last one; of all rows or of these, the tile
    with most keys first so that none starts late."""
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
    """Into how many parts the keys of a tile are split; weighed in docs/log.md.

    Times are in keys that a program walks through. A part as long as what each program has to do on average is where
    it begins; finer ones are taken where they even out what is left for the last round.
    """

    kv_heads: int
    window: int = 0  # where every layer has one, the widest
    num_programs: int = 264  # at once: two for each multiprocessor of an H200
    room: int = 1024  # for partial results, each of one part and KV head
    least_keys: int = 512  # of a part
    max_parts: int = 64
    loads: tuple[float, ...] = (1.0, 0.5, 0.25)  # keys of a part, as a share of the average program's; descending
    part_keys: int = 128  # what leaving and folding a partial result takes
    least_saving: float = 0.1  # of the time: for less nothing is split, or split further

    def parts(self, keys: Words) -> Words:
        """How many of each tile with so many keys, for all KV heads alike."""
        parts = np.ones(len(keys), np.int32)
        if self.window:
            keys = np.minimum(keys, self.window)
        if not len(keys) or int(keys.max()) < 2 * self.least_keys:
            return parts
        average = int(keys.sum()) * self.kv_heads / self.num_programs
        time = self._time(keys, parts)
        for load in self.loads:
            if average > (1 - self.least_saving) * time:
                break
            # Rounded down, so that all run at once; but tiles of one row, which differ by a few keys, alike.
            finer = np.minimum(keys / (load * average) + 0.1, keys // self.least_keys)
            finer = np.clip(finer, 1, self.max_parts).astype(np.int32)
            if int(finer[finer > 1].sum()) * self.kv_heads > self.room:
                break
            finer_time = self._time(keys, finer)
            if finer_time < (1 - self.least_saving) * time:
                parts, time = finer, finer_time
        return parts

    def _time(self, keys: Words, parts: Words) -> float:
        """What it takes at least. As the longest begin first, it takes little more."""
        lengths = np.sort(np.repeat(keys / parts + np.where(parts > 1, self.part_keys, 0), parts))[::-1]
        # Of the longest n * programs + 1 some program has n + 1, none of them shorter than the last.
        last = lengths[np.arange(0, len(lengths) * self.kv_heads, self.num_programs) // self.kv_heads]
        rounds = last * np.arange(1, len(last) + 1)
        return max(float(rounds.max()), float(lengths.sum()) * self.kv_heads / self.num_programs)


@dataclass(frozen=True, slots=True, eq=False)
class ExtendUnits:
    """Tiles, whole or in parts: what the programs of a KV head do."""

    units: Words  # [n, 5]: row, first token, which part, of how many, where the partials of the tile begin
    folds: Words  # [m, 5]: the first part of every tile that is split
    num_parts: int  # of tiles that are split, together


def extend_units(tiles: Words, parts: Words) -> ExtendUnits:
    """The units of tiles in so many parts each, the longest first. Tiles in one part need no partials."""
    rows, tokens, keys = tiles.T
    partials = np.where(parts > 1, parts, 0)
    of_tiles = np.stack([rows, tokens, np.zeros_like(rows), parts, np.cumsum(partials) - partials], axis=1)
    of_tiles = of_tiles.astype(np.int32)
    num_parts = int(partials.sum())
    if not num_parts:
        return ExtendUnits(of_tiles, of_tiles[:0], 0)
    units = np.repeat(of_tiles, parts, axis=0)
    units[:, 2] = np.arange(len(units)) - np.repeat(np.cumsum(parts) - parts, parts)
    order = np.argsort(-np.repeat(keys / parts, parts), kind="stable")
    return ExtendUnits(units[order], of_tiles[parts > 1], num_parts)


@dataclass(frozen=True, slots=True, eq=False)
class SharedTiles:
    """Tiles of several rows each, with all their queries."""

    tiles: Words  # [n, 3]: first of its rows, number of rows, positions that all of them begin with
    rows: Words  # of the tiles, one after the other
    tokens: Words  # [n, tokens per tile]: which of the pass's tokens; -1: none


def shared_tiles(rows: Words, common: Words, query_starts: Words, tokens: int, least: int) -> SharedTiles | None:
    """Rows in depth-first order, of which rows[i] and rows[i + 1] begin with the same common[i] positions. Neighbours
    with `least` of them in common and no more than half a tile of queries each are put together. None: there are none.
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
