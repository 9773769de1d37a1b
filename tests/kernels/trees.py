"""Random prefix trees for tests of shared reads: rows in depth-first order, and what neighbours have in common."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import groupby

import torch

from paceline.kernels.decode_units import DecodeUnits


@dataclass(frozen=True)
class Sharing:
    """Shared units by a simple implementation: block by block, row by row."""

    common: list[int]  # common[i]: positions that rows i and i + 1 have in common, multiples of `align`
    chunk: int
    align: int
    rows_per_unit: int
    lengths: list[int] = field(default_factory=list)
    units: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    query_rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        seen = set()
        for row in range(len(self.common) + 1):
            index = 0
            groups = [self.group(row, block) for block in range(self.covered(row) // self.align)]
            end = 0
            for members, blocks in groupby(groups):
                begin, end = end, end + len([*blocks]) * self.align
                for segment in self.segments(begin, end):
                    if (members, segment) not in seen:
                        seen.add((members, segment))
                        self._add(members, *segment, index)
                    index += 1
            self.rows.append((self.covered(row), index))

    def covered(self, row: int) -> int:
        return max([0, *self.common[max(row - 1, 0) : row + 1]])

    def group(self, row: int, block: int) -> tuple[int, ...]:
        """The rows that read this block together with `row`."""
        first = last = row
        while first and self.common[first - 1] > block * self.align:
            first -= 1
        while last < len(self.common) and self.common[last] > block * self.align:
            last += 1
        return tuple(range(first, last + 1))

    def segments(self, begin: int, end: int) -> list[tuple[int, int]]:
        return [(at, min(at + self.chunk, end)) for at in range(begin, end, self.chunk)]

    def _add(self, members: tuple[int, ...], begin: int, end: int, index: int) -> None:
        """A group is divided into units even if one is left with one row: its segments are in shared units."""
        for at in range(0, len(members), self.rows_per_unit):
            rows = members[at : at + self.rows_per_unit]
            self.units.append((rows[0], len(self.query_rows), len(rows), begin, end, index))
            self.query_rows.extend(rows)

    def shared_pages(self, page_size: int) -> list[tuple[int, int, int]]:
        return [(i + 1, i, depth // page_size) for i, depth in enumerate(self.common)]

    def write(self, buffers: DecodeUnits) -> None:
        """Fills the buffers as `apply_diff` would."""
        buffers.num_shared.fill_(len(self.units))
        buffers.shared_chunk.fill_(self.chunk)
        for target, words in (
            (buffers.shared_units, self.units),
            (buffers.shared_rows, self.rows),
            (buffers.query_rows, self.query_rows),
        ):
            target[: len(words)] = torch.tensor(words, dtype=torch.int32)


def random_sharing(
    rng: random.Random, rows: int, max_length: int, chunk: int, align: int, rows_per_unit: int
) -> Sharing:
    """Rows that diverge at random depths. Some decode the position where their shared units end."""
    most = max_length // align - 1
    common = [rng.choice([0, rng.randint(0, most), most]) * align for _ in range(rows - 1)]
    sharing = Sharing(common, chunk, align, rows_per_unit)
    for row in range(rows):
        first = sharing.covered(row)
        sharing.lengths.append(rng.choice([first, rng.randint(first, max_length - 1)]))
    return sharing
