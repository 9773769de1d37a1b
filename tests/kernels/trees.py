"""Random prefix trees for tests of shared chunks: rows in depth-first order, and what neighbours have in common."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Sharing:
    lengths: list[int]
    common: list[int]  # common[i]: whole chunks that rows i and i + 1 have in common
    chunk: int
    units: list[tuple[int, int, int, int]]
    covered: list[int]
    query_rows: list[int]

    def shared_pages(self, page_size: int) -> list[tuple[int, int, int]]:
        return [(i + 1, i, depth * self.chunk // page_size) for i, depth in enumerate(self.common)]


def shared_units(common: list[int], rows_per_unit: int) -> tuple[list[tuple[int, int, int, int]], list[int], list[int]]:
    """(units, covered chunks by row, query rows) for rows whose neighbours have common[i] whole chunks in common.

    A row's covered chunks must be its leading ones, so a run is divided into units even if one is left with one row.
    """
    rows = len(common) + 1
    units: list[tuple[int, int, int, int]] = []
    query_rows: list[int] = []
    covered = [max(common[i - 1] if i else 0, common[i] if i < rows - 1 else 0) for i in range(rows)]
    for chunk in range(max(covered, default=0)):
        row = 0
        while row < rows:
            if covered[row] <= chunk:
                row += 1
                continue
            end = row + 1
            while end < rows and common[end - 1] > chunk:
                end += 1
            for first in range(row, end, rows_per_unit):
                members = list(range(first, min(first + rows_per_unit, end)))
                units.append((members[0], chunk, len(query_rows), len(members)))
                query_rows += members
            row = end
    return units, covered, query_rows


def random_sharing(rng: random.Random, rows: int, max_length: int, chunk: int, rows_per_unit: int) -> Sharing:
    most = max_length // chunk - 1
    common = [rng.choice([0, rng.randint(0, most), most]) for _ in range(rows - 1)]
    units, covered, query_rows = shared_units(common, rows_per_unit)
    lengths = [rng.randint(depth * chunk, max_length - 1) for depth in covered]
    return Sharing(lengths, common, chunk, units, covered, query_rows)
