"""Shared prefixes of the rows of a pass, read from the prefix tree, for attention that reads shared KV once.

Two rows share the KV above the deepest node that both have locked. In depth-first order the rows below a node are
adjacent, so it is enough to give what each row shares with the next one: any run of rows shares the minimum over its
neighbours.

                 ┌─ 3         rows    1   3   0   4   2
      ┌─ 512 ────┼─ 0         common    512 512 128  0
 128 ─┤          └─ 1
      └─ 4                    (1, 3 and 0 share 512 positions, 4 shares 128 of them, 2 shares nothing and is left out)
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from paceline.scheduler.node import Node
from paceline.scheduler.plan import Column, Sharing


def find_sharing(locked_nodes: Iterable[tuple[int, Node]], starts: Column, version: int) -> Sharing | None:
    """Of rows with the nodes that they have locked; row i has `starts[i]` positions in memory. None: none share.
    `version` identifies the result: a new number for every call."""
    below: dict[Node, list[int]] = {}  # deepest node that another row or a pin has locked too -> rows
    for row, locked in locked_nodes:
        node: Node | None = locked
        while node is not None and node.locks < 2:
            node = node.parent
        if node is not None and node.depth:
            below.setdefault(node, []).append(row)
    if len(below) < 2 and all(len(rows) < 2 for rows in below.values()):
        return None
    paths = sorted(map(_path, below), key=lambda path: [one.sibling_order for one in path])
    rows = np.array([row for path in paths for row in below[path[-1]]], np.int32)
    depths: list[int] = []
    for path, after in zip(paths, [*paths[1:], []], strict=True):
        depths += [path[-1].depth] * (len(below[path[-1]]) - 1)
        depths.append(_common(path, after))
    depths.pop()  # nothing follows the last row
    reach = starts[rows]
    common = np.minimum(np.array(depths, np.int32), np.minimum(reach[:-1], reach[1:]))
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
    """Depth of the deepest node that both paths have."""
    depth = 0
    for a, b in zip(one, other, strict=False):
        if a is not b:
            break
        depth = a.depth
    return depth
