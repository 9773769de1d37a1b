"""The page pool: which KV pages are free.

Pages are allocated and freed in arrays, so a step that needs 256 of them costs one slice. The pool does not know who
owns a page; `invariants.py` checks that every page is free or has exactly one owner.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]
NO_PAGES: Pages = np.empty(0, dtype=np.int32)


class PagePool:
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        # A stack whose first `num_free` entries are the free pages; at first the lowest id is on top.
        self._stack: Pages = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._is_free = np.ones(num_pages, dtype=np.bool_)

    def allocate(self, count: int) -> Pages:
        assert count <= self.num_free, f"{count} pages requested, {self.num_free} are free: evict or retract first"
        rest = self.num_free - count
        pages = self._stack[rest : self.num_free][::-1].copy()
        self._is_free[pages] = False
        self.num_free = rest
        return pages

    def free(self, pages: Pages) -> None:
        if not len(pages):
            return
        assert not self._is_free[pages].any(), f"pages freed twice: {pages[self._is_free[pages]].tolist()}"
        self._is_free[pages] = True
        end = self.num_free + len(pages)
        self._stack[self.num_free : end] = pages[::-1]
        self.num_free = end

    def free_pages(self) -> Pages:
        return self._stack[: self.num_free].copy()
