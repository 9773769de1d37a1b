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
from itertools import pairwise

import numpy as np

from paceline.request import Request
from paceline.scheduler.node import Node
from paceline.scheduler.plan import Column, Sharing


def find_sharing(requests: Sequence[Request], starts: Column) -> Sharing | None:
    """Of rows that belong to `requests` and have `starts[row]` positions in memory. None: nobody shares anything."""
    paths = []
    for row, request in enumerate(requests):
        node, path = request.held, []
        while node is not None and node.depth:
            path.append(node)
            node = node.parent
        if path and path[-1].locks > 1:  # some other row, or a pin, holds its beginning too
            path.reverse()
            paths.append(([node.order for node in path], row, path))
    if len(paths) < 2:
        return None
    paths.sort(key=lambda entry: entry[:2])
    rows = np.array([row for _, row, _ in paths], np.int32)
    depths = [_common(one[2], other[2]) for one, other in pairwise(paths)]
    reach = starts[rows]
    common = np.minimum(np.array(depths, np.int32), np.minimum(reach[:-1], reach[1:]))
    return Sharing(rows, common) if common.any() else None


def _common(one: list[Node], other: list[Node]) -> int:
    depth = 0
    for a, b in zip(one, other, strict=False):
        if a is not b:
            break
        depth = a.depth
    return depth
