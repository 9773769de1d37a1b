"""Which rows of a pass read the same KV: the prefix tree's answer, for attention that reads it once.

Two rows have in common what lies above the deepest node that both hold. In depth-first order the rows below a node
stand together, so it is enough to say what each row has in common with the next: any run of rows shares the least of
what lies between its neighbours.

                 ┌─ 3         rows    1   3   0   4   2
      ┌─ 512 ────┼─ 0         common    512 512 128  0
 128 ─┤          └─ 1
      └─ 4                    (1, 3 and 0 share 512 positions, 4 shares 128 of them, 2 shares nothing and is left out)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.request import Request
from paceline.scheduler.node import Node
from paceline.scheduler.plan import Column, Sharing


def find_sharing(requests: Sequence[Request], starts: Column, version: int) -> Sharing | None:
    """Which rows of `requests`, with `starts[row]` positions in memory, share KV; None if no two do. `version` is what
    the result is known by: a new number for every call."""
    below: dict[Node, list[int]] = {}  # the deepest node that somebody else holds too -> rows
    for row, request in enumerate(requests):
        node = request.held
        while node is not None and node.locks < 2:
            node = node.parent
        if node is not None and node.depth:  # held by another row, or by a pin
            below.setdefault(node, []).append(row)
    if len(below) < 2 and all(len(rows) < 2 for rows in below.values()):
        return None
    paths = sorted(map(_path, below), key=lambda path: [one.order for one in path])
    rows = np.array([row for path in paths for row in below[path[-1]]], np.int32)
    depths = np.zeros(len(rows) - 1, np.int32)
    at = 0
    for path, after in zip(paths, [*paths[1:], []], strict=True):
        end = at + len(below[path[-1]])
        depths[at : end - 1] = path[-1].depth
        depths[end - 1 : end] = _common(path, after)  # nothing behind the last row
        at = end
    reach = starts[rows]
    common = np.minimum(depths, np.minimum(reach[:-1], reach[1:]))
    return Sharing(version, rows, common) if common.any() else None


def _path(node: Node) -> list[Node]:
    """From the first node with tokens down to this one."""
    path: list[Node] = []
    current: Node | None = node
    while current is not None and current.depth:
        path.append(current)
        current = current.parent
    path.reverse()
    return path


def _common(one: list[Node], other: list[Node]) -> int:
    depth = 0
    for a, b in zip(one, other, strict=False):
        if a is not b:
            break
        depth = a.depth
    return depth
